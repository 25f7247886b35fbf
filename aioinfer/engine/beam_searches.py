"""The beam searches of an engine: the results of their beams' rows become decisions, and complete
hypotheses become text.

The step loop calls `accept` between the scheduler's update and the next plan, so that a search has
its next rows in that plan. The output of a search comes at its end, all of it at once; long texts
are decoded in a thread, since nothing of them could be decoded before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from aioinfer.engine.beam_search import Hypothesis
from aioinfer.engine.emission import EmittingEngine
from aioinfer.engine.logprobs import TokenLogprob
from aioinfer.engine.output import Delta, OutputSequence
from aioinfer.errors import GenerationError
from aioinfer.ipc.plan import StepResult
from aioinfer.sampling_params import SamplingParams
from aioinfer.scheduler.request import Request
from aioinfer.scheduler.steps import StepOutput
from aioinfer.text.detokenizer import Detokenizer

#: Tokens that are decoded on the event loop, in about 0.5 ms.
_SHORT_OUTPUT = 256


@dataclass(slots=True)
class _Ending:
    """The output of a search that has ended, until it is emitted.

    Attributes:
        sequence: stands for the search in the engine.
        hypotheses: its results.
        outcome: its finish reason for the metrics.
        finish_reason: of hypotheses without an end token.
    """

    sequence: OutputSequence
    hypotheses: list[Hypothesis]
    outcome: str
    finish_reason: str


class BeamSearches:
    """The searches under way in one engine."""

    def __init__(self, engine: EmittingEngine, sequences: Mapping[Request, OutputSequence]):
        """`sequences` are the engine's open sequences, by request; the leader's sequence has the
        search."""
        self._engine = engine
        self._sequences = sequences
        self._ending: dict[Request, _Ending] = {}

    def accept(self, output: StepOutput, result: StepResult) -> list[Request]:
        """Takes the rows of beams from a step's result, and advances the searches for which the
        rows of all beams have come. Returns the leaders of these."""
        advanced: list[Request] = []
        logprobs = result.logprobs
        for row, request in output.beam_rows:
            assert request.beams is not None
            leader = request.beams.leader
            sequence = self._sequences.get(leader)
            if sequence is None or sequence.search is None:
                continue  # its request has failed earlier in this step
            if logprobs is None or result.tokens[row] < 0:
                error = GenerationError("the model's logits held NaN")
                self._engine.fail(sequence.output, error)
                continue
            found = logprobs.top_tokens[row], logprobs.top_logprobs[row]
            if sequence.search.take(request, *found):
                advanced.append(leader)
                self._advance(leader, sequence)
        return advanced

    def _advance(self, leader: Request, sequence: OutputSequence) -> None:
        run = sequence.search
        assert run is not None
        try:
            decision = run.advance()
        except Exception as error:  # one search must not end the other requests
            message = f"the beam search could not go on: {error!r}"
            self._engine.fail(sequence.output, GenerationError(message))
            return
        if decision is not None:
            self._engine.scheduler.advance(run.group, decision.parents, decision.tokens)
            return
        hypotheses = run.search.hypotheses[: sequence.output.params.n]
        best = hypotheses[0].end_token
        reason = "length" if best is None else "stop"
        self._engine.scheduler.finish(leader, reason, best)
        self._end(leader, _Ending(sequence, hypotheses, reason, "length"))

    def cut_short(self, sequence: OutputSequence) -> None:
        """Ends a search with the best outputs so far; an output that is not complete has "abort" as
        its finish reason."""
        leader, run = sequence.request, sequence.search
        if run is None or leader not in self._sequences or leader in self._ending:
            return
        hypotheses = run.best_so_far(sequence.output.params.n)
        self._engine.scheduler.finish(leader, "abort")
        self._end(leader, _Ending(sequence, hypotheses, "abort", "abort"))

    def emit_rest(self) -> None:
        """Emits the output of all searches that have ended."""
        for leader in list(self._ending):
            self._decode_and_emit(leader)

    # ---------------------------------------------------------------- output

    def _end(self, leader: Request, ending: _Ending) -> None:
        self._ending[leader] = ending
        asyncio.get_running_loop().call_soon(self._begin_emission, leader)

    def _begin_emission(self, leader: Request) -> None:
        """Emits the output of a search, once it is decoded."""
        ending = self._ending.get(leader)
        if ending is None:
            return
        if sum(len(each.tokens) for each in ending.hypotheses) <= _SHORT_OUTPUT:
            self._decode_and_emit(leader)
            return
        texts = asyncio.get_running_loop().run_in_executor(None, _texts, ending)
        texts.add_done_callback(partial(self._end_emission, leader))

    def _end_emission(self, leader: Request, texts: asyncio.Future[list[str]]) -> None:
        if leader not in self._ending or texts.cancelled():
            return
        if (error := texts.exception()) is None:
            self._emit(leader, texts.result())
        else:
            self._fail(leader, error)

    def _decode_and_emit(self, leader: Request) -> None:
        try:
            texts = _texts(self._ending[leader])
        except Exception as error:  # one request's text must not end the others
            self._fail(leader, error)
        else:
            self._emit(leader, texts)

    def _fail(self, leader: Request, error: BaseException) -> None:
        message = f"the tokens could not be turned into text: {error!r}"
        self._engine.fail(self._ending.pop(leader).sequence.output, GenerationError(message))

    def _emit(self, leader: Request, texts: Sequence[str]) -> None:
        """Hands the results to the reader, unless the request was aborted or has failed."""
        ending = self._ending.pop(leader)
        if self._sequences.get(leader) is not ending.sequence:
            return
        output = ending.sequence.output
        for index, (found, text) in enumerate(zip(ending.hypotheses, texts, strict=True)):
            delta = Delta(index, text, found.tokens, _logprobs(found, output.params))
            delta.finish_reason = ending.finish_reason if found.end_token is None else "stop"
            if found.end_token in output.params.stop_token_ids:
                delta.stop_reason = found.end_token
            delta.cumulative_logprob = found.cumulative_logprob
            output.put(delta)
        for index in range(len(texts), output.params.n):  # aborted before there were so many
            output.put(Delta(index, finish_reason=ending.finish_reason))
        self._engine.forget(leader, ending.outcome)


def _texts(ending: _Ending) -> list[str]:
    """Returns the texts of the hypotheses, in any thread."""
    make, params = ending.sequence.make_detokenizer, ending.sequence.output.params
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
