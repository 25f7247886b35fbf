"""Beam search: the search for the likeliest outputs of a prompt, over ordinary requests.

The beams of a search are the sequences of one prompt, as for `n`, with log-probabilities of the
likeliest tokens. In a round each of them samples a token. When the log-probabilities of all beams
have come, the search decides how they go on, and each beam is forked (`Scheduler.fork`): it goes on
with a token that was chosen for it, behind its own tokens or another beam's, whose KV blocks it
shares. Beams that come to different steps wait for each other; no other request waits for them.

A `BeamSearchState` gets the likeliest next tokens of all beams, and decides; it knows nothing of
blocks, slots and steps. `BeamSearches` is the step feature that takes the results of beams and
forks them. The output of a search comes at its end, all of it at once; long texts are decoded in a
thread, since nothing of them could be decoded before.

The search's rules are the same as in transformers' `generate(num_beams=...,
do_sample=False)`, in float32 as there, so that the results are the same token for token:

- of all continuations of all beams, the `width` likeliest that do not end go on;
- one that ends counts if it is among the `width` likeliest of all, and is kept if its score, the
  cumulative log-probability over length ** length_penalty, is one of the `width` best so far;
- the search ends at the maximum length, where the `width` likeliest continuations are complete as
  well, and as `BeamSearch.early_stopping` of the sampling parameters says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from aioinfer.engine.emission import Emission
from aioinfer.engine.open_requests import OpenRequests
from aioinfer.engine.output import Delta, RequestOutput
from aioinfer.errors import GenerationError
from aioinfer.features.host import Host
from aioinfer.features.logprobs.planning import ResultLogprobs, TokenLogprob
from aioinfer.ipc.plan import StepResult
from aioinfer.ipc.sections import F32, I32
from aioinfer.sampling_params import BeamSearch as SearchSettings
from aioinfer.sampling_params import SamplingParams
from aioinfer.scheduler.features import StepFeature
from aioinfer.scheduler.request import Request, Use
from aioinfer.scheduler.steps import Row, StepOutput
from aioinfer.text.detokenizer import Detokenizer

#: Tokens that are decoded on the event loop, in about 0.5 ms.
_SHORT_OUTPUT = 256


@dataclass(slots=True)
class TokenChoice:
    """A token that a beam took, and the one before it.

    Attributes:
        token, logprob: the token, and its log-probability.
        top: (token, log-probability) of the likeliest tokens at its position.
        before: the choice of the token before it, or None for the first.
    """

    token: int
    logprob: float
    top: list[tuple[int, float]]
    before: TokenChoice | None

    def chain(self) -> list[TokenChoice]:
        """Returns all choices from the first token to this one."""
        choices: list[TokenChoice] = []
        choice: TokenChoice | None = self
        while choice is not None:
            choices.append(choice)
            choice = choice.before
        return choices[::-1]


@dataclass(slots=True)
class Hypothesis:
    """A complete output.

    Attributes:
        tokens: an end token included.
        cumulative_logprob: of all tokens.
        score: that, over its length to the power of the length penalty.
        end_token: the token that ended it, or None at the maximum length.
        last: how its last token was chosen, if log-probabilities are kept.
    """

    tokens: list[int]
    cumulative_logprob: float
    score: np.float32
    end_token: int | None
    last: TokenChoice | None


@dataclass(slots=True)
class Decision:
    """The next token of each beam: beam i continues beam `parents[i]` with `tokens[i]`. A beam that
    another one continues also continues itself."""

    parents: list[int]
    tokens: list[int]


class BeamSearchState:
    """One search.

    Attributes:
        width: beams.
        num_candidates: how many of the likeliest tokens of each beam the search needs.
        length: tokens that each beam has.
        hypotheses: the complete ones, the best first, at most `width`.
    """

    def __init__(
        self,
        settings: SearchSettings,
        end_tokens: frozenset[int],
        max_tokens: int,
        *,
        min_tokens: int = 0,
        num_logprobs: int | None = None,
    ):
        """Begins with one beam without tokens.

        Args:
            settings: how to search.
            end_tokens: complete a hypothesis.
            max_tokens: so do as many tokens.
            min_tokens: no end token counts before so many tokens.
            num_logprobs: keep the log-probabilities of all tokens, and of so many of the likeliest.
        """
        self.width = settings.width
        self.num_candidates = max(settings.width + len(end_tokens), num_logprobs or 0)
        self.length = 0
        self.hypotheses: list[Hypothesis] = []
        self._settings = settings
        self._ends = np.array(sorted(end_tokens), np.int32)
        self._max_tokens = max_tokens
        self._min_tokens = min_tokens
        self._num_logprobs = num_logprobs
        self._scores: F32 = np.zeros(1, np.float32)
        self._choices: list[TokenChoice | None] = [None]
        self._can_improve = True

    @property
    def num_rows(self) -> int:
        """The number of beams for which the next call of `advance` needs rows."""
        return len(self._scores)

    def advance(
        self, top_tokens: I32, top_logprobs: F32, output_of: Callable[[int], Sequence[int]]
    ) -> Decision | None:
        """Takes the likeliest next tokens of all beams. Returns the next token of each beam, or
        None at the end of the search.

        Args:
            top_tokens: int32 [beams, num_candidates], likeliest first.
            top_logprobs: float32 [beams, num_candidates], of `top_tokens`.
            output_of: returns the tokens of a beam so far.
        """
        self.length += 1
        totals: F32 = self._scores[:, None] + top_logprobs
        ends = np.isin(top_tokens, self._ends)
        if self.length <= self._min_tokens:
            totals = np.where(ends, np.float32(-np.inf), totals)
        is_last = self.length >= self._max_tokens
        if is_last:
            ends = np.ones_like(ends)
        flat_totals, flat_ends = totals.ravel(), ends.ravel()
        order = _descending(flat_totals, flat_ends, self.width)
        completed = [int(i) for i in order[: self.width] if flat_ends[i]]
        self._complete(completed, top_tokens, top_logprobs, flat_totals, output_of)
        going_on = [int(i) for i in order if not flat_ends[i]][: self.width]
        if is_last or self._is_over(flat_totals[going_on[0]]):
            return None
        return self._go_on(going_on, top_tokens, top_logprobs, flat_totals)

    def _complete(
        self,
        places: Sequence[int],
        top_tokens: I32,
        top_logprobs: F32,
        totals: F32,
        output_of: Callable[[int], Sequence[int]],
    ) -> None:
        """Keeps the hypotheses at `places` that are among the best."""
        if not self._can_improve or (self._settings.early_stopping is True and self._is_full):
            return
        for place in places:
            score = totals[place] / np.float32(self.length**self._settings.length_penalty)
            if self._is_full and score <= self.hypotheses[-1].score:
                continue
            beam, column = divmod(place, top_tokens.shape[1])
            token = int(top_tokens[beam, column])
            choice = self._choice(beam, column, top_tokens, top_logprobs)
            end = token if token in self._ends else None
            output = [*output_of(beam), token]
            found = Hypothesis(output, float(totals[place]), score, end, choice)
            self.hypotheses.append(found)
            self.hypotheses.sort(key=lambda one: -one.score)
            del self.hypotheses[self.width :]

    @property
    def _is_full(self) -> bool:
        return len(self.hypotheses) == self.width

    def _is_over(self, best: np.float32) -> bool:
        """Whether the search ends before the maximum length; `best` is the score of the best beam
        without its length."""
        if not self._is_full:
            return False
        early, penalty = self._settings.early_stopping, self._settings.length_penalty
        length = self._max_tokens if early == "never" and penalty > 0 else self.length
        if best / np.float32(length**penalty) <= self.hypotheses[-1].score:
            self._can_improve = False
        return early is True or not self._can_improve

    def _go_on(
        self,
        places: Sequence[int],
        top_tokens: I32,
        top_logprobs: F32,
        totals: F32,
    ) -> Decision:
        """Gives the continuations at `places` to the beams: the first of a beam stays with it."""
        at: list[int] = [-1] * self.width
        others: list[int] = []
        for place in places:
            parent = place // top_tokens.shape[1]
            if at[parent] < 0:
                at[parent] = place
            else:
                others.append(place)
        more = iter(others)
        at = [place if place >= 0 else next(more) for place in at]
        split = [divmod(place, top_tokens.shape[1]) for place in at]
        self._choices = [
            self._choice(beam, column, top_tokens, top_logprobs) for beam, column in split
        ]
        self._scores = totals[at]
        return Decision([beam for beam, _ in split], [int(top_tokens[each]) for each in split])

    def _choice(
        self, beam: int, column: int, top_tokens: I32, top_logprobs: F32
    ) -> TokenChoice | None:
        if self._num_logprobs is None:
            return None
        count = self._num_logprobs
        top = zip(
            top_tokens[beam, :count].tolist(), top_logprobs[beam, :count].tolist(), strict=True
        )
        return TokenChoice(
            int(top_tokens[beam, column]),
            float(top_logprobs[beam, column]),
            list(top),
            self._choices[beam],
        )

    def best_so_far(
        self, count: int, output_of: Callable[[int], Sequence[int]]
    ) -> list[Hypothesis]:
        """Returns the `count` best hypotheses, with beams that are not complete where there are too
        few."""
        found = self.hypotheses[:count]
        order: Any = np.argsort(-self._scores, kind="stable")[: count - len(found)]
        for beam in order.tolist():
            total, output = self._scores[beam], list(output_of(beam))
            score = total / np.float32(max(1, len(output)) ** self._settings.length_penalty)
            choice = self._choices[beam]
            found.append(Hypothesis(output, float(total), score, None, choice))
        return found


def _descending(totals: F32, ends: npt.NDArray[np.bool_], width: int) -> npt.NDArray[np.intp]:
    """Returns the places of the highest totals, the highest first: the `width` highest of all, and
    the `width` highest that do not end, as far as there are so many."""
    count = len(totals)
    going_on = np.where(ends, np.float32(-np.inf), totals)
    kept = min(count, width)
    highest = np.concatenate(
        [np.argpartition(-each, kept - 1)[:kept] for each in (totals, going_on)]
    )
    places = np.unique(highest)
    return places[np.argsort(-totals[places], kind="stable")]


class BeamRun:
    """A search under way: the search, its beams, and the results of the current round.

    Attributes:
        search: decides how the beams go on.
        beams: the requests of its beams. Each samples one token a round, which is replaced by the
            search's choice.
        num_tokens: tokens of each beam that the search has decided on.
        make_detokenizer: of one result, if there is text.
    """

    def __init__(
        self,
        search: BeamSearchState,
        beams: Sequence[Request],
        make_detokenizer: Callable[[], Detokenizer] | None,
    ):
        self.search = search
        self.beams = beams
        self.make_detokenizer = make_detokenizer
        self._rows: dict[Request, tuple[I32, F32]] = {}
        self.num_tokens = 0

    def take(self, request: Request, top_tokens: I32, top_logprobs: F32) -> bool:
        """Takes the row of one beam, int32 and float32 [candidates]. Returns whether the rows of
        all beams are there."""
        count = self.search.num_candidates  # other rows of its step may have more
        self._rows[request] = top_tokens[:count], top_logprobs[:count]
        return len(self._rows) == len(self.beams)

    def advance(self) -> Decision | None:
        """Lets the search decide on the next tokens, with the rows of all beams; see
        `BeamSearchState.advance`."""
        rows = [self._rows[request] for request in self.beams[: self.search.num_rows]]
        self._rows.clear()
        tokens, logprobs = (np.stack(parts) for parts in zip(*rows, strict=True))
        decision = self.search.advance(tokens, logprobs, self._output_of)
        self.num_tokens += decision is not None
        return decision

    def best_so_far(self, count: int) -> list[Hypothesis]:
        """Returns the `count` best outputs, complete or not."""
        return self.search.best_so_far(count, self._output_of)

    def _output_of(self, beam: int) -> Sequence[int]:
        """Returns the tokens that the search has decided on for a beam; a sampled one may stand
        behind them."""
        request = self.beams[beam]
        return request.tokens[request.prompt_len : request.prompt_len + self.num_tokens]


class Beam(Use):
    """A sequence that is a beam of `run`."""

    __slots__ = ("run",)
    feature: ClassVar[str] = "beam_search"
    allows_lookahead: ClassVar[bool] = False  # each token decides how the search goes on

    def __init__(self, run: BeamRun):
        self.run = run


@dataclass(slots=True)
class _Ending:
    """The output of a search that has ended, until it is emitted.

    Attributes:
        output: where it goes.
        run: the search.
        hypotheses: its results.
        outcome: its finish reason for the metrics.
        finish_reason: of hypotheses without an end token.
    """

    output: RequestOutput
    run: BeamRun
    hypotheses: list[Hypothesis]
    outcome: str
    finish_reason: str


class BeamSearches(StepFeature):
    """The searches under way in one engine: a feature without a part in the workers."""

    name = "beam_search"

    def __init__(self, host: Host, requests: OpenRequests, emission: Emission):
        """`requests` and `emission` are the engine's."""
        super().__init__(host)
        self._requests = requests
        self._ending: dict[BeamRun, _Ending] = {}
        emission.flushes.append(self._flush)

    def take(self, rows: Sequence[Row], result: StepResult, output: StepOutput) -> StepOutput:
        """Takes the rows of beams, and advances the searches for which the rows of all beams have
        come. Returns the output of the other requests, and one token for each of these searches,
        which is never emitted."""
        logprobs = ResultLogprobs.of_result(result)
        advanced: list[Request] = []
        for row in rows:
            run, request = row.use.run, row.request
            sequence = self._requests.sequences.get(request)
            if sequence is None or run in self._ending:
                continue  # its search has failed or ended
            if logprobs is None or result.tokens[row.place] < 0:
                error = GenerationError("the model's logits held NaN")
                self._requests.fail(sequence.output, error)
            elif run.take(request, *logprobs.likeliest(row.place)):
                advanced.append(run.beams[0])
                self._advance(run, sequence.output)
        return _without(output, {row.request for row in rows}, advanced)

    def _advance(self, run: BeamRun, output: RequestOutput) -> None:
        try:
            decision = run.advance()
        except Exception as error:  # one search must not end the other requests
            message = f"the beam search could not go on: {error!r}"
            self._requests.fail(output, GenerationError(message))
            return
        if decision is None:
            hypotheses = run.search.hypotheses[: output.params.n]
            best = hypotheses[0].end_token
            self._end(output, run, hypotheses, "length" if best is None else "stop", "length")
            return
        scheduler = self.host.scheduler()
        num_tokens = run.beams[0].prompt_len + run.num_tokens - 1
        for request, parent, token in zip(
            run.beams, decision.parents, decision.tokens, strict=True
        ):
            scheduler.fork(request, run.beams[parent], num_tokens, token)

    def cut_short(self, output: RequestOutput) -> None:
        """Ends a search with the best outputs so far; an output that is not complete has "abort" as
        its finish reason."""
        first = output.sequences[0].request
        beam = first.use(Beam)
        if beam is None or beam.run in self._ending:
            return
        run = beam.run
        if first in self._requests.sequences:
            hypotheses = run.best_so_far(output.params.n)
            self._end(output, run, hypotheses, "abort", "abort")

    def _flush(self) -> None:
        """Emits the output of all searches that have ended."""
        for run in list(self._ending):
            self._decode_and_emit(run)

    # ---------------------------------------------------------------- output

    def _end(
        self,
        output: RequestOutput,
        run: BeamRun,
        hypotheses: list[Hypothesis],
        outcome: str,
        finish_reason: str,
    ) -> None:
        """Ends the requests of a search; its output is emitted later."""
        for request in run.beams:
            self.host.scheduler().finish(request, outcome)
        self._ending[run] = _Ending(output, run, hypotheses, outcome, finish_reason)
        asyncio.get_running_loop().call_soon(self._begin_emission, run)

    def _begin_emission(self, run: BeamRun) -> None:
        """Emits the output of a search, once it is decoded."""
        ending = self._ending.get(run)
        if ending is None:
            return
        if sum(len(each.tokens) for each in ending.hypotheses) <= _SHORT_OUTPUT:
            self._decode_and_emit(run)
            return
        texts = asyncio.get_running_loop().run_in_executor(None, _texts, ending)
        texts.add_done_callback(partial(self._end_emission, run))

    def _end_emission(self, run: BeamRun, texts: asyncio.Future[list[str]]) -> None:
        if run not in self._ending or texts.cancelled():
            return
        if (error := texts.exception()) is None:
            self._emit(run, texts.result())
        else:
            self._fail(run, error)

    def _decode_and_emit(self, run: BeamRun) -> None:
        try:
            texts = _texts(self._ending[run])
        except Exception as error:  # one request's text must not end the others
            self._fail(run, error)
        else:
            self._emit(run, texts)

    def _fail(self, run: BeamRun, error: BaseException) -> None:
        message = f"the tokens could not be turned into text: {error!r}"
        self._requests.fail(self._ending.pop(run).output, GenerationError(message))

    def _emit(self, run: BeamRun, texts: Sequence[str]) -> None:
        """Hands the results to the reader, unless the request was aborted or has failed."""
        ending = self._ending.pop(run)
        if run.beams[0] not in self._requests.sequences:
            return
        output = ending.output
        for index, (found, text) in enumerate(zip(ending.hypotheses, texts, strict=True)):
            delta = Delta(index, text, found.tokens, _logprobs(found, output.params))
            delta.finish_reason = ending.finish_reason if found.end_token is None else "stop"
            if found.end_token in output.params.stop_token_ids:
                delta.stop_reason = found.end_token
            delta.cumulative_logprob = found.cumulative_logprob
            output.put(delta)
        for index in range(len(texts), output.params.n):  # aborted before there were so many
            output.put(Delta(index, finish_reason=ending.finish_reason))
        for request in run.beams:
            self._requests.forget(request, ending.outcome)


def _without(
    output: StepOutput, beams: Collection[Request], advanced: Sequence[Request]
) -> StepOutput:
    """Returns the output without the tokens of `beams`, and with a token of each of `advanced`."""
    kept = [i for i, request in enumerate(output.requests) if request not in beams]
    more = len(advanced)
    return StepOutput(
        [output.requests[i] for i in kept] + list(advanced),
        [output.tokens[i] for i in kept] + [0] * more,
        [output.rows[i] for i in kept] + [-1] * more,
        {new: output.finished[old] for new, old in enumerate(kept) if old in output.finished},
    )


def _texts(ending: _Ending) -> list[str]:
    """Returns the texts of the hypotheses, in any thread."""
    make, params = ending.run.make_detokenizer, ending.output.params
    if make is None:
        return [""] * len(ending.hypotheses)
    return [_decode(make(), found, params) for found in ending.hypotheses]


def _decode(detokenizer: Detokenizer, found: Hypothesis, params: SamplingParams) -> str:
    """Returns the text of a hypothesis, without its end token unless that was asked for."""
    tokens = found.tokens
    if found.end_token is not None and not params.include_stop:
        tokens = tokens[:-1]
    return "".join(map(detokenizer.next, tokens)) + detokenizer.flush()


def _logprobs(found: Hypothesis, params: SamplingParams) -> list[TokenLogprob] | None:
    if params.logprobs is None or found.last is None:
        return None
    return [TokenLogprob(each.token, each.logprob, each.top) for each in found.last.chain()]
