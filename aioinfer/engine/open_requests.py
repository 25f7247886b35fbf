"""The open requests of an engine: accepted, and not ended yet or not wholly emitted.

The parts of an engine share one `OpenRequests`: emission passes tokens on to its sequences,
recovery requeues them, features fail single ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from aioinfer.engine.metrics import EngineMetrics
from aioinfer.engine.output import OutputSequence, RequestOutput
from aioinfer.scheduler.request import Request, RequestStatus
from aioinfer.scheduler.scheduler import Scheduler


class OpenRequests:
    """All methods are called on the event loop.

    Attributes:
        sequences: the open sequences, by the scheduler's request.
        metrics: of the engine.
        scheduler: of the engine, once its workers have started.
        plan_soon: has the engine plan a step once the event loop has handled all ready events.
    """

    scheduler: Scheduler

    def __init__(self, metrics: EngineMetrics, plan_soon: Callable[[], None]):
        self.sequences: dict[Request, OutputSequence] = {}
        self.metrics = metrics
        self.plan_soon = plan_soon
        self._idle = asyncio.Event()

    def add(self, output: RequestOutput, arrived: float) -> None:
        """Queues the sequences of a request that was submitted at `arrived` (of
        `time.perf_counter`)."""
        for sequence in output.sequences:
            request = sequence.request
            if request.status is RequestStatus.FINISHED:
                continue  # its client has all of it
            self.sequences[request] = sequence
            if not (sequence.is_beam and sequence.index):
                sequence.times = self.metrics.begin(
                    request, arrived, counts_prompt=sequence.index == 0
                )
            self.scheduler.add(request)

    def abort(self, output: RequestOutput, reason: str = "abort") -> None:
        """Ends the sequences of a request. Their blocks are free for the next plan."""
        for sequence in output.sequences:
            self.scheduler.finish(sequence.request, reason)
            # also where the scheduler had finished it: its text may have failed after that
            self.forget(sequence.request, reason)
        self.plan_soon()

    def fail(self, output: RequestOutput, error: Exception) -> None:
        """Ends one request with an error; the others go on."""
        self.abort(output, "error")
        output.fail(error)

    def fail_request(self, request: Request, error: Exception) -> None:
        """Ends the request that a sequence belongs to with an error."""
        if request in self.sequences:
            self.fail(self.sequences[request].output, error)

    def forget(self, request: Request, outcome: str) -> None:
        """Records that a request has ended and that its text is emitted."""
        sequence = self.sequences.pop(request, None)
        if sequence is not None:
            sequence.finish_reason = outcome
        self.metrics.end(request, outcome, 0 if sequence is None else sequence.num_output)
        self._note_idle()

    def export(self, sequences: Iterable[OutputSequence]) -> None:
        """Hands sequences over to another engine: they no longer belong to this one. Its scheduler
        still has them, until it is cleared."""
        for sequence in sequences:
            del self.sequences[sequence.request]
            if sequence.times is not None:
                self.metrics.release(sequence.request)
        self._note_idle()

    def import_from(self, sequences: Iterable[OutputSequence]) -> None:
        """Queues sequences that another engine has exported: their known tokens are recomputed, as
        after a preemption."""
        for sequence in sequences:
            request = sequence.request
            request.detach()
            self.sequences[request] = sequence
            if sequence.times is not None:
                self.metrics.import_request(request, sequence.times)
            if request.status is not RequestStatus.FINISHED:  # else a beam that waits for others
                self.scheduler.add(request)
            sequence.output.on_abort = self.abort
        self.plan_soon()

    def end_all(self, error: Exception) -> None:
        """Ends all requests with an error."""
        for sequence in list(self.sequences.values()):
            sequence.output.fail(error)
        self.sequences.clear()
        self.metrics.end_all("error")
        self._idle.set()

    def outputs(self) -> list[RequestOutput]:
        """Returns the outputs of all open requests."""
        return list(dict.fromkeys(sequence.output for sequence in self.sequences.values()))

    async def wait_idle(self) -> None:
        """Returns when no request is left."""
        if self.sequences:
            self._idle.clear()
            await self._idle.wait()

    def _note_idle(self) -> None:
        if not self.sequences:
            self._idle.set()
