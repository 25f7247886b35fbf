"""Inputs of a step from a plan and the slots, in plain torch: for workers without kernels
(`aioinfer.kernels.prepare` does it on GPUs)."""

from __future__ import annotations

import numpy as np
import torch

from aioinfer.ipc.plan import StepPlan
from aioinfer.layers.step import GroupInputs, HostRows, SampledRows, Step, StepInputs
from aioinfer.worker.slots import Slots


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
