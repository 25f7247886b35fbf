"""The plan of a decode step where its CUDA graph expects it: one int32 array on the GPU."""

from __future__ import annotations

import torch

from aioinfer.ipc.plan import StepPlan
from aioinfer.worker.masks import constrained_rows


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

    def fill(self, plan: StepPlan, buffer_index: int, host: torch.Tensor) -> None:
        """Writes a plan into pinned memory (int32 like `values`) and starts its copy; what is
        beyond the plan's rows and growth becomes padding. Constrained rows do not count as
        sampled: their tokens come later."""
        array = host.numpy()
        growth_start = 4 * self.rows
        array[:growth_start] = 0
        array[growth_start : growth_start + self.growth] = -1
        for number, field in enumerate((plan.slots, plan.starts, plan.lengths, plan.samples)):
            array[number * self.rows : number * self.rows + len(field)] = field
        constrained = constrained_rows(plan)
        if constrained is not None:
            array[3 * self.rows + constrained] = 0
        for number, field in enumerate((plan.table_rows, plan.table_indices, plan.table_blocks)):
            start = growth_start + number * self.growth
            array[start : start + len(field)] = field
        array[-1] = buffer_index
        self.values.copy_(host, non_blocking=True)
