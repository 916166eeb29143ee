"""Where servers are: their addresses, and the plain HTTP requests to them (`/schema`)."""

from __future__ import annotations

import base64
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from envfleet.errors import BadArgument, ConnectFailed, Unauthorized
from envfleet.remote.client_config import ClientConfig
from envfleet.remote.message_json import load_bytes
from envfleet.remote.request_gate import is_loopback

_SCHEMES = {"http": "http", "ws": "http", "https": "https", "wss": "https"}


@dataclass(frozen=True)
class Endpoint:
    """A server's address. `public` is what may be shown: no user, password, query or header.

    Example:
        >>> Endpoint.parse("https://me:secret@host/space").public
        'https://host/space'
        >>> Endpoint.parse("http://127.0.0.1:8000").ws
        'ws://127.0.0.1:8000/ws'
    """

    public: str
    ws: str = field(repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    loopback: bool = False

    @classmethod
    def parse(cls, url: str, headers: Mapping[str, str] | None = None, token: str | None = None) -> Endpoint:
        """From a URL with any of http, https, ws and wss; a path before `/ws` is kept."""
        parts = urlsplit(url if isinstance(url, str) else "")
        scheme = _SCHEMES.get(parts.scheme)
        if scheme is None or not parts.hostname:
            named = scheme or parts.netloc  # "localhost:8000" has neither
            found = (
                f"this one begins with {parts.scheme}://" if named else "this one has no http:// in front"
            )  # no more: passwords
            raise BadArgument(f"a server's address looks like http://host:8000 (or https, ws, wss); {found}")
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        netloc = f"{host}:{parts.port}" if parts.port else host
        path = parts.path.rstrip("/").removesuffix("/ws")
        sent = dict(headers or {})
        if parts.username is not None:
            pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            sent.setdefault("Authorization", "Basic " + base64.b64encode(pair.encode()).decode())
        if token is not None:
            sent["Authorization"] = f"Bearer {token}"
        socket_scheme = "wss" if scheme == "https" else "ws"
        return cls(
            public=urlunsplit((scheme, netloc, path, "", "")),
            ws=urlunsplit((socket_scheme, netloc, path + "/ws", parts.query, "")),
            headers=sent,
            loopback=is_loopback(parts.hostname),
        )


def split_mapping(url: Any, options: Any) -> tuple[Any, Any]:
    """The address and the options, of which a mapping with `env_url` may have some.

    Example:
        >>> split_mapping({"env_url": "http://a:8000", "token": "t"}, {"connect_timeout_s": 3.0})
        ('http://a:8000', {'token': 't', 'connect_timeout_s': 3.0})
    """
    if not isinstance(url, Mapping):
        return url, dict(options)
    if "env_url" not in url:
        raise BadArgument(f"the mapping needs the key 'env_url', the server's address; it has {sorted(map(str, url))}")
    return url["env_url"], {**{key: value for key, value in url.items() if key != "env_url"}, **options}


def endpoints_of(url: Any, config: ClientConfig) -> dict[str, Endpoint]:
    """The servers of a URL, or a list of them."""
    urls = [url] if isinstance(url, str) else list(url)
    if not urls:
        raise BadArgument("a client needs at least one server address")
    parsed = [Endpoint.parse(each, config.headers, config.token) for each in urls]
    return {endpoint.public: endpoint for endpoint in parsed}


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        """A redirect would carry the token to an address the user did not name."""
        return None


def get_json(endpoint: Endpoint, path: str, config: ClientConfig) -> Any:
    """GET a JSON document of the server; raises ConnectFailed or Unauthorized."""
    handlers: list[urllib.request.BaseHandler] = [_NoRedirect()]
    if endpoint.public.startswith("https"):  # a context costs tens of milliseconds
        handlers.append(urllib.request.HTTPSHandler(context=config.ssl_context or ssl.create_default_context()))
    if endpoint.loopback:
        handlers.append(urllib.request.ProxyHandler({}))
    opener = urllib.request.build_opener(*handlers)
    request = urllib.request.Request(endpoint.public + path, headers=dict(endpoint.headers))
    try:
        with opener.open(request, timeout=config.connect_timeout_s) as response:
            body = response.read(config.max_message_bytes + 1)
    except urllib.error.HTTPError as error:
        error.close()
        kind = Unauthorized if error.code in (401, 403) else ConnectFailed
        raise kind(endpoint.public, f"{path} answered HTTP {error.code}") from None
    except (OSError, ValueError) as error:
        raise ConnectFailed(endpoint.public, f"{path}: {str(error)[:200]}") from None
    if len(body) > config.max_message_bytes:
        raise ConnectFailed(endpoint.public, f"{path} is over {config.max_message_bytes} bytes")
    try:
        return load_bytes(body)
    except (ValueError, RecursionError):
        raise ConnectFailed(endpoint.public, f"{path} is not JSON, or nested too deep") from None


def shared_schema(urls: Sequence[str], options: Mapping[str, Any]) -> Mapping[str, Any]:
    """The `/schema` of the first server that answers."""
    config = ClientConfig.of(options)
    failures = []
    for endpoint in endpoints_of(urls, config).values():
        try:
            found = get_json(endpoint, "/schema", config)
            return found if isinstance(found, Mapping) else {}
        except ConnectFailed as error:
            failures.append(f"{endpoint.public}: {error.why}")
    raise ConnectFailed(", ".join(urls), "; ".join(failures))
