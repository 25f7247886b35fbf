"""One step of a pipeline stage on a CPU: `ModelRunner` between two other stages."""

from __future__ import annotations

import time

import torch

from aioinfer.ipc.plan import StepPlan
from aioinfer.layers.residual import ResidualStream
from aioinfer.layers.step import Step
from aioinfer.models.decoder import CausalLM
from aioinfer.worker.expert_report import StageExpertReport
from aioinfer.worker.kv_tensors import KVTensors
from aioinfer.worker.masks import MaskSource
from aioinfer.worker.model_runner import ModelRunner, PendingResult
from aioinfer.worker.sampler import Sampled
from aioinfer.worker.slots import Slots
from aioinfer.worker.stage_links import StageLinks
from aioinfer.worker.step_inputs import prepare_step


class StageRunner(ModelRunner):
    """Runs the layers of one stage. The last stage samples, and waits for masks; the first takes
    the tokens of its rows from the tokens that the last has sampled.

    Args:
        links: to the other stages.
    """

    def __init__(self, model: CausalLM, kv: KVTensors, slots: Slots, links: StageLinks):
        super().__init__(model, kv, slots)
        self._links = links
        self._stage_report = StageExpertReport.of_stage(model, links)
        self.expert_report = self._stage_report

    @torch.inference_mode()
    def step(self, plan: StepPlan, masks: MaskSource | None = None) -> PendingResult:
        """See `ModelRunner.step`. The result of a stage that does not sample has no tokens, and no
        `busy_ns` counts the time in which the stage waited for others."""
        links = self._links
        if links.is_first:
            links.enter_tokens(plan, self.slots)
            links.expect_tokens(plan)
        waited = links.waited_ns  # earlier waits are not in the step's time
        if links.is_last:
            pending = super().step(plan, masks)
            if len(pending.sampled.tokens):
                links.return_tokens(pending.sampled.tokens.int())
        else:
            pending = self._pass_on(plan)
        self._stage_report.pass_on(plan.step_id)
        pending.busy_ns -= links.waited_ns - waited
        return pending

    def _pass_on(self, plan: StepPlan) -> PendingResult:
        """Computes the layers of a stage that is not the last, and sends their hidden states on."""
        began = time.perf_counter_ns()
        self._apply(plan)
        step = prepare_step(plan, self.slots)
        self.model.plan(step)
        self._links.send(self.model.finish(step, self._begin(step)))
        nothing = Sampled.plain(torch.empty(0, dtype=torch.int32, device=self.slots.device))
        return PendingResult(plan.step_id, nothing, time.perf_counter_ns() - began)

    def _begin(self, step: Step) -> ResidualStream:
        received = None
        if not self._links.is_first:
            received = self._links.receive(len(step.inputs.input_ids))
        return self.model.begin(step, received=received)
