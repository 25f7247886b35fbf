"""One step of the model: from a `StepPlan` to the tokens that it chose.

The worker calls `ModelRunner.step` for each plan, in order. The inputs of a step are derived from
the slots by a few tensor operations, whatever the number of rows, and the chosen tokens are written
back into the slots, where the next step finds them: the host sends no token twice and none that a
step chose.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch

from aioinfer.ipc.plan import StepPlan, StepResult
from aioinfer.layers.attention import AttentionMetadata, KVCache
from aioinfer.models.registry import CausalLM
from aioinfer.worker.sampler import Sampled, sample
from aioinfer.worker.slots import Slots


@dataclass(slots=True)
class StepInputs:
    """What the model reads in a step of T tokens.

    Attributes:
        input_ids, positions: int64 [T].
        metadata: where each token's key and value go, and what each attends to.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    metadata: AttentionMetadata


@dataclass(slots=True)
class PendingResult:
    """The result of a step that has been started.

    Attributes:
        step_id: the plan's.
        sampled: what was chosen, still on the device.
        busy_ns: nanoseconds that the host spent on the step.
    """

    step_id: int
    sampled: Sampled
    busy_ns: int

    def wait(self) -> StepResult:
        """Returns the result once it has reached the host; at once on a CPU."""
        sampled = self.sampled
        return StepResult(
            self.step_id,
            sampled.tokens.cpu().numpy(),
            sampled.logprobs.cpu().numpy(),
            sampled.top_tokens.cpu().numpy(),
            sampled.top_logprobs.cpu().numpy(),
            self.busy_ns,
        )


class ModelRunner:
    """Runs one rank's model over its KV cache.

    Attributes:
        model: the rank's share of the model.
        kv: [2, layers, num_blocks, block_size, kv_heads, head_size], keys and values of all layers.
        slots: the running requests.
    """

    def __init__(self, model: CausalLM, kv: torch.Tensor, slots: Slots):
        self.model = model
        self.kv = kv
        self.slots = slots
        self._caches = [KVCache(keys, values) for keys, values in zip(kv[0], kv[1], strict=True)]

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> PendingResult:
        """Executes a plan: slots and blocks as it says, the model over its rows, and a token for
        each sampling row."""
        began = time.perf_counter_ns()
        self.slots.apply(plan)
        self._copy_blocks(plan)
        inputs = prepare_inputs(plan, self.slots)
        hidden = self.model.forward(
            inputs.input_ids, inputs.positions, self._caches, inputs.metadata
        )
        sampled = self._sample(plan, hidden)
        return PendingResult(plan.step_id, sampled, time.perf_counter_ns() - began)

    def _copy_blocks(self, plan: StepPlan) -> None:
        """Copies KV blocks; all sources are read before any target is written."""
        if len(plan.copy_sources):
            sources, targets = (
                torch.tensor(blocks, device=self.kv.device).long()
                for blocks in (plan.copy_sources, plan.copy_targets)
            )
            self.kv.index_copy_(2, targets, self.kv.index_select(2, sources))

    def _sample(self, plan: StepPlan, hidden: torch.Tensor) -> Sampled:
        """Chooses a token for each sampling row from the hidden states [T, hidden_size], and enters
        them in the slots."""
        sampling = np.flatnonzero(plan.samples)
        if not len(sampling):
            return Sampled.plain(torch.empty(0, dtype=torch.int32, device=hidden.device))
        if len(sampling) < len(hidden):
            last = np.cumsum(plan.lengths)[sampling] - 1
            hidden = hidden[torch.from_numpy(last).to(hidden.device)]
        slot_ids = plan.slots[sampling]
        positions = plan.starts[sampling] + plan.lengths[sampling]
        sampled = sample(
            self.model.logits(hidden), self.slots, slot_ids, positions, self.model.vocabulary
        )
        self.slots.append(slot_ids, positions, sampled.tokens)
        return sampled


def prepare_inputs(plan: StepPlan, slots: Slots) -> StepInputs:
    """Derives the inputs of a step of R rows and T tokens from the slots, on their device."""
    device, block_size = slots.device, slots.block_size
    rows = torch.from_numpy(np.stack([plan.slots, plan.starts, plan.lengths]).astype(np.int64)).to(
        device
    )
    slot_ids, starts, lengths = rows
    ends = lengths.cumsum(0)
    num_rows, num_tokens = len(plan.slots), plan.num_tokens
    if num_tokens == num_rows:
        token_slots, positions = slot_ids, starts
    else:
        row_of_token = torch.repeat_interleave(lengths, output_size=num_tokens)
        token_slots = slot_ids[row_of_token]
        positions = (
            torch.arange(num_tokens, device=device) + (starts - ends + lengths)[row_of_token]
        )
    block_ids = slots.block_table[token_slots, positions // block_size].long()
    seq_lens = plan.starts + plan.lengths
    num_blocks = -(-int(seq_lens.max()) // block_size)
    longer = plan.lengths > 1
    metadata = AttentionMetadata(
        slot_mapping=block_ids * block_size + positions % block_size,
        block_tables=slots.block_table[:, :num_blocks][slot_ids],
        query_starts=torch.nn.functional.pad(ends, (1, 0)).int(),
        seq_lens=(starts + lengths).int(),
        num_decodes=int(np.argmax(longer)) if longer.any() else num_rows,
        query_lens_cpu=plan.lengths.tolist(),
        seq_lens_cpu=seq_lens.tolist(),
    )
    return StepInputs(slots.tokens[token_slots, positions].long(), positions, metadata)
