"""The names that the `Host` header of a request may have: the defence against DNS rebinding.

A web page of another site can let its own name resolve to 127.0.0.1; for the browser the local
server then belongs to that site. The request still carries that name. `server` checks it before
anything else.
"""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import ip_address

#: Names of this machine itself, for a server that only this machine can reach.
_LOCAL_NAMES = ("localhost", "*.localhost", "127.0.0.1", "[::1]")


class AllowedHosts:
    """The names under which the server may be addressed."""

    def __init__(self, names: Iterable[str]):
        """`names` are exact names, `*.example.org` for all below a domain, or `*` for any name; an
        IPv6 address may stand in brackets."""
        lowered = {name.lower().rstrip(".") for name in names}
        self._any = "*" in lowered
        self._suffixes = tuple(name[1:] for name in lowered if name.startswith("*."))
        self._exact = {_without_brackets(name) for name in lowered}

    @classmethod
    def of(cls, configured: list[str], host: str, *, is_loopback: bool) -> AllowedHosts:
        """Returns the configured names or, without any, localhost's and the name of `server.host`
        where the server listens on loopback, and any elsewhere."""
        if configured:
            return cls(configured)
        return cls([*_LOCAL_NAMES, host]) if is_loopback else cls("*")

    def admits(self, header: str | None) -> bool:
        """Whether a request with this `Host` header may be answered. Without one there is no web
        page behind it: browsers always send it."""
        if self._any or header is None:
            return True
        name = _name_of(header)
        return name in self._exact or name.endswith(self._suffixes)


def _name_of(header: str) -> str:
    """Returns the name in a `Host` header, in lower case: without port, brackets and final dot."""
    name, colon, port = header.rpartition(":")
    if not colon or not port.isdecimal() or (":" in name and not name.endswith("]")):
        name = header if port or not colon else name
    return _without_brackets(name.lower().rstrip("."))


def _without_brackets(name: str) -> str:
    """Returns an IPv6 address in its canonical form and without brackets, another name as it is."""
    if not (name.startswith("[") and name.endswith("]")):
        return name
    try:
        return str(ip_address(name[1:-1]))
    except ValueError:
        return name
