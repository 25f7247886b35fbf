"""What a caller holds of a running request: its completions, and the queue on which their new text
arrives.

`Frontend.submit` makes a `Generation`; the HTTP handlers and `LLM` iterate over it. The engine's
step loop feeds it through `Choice.take`, on the same event loop. The queue holds at most one delta
a completion: what a slow reader has not fetched merges, so that it costs bounded memory and delays
nobody. A reader that can take a token at once, without being woken, attaches a `Sink`; then the
queue is only for what the sink turns down.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Protocol

from aioinfer.sampling_params import SamplingParams
from aioinfer.scheduler.request import Request, Status
from aioinfer.text.detokenizer import Detokenizer
from aioinfer.text.stops import StopStrings


@dataclass(slots=True)
class TokenLogprob:
    """The log-probability of a chosen token, and (token id, log-probability) of the likeliest ones
    in its place."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(slots=True)
class Delta:
    """What is new of one completion since the last delta.

    Attributes:
        index: which of the n completions.
        text: new text; may be empty, when a token is held back (half a character, the beginning of
            a stop string).
        token_ids: the new tokens, an end token included.
        logprobs: one for each new token, if they were asked for.
        finish_reason: "stop", "length", "abort" or "error" in the last delta, else None.
        stop_reason: the token id or the string that ended the text.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def merge(self, later: Delta) -> None:
        """Appends a later delta of the same completion."""
        self.text += later.text
        self.token_ids += later.token_ids
        if later.logprobs:
            self.logprobs = (self.logprobs or []) + later.logprobs
        self.finish_reason = later.finish_reason
        self.stop_reason = later.stop_reason


class Sink(Protocol):
    """Takes tokens straight from the step loop."""

    def take(
        self, index: int, text: str, reason: str | None, stop_reason: int | str | None
    ) -> bool:
        """Takes a token of completion `index` with what it adds to the text, and how the completion
        ends with it, if it does.

        Returns False to have it queued instead. It must not wait, and must not raise.
        """
        ...


class Generation:
    """One request: n completions of one prompt. Iterate over it for the deltas of all of them."""

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        abort: Callable[[Generation], None],
    ):
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.choices: list[Choice] = []
        self._abort = abort
        self._queue: dict[int, Delta] = {}
        self._unfinished = params.n
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._sink: Sink | None = None

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens whose KV blocks were found in the prefix cache; known once the first delta
        is there."""
        return max(0, self.choices[0].request.num_cached)

    @property
    def is_finished(self) -> bool:
        """Whether nothing more will be generated."""
        return self._unfinished == 0 or self._error is not None

    def abort(self, error: Exception | None = None) -> None:
        """Ends what is unfinished and frees its KV blocks. Does nothing on a finished request.

        The reader gets the deltas that are queued, and then `error` if there is one.
        """
        if not self.is_finished:
            self._abort(self)
            self._unfinished = 0
            self._error = error
            self._wake()

    def attach(self, sink: Sink) -> None:
        """From now on offers each token to `sink`, unless something is queued: the order of a
        completion's text is kept."""
        self._sink = sink

    def take(
        self,
        index: int,
        text: str,
        token: int,
        logprob: TokenLogprob | None,
        reason: str | None,
        stop_reason: int | str | None,
    ) -> None:
        """Hands on a token (the step loop calls this): to the sink, or as a delta to the queue."""
        if (
            self._sink is not None
            and not self._queue
            and logprob is None
            and self._sink.take(index, text, reason, stop_reason)
        ):
            if reason is not None:
                self._unfinished -= 1
                if not self._unfinished:
                    self._wake()
            return
        self.put(Delta(index, text, [token], [logprob] if logprob else None, reason, stop_reason))

    def put(self, delta: Delta) -> None:
        """Queues a delta."""
        waiting = self._queue.get(delta.index)
        if waiting is None:
            self._queue[delta.index] = delta
        else:
            waiting.merge(delta)
        if delta.finish_reason is not None:
            self._unfinished -= 1
        self._wake()

    def fail(self, error: Exception) -> None:
        """Ends the request with an error, which the reader gets after the deltas that are
        queued."""
        if not self.is_finished:
            self._error = error
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        while not self._queue:
            if self._error is not None:
                raise self._error
            if self._unfinished == 0:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._queue.pop(next(iter(self._queue)))


class Choice:
    """One completion: turns its tokens into text, and finds the stop strings."""

    __slots__ = ("_detokenizer", "_stops", "generation", "index", "request")

    def __init__(
        self, index: int, request: Request, generation: Generation, detokenizer: Detokenizer | None
    ):
        self.index = index
        self.request = request
        self.generation = generation
        self._detokenizer = detokenizer
        params = request.params
        self._stops = StopStrings(params.stop, params.include_stop) if params.stop else None

    def take(self, token: int, logprob: TokenLogprob | None) -> str | None:
        """Hands on a new token. Returns the stop string that the text ran into, if one did.

        Then the caller ends the request; what is handed on says already that it has ended.
        """
        request, detokenizer, stops = self.request, self._detokenizer, self._stops
        if request.status is Status.FINISHED or detokenizer is None:
            return self._take_otherwise(token, logprob)
        text, stop = detokenizer.next(token), None
        if stops is not None and request.num_output >= request.params.min_tokens:
            text, stop = stops.feed(text)
        self.generation.take(
            self.index, text, token, logprob, None if stop is None else "stop", stop
        )
        return stop

    def _take_otherwise(self, token: int, logprob: TokenLogprob | None) -> str | None:
        """Hands on the last token of a request that the scheduler has ended, or any where no text
        is wanted."""
        request, detokenizer, stops = self.request, self._detokenizer, self._stops
        text, stop = "", None
        if detokenizer is not None:
            if request.finish_reason != "stop" or request.params.include_stop:
                text = detokenizer.next(token)
            text += detokenizer.flush()
            if stops is not None and request.num_output >= request.params.min_tokens:
                text, stop = stops.feed(text)
                text += stops.flush() if stop is None else ""
        if stop is not None:
            self.generation.take(self.index, text, token, logprob, "stop", stop)
        else:
            self.generation.take(
                self.index, text, token, logprob, request.finish_reason, request.stop_reason
            )
        return stop
