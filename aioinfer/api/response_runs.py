"""Background responses (`"background": true`): they are generated without a connection until they
end or are cancelled. Clients poll them, or follow their events.

`responses` starts them. `ResponseRuns` holds the responses that have not ended; the `ObjectStore`
has the others. Both are in memory: a server that ends cancels the responses that are not complete.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import TYPE_CHECKING

from aiohttp import web

from aioinfer.api.admission import bounded
from aioinfer.api.delivery import submitted
from aioinfer.api.event_stream import StreamState
from aioinfer.api.generation import Generation
from aioinfer.api.limits import ACCOUNT
from aioinfer.api.logprobs import formatted
from aioinfer.api.object_store import MAX_STORED, ObjectStore, json_size
from aioinfer.api.record import RECORD, RequestRecord
from aioinfer.api.response_context import ResponseContext
from aioinfer.api.response_events import Response, ResponseDialect
from aioinfer.api.responses_body import ResponseRequest
from aioinfer.config import ChatConfig
from aioinfer.engine.chat_turn import Turn
from aioinfer.errors import OverloadedError
from aioinfer.scheduler.request import RequestStatus

if TYPE_CHECKING:
    from aioinfer.engine.frontend import Frontend
    from aioinfer.engine.output import RequestOutput


class ResponseRun:
    """A response that is generated in the background.

    Attributes:
        num_bytes: the length of its items as JSON.
        events: the events so far by their sequence numbers, if it was asked to be a stream.
        ended: the response, once it has ended.
    """

    def __init__(
        self,
        frontend: Frontend,
        body: ResponseRequest,
        turn: Turn,
        context: ResponseContext,
        state: StreamState,
    ):
        """`state` has the key of its ids."""
        self.context = context
        self.events: list[bytes] = []
        self.ended: Response | None = None
        self._body, self._turn = body, turn
        self._dialect = ResponseDialect(frontend, body, turn, state, self._end)
        self._output: RequestOutput | None = None
        self._news = asyncio.Event()
        self.num_bytes = json_size(context.items)

    @property
    def id(self) -> str:
        """The id of the response."""
        return self._dialect.id

    @property
    def is_stream(self) -> bool:
        """Whether its events are kept."""
        return bool(self._body.stream)

    def body(self) -> Response:
        """Returns the response as it stands."""
        if self.ended is not None:
            return self.ended
        is_running = self._output is not None and self._output.sequences[0].request.status in (
            RequestStatus.RUNNING,
            RequestStatus.FINISHED,
        )
        # one that was preempted is in progress
        waits = not self._dialect.blocks.all and not is_running
        return self._dialect.response(unfinished="queued" if waits else "in_progress")

    def keep(self, request: web.Request) -> None:
        """Stores the response, if it has ended."""
        if self.ended is not None:
            self.context.keep(request, self._body, self.ended, self.events)

    def cancel(self) -> None:
        """Has the generation end; the response is cancelled unless it is complete."""
        if self._output is not None:
            self._output.abort()

    async def generate(self, request: web.Request, queued: asyncio.Future[Response]) -> None:
        """Generates the response for a request, beyond its reply. `queued` becomes the response
        when it is in the queue, or the error that kept it out."""
        request[RECORD] = RequestRecord(request[RECORD].arrived)  # the other ends with the reply
        generation = Generation(
            self.id,
            [self._turn.prompt],
            self._turn.params,
            priority=self._body.priority,
            cache_salt=self._body.cache_salt,
        )
        try:
            async with (
                bounded(request, self._body.timeout_s),
                submitted(request, generation) as outputs,
            ):
                self._output = outputs[0]
                writer = self._dialect.choice(outputs[0], 0, 0)
                queued.set_result(self.body())
                async for delta in outputs[0]:
                    make = partial(writer.events, delta)
                    self._note(await formatted(delta.logprobs or (), make))
        except Exception as error:
            if not queued.done():
                queued.set_exception(error)
                return
            self._end(self._dialect.failed(error))
            self._note(self._dialect.failure(error))
        if self.ended is None:
            self.ended = self._dialect.response(unfinished="cancelled")
        self._note(b"")

    def _end(self, ended: Response) -> None:
        self.ended = ended

    def _note(self, events: bytes) -> None:
        """Stores events, and wakes the followers of the stream."""
        if self.is_stream:
            # JSON has no line ends of its own
            self.events += [event + b"\n\n" for event in events.split(b"\n\n")[:-1]]
        self._news.set()
        self._news = asyncio.Event()

    async def follow(self, first: int) -> AsyncIterator[bytes]:
        """Yields the events from this sequence number on as they come."""
        while True:
            if first < len(self.events):
                found = b"".join(self.events[first:])
                first = len(self.events)
                yield found
            elif self.ended is not None:
                return
            else:
                await self._news.wait()


class ResponseRuns:
    """The background responses of all API keys that have not ended. The limits of stored objects,
    in number and in bytes, bound them too."""

    def __init__(self, store: ObjectStore, config: ChatConfig):
        self._store, self._config = store, config
        self._runs: dict[tuple[str | None, str], ResponseRun] = {}
        self._tasks: dict[ResponseRun, asyncio.Task[None]] = {}

    def find(self, owner: str | None, id: str) -> ResponseRun | None:
        """Returns a response of an API key that has not ended; None where there is none."""
        return self._runs.get((owner, id))

    async def begin(self, request: web.Request, run: ResponseRun) -> Response:
        """Begins a response for a request, and returns it when it is in the queue.

        Raises `RequestError` if it could not be stored, `OverloadedError` if there are too many,
        and what `submitted` does.
        """
        self._store.check_room(run.num_bytes, "a response in the background", "background")
        num_bytes = sum(other.num_bytes for other in self._tasks) + run.num_bytes
        if len(self._tasks) >= MAX_STORED or num_bytes > self._config.max_stored_bytes:
            raise OverloadedError(
                f"{len(self._tasks)} responses are in the background, one more is too many; try "
                "again later"
            )
        queued: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._run(request, run, queued))
        self._tasks[run] = task
        task.add_done_callback(partial(self._forget, run))
        try:
            return await queued
        except asyncio.CancelledError:  # the client is gone before it got the id
            task.cancel()
            raise

    async def cancel(self, run: ResponseRun) -> None:
        """Cancels a response, and returns when it has ended."""
        run.cancel()
        await asyncio.wait([self._tasks[run]])

    async def stop(self, app: web.Application) -> None:
        """Ends all of them; a handler of `on_shutdown`."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(
        self, request: web.Request, run: ResponseRun, queued: asyncio.Future[Response]
    ) -> None:
        account = request[ACCOUNT]
        place = (account.key.name, run.id)
        self._runs[place] = run
        try:
            with account.occupied():
                await run.generate(request, queued)
            run.keep(request)
        finally:
            del self._runs[place]

    def _forget(self, run: ResponseRun, task: asyncio.Task[None]) -> None:
        del self._tasks[run]


RESPONSE_RUNS = web.AppKey("response_runs", ResponseRuns)
