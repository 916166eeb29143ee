"""Which requests a server accepts: those of programs that have its address, and of web pages that are allowed.

A browser lets every page open a WebSocket to this machine and post plain text to it. The page's origin is in `Origin`; if
its own name was made to point at this machine, that name is in `Host`. Both are checked before anything else.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from urllib.parse import urlsplit

Headers = Iterable[tuple[bytes, bytes]]

_PLAIN_TYPES = ("text/plain", "multipart/form-data")  # what a page can post anywhere without being asked
_FORM_TYPE = "application/x-www-form-urlencoded"  # the same, but curl and urllib send it with every body


class Gate:
    """The names and origins that are accepted: loopback, the address that is bound, and those that were listed.

    Args:
        host: the address that is bound.
        hosts: more names clients may use for this server; "*" allows every name.
        origins: web origins ("https://lab.example") whose pages may use it; "*" allows every page.
    """

    def __init__(self, host: str, hosts: Sequence[str] = (), origins: Sequence[str] = ()) -> None:
        self._hosts = {host.lower(), *(name.lower() for name in hosts)}
        self._origins = {origin.lower().rstrip("/") for origin in origins}

    def refusal(self, headers: Headers, local: str | None) -> tuple[int, str] | None:
        """Status and reason when a request is not let in. `local` is the address its connection came in on."""
        names = [value for name, value in headers if name.lower() == b"host"]
        if "*" not in self._hosts and (len(names) != 1 or not self._is_ours(_host_of(names[0]), local)):
            return 421, "this server is not known under that name: use its address, or serve with --allow-host NAME"
        for name, value in headers:
            if name.lower() == b"origin" and not self._lets_in(value, local):
                return 403, "pages of that origin are not accepted: serve with --allow-origin ORIGIN"
        return None

    def _is_ours(self, host: str, local: str | None) -> bool:
        return bool(host) and (host in self._hosts or host == local or is_loopback(host))

    def _lets_in(self, origin: bytes, local: str | None) -> bool:
        text = origin.decode("latin-1").strip().lower()
        if "*" in self._origins or text in self._origins:
            return True
        try:
            parts = urlsplit(text)
            _ = parts.port  # raises for a port that is none
            plain = parts.scheme in ("http", "https") and text == f"{parts.scheme}://{parts.netloc}"
            return plain and "@" not in parts.netloc and self._is_ours(parts.hostname or "", local)
        except ValueError:
            return False


def refused_body(headers: Headers) -> str | None:
    """Why the body of a POST is not read: it is of a type that any page may post; None when it is read."""
    given = {name.lower(): value.decode("latin-1") for name, value in headers}
    kind = given.get(b"content-type", "").partition(";")[0].strip().lower()
    from_browser = b"origin" in given or any(name.startswith(b"sec-fetch-") for name in given)
    if kind in _PLAIN_TYPES or (from_browser and kind in ("", _FORM_TYPE)):
        return "the body must be sent as Content-Type: application/json"
    return None


def is_loopback(host: str) -> bool:
    """Whether a name can only mean this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _host_of(header: bytes) -> str:
    """The name in a Host header, without its port; "" when it is none."""
    text = header.decode("latin-1").strip().lower()
    try:
        parts = urlsplit(f"//{text}")
        _ = parts.port  # raises for a port that is none
        return (parts.hostname or "") if "@" not in text and not (parts.path or parts.query or parts.fragment) else ""
    except ValueError:
        return ""
