"""Admission control: the bound of the waiting queue, and the deadlines of requests.

The bound is one for all clients, so a request beyond it is answered 503 with `Retry-After` (429
would mean that this client sends too much). It is a matter of the HTTP server and not of the
frontend: `LLM` submits all of its prompts at once.

Where there are several API keys, none may fill the queue alone: one's requests wait only as long as
they are no more than the places that are still free. So a key alone gets half of the queue, two get
a third each, and there is always room for the next (dynamic thresholds: Choudhury and Hahne,
"Dynamic Queue Length Thresholds for Shared-Memory Packet Switches", 1998, with a factor of 1).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

from aiohttp import web

from aioinfer.api.context import MODELS, frontend_of
from aioinfer.api.errors import Handler
from aioinfer.api.http.limits import ACCOUNT, ACCOUNTS
from aioinfer.engine.recovery import EngineState
from aioinfer.engine.router import find_excess
from aioinfer.errors import OverloadedError, RequestError
from aioinfer.scheduler.request import Flow

if TYPE_CHECKING:
    from aioinfer.engine.frontend import Frontend
    from aioinfer.engine.output import RequestOutput


class AdmissionControl:
    """The bound of a model's waiting queue, and the part of it that one API key may fill.

    Requests that are reserved and not yet queued count as queued.

    Attributes:
        coming: reserved requests.
        coming_of: reserved requests by flow.
    """

    def __init__(self, frontend: Frontend):
        self._frontend = frontend
        self.coming = 0
        self.coming_of: Counter[str] = Counter()

    def check(self, requests: int, flow: str | None = None) -> None:
        """Raises `OverloadedError` unless so many requests may join the queue, which has the bound
        of `find_excess`; `flow` is given where several share it. Raises `RequestError` for more
        than will ever have room."""
        limits = self._frontend.config.scheduler
        if (bound := limits.max_waiting_requests) is not None:
            most = bound + limits.max_num_seqs * len(self._frontend.engines)
            if requests > most:
                raise RequestError(
                    f"{requests} prompts or sequences are more than the {most} that this server "
                    "takes at once (scheduler.max_waiting_requests and max_num_seqs)"
                )
        schedulers = [
            engine.scheduler
            for engine in self._frontend.engines
            if engine.state is not EngineState.DEAD
        ]
        excess = find_excess(schedulers, limits, requests, self.coming)
        if excess is not None:
            raise OverloadedError(f"{excess}; try again later")
        if flow is None or bound is None:
            return
        waiting = sum(scheduler.num_waiting for scheduler in schedulers) + self.coming
        free_slots = sum(scheduler.num_free_slots for scheduler in schedulers)
        own = sum(s.num_waiting_of(flow) for s in schedulers) + self.coming_of[flow]
        places = bound - max(0, waiting - free_slots)
        if own + requests - free_slots > places:
            raise OverloadedError(
                f"{own} requests of this API key wait, {requests} more are too many beside those "
                "of others; try again later"
            )

    @contextmanager
    def reserve(self, requests: int, flow: str | None = None) -> Iterator[Callable[[int], None]]:
        """Reserves places in the queue for so many sequences, all or none. The block gets a
        function that records that so many of them are in the queue now; its end releases the unused
        places. Raises `OverloadedError`."""
        self.check(requests, flow)
        left = 0

        def use(number: int) -> None:
            nonlocal left
            left -= number
            self.coming -= number
            if flow is not None:
                self.coming_of[flow] -= number

        use(-requests)
        try:
            yield use
        finally:
            use(left)


def sharer(request: web.Request) -> str | None:
    """Returns the name of a request's API key if others share the queue with it."""
    return request[ACCOUNT].key.name if len(request.app[ACCOUNTS]) > 1 else None


#: The flow of requests with several prompts, where one API key has the server.
_BATCHES = Flow("batches")


def flow_of(request: web.Request, num_prompts: int) -> Flow:
    """Returns the flow of a request's prompts: that of its API key. A key that is alone has two, so
    that a request with one prompt waits behind a few of another request's thousands."""
    return _BATCHES if num_prompts > 1 and sharer(request) is None else request[ACCOUNT].flow


#: Of each model, by its first name.
ADMISSION: web.AppKey[dict[str, AdmissionControl]] = web.AppKey("admission")


def admission_of(request: web.Request) -> AdmissionControl:
    """Returns the admission control of the model that a request is for."""
    return request.app[ADMISSION][frontend_of(request).config.name]


def admit(request: web.Request, timeout_s: float | None, count: int = 1) -> None:
    """Admits a request after its body has been read and before its prompts are encoded: a rejection
    must be cheap.

    Shortens its deadline to `timeout_s` seconds. Raises `OverloadedError` unless its `count`
    prompts may join the queue.
    """
    request[DEADLINE].shorten(timeout_s)
    admission_of(request).check(count, flow=sharer(request))


class Deadline:
    """The deadline of a request. Until the request is submitted, its handler is cancelled at that
    time; after that, its sequences are aborted instead."""

    def __init__(self, timeout_s: float | None):
        """`timeout_s` seconds from now; None is never."""
        self._began = asyncio.get_running_loop().time()
        self.guard = asyncio.timeout(timeout_s)

    def shorten(self, timeout_s: float | None) -> None:
        """Makes the request end no later than `timeout_s` seconds after it arrived."""
        when = self.guard.when()
        if timeout_s is not None and (when is None or self._began + timeout_s < when):
            self.guard.reschedule(self._began + timeout_s)

    def lift(self) -> None:
        """Removes the deadline of the handler."""
        self.guard.reschedule(None)

    def hand_over(self, outputs: Sequence[RequestOutput]) -> Callable[[], None]:
        """From now on aborts these outputs at the deadline instead of the handler. Returns a
        function that cancels this.

        The reader gets `RequestError` (504) after what has been generated, however slowly it reads.
        """
        when = self.guard.when()
        if when is None:
            return lambda: None
        self.lift()

        def expire() -> None:
            for output in outputs:
                output.abort(_expired())

        return asyncio.get_running_loop().call_at(when, expire).cancel


#: The deadline that `bound_time` gave a request.
DEADLINE = web.RequestKey("deadline", Deadline)


@web.middleware
async def bound_time(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Gives a request its deadline: `server.request_timeout_s`, which its `timeout_s` may shorten.

    Answers 504 at the deadline.
    """
    async with bounded(request):
        return await handler(request)


@asynccontextmanager
async def bounded(request: web.Request, timeout_s: float | None = None) -> AsyncIterator[None]:
    """Sets a new deadline for the work on a request in this block: the server's, or `timeout_s`
    seconds where these are less. Raises `RequestError` (504) at the deadline."""
    settings = request.app[MODELS].first.config.server
    deadline = request[DEADLINE] = Deadline(settings.request_timeout_s)
    try:
        async with deadline.guard:
            deadline.shorten(timeout_s)
            yield
    except TimeoutError:
        if not deadline.guard.expired():
            raise
        raise _expired() from None


def _expired() -> RequestError:
    return RequestError("the request took longer than it may", status=504, code="timeout")
