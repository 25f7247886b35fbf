"""The output of a request while it is generated: n sequences of tokens, and their text as it comes.

`Frontend.admit` makes a `RequestOutput` for each request, and the HTTP handlers and `LLM` iterate
over it for `Delta`s. The engine's step loop feeds it, on the same event loop:
`OutputSequence.append` decodes each new token and finds stop strings.

A delta that its reader has not fetched yet is merged with the next one of its sequence, so a slow
reader costs bounded memory and delays nobody. A reader that can take tokens without being woken
attaches a `Sink`; the queue of deltas then holds only what the sink does not accept.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from aioinfer.engine.beam_search import BeamRun
from aioinfer.engine.logprobs import TokenLogprob
from aioinfer.engine.metrics import RequestTimes
from aioinfer.ipc.sections import F32
from aioinfer.sampling_params import SamplingParams
from aioinfer.scheduler.prompt_rows import (
    PromptPool,
    PromptProgress,
    PromptScores,
    PromptStates,
)
from aioinfer.scheduler.request import Request, Status
from aioinfer.text.constraints import Constraint
from aioinfer.text.detokenizer import Detokenizer
from aioinfer.text.stops import StopStrings


@dataclass(slots=True)
class Delta:
    """What is new in one sequence since its last delta.

    Attributes:
        index: the number of the sequence, 0 to n - 1.
        text: new text. It may be empty: half a character and what may become a stop string are
            held back.
        token_ids: the new tokens, an end token included.
        logprobs: one for each new token, if the request has `logprobs`.
        finish_reason: "stop", "length", "abort" or "error" in the last delta, else None.
        stop_reason: the string, or the token id of `stop_token_ids`, that ended the text; None at
            the model's own end token.
        cumulative_logprob: of all tokens, in the output of a beam search.
        is_restored: whether the client has it already (see `RequestOutput.restore`).
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None
    is_restored: bool = False
    _later_texts: list[str] | None = field(default=None, init=False, repr=False, compare=False)

    def merge(self, later: Delta) -> None:
        """Appends a later delta of the same sequence, in time that does not depend on how much has
        been merged before. The text lacks what was appended until `join`."""
        if self._later_texts is None:
            self._later_texts = []
        self._later_texts.append(later.text)
        self.token_ids += later.token_ids
        if later.logprobs:
            if self.logprobs is None:
                self.logprobs = []
            self.logprobs += later.logprobs
        self.finish_reason = later.finish_reason
        self.stop_reason = later.stop_reason
        self.cumulative_logprob = later.cumulative_logprob

    def join(self) -> Delta:
        """Makes the text whole after all calls of `merge`, and returns this delta."""
        if self._later_texts is not None:
            self.text += "".join(self._later_texts)
            self._later_texts = None
        return self


class KnownDelta(msgspec.Struct, array_like=True):
    """A delta that the client has from another server, whose output this one goes on with. See
    `Delta`; the text follows from the tokens.

    Attributes:
        num_cached: prompt tokens that the other server found in its prefix cache.
    """

    index: int
    token_ids: list[int]
    num_cached: int | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Sink(Protocol):
    """Accepts tokens straight from the step loop."""

    def push(
        self, index: int, text: str, token: int, reason: str | None, stop_reason: int | str | None
    ) -> bool:
        """Accepts one token of sequence `index`: the text that it adds, and the finish reason if
        the sequence ends with it.

        Returns False to have it queued instead. It must neither wait nor raise.
        """
        ...


class RequestOutput:
    """The output of one request: n sequences for one prompt. Iterate over it for their deltas, or
    `collect` it.

    Attributes:
        request_id: for messages.
        prompt_token_ids: the prompt as the model sees it.
        params: the request's sampling parameters.
        sequences: the n sequences, by index; one that stands for all beams of a beam search.
        stops: the search for the request's stop strings, which each sequence begins anew; None if
            it has none.
        on_abort: called with this object when the reader aborts the request; changes when the
            request moves to another engine.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        abort: Callable[[RequestOutput], None],
    ):
        """`abort` is the first `on_abort`."""
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.sequences: list[OutputSequence] = []
        self.stops = StopStrings(params.stop, params.include_stop) if params.stop else None
        self.on_abort = abort
        self._queue: dict[int, Delta] = {}
        self._num_unfinished = params.n
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._is_collected = False
        self._sink: Sink | None = None

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens whose KV blocks were found in the prefix cache. Known with the first
        delta."""
        return max(0, self.sequences[0].request.num_cached)

    @property
    def num_generated(self) -> int:
        """Tokens that were generated for the reader, of all sequences."""
        if self.params.prompt_only:
            return 0
        if self.params.beam_search is not None:
            return self.params.n * self.sequences[0].request.num_output
        return sum(sequence.request.num_output for sequence in self.sequences)

    def generated(self) -> list[Sequence[int]]:
        """Returns the tokens so far of each sequence, an end token included."""
        requests = [sequence.request for sequence in self.sequences]
        return [request.tokens[len(self.prompt_token_ids) :] for request in requests]

    @property
    def prompt_scores(self) -> PromptScores | None:
        """The log-probabilities of the prompt's tokens, if they were requested. Complete with the
        first delta."""
        rows = self.sequences[0].request.prompt_rows
        return rows if isinstance(rows, PromptScores) else None

    @property
    def prompt_progress(self) -> PromptProgress | None:
        """How much of the prompt is computed, if that was requested."""
        rows = self.sequences[0].request.prompt_rows
        return rows if isinstance(rows, PromptProgress) else None

    def report_progress(self) -> None:
        """Wakes the reader with a delta without tokens, since its prompt has advanced."""
        self.put(Delta(0))

    @property
    def pooled(self) -> F32 | None:
        """The pooled hidden state of the prompt, float32 [hidden_size], or those of all tokens
        [P, hidden_size], if it was requested. Known with the first delta."""
        rows = self.sequences[0].request.prompt_rows
        if isinstance(rows, PromptStates):
            return rows.states if rows.is_done else None
        return rows.state if isinstance(rows, PromptPool) else None

    @property
    def can_resume(self) -> bool:
        """Whether another server can go on with the output from its tokens alone."""
        params = self.params
        return (
            params.beam_search is None
            and params.logprobs is None
            and not params.prompt_only
            and self.sequences[0].request.prompt_rows is None
        )

    @property
    def is_finished(self) -> bool:
        """Whether no further token will come."""
        return self._num_unfinished == 0 or self._error is not None

    @property
    def has_deltas(self) -> bool:
        """Whether the reader has deltas to fetch."""
        return bool(self._queue)

    def abort(self, error: Exception | None = None) -> None:
        """Ends the sequences that are unfinished and frees their KV blocks. Does nothing on a
        finished request.

        The reader gets the deltas that are queued, and then `error` if there is one.
        """
        if not self.is_finished:
            self.on_abort(self)
            self._num_unfinished = 0
            self._error = error
            self._wake()

    def attach(self, sink: Sink) -> None:
        """From now on offers each token to `sink` first, unless a delta is queued: the order of the
        text is kept."""
        self._sink = sink

    def push(
        self,
        index: int,
        text: str,
        token: int,
        logprob: TokenLogprob | None,
        reason: str | None,
        stop_reason: int | str | None,
    ) -> None:
        """Passes on a token of sequence `index`: to the sink, or as a delta to the queue. Called by
        the step loop."""
        if (
            self._sink is not None
            and not self._queue
            and logprob is None
            and self._sink.push(index, text, token, reason, stop_reason)
        ):
            if reason is not None:
                self._num_unfinished -= 1
                if not self._num_unfinished:
                    self._wake()
            return
        if logprob is not None:
            logprob.text = text
        self.put(Delta(index, text, [token], [logprob] if logprob else None, reason, stop_reason))

    def put(self, delta: Delta) -> None:
        """Queues a delta."""
        waiting = self._queue.get(delta.index)
        if waiting is None:
            self._queue[delta.index] = delta
        else:
            waiting.merge(delta)
        if delta.finish_reason is not None:
            self._num_unfinished -= 1
        self._wake()

    def restore(self, known: Sequence[KnownDelta]) -> None:
        """Makes the output go on behind what its client has, before the engine has it. The reader
        gets these deltas first, and one by one. About 2 us a token, and 10 more under a grammar.

        Raises `GenerationError` if the request's restrictions exclude a token.
        """
        for number, delta in enumerate(known):
            self.sequences[delta.index].restore(delta)
            if (made := self._queue.pop(delta.index, None)) is not None:
                made.is_restored = True
                self._queue[-1 - number] = made  # later ones must not merge with it

    def fail(self, error: Exception) -> None:
        """Ends the request with an error, which the reader gets after the deltas that are
        queued."""
        if not self.is_finished:
            self._error = error
            self._wake()

    def _wake(self) -> None:
        if (
            self._waiter is not None
            and not self._waiter.done()
            and (not self._is_collected or self.is_finished)
        ):
            self._waiter.set_result(None)

    async def _wait(self) -> None:
        """Waits for `_wake`."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    async def collect(self) -> list[Delta]:
        """Waits for the end and returns all that each sequence has brought since the last delta was
        fetched, in one delta a sequence, by index. The deltas merge in the queue meanwhile, so that
        no token wakes the reader.

        Raises the error that the request ends with, as the iteration does.
        """
        self._is_collected = True
        try:
            while not self.is_finished:
                await self._wait()
        finally:
            self._is_collected = False
        if self._error is not None:
            raise self._error
        wholes: dict[int, Delta] = {}
        for delta in self._queue.values():  # several of a sequence that was restored
            delta.join()
            if delta.index in wholes:
                wholes[delta.index].merge(delta)
            else:
                wholes[delta.index] = delta
        self._queue = {}
        return [wholes[index].join() for index in sorted(wholes)]

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        while not self._queue:
            if self._error is not None:
                raise self._error
            if self._num_unfinished == 0:
                raise StopAsyncIteration
            await self._wait()
        return self._queue.pop(next(iter(self._queue))).join()


class OutputSequence:
    """One sequence of a request's output: decodes its tokens, and finds stop strings.

    `times` is when it was queued, scheduled and so on, once the engine has it. `constraint` is
    what restricts its next tokens, or None. `search` is the beam search that it stands for, or
    None, and `make_detokenizer` then makes one for each result, if there is text.
    """

    __slots__ = (
        "_detokenizer", "_min_tokens", "_stops", "constraint", "index", "make_detokenizer",
        "output", "request", "search", "times",
    )  # fmt: skip

    def __init__(
        self,
        index: int,
        request: Request,
        output: RequestOutput,
        detokenizer: Detokenizer | None,
        constraint: Constraint | None = None,
    ):
        """`request` is what the scheduler knows of the sequence; without a `detokenizer` there is
        no text."""
        self.constraint = constraint
        self.search: BeamRun | None = None
        self.make_detokenizer: Callable[[], Detokenizer] | None = None
        self.index = index
        self.request = request
        self.output = output
        self.times: RequestTimes | None = None
        self._detokenizer = detokenizer
        params = request.params
        self._min_tokens = params.min_tokens
        self._stops = output.stops and output.stops.for_other_text()

    def append(self, token: int, logprob: TokenLogprob | None, num_more: int = 0) -> str | None:
        """Passes on a new token with its text. Returns the stop string that the text now ends in,
        if it does.

        The reader's last delta has the finish reason, and the caller has to end the
        request in the scheduler. Where the scheduler has ended it in the same step, by its length
        or by an end token, the stop string is the reason that counts, here and in the request.

        Args:
            token: the next token of the sequence.
            logprob: its log-probability, if the request has `logprobs`.
            num_more: how many tokens of the same step come after it.
        """
        request, detokenizer, stops = self.request, self._detokenizer, self._stops
        if (request.status is Status.FINISHED and not num_more) or detokenizer is None:
            return self._append_last(token, logprob, num_more)
        text, stop = detokenizer.next(token), None
        if stops is not None and (
            not self._min_tokens or request.num_output - num_more >= self._min_tokens
        ):
            text, stop = stops.feed(text)
            if stop is not None and request.status is Status.FINISHED:
                request.finish_reason, request.stop_reason = "stop", stop
        self.output.push(self.index, text, token, logprob, None if stop is None else "stop", stop)
        return stop

    def restore(self, known: KnownDelta) -> None:
        """Appends tokens that the client has. They are computed anew once the scheduler has the
        request, as after a preemption. See `RequestOutput.restore`."""
        request, tokens, reason = self.request, known.token_ids, known.finish_reason
        if self.constraint is not None and reason is None:
            self.constraint.accept(tokens)
        for number, token in enumerate(tokens, 1):
            request.tokens.append(token)
            if reason is not None and number == len(tokens):
                is_end = token in request.end_tokens
                self._finish(reason, token if is_end else known.stop_reason)
            self.append(token, None)
        if reason is not None and not tokens:
            self._finish(reason, known.stop_reason)
            self.output.put(Delta(self.index, finish_reason=reason))
        request.num_cached = max(request.num_cached, known.num_cached or 0)
        request.clear_place()

    def _finish(self, reason: str, stop_reason: int | str | None) -> None:
        request = self.request
        request.status, request.finish_reason = Status.FINISHED, reason
        request.stop_reason = stop_reason

    def _append_last(self, token: int, logprob: TokenLogprob | None, num_more: int) -> str | None:
        """Passes on the last token of a request that the scheduler has ended, or any token where
        there is no text."""
        request, detokenizer, stops = self.request, self._detokenizer, self._stops
        if request.params.prompt_only:  # the token that ended it is nobody's
            self.output.put(Delta(self.index, finish_reason=request.finish_reason))
            return None
        if num_more:
            self.output.push(self.index, "", token, logprob, None, None)
            return None
        text, stop = "", None
        if detokenizer is not None:
            # an end token is no text; a constraint may end a request with any token
            if request.stop_reason is None or request.params.include_stop:
                text = detokenizer.next(token)
            text += detokenizer.flush()
            if stops is not None and request.num_output >= self._min_tokens:
                text, stop = stops.feed(text)
                text += stops.flush() if stop is None else ""
        if stop is not None:
            request.finish_reason, request.stop_reason = "stop", stop
        reason = request.stop_reason
        if isinstance(reason, int) and reason not in request.params.stop_token_ids:
            reason = None  # the model's own end token, as in vLLM
        self.output.push(self.index, text, token, logprob, request.finish_reason, reason)
        return stop
