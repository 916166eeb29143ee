"""The few plain HTTP requests a client needs: `/schema`, `/metadata`, `/health`."""

from __future__ import annotations

import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from envfleet.errors import BadArgument
from envfleet.remote.message_json import load_bytes
from envfleet.remote.remote_errors import ConnectFailed, Unauthorized
from envfleet.remote.wire import Endpoint

if TYPE_CHECKING:
    from envfleet.remote.client import ClientConfig


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        """A redirect would carry the token to an address the user did not name."""
        return None


def get_json(endpoint: Endpoint, path: str, config: ClientConfig) -> Any:
    """GET a JSON document of the server; raises ConnectFailed or Unauthorized."""
    tls = config.ssl_context or ssl.create_default_context()
    handlers: list[urllib.request.BaseHandler] = [_NoRedirect(), urllib.request.HTTPSHandler(context=tls)]
    if endpoint.loopback:
        handlers.append(urllib.request.ProxyHandler({}))
    opener = urllib.request.build_opener(*handlers)
    request = urllib.request.Request(endpoint.http(path), headers=dict(endpoint.headers))
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


def action_fields(schema: Any) -> dict[str, Any]:
    """The fields of the action in a server's `/schema`, without the ones every action inherits."""
    action = schema.get("action") if isinstance(schema, Mapping) else None
    properties = action.get("properties") if isinstance(action, Mapping) else None
    return {key: value for key, value in (properties or {}).items() if key != "metadata"}


def only_field(schema: Any) -> str:
    """The field a bare value means: the action's only one, or its only required one; else BadArgument.

    Example:
        >>> only_field({"action": {"properties": {"message": {"type": "string"}, "metadata": {}}}})
        'message'
    """
    names = list(action_fields(schema))
    required = [name for name in names if name in schema["action"].get("required", ())]
    if len(names) != 1 and len(required) != 1:
        raise BadArgument(f"the server's action has the fields {names}: pass a mapping with them, not a bare value")
    return (required if len(required) == 1 else names)[0]
