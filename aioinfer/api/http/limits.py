"""What a request may do: its API key, and the limits of each key: requests and tokens a minute, and
concurrent requests.

`server` installs `require_key` as middleware. It finds the account of a request and charges it the
request; `delivery` charges it the tokens. Only POST requests count: the others cost next to
nothing. Charges, and when they are made:

- a request, when it arrives; one that is answered 429 is not charged;
- its prompt tokens and its `max_tokens` (times n) when it is queued, so that requests that run at
  the same time cannot use the same tokens; without `max_tokens` its prompt tokens alone;
- when it ends, its actual use instead: its prompts and the tokens that were generated, whether it
  finished or was aborted. A request without `max_tokens` may so use more than was left; the key
  then waits until the excess has flowed off as well.

When the keys are reloaded, a name keeps its usage: its requests go on to count, and of a limit that
has changed the same part is used up as before, so no reload gives a key a minute's worth at once. A
name that is gone is remembered, in case it comes back.

A rate is a GCRA (generic cell rate algorithm; ITU-T I.371, ATM Forum Traffic Management 4.0), the
same as a token bucket that holds a minute's worth: all of its state is the time at which nothing
is used up any more. That is one number a key, and no timer.

`RateLimiter` lets a few new requests in at each iteration of the event loop. Parsing and submitting
a request takes the loop about 0.5 ms, and handlers that become ready together run in the same
iteration: without a limit, 256 clients that send at the same moment would leave the workers without
a plan, and running streams without a token, for 0.1 s.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from aiohttp import web

from aioinfer.api.errors import Handler, local_path
from aioinfer.api.http.keys import ApiKey, ApiKeys
from aioinfer.config import ServerConfig
from aioinfer.errors import ConfigError, FieldError, RateLimitError, RequestError
from aioinfer.scheduler.request import Flow

if TYPE_CHECKING:
    from aioinfer.engine.output import RequestOutput

_log = logging.getLogger(__name__)

#: Headers that hold an API key as it is: Anthropic's and Azure's.
_KEY_HEADERS = ("X-Api-Key", "api-key")
#: Paths of monitoring, which need no key.
MONITORING_PATHS = frozenset(
    ("/health", "/health/live", "/health/ready", "/metrics", "/openapi.json")
)
_PERIOD_S = 60.0
#: When a key with as many requests as it may have at a time should try again: how long the others
#: take is unknown.
_CONCURRENCY_RETRY_S = 1
#: The limits that a rejection can name.
LIMITS = ("requests", "tokens", "concurrency")
#: Headers of the replies of keys with limits, besides `Retry-After`.
RATE_HEADERS = tuple(
    f"x-ratelimit-{what}-{unit}"
    for unit in ("requests", "tokens")
    for what in ("limit", "remaining", "reset")
)


class Rate:
    """A limit on the use per minute, by GCRA. Times are seconds of one clock.

    Attributes:
        limit: what may be used a minute, and at once after a minute of rest. It may be set: the
            part that is used up stays, since the state is a time.
    """

    __slots__ = ("_free_at", "limit")

    def __init__(self, limit: int):
        self.limit = limit
        self._free_at = -math.inf

    def remaining(self, now: float) -> int:
        """Returns how much may be used at once; below 0 where more was used than there was."""
        return math.floor(self.limit - self.reset_s(now) * self.limit / _PERIOD_S + 1e-6)

    def reset_s(self, now: float) -> float:
        """Returns the seconds until all of the limit may be used."""
        return max(0.0, self._free_at - now)

    def wait_s(self, amount: int, now: float) -> float:
        """Returns the seconds until `amount` may be used; for more than the limit, until all of it
        may."""
        room_s = _PERIOD_S * (1 - min(amount, self.limit) / self.limit)
        wait = self.reset_s(now) - room_s
        return wait if wait > 1e-6 else 0.0

    def charge(self, amount: float, now: float) -> None:
        """Records that `amount` is used, or, below 0, that so much of it was not."""
        self._free_at = max(now, self._free_at) + amount * _PERIOD_S / self.limit


class TokenCharge:
    """The tokens that a request is charged: at first the most that it may use, at the end its
    actual use."""

    __slots__ = ("_account", "_limit", "_rate", "_reserved")

    def __init__(self, account: Account, tokens: int):
        """Raises `RateLimitError` if the account has fewer tokens left."""
        self._account, self._rate, self._reserved = account, account.tokens, tokens
        if self._rate is not None:
            now = time.monotonic()
            if wait := self._rate.wait_s(tokens, now):
                raise account.rejection("tokens", wait)
            self._rate.charge(tokens, now)
            self._limit = self._rate.limit

    def settle(self, outputs: Sequence[RequestOutput]) -> None:
        """Charges the actual use of these outputs, of all prompts that were queued, instead of the
        reserved tokens."""
        prompt = sum(len(output.prompt_token_ids) for output in outputs)
        generated = sum(output.num_generated for output in outputs)
        self._account.num_prompt_tokens += prompt
        self._account.num_generated_tokens += generated
        if self._rate is not None:
            # the reserved tokens, scaled to the current limit, which may differ
            reserved = self._reserved * self._rate.limit / self._limit
            self._rate.charge(prompt + generated - reserved, time.monotonic())


class Account:
    """The usage and the limits of one API key.

    Attributes:
        key: the key, with its limits.
        flow: its requests, for the scheduler.
        requests, tokens: its rates; None without a limit.
        num_requests, num_prompt_tokens, num_generated_tokens: totals: accepted requests, and the
            tokens of requests that have ended.
        num_rejected: requests that were answered 429, by limit.
        num_concurrent: requests that are being answered.
    """

    def __init__(self, key: ApiKey):
        self.num_requests = self.num_prompt_tokens = self.num_generated_tokens = 0
        self.num_rejected = dict.fromkeys(LIMITS, 0)
        self.num_concurrent = 0
        self.requests: Rate | None = None
        self.tokens: Rate | None = None
        self.set_key(key)

    def set_key(self, key: ApiKey) -> None:
        """Sets new limits; the used part of each stays used."""
        self.key = key
        self.flow = Flow(key.name, key.weight)
        self.requests = _rate(self.requests, key.requests_per_minute)
        self.tokens = _rate(self.tokens, key.tokens_per_minute)

    @contextmanager
    def request(self) -> Iterator[None]:
        """Charges a request, which is being answered until the end of the block.

        Raises `RateLimitError`. That a key has no tokens left is found here as well, before its
        prompt is encoded.
        """
        limit, now = self.key.max_concurrent_requests, time.monotonic()
        if limit is not None and self.num_concurrent >= limit:
            raise self.rejection("concurrency", _CONCURRENCY_RETRY_S)
        if self.tokens is not None and (wait := self.tokens.wait_s(1, now)):
            raise self.rejection("tokens", wait)
        if self.requests is not None:
            if wait := self.requests.wait_s(1, now):
                raise self.rejection("requests", wait)
            self.requests.charge(1, now)
        self.num_requests += 1
        with self.occupied():
            yield

    @contextmanager
    def occupied(self) -> Iterator[None]:
        """Counts work that goes on after a request's reply as a request that is being answered."""
        self.num_concurrent += 1
        try:
            yield
        finally:
            self.num_concurrent -= 1

    def rejection(self, kind: str, wait_s: float) -> RateLimitError:
        """Records that a request is beyond a limit of `LIMITS`, and returns the error."""
        self.num_rejected[kind] += 1
        seconds = max(1, math.ceil(wait_s))
        limits = {
            "requests": f"{self.key.requests_per_minute} requests a minute",
            "tokens": f"{self.key.tokens_per_minute} tokens a minute",
            "concurrency": f"{self.key.max_concurrent_requests} requests at a time",
        }
        return RateLimitError(
            f"the limit of {limits[kind]} is reached; try again in {seconds} s",
            kind=kind,
            retry_after_s=seconds,
        )

    def priority(self, asked: int | None) -> int:
        """Returns the priority of a request that asks for `asked`, or for none. Raises
        `RequestError` for one below the bound."""
        bound = self.key.min_priority
        if asked is None:
            return max(0, bound)
        if asked < bound:
            raise FieldError(
                "priority",
                f"is {asked}, and may be {bound} or above: API keys may have another min_priority",
            )
        return asked

    def headers(self) -> dict[str, str]:
        """Returns `RATE_HEADERS` with their values; headers of a missing limit are left out."""
        now, found = time.monotonic(), {}
        for unit, rate in (("requests", self.requests), ("tokens", self.tokens)):
            if rate is not None:
                found[f"x-ratelimit-limit-{unit}"] = str(rate.limit)
                found[f"x-ratelimit-remaining-{unit}"] = str(max(0, rate.remaining(now)))
                found[f"x-ratelimit-reset-{unit}"] = duration_text(rate.reset_s(now))
        return found


def _rate(old: Rate | None, limit: int | None) -> Rate | None:
    """Returns the rate of a new limit: the old one with its usage, if there was one."""
    if limit is None:
        return None
    rate = old or Rate(limit)
    rate.limit = limit
    return rate


def duration_text(seconds: float) -> str:
    """Returns a duration as OpenAI's headers have it: "0s", "120ms", "1.5s", "6m0s"."""
    milliseconds = math.ceil(seconds * 1000 - 1e-6)
    if 0 < milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes}m{rest / 1000:g}s" if minutes else f"{rest / 1000:g}s"


class Accounts:
    """The accounts of all API keys."""

    def __init__(self, keys: ApiKeys):
        self._known: dict[str, Account] = {}  # also of names that are gone
        self.set_keys(keys)

    def __len__(self) -> int:
        return len(self._keys.all)

    def __iter__(self) -> Iterator[Account]:
        """Yields the accounts in the order of their keys."""
        return (self._known[key.name] for key in self._keys.all)

    def find(self, authorization: str | None) -> Account | None:
        """Returns the account of the key in an `Authorization` header, None if there is none."""
        key = self._keys.find(authorization)
        return None if key is None else self._known[key.name]

    def named(self, name: str) -> Account | None:
        """Returns the account of a key's name, None if no key has it (any more)."""
        return next((account for account in self if account.key.name == name), None)

    def check_admin(self, authorizations: Iterable[str | None]) -> None:
        """Raises `RequestError` unless one of these `Authorization` headers holds a key for the
        admin endpoints."""
        if not self._keys.has_admin:
            raise RequestError(
                "this endpoint needs an admin key, and the server has none: server.admin_key, or "
                "admin = true in the file of server.api_keys",
                status=403,
                code="no_admin_key",
            )
        if not any(map(self._keys.is_admin, authorizations)):
            raise RequestError(
                "this endpoint needs an admin key, as in 'Authorization: Bearer KEY'",
                status=401,
                code="invalid_admin_key",
            )

    def set_keys(self, keys: ApiKeys) -> None:
        """Replaces the keys; accounts whose name stays go on. Requests that are being answered go
        on as they are."""
        self._keys = keys
        for key in keys.all:
            if key.name in self._known:
                self._known[key.name].set_key(key)
            else:
                self._known[key.name] = Account(key)

    async def reload(self, config: ServerConfig) -> None:
        """Reads the key file again, and logs a line. A file that cannot be used changes nothing."""
        try:
            keys = await asyncio.to_thread(ApiKeys.load, config)
        except ConfigError as error:
            _log.error("the API keys stay as they were: %s", error)
        else:
            self.set_keys(keys)
            _log.info("the API keys were read again: %d names", len(keys.all))


ACCOUNTS = web.AppKey("accounts", Accounts)
ACCOUNT = web.RequestKey("account", Account)


#: The paths that need no key: `MONITORING_PATHS`, and the page, which asks the user for one.
OPEN_PATHS = web.AppKey("open_paths", frozenset[str])
#: The paths that act on the whole server: they need an admin key.
ADMIN_PATHS = web.AppKey("admin_paths", frozenset[str])


@web.middleware
async def require_key(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answers 401 to a request without a right key, whatever its path, but for the open ones, and
    429 to a POST request beyond a limit of its key; the others get their key's account. Requests
    for `ADMIN_PATHS` need an admin key."""
    app, path = request.app, local_path(request)
    if path in app[ADMIN_PATHS]:
        app[ACCOUNTS].check_admin(authorizations(request))
    elif path not in app[OPEN_PATHS]:
        if ACCOUNT not in request:  # else it is the server's own
            found = map(app[ACCOUNTS].find, authorizations(request))
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


#: Requests that begin in one iteration of the event loop: some 4 ms of work.
MAX_REQUESTS = 8


class RateLimiter:
    """Handlers `enter` before they begin to work. At most `MAX_REQUESTS` do so in one iteration of
    the event loop, the others in later ones, in order."""

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(MAX_REQUESTS)

    async def enter(self) -> None:
        """Returns at once, or when the handlers that came before have entered."""
        await self._places.acquire()
        asyncio.get_running_loop().call_soon(self._places.release)


RATE_LIMITER = web.AppKey("rate_limiter", RateLimiter)
