"""Buffers of a step on a GPU: the pinned memory through which a plan is uploaded, and the inputs,
which kernels fill from the slots, at addresses that CUDA graphs refer to. `GpuDevice` has both.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from aioinfer.ipc.plan import I32
from aioinfer.kernels import prepare
from aioinfer.kernels.states import plan_replays
from aioinfer.layers.step import GroupInputs, Replays, StepInputs
from aioinfer.worker.device import NUM_BUFFERS, token_types
from aioinfer.worker.slots import Slots

#: Tensors of equal length: of a list, or the rows of one.
Tensors = Sequence[torch.Tensor] | torch.Tensor

_MIN_SIZE = 1 << 14


class Staging:
    """Uploads of int32 arrays through pinned memory, packed into one copy that the host does not
    wait for. `device` is the device of the steps; on a CPU (in tests) nothing is pinned.

    Attributes:
        index: which of the `NUM_BUFFERS` buffers the current step uses.
    """

    def __init__(self, device: torch.device):
        self.index = 0
        self._device = device
        self._buffers = [self._make(_MIN_SIZE) for _ in range(NUM_BUFFERS)]
        self._over: list[torch.cuda.Event | None] = [None] * NUM_BUFFERS

    def begin(self) -> int:
        """Begins a step: takes the next buffer, and waits for the step that used it.

        Returns its index.
        """
        self.index = (self.index + 1) % NUM_BUFFERS
        over = self._over[self.index]
        if over is not None:
            over.synchronize()
        return self.index

    def end(self, over: torch.cuda.Event) -> None:
        """Ends a step: `over` is recorded when all of its work has been launched."""
        self._over[self.index] = over

    def upload(self, arrays: Sequence[I32]) -> list[torch.Tensor]:
        """Returns each array as an int32 tensor of its shape on the device. At most once a step."""
        sizes = [array.size for array in arrays]
        total = sum(sizes)
        if len(self._buffers[self.index]) < total:
            self._buffers[self.index] = self._make(1 << total.bit_length())
        buffer = self._buffers[self.index]
        np.concatenate([array.reshape(-1) for array in arrays], out=buffer.numpy()[:total])
        uploaded = buffer[:total].to(self._device, non_blocking=True, copy=True)
        return [
            part.view(array.shape)
            for part, array in zip(uploaded.split(sizes), arrays, strict=True)
        ]

    def host_buffer(self, size: int) -> torch.Tensor:
        """Returns int32 [size] of this step's pinned memory, to be filled and copied instead of
        `upload`."""
        if len(self._buffers[self.index]) < size:
            self._buffers[self.index] = self._make(1 << size.bit_length())
        return self._buffers[self.index][:size]

    def _make(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int32, pin_memory=self._device.type == "cuda")


class StepBuffers:
    """Buffers for R rows and T tokens, of which each step uses the beginnings.

    Args:
        slots: from which the inputs are derived.
        rows, tokens: the maxima of a step.
        max_pending: the maximum of tokens that a row replays (see `StepInputs.replays`); 0 for
            steps that replay none.

    Attributes:
        rows, tokens: the same.
        whole: the buffers. Block tables start as zeros: padding names a block that exists.
    """

    def __init__(self, slots: Slots, rows: int, tokens: int, max_pending: int = 0):
        self.rows, self.tokens = rows, tokens
        self._slots, self._max_pending = slots, max_pending

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=slots.device)

        groups = tuple(
            GroupInputs(zeros(tokens, dtype=torch.int64), zeros(rows, tables.shape[1]))
            for tables in slots.tables_by_group
        )
        rotary = None if slots.rotary_offsets is None else zeros(3, tokens)
        replays = None
        if max_pending:
            replays = Replays(zeros(rows), zeros(rows), zeros(rows))
        self.whole = StepInputs(
            zeros(tokens), zeros(tokens), zeros(rows + 1), zeros(rows), groups, rotary, replays,
            zeros(tokens) if slots.has_token_types else None,
        )  # fmt: skip

    def views(self, num_tokens: int, rows: int, slots: torch.Tensor | None = None) -> StepInputs:
        """Returns the beginnings of the buffers, with the slots of the rows (int32 [R])."""
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
            None if whole.rotary is None else whole.rotary[:, :num_tokens],
            None if whole.replays is None else Replays(*(x[:rows] for x in whole.replays)),
            None if whole.token_types is None else whole.token_types[:num_tokens],
            slots,
        )

    def prepare(
        self, rows: Tensors, num_tokens: int, *, max_length: int,
        limits: torch.Tensor | None = None, offsets: torch.Tensor | None = None,
        keeps_first: bool = False,
    ) -> StepInputs:  # fmt: skip
        """Launches the preparation of rows (slots, starts and lengths, each int32 [R]), and returns
        their inputs; tokens beyond the lengths' sum, up to `num_tokens`, become padding.

        Args:
            max_length: at least the tokens of a row.
            limits, keeps_first: int32 [R]; with these as `Device.prepare_successors`.
            offsets: int32 [R], see `LookaheadRows`; None without lookahead rows.
        """
        slots, inputs = self._slots, self.views(num_tokens, len(rows[0]), rows[0])
        tokens = slots.tokens if limits is None else slots.tokens[:, 1:]
        for group, tables in zip(inputs.groups, slots.tables_by_group, strict=True):
            filled = prepare.PreparedInputs(
                inputs.input_ids, inputs.positions, group.slot_mapping, inputs.query_starts,
                inputs.seq_lens, group.block_tables, inputs.rotary,
            )  # fmt: skip
            prepare.prepare_inputs(
                *rows, tokens, tables, filled, block_size=slots.block_size,
                max_length=max_length, rotary_offsets=slots.rotary_offsets, limits=limits,
                keeps_first=keeps_first,
            )  # fmt: skip
        if inputs.replays is not None:
            plan_replays(rows, offsets, slots.state_lens, inputs.replays, self._max_pending)
        if inputs.token_types is not None:
            second = slots.params["second_text"].index_select(0, rows[0])
            # models with token types have no graphs: there are as many tokens as the rows have
            of_tokens = second.repeat_interleave(rows[2], output_size=num_tokens)
            inputs.token_types.copy_(token_types(inputs.positions, of_tokens))
        return inputs

    def clear(self) -> StepInputs:
        """Makes a step find nothing to cache and nothing to attend; returns its inputs, the
        buffers as a whole."""
        for group in self.whole.groups:
            group.slot_mapping.fill_(-1)
        self.whole.query_starts.zero_()
        self.whole.seq_lens.zero_()
        return self.views(self.tokens, self.rows)
