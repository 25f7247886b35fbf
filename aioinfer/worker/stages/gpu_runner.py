"""One step of a pipeline stage on a GPU: `GpuModelRunner` between two other stages.

Receives and sends are launched around the graphs, not captured in them: a step waits on its stream
for the hidden states of the stage before, copies them into the buffer that the graphs read, replays
or launches the same work as the runner of a whole model, and sends a copy of the output. The graphs
of the last stage end with the sampled tokens, the graphs of the other stages with hidden states in
a buffer. So a stage may receive and send while it computes another step, and the host waits for
nothing but messages that late rows need.

A receive of tokens is posted behind all that the tokens depend on: a kernel that waits for another
GPU may hold up the loading of modules and the freeing of memory on its own, and with them the
kernels launched behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from aioinfer.ipc.plan import StepPlan, StepResult
from aioinfer.layers.residual import ResidualStream
from aioinfer.layers.step import Step
from aioinfer.models.decoder import CausalLM
from aioinfer.worker.features import AwaitMessage, PendingSection, StepCalls, StepWorks
from aioinfer.worker.gpu_runner import GpuModelRunner, PendingGpuResult, _Launched
from aioinfer.worker.kv_tensors import KVTensors
from aioinfer.worker.slots import Slots
from aioinfer.worker.stages.links import StageLinks
from aioinfer.worker.step_buffers import Tensors


@dataclass(slots=True)
class PendingStageResult:
    """The result of a stage's step that has been launched.

    Attributes:
        pending: the result that the runner of a whole model returns.
        received, computed: recorded before and after the device's computation.
    """

    pending: PendingGpuResult
    received: torch.cuda.Event
    computed: torch.cuda.Event

    @property
    def step_id(self) -> int:
        """The plan's."""
        return self.pending.step_id

    def wait(self) -> StepResult:
        """Returns the result once it has reached the host; its `busy_ns` is the device's."""
        result = self.pending.wait()
        self.computed.synchronize()
        result.busy_ns = int(self.received.elapsed_time(self.computed) * 1e6)
        return result


class GpuStageRunner(GpuModelRunner):
    """Runs the layers of one stage. The last stage samples, and calls the features of a plan; the
    first takes the tokens of its rows from the tokens that the last has sampled."""

    def __init__(
        self,
        model: CausalLM,
        kv: KVTensors,
        slots: Slots,
        max_tokens: int,
        works: StepWorks | None = None,
        *,
        links: StageLinks,
        use_graphs: bool = True,
    ):
        """As `GpuModelRunner`; `links` to the other stages."""
        super().__init__(model, kv, slots, max_tokens, works, use_graphs=use_graphs)
        self._links, self._samples = links, links.is_last
        size, rows = model.hidden_size, len(slots.tokens)
        dtype, device = model.backend.dtype, slots.device
        received = 0 if links.is_first else self._max_tokens
        # the buffers that graphs read and write: no step may move them
        self._received = torch.zeros(received, size, dtype=dtype, device=device)
        decoded = 0 if links.is_last else rows
        self._decoded = torch.zeros(decoded, size, dtype=dtype, device=device)
        # of the step that is being launched, to be sent
        self._outgoing = self._decoded

    @torch.inference_mode()
    def step(  # type: ignore[override]
        self, plan: StepPlan, await_message: AwaitMessage | None = None
    ) -> PendingStageResult:
        """See `GpuModelRunner.step`. The result of a stage that does not sample has no tokens."""
        links, num_tokens = self._links, plan.num_tokens
        if links.is_first:
            links.enter_tokens(plan, self.slots)
        elif num_tokens:
            self._received[:num_tokens].copy_(links.receive(num_tokens))
        received = torch.cuda.Event(enable_timing=True)
        received.record()
        pending = super().step(plan, await_message)
        computed = torch.cuda.Event(enable_timing=True)
        computed.record()
        if not links.is_last and num_tokens:
            links.send(self._outgoing)
        if links.is_first:
            links.expect_tokens(plan)
        elif links.is_last and plan.samples.any():
            links.return_tokens(self._sampled)
        self.works.pass_on(plan.step_id)
        return PendingStageResult(pending, received, computed)

    def _fetch(
        self, index: int, count: int, pending: Sequence[PendingSection]
    ) -> tuple[torch.Tensor, Sequence[PendingSection], torch.cuda.Event]:
        self._sampled = self._sampler.results(index, count)[0]
        return super()._fetch(index, count, pending)

    def _begin(self, step: Step, out: torch.Tensor | None = None) -> ResidualStream:
        received = None
        if not self._links.is_first:
            received = self._received[: len(step.inputs.input_ids)]
        return self.model.begin(step, out, received)

    def _replay(self, plan: StepPlan, index: int, calls: StepCalls) -> _Launched:
        self._outgoing = self._decoded[: len(plan.slots)]
        return super()._replay(plan, index, calls)

    def _compute(
        self, plan: StepPlan, calls: StepCalls, rows: Tensors, places: Tensors
    ) -> torch.Tensor:
        self._outgoing = super()._compute(plan, calls, rows, places)
        return self._outgoing

    def _sample_decodes(self, hidden: torch.Tensor, rows: int) -> None:
        if self._links.is_last:
            super()._sample_decodes(hidden, rows)
        else:
            self._decoded[:rows].copy_(hidden)
