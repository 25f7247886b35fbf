"""The output of a request while it is generated: n sequences of tokens, and their text as it comes.

`Frontend.admit` makes a `RequestOutput` for each request, and the HTTP handlers and `LLM` iterate
over it for `Delta`s. The engine's step loop feeds it, on the same event loop:
`OutputSequence.append` decodes each new token and finds stop strings.

A delta that its reader has not fetched yet is merged with the next one of its sequence, so a slow
reader costs bounded memory and delays no other request. A reader that can take tokens without being
woken attaches a `Sink`; the queue of deltas then holds only the tokens that the sink does not
accept.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from aioinfer.engine.metrics import RequestTimes
from aioinfer.features.logprobs.planning import TokenLogprob
from aioinfer.features.masks.planning import constraint_of
from aioinfer.features.pooled_states.planning import PromptPool
from aioinfer.features.prompt_logprobs.planning import PromptScores
from aioinfer.features.prompt_progress.planning import PromptProgress
from aioinfer.features.speculation.planning import Predicted
from aioinfer.features.token_states.planning import PromptStates
from aioinfer.ipc.sections import F32
from aioinfer.sampling_params import SamplingParams
from aioinfer.scheduler.request import Finish, Request
from aioinfer.tasks import together
from aioinfer.text.detokenizer import Detokenizer
from aioinfer.text.stops import StopStrings


@dataclass(slots=True)
class Delta:
    """The new part of one sequence since its last delta.

    Attributes:
        index: the number of the sequence, 0 to n - 1.
        text: new text. It may be empty: half a character and text that may become a stop string are
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
        been merged before. The text lacks the appended part until `join`."""
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
    """A delta that the client has from another server; this server continues that output. See
    `Delta`; the text follows from the tokens.

    Attributes:
        num_cached: prompt tokens that the other server found in its prefix cache.
    """

    index: int
    token_ids: list[int]
    num_cached: int | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


#: The token or the stop string that has ended a text, if one of them has.
StopReason = int | str | None


class Sink(Protocol):
    """Accepts tokens straight from the step loop."""

    def push(
        self, index: int, text: str, token: int, reason: str | None, stop_reason: StopReason
    ) -> bool:
        """Accepts one token of sequence `index`: the text that it adds, and the finish reason if
        the sequence ends with it.

        Returns False to have it queued instead. It must neither wait nor raise.
        """
        ...


#: The version of the weights that a server starts with.
FIRST_VERSION = "0"


class RequestOutput:
    """The output of one request: n sequences for one prompt. Iterate over it for their deltas, or
    `collect` it.

    Attributes:
        request_id: for messages.
        prompt_token_ids: the prompt as the model sees it.
        params: the request's sampling parameters.
        sequences: the n sequences, by index; of a beam search, the beams.
        stops: the search for the request's stop strings, which each sequence starts from scratch;
            None if it has none.
        weight_versions: of the weights that its tokens are computed with, oldest first; several
            if they were updated meanwhile.
        on_abort: called with this object when the reader aborts the request; changes when the
            request moves to another engine.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        abort: Callable[[RequestOutput], None] | None = None,
    ):
        """`abort` is the first `on_abort`; it is set once an engine has the request."""
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.sequences: list[OutputSequence] = []
        self.stops = StopStrings(params.stop, params.include_stop) if params.stop else None
        self.weight_versions: list[str] = []
        self.on_abort = abort or _not_queued
        self._queue: dict[int, Delta] = {}
        self._num_unfinished = params.n
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._is_collected = False
        self._sink: Sink | None = None

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens found in the prefix cache. Known with the first delta."""
        request = self.sequences[0].request
        virtual = request.prompt_len - len(self.prompt_token_ids)  # of a soft prompt
        return max(0, request.num_cached - virtual)

    @property
    def num_generated(self) -> int:
        """Tokens that were generated for the reader, of all sequences."""
        if self.params.prompt_only:
            return 0
        if self.params.beam_search is not None:
            return self.params.n * self.sequences[0].num_output
        return sum(sequence.num_output for sequence in self.sequences)

    def generated(self) -> list[Sequence[int]]:
        """Returns the tokens so far of each sequence, an end token included."""
        return [sequence.generated() for sequence in self.sequences]

    @property
    def prompt_scores(self) -> PromptScores | None:
        """The log-probabilities of the prompt's tokens, if they were requested. Complete with the
        first delta."""
        return self.sequences[0].request.use(PromptScores)

    @property
    def prompt_progress(self) -> PromptProgress | None:
        """How much of the prompt is computed, if that was requested."""
        return self.sequences[0].request.use(PromptProgress)

    def report_progress(self) -> None:
        """Wakes the reader with a delta without tokens, since its prompt has advanced."""
        self.put(Delta(0))

    @property
    def pooled(self) -> F32 | None:
        """The pooled hidden state of the prompt, float32 [hidden_size], or the hidden states of all
        tokens [P, hidden_size], if requested. Known with the first delta."""
        request = self.sequences[0].request
        if (states := request.use(PromptStates)) is not None:
            return states.states if states.is_done else None
        pool = request.use(PromptPool)
        return None if pool is None else pool.state

    def features(self, index: int) -> dict[str, Any]:
        """Returns what features have found so far for a sequence, by the feature's name
        (`Use.output`)."""
        uses = self.sequences[index].request.uses
        return {use.feature: found for use in uses if (found := use.output) is not None}

    @property
    def predicted_counts(self) -> tuple[int, int] | None:
        """How many drafts of the sequences were kept, and how many were not, if a text was
        predicted."""
        found = (sequence.request.use(Predicted) for sequence in self.sequences)
        uses = [use for use in found if use is not None]
        if not uses:
            return None
        return sum(use.num_kept for use in uses), sum(use.num_dropped for use in uses)

    def note_weights(self, version: str) -> None:
        """Notes of which version the weights are that compute its tokens from now on."""
        has_begun = any(sequence.request.has_begun for sequence in self.sequences)
        before = self.weight_versions if has_begun else []
        self.weight_versions = before if before[-1:] == [version] else [*before, version]

    @property
    def can_resume(self) -> bool:
        """Whether another server can go on with the output from its tokens alone."""
        params = self.params
        return (
            params.beam_search is None
            and params.logprobs is None
            and params.prompt_logprobs is None
            and not params.reports_progress
            and not params.prompt_only
            and not params.extra_args
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
        stop_reason: StopReason,
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
        """Makes the output go on behind the deltas that its client has, before the engine has it.
        The reader gets these deltas first, and one by one. About 2 us a token, and 10 more under a
        grammar.

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


def _not_queued(_: RequestOutput) -> None:
    """Aborts a request that no engine has yet."""


class OutputSequence:
    """One sequence of a request's output: decodes its tokens, and finds stop strings.

    `times` has the times at which it was queued, scheduled and so on, once the engine has it.
    `finish_reason` is set once it has ended: "stop", "length", "abort" or "error". The tokens of a
    beam (`is_beam`) are not emitted: the output of its search comes at the end.
    """

    __slots__ = (
        "_detokenizer", "_min_tokens", "_num_output", "_stops", "finish_reason", "index", "is_beam",
        "output", "request", "times",
    )  # fmt: skip

    def __init__(
        self,
        index: int,
        request: Request,
        output: RequestOutput,
        detokenizer: Detokenizer | None,
    ):
        """`request` is the scheduler's side of the sequence; without a `detokenizer` there is no
        text."""
        self.is_beam = request.params.beam_search is not None
        self.index = index
        self.request = request
        self.output = output
        self._num_output = 0
        self.finish_reason: str | None = None
        self.times: RequestTimes | None = None
        self._detokenizer = detokenizer
        params = request.params
        self._min_tokens = params.min_tokens
        self._stops = output.stops and output.stops.for_other_text()

    @property
    def num_output(self) -> int:
        """Tokens that were passed on: the scheduler may know of more. Of a beam, its length."""
        return self.request.num_output if self.is_beam else self._num_output

    def generated(self) -> Sequence[int]:
        """Returns the tokens that were passed on."""
        start = self.request.prompt_len
        return self.request.tokens[start : start + self.num_output]

    def append(
        self, token: int, logprob: TokenLogprob | None, finish: Finish | None
    ) -> Finish | None:
        """Passes on a new token with its text. Returns why the sequence ends with it, if it does.

        A stop string in the text comes before any other reason, and the caller ends the request in
        the scheduler where it has not ended there.

        Args:
            token: the next token of the sequence.
            logprob: its log-probability, if the request has `logprobs`.
            finish: why the request has ended with this token in the scheduler, or None.
        """
        self._num_output += 1
        detokenizer, stops = self._detokenizer, self._stops
        if finish is not None or detokenizer is None:
            return self._append_last(token, logprob, finish)
        text, stop = detokenizer.next(token), None
        if stops is not None and self._num_output >= self._min_tokens:
            text, stop = stops.feed(text)
        if stop is None:
            self.output.push(self.index, text, token, logprob, None, None)
            return None
        self.output.push(self.index, text, token, logprob, "stop", stop)
        return Finish("stop", stop)

    def restore(self, known: KnownDelta) -> None:
        """Appends tokens that the client has. They are recomputed once the scheduler has the
        request, as after a preemption. See `RequestOutput.restore`."""
        tokens, finish = known.token_ids, None
        if known.finish_reason is not None:
            is_end = bool(tokens) and tokens[-1] in self.request.end_tokens
            finish = Finish(known.finish_reason, tokens[-1] if is_end else known.stop_reason)
            self.finish_reason = finish.reason
        elif (constraint := constraint_of(self.request)) is not None:
            constraint.accept(tokens)
        self.request.restore(tokens, known.num_cached or 0, finish)
        for number, token in enumerate(tokens, 1):
            self.append(token, None, finish if number == len(tokens) else None)
        if finish is not None and not tokens:
            self.output.put(Delta(self.index, finish_reason=finish.reason))

    def _append_last(
        self, token: int, logprob: TokenLogprob | None, finish: Finish | None
    ) -> Finish | None:
        """Passes on the last token of a request that the scheduler has ended, or any token where
        there is no text."""
        params, detokenizer, stops = self.request.params, self._detokenizer, self._stops
        if finish is None:
            self.output.push(self.index, "", token, logprob, None, None)
            return None
        if params.prompt_only:  # the token is not part of the output
            self.output.put(Delta(self.index, finish_reason=finish.reason))
            return finish
        text = ""
        if detokenizer is not None:
            # an end token is no text; a constraint may end a request with any token, and a stop
            # string has ended an output that is restored
            if not isinstance(finish.stop_reason, int) or params.include_stop:
                text = detokenizer.next(token)
            text += detokenizer.flush()
            if stops is not None and self._num_output >= self._min_tokens:
                text, stop = stops.feed(text)
                if stop is None:
                    text += stops.flush()
                else:
                    finish = Finish("stop", stop)
        reason = finish.stop_reason
        if isinstance(reason, int) and reason not in params.stop_token_ids:
            reason = None  # the model's own end token, as in vLLM
        self.output.push(self.index, text, token, logprob, finish.reason, reason)
        return finish


async def collect(outputs: Sequence[RequestOutput]) -> list[Delta]:
    """Waits for all choices of all outputs, and returns them in order, all of each in one delta.

    Raises `EngineDeadError`, `GenerationError`.
    """
    collected = await together([output.collect() for output in outputs])
    return [choice for group in collected for choice in group]
