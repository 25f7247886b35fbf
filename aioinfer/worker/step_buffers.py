"""Buffers on a GPU that CUDA graphs refer to: the plan of a decode step (`PlanBuffer`), and the
inputs of a step, which kernels fill from the slots (`StepBuffers`). `model_runner.prepare_step`
makes the inputs of a step on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from aioinfer.ipc.plan import I32, StepPlan
from aioinfer.kernels import prepare
from aioinfer.layers.step import GroupInputs, StepInputs
from aioinfer.worker.slots import Slots

#: Tensors of equal length: of a list, or the rows of one.
Tensors = Sequence[torch.Tensor] | torch.Tensor


class StepBuffers:
    """Buffers for R rows and T tokens, of which each step uses the beginnings.

    Args:
        slots: from which the inputs are derived.
        rows, tokens: the maxima of a step.

    Attributes:
        rows, tokens: the same.
        whole: the buffers. Block tables start as zeros: padding names a block that exists.
    """

    def __init__(self, slots: Slots, rows: int, tokens: int):
        self.rows, self.tokens = rows, tokens
        self._slots = slots

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=slots.device)

        groups = tuple(
            GroupInputs(zeros(tokens, dtype=torch.int64), zeros(rows, tables.shape[1]))
            for tables in slots.tables_by_group
        )
        self.whole = StepInputs(zeros(tokens), zeros(tokens), zeros(rows + 1), zeros(rows), groups)

    def views(self, num_tokens: int, rows: int) -> StepInputs:
        """Returns the beginnings of the buffers."""
        whole = self.whole
        return StepInputs(
            whole.input_ids[:num_tokens],
            whole.positions[:num_tokens],
            whole.query_starts[: rows + 1],
            whole.seq_lens[:rows],
            tuple(
                GroupInputs(group.slot_mapping[:num_tokens], group.block_tables[:rows])
                for group in whole.groups
            ),
        )

    def prepare(self, rows: Tensors, num_tokens: int, *, max_length: int) -> StepInputs:
        """Launches the preparation of rows (slots, starts and lengths, each int32 [R]), and returns
        their inputs; tokens beyond the lengths' sum, up to `num_tokens`, become padding.

        Args:
            max_length: at least the tokens of a row.
        """
        slots, inputs = self._slots, self.views(num_tokens, len(rows[0]))
        for group, tables in zip(inputs.groups, slots.tables_by_group, strict=True):
            filled = prepare.PreparedInputs(
                inputs.input_ids, inputs.positions, group.slot_mapping, inputs.query_starts,
                inputs.seq_lens, group.block_tables,
            )  # fmt: skip
            prepare.prepare_inputs(
                *rows, slots.tokens, tables, filled,
                block_size=slots.block_size, max_length=max_length,
            )  # fmt: skip
        return inputs

    def clear(self) -> StepInputs:
        """Makes a step find nothing to cache and nothing to attend; returns its inputs, the
        buffers as a whole."""
        for group in self.whole.groups:
            group.slot_mapping.fill_(-1)
        self.whole.query_starts.zero_()
        self.whole.seq_lens.zero_()
        return self.views(self.tokens, self.rows)


class PlanBuffer:
    """Sections of equal meaning at fixed places: `rows` entries each for slots, starts, lengths and
    samples; `growth` entries each for table rows, indices and blocks; at last the number of the
    result buffer.

    Args:
        rows: the maximum number of rows of a step.
        growth: the maximum number of entries by which block tables grow.
        device: of the worker.

    Attributes:
        values: int32 [4 * rows + 3 * growth + 1] on the device.
        buffer_index: its last entry.
    """

    def __init__(self, rows: int, growth: int, device: torch.device):
        self.rows, self.growth = rows, growth
        self.values = torch.zeros(4 * rows + 3 * growth + 1, dtype=torch.int32, device=device)
        self.buffer_index = self.values[-1:]

    def row_section(self, number: int, rows: int) -> torch.Tensor:
        """Returns the first `rows` entries of slots (0), starts (1), lengths (2) or samples (3)."""
        return self.values[number * self.rows : number * self.rows + rows]

    def growth_sections(self) -> tuple[torch.Tensor, ...]:
        """Returns table rows, indices and blocks, each int32 [growth]."""
        return self.values[4 * self.rows : -1].view(3, self.growth).unbind()

    def clear_growth(self) -> None:
        """Makes all entries of the growth padding."""
        self.growth_sections()[0].fill_(-1)

    def fill(
        self, plan: StepPlan, buffer_index: int, host: torch.Tensor, late: I32 | None = None
    ) -> None:
        """Writes a plan into pinned memory (int32 like `values`) and starts its copy; entries
        beyond the plan's rows and growth become padding. The rows `late` (int32 [M]) do not count
        as sampled: their tokens come later."""
        array = host.numpy()
        growth_start = 4 * self.rows
        array[:growth_start] = 0
        array[growth_start : growth_start + self.growth] = -1
        for number, field in enumerate((plan.slots, plan.starts, plan.lengths, plan.samples)):
            array[number * self.rows : number * self.rows + len(field)] = field
        if late is not None:
            array[3 * self.rows + late] = 0
        for number, field in enumerate((plan.table_rows, plan.table_indices, plan.table_blocks)):
            start = growth_start + number * self.growth
            array[start : start + len(field)] = field
        array[-1] = buffer_index
        self.values.copy_(host, non_blocking=True)
