"""The inputs of a step on a GPU: buffers that kernels fill from the slots, and that CUDA graphs
refer to. `step_inputs` makes the inputs of a step on a CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

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
        their inputs; what `num_tokens` exceeds the lengths' sum becomes padding.

        Args:
            max_length: at least the tokens of a row.
        """
        slots, inputs = self._slots, self.views(num_tokens, len(rows[0]))
        for group, tables in zip(inputs.groups, slots.tables_by_group, strict=True):
            filled = prepare.StepInputs(
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
