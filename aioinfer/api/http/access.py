"""Middleware in front of the handlers: API keys, CORS, and the headers of all responses.

`server` installs `require_key` and `Cors` as middleware and `mark_response` as a signal handler for
all responses. `keys` has the keys, `limits` what each of them has used.

`AllowedHosts` has the names that the `Host` header of a request may have, which `server` checks
before anything else: a web page of another site can let its own name resolve to 127.0.0.1 (DNS
rebinding), and for the browser the local server then belongs to that site. The request still has
that name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from ipaddress import ip_address

from aiohttp import web

from aioinfer.api.admin.page import PAGE_PATHS
from aioinfer.api.errors import SERVER_NAME, Handler, local_path
from aioinfer.api.http.limits import ACCOUNT, ACCOUNTS, RATE_HEADERS
from aioinfer.api.http.logs import REQUEST_ID_HEADER, request_id
from aioinfer.errors import RequestError

#: Headers that hold an API key as it is: Anthropic's and Azure's.
_KEY_HEADERS = ("X-Api-Key", "api-key")
#: Response headers that a script of another origin may read.
_EXPOSED = ", ".join((REQUEST_ID_HEADER, "Retry-After", *RATE_HEADERS))
#: Paths that need no key: the paths of monitoring, and the page, which asks the user for one.
OPEN_PATHS = frozenset(
    ("/health", "/health/live", "/health/ready", "/metrics", "/openapi.json", *PAGE_PATHS)
)
#: Paths that act on the whole server: they need an admin key.
ADMIN_PATHS = frozenset(
    ("/abort", "/experts", "/experts/placement", "/pause", "/reset_prefix_cache", "/resume")
)
#: Seconds for which a browser may remember the answer to a preflight.
_PREFLIGHT_AGE_S = 600


@web.middleware
async def require_key(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answers 401 to a request without a right key, whatever its path, but for `OPEN_PATHS`, and
    429 to a POST request beyond a limit of its key; the others get their key's account. Requests
    for `ADMIN_PATHS` need an admin key."""
    path, accounts = local_path(request), request.app[ACCOUNTS]
    if path in ADMIN_PATHS:
        accounts.check_admin(authorizations(request))
    elif path not in OPEN_PATHS:
        if ACCOUNT not in request:  # else it is the server's own
            found = map(accounts.find, authorizations(request))
            account = next((account for account in found if account is not None), None)
            if account is None:
                raise RequestError(
                    "a valid API key is needed, as in 'Authorization: Bearer KEY' or 'X-Api-Key: "
                    "KEY'",
                    status=401,
                    code="invalid_api_key",
                )
            request[ACCOUNT] = account
        if request.method == "POST":
            with request[ACCOUNT].request():
                return await handler(request)
    return await handler(request)


def authorizations(request: web.BaseRequest) -> Iterator[str | None]:
    """Yields the API keys that a request brings: its `Authorization` header, and the headers that
    clients of other APIs send instead, in the form of the former."""
    yield request.headers.get("Authorization")
    for name in _KEY_HEADERS:
        if (key := request.headers.get(name)) is not None:
            yield f"Bearer {key}"


class Cors:
    """Lets the pages of some origins read replies (the CORS protocol of the Fetch standard); `*`
    stands for all origins."""

    def __init__(self, origins: Iterable[str]):
        self._origins = frozenset(origins)

    def _allowed(self, request: web.Request) -> str | None:
        """Returns the value of `Access-Control-Allow-Origin` if the request's origin may have
        one."""
        if "*" in self._origins:
            return "*"
        origin = request.headers.get("Origin")
        return origin if origin in self._origins else None

    @web.middleware
    async def answer_preflight(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answers the preflight request that a browser sends before another site's request; it
        carries no key."""
        is_preflight = (
            request.method == "OPTIONS"
            and "Origin" in request.headers
            and "Access-Control-Request-Method" in request.headers
        )
        if not is_preflight or self._allowed(request) is None:
            return await handler(request)
        headers = {
            "Access-Control-Allow-Methods": "GET, POST, DELETE",
            "Access-Control-Allow-Headers": request.headers.get(
                "Access-Control-Request-Headers", "Authorization, Content-Type"
            ),
            "Access-Control-Max-Age": str(_PREFLIGHT_AGE_S),
        }
        return web.Response(status=204, headers=headers)

    async def mark_response(self, request: web.Request, response: web.StreamResponse) -> None:
        """Sets the headers of a response that name whose pages may read it."""
        if not self._origins:
            return
        if (origin := self._allowed(request)) is not None:
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Access-Control-Expose-Headers"] = _EXPOSED
        if origin != "*":
            response.headers.add("Vary", "Origin")


async def mark_response(request: web.BaseRequest, response: web.StreamResponse) -> None:
    """Sends the request's id back with a response, the server's name, and the state of the key's
    limits with a response to a POST request."""
    response.headers[REQUEST_ID_HEADER] = request_id(request)
    response.headers["Server"] = SERVER_NAME  # instead of aiohttp's and Python's versions
    account = request.get(ACCOUNT)
    if account is not None and request.method == "POST":
        response.headers.update(account.headers())


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

    def check(self, request: web.BaseRequest) -> None:
        """Raises `RequestError` (421) for a request to another name."""
        if not self.admits(request.headers.get("Host")):
            raise RequestError(
                "the Host header names another server; server.allowed_hosts lists the names that "
                "are answered",
                status=421,
                code="host_not_allowed",
            )

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
