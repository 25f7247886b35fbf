"""The emission of a step: its tokens become text, and the text goes to the clients, in portions.

The step loop owns an `Emission`. It adds each result, and emits once the next step has been posted;
the event loop does other work between two portions of a large step. The emission works on values
(`StepOutput`): the scheduler may have gone on with the next step meanwhile.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator

from aioinfer.engine.open_requests import OpenRequests
from aioinfer.engine.output import OutputSequence
from aioinfer.errors import EngineDeadError, GenerationError, NoTokenError
from aioinfer.features.logprobs.planning import ResultLogprobs
from aioinfer.features.masks.planning import constraint_of
from aioinfer.ipc.plan import StepResult
from aioinfer.scheduler.steps import StepOutput

#: Tokens that are emitted in one go, in about 2 ms.
_PORTION = 256
_ALL_EMITTED = object()


class Emission:
    """The steps whose tokens the scheduler took and which are not wholly emitted.

    Attributes:
        flushes: called by `emit_rest`: they emit output that is kept elsewhere.
        is_whole: whether all tokens that the scheduler took were emitted or are about to be. If
            not, the text of any request that has begun may lack some.
    """

    def __init__(self, requests: OpenRequests, on_loss: Callable[[Exception], None]):
        """`on_loss` is called with the error when tokens could not be emitted."""
        self.is_whole = True
        self.flushes: list[Callable[[], None]] = []
        self._requests = requests
        self._on_loss = on_loss
        self._steps: deque[Iterator[None]] = deque()  # the portions of each, oldest first

    def add(self, output: StepOutput, result: StepResult) -> None:
        """Adds the tokens of a step to the tokens to be emitted."""
        self._steps.append(self._emit(output, result))

    def emit_portion(self) -> None:
        """Emits all steps but the last wholly, and a portion of the last, and schedules itself on
        the event loop for the next portion."""
        while len(self._steps) > 1:
            self._advance()
        if self._steps and self._advance():
            asyncio.get_running_loop().call_soon(self.emit_portion)

    def emit_rest(self) -> None:
        """Emits all that is left."""
        while self._steps:
            self._advance()
        for flush in self.flushes:
            flush()

    def _advance(self) -> bool:
        """Emits up to `_PORTION` tokens of the oldest step, and drops the step when all of its
        tokens are emitted. Returns whether more of it are left."""
        lost: EngineDeadError | None = None
        with self._requests.metrics.timer.emit:
            try:
                if next(self._steps[0], _ALL_EMITTED) is not _ALL_EMITTED:
                    return True
            except Exception as error:
                lost = EngineDeadError(f"tokens could not be emitted: {error!r}")
        self._steps.popleft()
        if lost is not None:
            self.is_whole = False
            self._on_loss(lost)  # which may emit the steps behind this one
        return False

    def _emit(self, output: StepOutput, result: StepResult) -> Iterator[None]:
        """Appends each new token to its sequence, and ends requests that have reached a stop
        string.

        Yields between two portions of the tokens, so that many streams do not keep new requests
        waiting.
        """
        requests, finished = self._requests, output.finished
        sequences = requests.sequences
        logprobs = ResultLogprobs.of_result(result) if result.sections else None
        has_stopped = False
        for place, (request, token, row) in enumerate(
            zip(output.requests, output.tokens, output.rows, strict=True)
        ):
            sequence = sequences.get(request)
            if sequence is None or sequence.is_beam:
                continue  # it was aborted, failed or stopped before; or its text comes at the end
            if token < 0:
                requests.fail(sequence.output, _without_token(sequence))
                continue
            try:
                finish = sequence.append(
                    token,
                    None if logprobs is None else logprobs.of(row, token, request.params),
                    finished.get(place),
                )
            except Exception as error:  # one request's text must not end the others
                message = f"the tokens could not be turned into text: {error!r}"
                requests.fail(sequence.output, GenerationError(message))
                continue
            if finish is not None:
                if place not in finished:
                    requests.scheduler.finish(request, *finish)
                    has_stopped = True
                requests.forget(request, finish.reason)
            if (place + 1) % _PORTION == 0:
                yield
        if has_stopped:
            requests.plan_soon()


def _without_token(sequence: OutputSequence) -> GenerationError:
    """Returns the error of a sequence for which no token was sampled. `min_tokens` forbids end
    tokens where the logits are, behind the mask of a grammar that may allow nothing else."""
    if constraint_of(sequence.request) is None:
        return GenerationError("the model's logits held NaN")
    return NoTokenError(
        "no token may come next: what the request allows and forbids excludes all (or the model's "
        "logits held NaN)"
    )
