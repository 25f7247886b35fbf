"""One step of the model on a CPU: from a `StepPlan` to the tokens sampled.

The worker calls `ModelRunner.step` for each plan, in order. The sampled tokens are written back
into the slots, where the next step finds them: the host sends no token twice and none that a step
sampled. `prepare_step` derives the inputs of a step from a plan and the slots in plain torch
(`aioinfer.kernels.prepare` does it on GPUs); `rows_of` and `first_tokens` find the rows and tokens
of slots in a plan, for features whose sections name slots.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from aioinfer.ipc.plan import I32, StepPlan, StepResult
from aioinfer.layers.residual import ResidualStream
from aioinfer.layers.step import GroupInputs, HostRows, SampledRows, Step, StepInputs
from aioinfer.models.decoder import CausalLM
from aioinfer.worker.features import (
    AwaitMessage,
    PendingSection,
    StepCalls,
    StepWorks,
    sections_of,
)
from aioinfer.worker.kv_tensors import KVTensors, sort_copies
from aioinfer.worker.sampling.sampler import sample
from aioinfer.worker.slots import Slots
from aioinfer.worker.staging import upload


def prepare_step(plan: StepPlan, slots: Slots) -> Step:
    """Returns the step of a plan with at least one row, derived from the slots on their device by a
    few tensor operations, whatever the number of rows."""
    device, block_size = slots.device, slots.block_size
    rows = np.stack([plan.slots, plan.starts, plan.lengths]).astype(np.int64)
    slot_ids, starts, lengths = torch.from_numpy(rows).to(device)
    ends = lengths.cumsum(0)
    num_rows, num_tokens = len(plan.slots), plan.num_tokens
    if num_tokens == num_rows:
        token_slots, positions = slot_ids, starts
    else:
        row_of_token = torch.repeat_interleave(lengths, output_size=num_tokens)
        token_slots = slot_ids[row_of_token]
        offsets = (starts - ends + lengths)[row_of_token]
        positions = torch.arange(num_tokens, device=device) + offsets
    seq_lens = plan.starts + plan.lengths
    num_blocks = -(-int(seq_lens.max()) // block_size)
    groups = []
    for tables in slots.tables_by_group:
        block_ids = tables[token_slots, positions // block_size].long()
        slot_mapping = block_ids * block_size + positions % block_size
        groups.append(GroupInputs(slot_mapping, tables[:, :num_blocks][slot_ids]))
    inputs = StepInputs(
        input_ids=slots.tokens[token_slots, positions],
        positions=positions.int(),
        query_starts=torch.nn.functional.pad(ends, (1, 0)).int(),
        seq_lens=(starts + lengths).int(),
        groups=tuple(groups),
    )
    host = HostRows(plan.lengths.tolist(), seq_lens.tolist())
    return Step(inputs, count_decodes(plan), _sampled_rows(plan, inputs), host)


def count_decodes(plan: StepPlan) -> int:
    """Returns how many of the first rows compute one token and sample the next."""
    others = np.flatnonzero((plan.lengths > 1) | (plan.samples == 0))
    return int(others[0]) if len(others) else len(plan.slots)


def _sampled_rows(plan: StepPlan, inputs: StepInputs) -> SampledRows | None:
    """Returns the sampled rows, or None if every token is the last of one."""
    rows = np.flatnonzero(plan.samples).astype(np.int32)
    if len(rows) == len(inputs.input_ids):
        return None
    device = inputs.input_ids.device
    last = np.cumsum(plan.lengths, dtype=np.int32)[rows] - 1
    return SampledRows.of(
        inputs, torch.from_numpy(rows).to(device), torch.from_numpy(last).to(device)
    )


def rows_of(plan: StepPlan, slots: I32) -> npt.NDArray[np.intp]:
    """Returns the rows of these slots in a plan: of n slots, [n]."""
    order = np.argsort(plan.slots)
    return order[np.searchsorted(plan.slots, slots, sorter=order)]


def first_tokens(plan: StepPlan, slots: I32) -> npt.NDArray[np.int64]:
    """Returns which of a step's tokens is the first one of the row of each slot: of n slots,
    [n]."""
    firsts = np.cumsum(plan.lengths, dtype=np.int64) - plan.lengths
    return firsts[rows_of(plan, slots)]


def spread(values: npt.NDArray[np.integer], counts: I32, step: int) -> npt.NDArray[np.int64]:
    """Returns each value `counts[i]` times, growing by `step` from one to the next: of n values,
    [sum of counts]."""
    repeated = np.repeat(values.astype(np.int64), counts)
    if step:
        starts = np.repeat(np.cumsum(counts, dtype=np.int64) - counts, counts)
        repeated += np.arange(len(repeated)) - starts
    return repeated


@dataclass(slots=True)
class PendingResult:
    """The result of a step that has been computed.

    Attributes:
        step_id: the plan's.
        tokens: int32 [S] on the device, the sampled tokens.
        busy_ns: nanoseconds that the step took, less those spent waiting for a message.
        pending: its sections.
    """

    step_id: int
    tokens: torch.Tensor
    busy_ns: int
    pending: Sequence[PendingSection] = ()

    def wait(self) -> StepResult:
        """Returns the result."""
        tokens = self.tokens.cpu().numpy()
        return StepResult(self.step_id, tokens, sections_of(self.pending), self.busy_ns)


class ModelRunner:
    """Runs one rank's model over its KV cache.

    Attributes:
        model: the rank's part of the model, bound to `kv`.
        kv: keys and values of all layers.
        slots: the running requests.
        works: the worker halves of the features; by default none.
    """

    def __init__(
        self, model: CausalLM, kv: KVTensors, slots: Slots, works: StepWorks | None = None
    ):
        self.model = model
        self.kv = kv
        self.slots = slots
        self.works = works or StepWorks()

    @torch.inference_mode()
    def step(self, plan: StepPlan, await_message: AwaitMessage | None = None) -> PendingResult:
        """Executes a plan: applies it to slots and KV blocks, computes its rows, and samples a
        token for each sampled row, late rows last."""
        began = time.perf_counter_ns()
        self._apply(plan)
        calls = self.works.of(plan)
        logits, waited_ns = self._compute(plan, calls), 0
        if logits is None:
            tokens = torch.empty(0, dtype=torch.int32, device=self.slots.device)
        else:
            tokens, waited_ns = self._sample(plan, calls, logits, await_message)
            calls.read_tokens(logits, tokens)
        busy_ns = time.perf_counter_ns() - began - waited_ns
        calls.pending += self.works.read_step(plan.step_id)
        return PendingResult(plan.step_id, tokens, busy_ns, calls.pending)

    def _apply(self, plan: StepPlan) -> None:
        """Applies a plan to slots and KV blocks."""
        self.slots.apply(plan)
        if len(plan.copy_sources):
            counts, copies = sort_copies(plan, len(self.kv.groups))
            self.kv.copy_blocks(counts, *torch.from_numpy(copies).to(self.slots.device))

    def _begin(self, step: Step) -> ResidualStream:
        """Computes all layers but the model's last."""
        return self.model.begin(step)

    def _compute(self, plan: StepPlan, calls: StepCalls) -> torch.Tensor | None:
        """Returns the logits [S, local_size] of the sampled rows; None if there is none."""
        if not len(plan.slots):
            self.model.take_part()
            return None
        model, step = self.model, prepare_step(plan, self.slots)
        every = calls.need_all_tokens
        if every:
            step.sampled = None
        model.plan(step)
        finish = model.finish_all if every else model.finish
        hidden = finish(step, self._begin(step))
        calls.read_hidden(hidden, has_all_tokens=every)
        if not plan.samples.any():
            return None
        if not every:
            return model.logits(hidden)
        last = torch.from_numpy(np.cumsum(plan.lengths)[np.flatnonzero(plan.samples)] - 1)
        return model.logits_of(hidden.index_select(0, last.to(hidden.device)))

    def _sample(
        self,
        plan: StepPlan,
        calls: StepCalls,
        logits: torch.Tensor,
        await_message: AwaitMessage | None,
    ) -> tuple[torch.Tensor, int]:
        """Samples a token for each row of `logits` [S, local_size], and enters it in its slot.

        Returns the tokens, int32 [S], and how many nanoseconds a message was waited for.
        """
        rows = np.flatnonzero(plan.samples)
        slot_ids, positions = plan.slots[rows], plan.starts[rows] + plan.lengths[rows]
        vocabulary, waited_ns = self.model.vocabulary, 0
        if calls.late is not None:
            tokens, waited_ns = self._sample_late_rows(
                calls, logits, slot_ids, positions, await_message
            )
        elif calls:  # which read the logits afterwards
            adjust = calls.adjuster(np.arange(len(rows)))
            tokens = sample(logits, self.slots, slot_ids, positions, vocabulary, adjust)
        else:
            tokens = sample(logits, self.slots, slot_ids, positions, vocabulary, in_place=True)
        self.slots.append(slot_ids, positions, tokens)
        return tokens, waited_ns

    def _sample_late_rows(
        self,
        calls: StepCalls,
        logits: torch.Tensor,
        slot_ids: I32,
        positions: I32,
        await_message: AwaitMessage | None,
    ) -> tuple[torch.Tensor, int]:
        """Samples a token for each row of `logits` [S, local_size], late rows after all others;
        returns the same as `_sample`. `slot_ids`, `positions`: int32 [S]."""
        late = calls.late
        assert late is not None
        tokens = torch.empty(len(logits), dtype=torch.int32, device=logits.device)

        def sample_some(some: npt.NDArray[np.integer], of_some: torch.Tensor) -> None:
            at = upload(some, logits.device).long()
            tokens[at] = sample(
                of_some, self.slots, slot_ids[some], positions[some], self.model.vocabulary,
                calls.adjuster(some), in_place=True,
            )  # fmt: skip

        others = np.delete(np.arange(len(logits)), late)
        if len(others):
            sample_some(others, logits.index_select(0, upload(others, logits.device)))
        places = upload(late, logits.device)
        changed, waited_ns = calls.late_logits(logits, places, await_message)
        sample_some(late, changed)
        return tokens, waited_ns
