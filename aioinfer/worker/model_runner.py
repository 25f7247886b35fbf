"""One step of the model on a CPU: from a `StepPlan` to the tokens sampled.

The worker calls `ModelRunner.step` for each plan, in order. The sampled tokens are written back
into the slots, where the next step finds them: the host sends no token twice and none that a step
sampled.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from aioinfer.ipc.plan import I32, Logprobs, StepPlan, StepResult
from aioinfer.ipc.requested_logprobs import RequestedLogprobRows
from aioinfer.layers.residual import ResidualStream
from aioinfer.layers.step import Step
from aioinfer.models.decoder import CausalLM
from aioinfer.worker.expert_report import ExpertReport
from aioinfer.worker.kv_tensors import KVTensors, sort_copies
from aioinfer.worker.masks import MaskedRows, MaskSource, await_masks
from aioinfer.worker.prompt_rows import (
    PendingSection,
    PromptOutputs,
    has_prompt_rows,
    sections_of,
)
from aioinfer.worker.requested_logprobs import requested_logprobs
from aioinfer.worker.sampler import Sampled, sample
from aioinfer.worker.slots import Slots
from aioinfer.worker.step_inputs import prepare_step


@dataclass(slots=True)
class PendingResult:
    """The result of a step that has been computed.

    Attributes:
        step_id: the plan's.
        sampled: the outcome of sampling.
        busy_ns: nanoseconds that the step took, less those spent waiting for masks.
        outputs: further sections.
    """

    step_id: int
    sampled: Sampled
    busy_ns: int
    outputs: Sequence[PendingSection] = ()

    def wait(self) -> StepResult:
        """Returns the result."""
        sampled = self.sampled
        result = StepResult(self.step_id, sampled.tokens.cpu().numpy(), busy_ns=self.busy_ns)
        if len(sampled.logprobs):
            parts = sampled.logprobs, sampled.top_tokens, sampled.top_logprobs
            result.sections = [Logprobs(*(part.cpu().numpy() for part in parts))]
        if self.outputs:
            result.sections = [*result.sections, *sections_of(self.outputs)]
        return result


class ModelRunner:
    """Runs one rank's model over its KV cache.

    Attributes:
        model: the rank's part of the model, bound to `kv`.
        kv: keys and values of all layers.
        slots: the running requests.
        expert_report: of the tokens that experts were given.
    """

    def __init__(self, model: CausalLM, kv: KVTensors, slots: Slots):
        self.model = model
        self.kv = kv
        self.slots = slots
        self.expert_report = ExpertReport.of(model)
        self._prompt_rows = PromptOutputs(model, slots)
        # of the step that is being computed
        self._outputs: Sequence[PendingSection] = ()

    @torch.inference_mode()
    def step(self, plan: StepPlan, masks: MaskSource | None = None) -> PendingResult:
        """Executes a plan: applies it to slots and KV blocks, computes its rows, waits for the
        masks if any row is constrained, and samples a token for each sampled row."""
        began = time.perf_counter_ns()
        self._apply(plan)
        logits = self._compute(plan)
        masked, waited_ns = await_masks(plan, masks)
        sampled = self._sample(plan, logits, masked)
        busy_ns = time.perf_counter_ns() - began - waited_ns
        outputs = [*self._outputs, *self.expert_report.take()]
        self._outputs = ()
        return PendingResult(plan.step_id, sampled, busy_ns, outputs)

    def _apply(self, plan: StepPlan) -> None:
        """Applies a plan to slots and KV blocks."""
        self.slots.apply(plan)
        if len(plan.copy_sources):
            counts, copies = sort_copies(plan, len(self.kv.groups))
            self.kv.copy_blocks(counts, *torch.from_numpy(copies).to(self.slots.device))

    def _begin(self, step: Step) -> ResidualStream:
        """Computes all layers but the model's last."""
        return self.model.begin(step)

    def _compute(self, plan: StepPlan) -> torch.Tensor | None:
        """Returns the logits [S, local_size] of the sampled rows; None if there is none."""
        if not len(plan.slots):
            self.model.take_part()
            return None
        step = prepare_step(plan, self.slots)
        if plan.sections and has_prompt_rows(plan):
            return self._compute_prompt_rows(plan, step)
        self.model.plan(step)
        hidden = self.model.finish(step, self._begin(step))
        return self.model.logits(hidden) if plan.samples.any() else None

    def _compute_prompt_rows(self, plan: StepPlan, step: Step) -> torch.Tensor | None:
        """Computes a step in which prompt rows have outputs of their own. Returns the
        logits of the sampled rows; None if there is none."""
        model, every = self.model, self._prompt_rows.needs_all_tokens(plan)
        if every:
            step.sampled = None
        model.plan(step)
        finish = model.finish_all if every else model.finish
        hidden = finish(step, self._begin(step))
        self._outputs = self._prompt_rows.compute(plan, hidden, has_all_tokens=every)
        if not plan.samples.any():
            return None
        if not every:
            return model.logits(hidden)
        last = torch.from_numpy(np.cumsum(plan.lengths)[np.flatnonzero(plan.samples)] - 1)
        return model.logits_of(hidden.index_select(0, last.to(hidden.device)))

    def _sample(
        self, plan: StepPlan, logits: torch.Tensor | None, masked: MaskedRows | None
    ) -> Sampled:
        """Samples a token for each row of `logits` [S, local_size], and enters them in the
        slots."""
        if logits is None:
            return Sampled.plain(torch.empty(0, dtype=torch.int32, device=self.slots.device))
        rows = np.flatnonzero(plan.samples)
        slot_ids = plan.slots[rows]
        positions = plan.starts[rows] + plan.lengths[rows]
        vocabulary = self.model.vocabulary
        wanted = plan.section(RequestedLogprobRows)
        if wanted is not None:  # before the sampler changes the logits
            found = requested_logprobs(logits, wanted, vocabulary, self._upload)
            self._outputs = [*self._outputs, found]
        sampled = sample(logits, self.slots, slot_ids, positions, vocabulary, masked)
        self.slots.append(slot_ids, positions, sampled.tokens)
        return sampled

    def _upload(self, array: I32) -> torch.Tensor:
        """Copies an array, which may be a view into the ring, to the device."""
        return torch.tensor(array, device=self.slots.device)
