"""The emission of a step: its tokens become text, and the text goes to the clients, in portions.

The step loop owns an `Emission`. It begins one for each result, once the next step has been posted,
and the event loop does other work between two portions of a large one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from aioinfer.engine.logprobs import ResultLogprobs
from aioinfer.engine.metrics import EngineMetrics
from aioinfer.engine.output import OutputSequence, RequestOutput
from aioinfer.errors import EngineDeadError, GenerationError, NoTokenError
from aioinfer.ipc.plan import StepResult
from aioinfer.scheduler.request import Request
from aioinfer.scheduler.scheduler import Scheduler
from aioinfer.scheduler.steps import StepOutput

#: Tokens that are emitted in one go, in about 2 ms.
_PORTION = 256
_ALL_EMITTED = object()


class EmittingEngine(Protocol):
    """What an emission uses of its engine. See `Engine`."""

    metrics: EngineMetrics
    scheduler: Scheduler

    def fail(self, output: RequestOutput, error: Exception) -> None: ...

    def forget(self, request: Request, outcome: str) -> None: ...

    def plan_soon(self) -> None: ...

    def handle_loss(self, error: Exception) -> None: ...


class Emission:
    """What is left to emit of the step whose tokens were taken last.

    Attributes:
        is_whole: whether all tokens that the scheduler took were emitted or are about to be. If
            not, the text of any request that has begun may lack some.
    """

    def __init__(self, engine: EmittingEngine, sequences: Mapping[Request, OutputSequence]):
        """`sequences` are the engine's open ones, by request."""
        self.is_whole = True
        self._engine = engine
        self._sequences = sequences
        self._portions: Iterator[None] = iter(())

    def begin(self, output: StepOutput, result: StepResult) -> None:
        """Sets what is to be emitted next; all of the former step was emitted."""
        self._portions = self._emit(output, result)

    def emit_portion(self) -> None:
        """Emits a portion of the tokens, and has the event loop call it again for the next."""
        if self._advance():
            asyncio.get_running_loop().call_soon(self.emit_portion)

    def emit_rest(self) -> None:
        """Emits all that is left."""
        while self._advance():
            pass

    def _advance(self) -> bool:
        """Emits up to `_PORTION` tokens. Returns whether more are left."""
        with self._engine.metrics.timer.emit:
            try:
                return next(self._portions, _ALL_EMITTED) is not _ALL_EMITTED
            except Exception as error:
                self.is_whole = False
                lost = EngineDeadError(f"tokens could not be emitted: {error!r}")
                self._engine.handle_loss(lost)
                return False

    def _emit(self, output: StepOutput, result: StepResult) -> Iterator[None]:
        """Appends each new token to its sequence, and ends the requests whose text ends in a stop
        string.

        Yields between two portions of the tokens, so that many streams do not keep new requests
        waiting.
        """
        engine, sequences = self._engine, self._sequences
        logprobs = ResultLogprobs(result) if result.sections else None
        stopped, num_more, several = False, 0, output.has_several
        for number, (request, token, row) in enumerate(
            zip(output.requests, output.tokens, output.rows, strict=True), 1
        ):
            sequence = sequences.get(request)
            if sequence is None:
                continue  # its request was aborted, failed, or stopped earlier in this step
            if token < 0:
                engine.fail(sequence.output, _without_token(sequence))
                continue
            if several:
                num_more = _count_equal(output.requests, number)
            try:
                stop = sequence.append(
                    token,
                    None if logprobs is None else logprobs.of(row, token, request.params),
                    num_more,
                )
            except Exception as error:  # one request's text must not end the others
                message = f"the tokens could not be turned into text: {error!r}"
                engine.fail(sequence.output, GenerationError(message))
                continue
            if stop is not None:
                engine.scheduler.finish(request, "stop", stop)
                stopped = True
            if request.finish_reason is not None and (stop is not None or not num_more):
                engine.forget(request, request.finish_reason)
            if number % _PORTION == 0:
                yield
        if stopped:
            engine.plan_soon()


def _without_token(sequence: OutputSequence) -> GenerationError:
    """Returns the error of a sequence for which no token was sampled. `min_tokens` forbids end
    tokens where the logits are, behind the mask of a grammar that may allow nothing else."""
    if sequence.constraint is None:
        return GenerationError("the model's logits held NaN")
    return NoTokenError(
        "no token may come next: what the request allows and forbids excludes all (or the model's "
        "logits held NaN)"
    )


def _count_equal(requests: Sequence[Request], start: int) -> int:
    """Returns how many of `requests`, from `start` on, are `requests[start - 1]`."""
    end = start
    while end < len(requests) and requests[end] is requests[start - 1]:
        end += 1
    return end - start
