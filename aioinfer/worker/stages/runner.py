"""One step of a pipeline stage on a CPU: `ModelRunner` between two other stages."""

from __future__ import annotations

import time

import torch

from aioinfer.ipc.plan import StepPlan
from aioinfer.layers.residual import ResidualStream
from aioinfer.layers.step import Step
from aioinfer.models.decoder import CausalLM
from aioinfer.worker.features import AwaitMessage, StepWorks
from aioinfer.worker.kv_tensors import KVTensors
from aioinfer.worker.model_runner import ModelRunner, PendingResult, prepare_step
from aioinfer.worker.slots import Slots
from aioinfer.worker.stages.links import StageLinks


class StageRunner(ModelRunner):
    """Runs the layers of one stage. The last stage samples, and calls the features of a plan; the
    first takes the tokens of its rows from the tokens that the last has sampled.

    Args:
        links: to the other stages.
    """

    def __init__(
        self,
        model: CausalLM,
        kv: KVTensors,
        slots: Slots,
        links: StageLinks,
        works: StepWorks | None = None,
    ):
        super().__init__(model, kv, slots, works)
        self._links = links

    @torch.inference_mode()
    def step(self, plan: StepPlan, await_message: AwaitMessage | None = None) -> PendingResult:
        """See `ModelRunner.step`. The result of a stage that does not sample has no tokens, and no
        `busy_ns` counts the time in which the stage waited for others."""
        links = self._links
        if links.is_first:
            links.enter_tokens(plan, self.slots)
            links.expect_tokens(plan)
        waited = links.waited_ns  # earlier waits are not in the step's time
        if links.is_last:
            result = super().step(plan, await_message)
            if len(result.tokens):
                links.return_tokens(result.tokens.int())
        else:
            result = self._pass_on(plan)
        self.works.pass_on(plan.step_id)
        result.busy_ns -= links.waited_ns - waited
        return result

    def _pass_on(self, plan: StepPlan) -> PendingResult:
        """Computes the layers of a stage that is not the last, and sends their hidden states on."""
        began = time.perf_counter_ns()
        self._apply(plan)
        step = prepare_step(plan, self.slots)
        self.model.plan(step)
        self._links.send(self.model.finish(step, self._begin(step)))
        nothing = torch.empty(0, dtype=torch.int32, device=self.slots.device)
        return PendingResult(plan.step_id, nothing, time.perf_counter_ns() - began)

    def _begin(self, step: Step) -> ResidualStream:
        received = None
        if not self._links.is_first:
            received = self._links.receive(len(step.inputs.input_ids))
        return self.model.begin(step, received=received)
