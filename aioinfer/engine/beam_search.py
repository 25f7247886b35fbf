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
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from aioinfer.engine.beam_search_state import BeamSearchState, Decision, Hypothesis
from aioinfer.engine.emission import Emission
from aioinfer.engine.open_requests import OpenRequests
from aioinfer.engine.output import Delta, RequestOutput
from aioinfer.errors import GenerationError
from aioinfer.features.host import Host
from aioinfer.features.logprobs.planning import ResultLogprobs, TokenLogprob
from aioinfer.ipc.plan import StepResult
from aioinfer.ipc.sections import F32, I32
from aioinfer.sampling_params import SamplingParams
from aioinfer.scheduler.features import StepFeature
from aioinfer.scheduler.request import Request, Use
from aioinfer.scheduler.steps import Row, StepOutput
from aioinfer.text.detokenizer import Detokenizer

#: Tokens that are decoded on the event loop, in about 0.5 ms.
_SHORT_OUTPUT = 256


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
