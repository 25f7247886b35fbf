"""The tokens of a step by adapter, for the products that add what the adapters of the tokens give.

On a GPU they are sorted on the device (`kernels.adapter_tiles`), so that a CUDA graph holds for any
adapters; on a CPU, and for the rows of `RowProduct`, in plain torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from aioinfer.layers.backend import Backend
from aioinfer.layers.extension import Extension, Terms
from aioinfer.layers.step import Step

if TYPE_CHECKING:
    from aioinfer.kernels.adapter_tiles import AdapterTiles
    from aioinfer.kernels.adapters import AdapterWorkspace

#: Of more rows than `kernels.adapter_tiles.MAX_FUSED_ROWS` a product has the adapters in its launch
#: only if it has so many times as many input features as columns of B.
_COLUMN_SHARE = 8


class AdapterTokens(Extension):
    """The tokens of a step by adapter: what `AdapterSlots` does with steps.

    Args:
        count: of the slots.
        max_rank: of an adapter.
        backend: of the rank's layers.

    Attributes:
        backend, count, max_rank: the same.
        ranks: int32 [count], of the adapter in each slot.
        of_slots: int32 [requests], the adapter slot of each request's slot plus 1, 0 for none; made
            by `allocate`.
        workspace: of the kernels; made by `allocate`.
    """

    of_slots: torch.Tensor
    workspace: AdapterWorkspace

    def __init__(self, count: int, max_rank: int, backend: Backend):
        self.count, self.max_rank, self.backend = count, max_rank, backend
        device = backend.device
        self.ranks = torch.zeros(count, dtype=torch.int32, device=device)
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._tokens = 0
        #: of products of a single token, in the planned step
        self._launches = 0
        #: the adapter slots of a step's tokens, where graphs read them; and of the planned step,
        #: of all tokens and of the sampled ones
        self._buffer: torch.Tensor | None = None
        self._given: torch.Tensor | None = None
        self._sampled: torch.Tensor | None = None
        #: on a CPU: by the number of tokens, the tokens of each slot
        self._by_slot: dict[int, list[tuple[int, torch.Tensor]]] = {}
        #: by the number of rows, for products that are timed
        self._even: dict[int, tuple[AdapterTiles, torch.Tensor]] = {}
        self._tiles: AdapterTiles
        self._sampled_tiles: AdapterTiles

    def allocate_tokens(self, tokens: int, merged: tuple[int, ...], inputs: int) -> None:
        """Makes the memory that kernels need, for steps of up to `tokens` tokens.

        Args:
            merged: the numbers of modules that products merge, in ascending order.
            inputs: the maximum of a product's input features.
        """
        from aioinfer.kernels.adapter_tiles import AdapterTiles, RankLayout
        from aioinfer.kernels.adapters import AdapterWorkspace

        layout = RankLayout(self.count, self.max_rank, merged)
        device, dtype = self.backend.device, self.backend.dtype
        self.workspace = AdapterWorkspace.empty(tokens, layout, inputs, dtype, device)
        self._buffer = torch.zeros(tokens, dtype=torch.int32, device=device)
        self._tiles = AdapterTiles.empty(tokens, layout, dtype, device)
        sampled = AdapterTiles.empty(tokens, layout, dtype, device)
        self._sampled_tiles = replace(sampled, words=self._tiles.words)

    @property
    def max_columned(self) -> int:
        """Of so many tokens at most, x A^T has a column for each rank of each adapter."""
        return len(self._tiles.shrunk)

    def even_tiles(self, rows: int) -> tuple[AdapterTiles, torch.Tensor]:
        """Returns the tiles of so many rows, of which all adapters have equal parts, and ranks
        int32 [count], the maximum of each: for products that are timed. They are made once."""
        from aioinfer.kernels.adapter_tiles import tile_size

        if rows not in self._even:
            tiles, size = self._tiles.views(rows), tile_size(rows)
            order = torch.full((len(tiles.slots), size), -1, dtype=torch.int32)
            slots, tile = torch.full((len(tiles.slots),), -1, dtype=torch.int32), 0
            for slot in range(self.count):
                own = range(slot * rows // self.count, (slot + 1) * rows // self.count)
                for first in range(0, len(own), size):
                    some = own[first : first + size]
                    order[tile, : len(some)] = torch.tensor(some, dtype=torch.int32)
                    slots[tile], tile = slot, tile + 1
            order, slots = (each.to(self.ranks.device) for each in (order.flatten(), slots))
            ranks = torch.full_like(self.ranks, self.max_rank)
            self._even[rows] = replace(tiles, order=order, slots=slots), ranks
        return self._even[rows]

    def of_rows(self, step: Step, rows: int) -> Terms | None:
        """See `ExpertExtension.terms_of`: int32 [rows], adapter slots, negative for none."""
        given, sampled = self.terms_of(step), step.sampled
        if given is None or rows == len(given):
            return given
        assert sampled is not None, "neither all tokens nor the sampled ones"
        return given.index_select(0, sampled.last)

    def terms_of(self, step: Step) -> Terms | None:
        """See `Extension.terms_of`: int32 [T], adapter slots, negative for none."""
        if not self.is_active or self._buffer is None:
            return self._given if self.is_active else None
        return self._buffer[: len(step.inputs.input_ids)]

    def terms_at(self, tokens: torch.Tensor | None) -> Terms | None:
        """See `Extension.terms_at`: int32 [N], adapter slots, negative for none."""
        if not self.is_active or self._given is None:
            return None
        return self._sampled if tokens is None else self._given.index_select(0, tokens)

    def beside(self) -> AbstractContextManager[Any]:
        """Context of launches beside those that follow on the current stream, until `join`; on a
        CPU of calls in their order."""
        if self._side is None:
            return nullcontext()
        self._side.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._side)

    def join(self) -> None:
        """Lets the current stream wait for the launches of `beside`."""
        if self._side is not None:
            torch.cuda.current_stream().wait_stream(self._side)

    def plan(self, step: Step) -> None:
        """See `Extension.plan`."""
        slots, sampled = step.inputs.slots, step.sampled
        if not self.is_active or slots is None:
            return
        adapters = self._assign(slots, step)
        self._tokens, self._launches = len(adapters), 0
        self._by_slot = {}
        self._given = self._sampled = adapters
        self._sort(adapters, is_sampled=False)
        if sampled is not None:
            self._sampled = adapters.index_select(0, sampled.last)
            self._sort(self._sampled, is_sampled=True)

    def _assign(self, slots: torch.Tensor, step: Step) -> torch.Tensor:
        """Returns the adapter slot (int32 [T], negative for none) of each token of a step, whose
        rows have these slots."""
        inputs, tokens = step.inputs, len(step.inputs.input_ids)
        if self._buffer is None:
            lengths = inputs.query_starts.diff()
            of_rows = self.of_slots.index_select(0, slots) - 1
            return of_rows.repeat_interleave(lengths, output_size=tokens)
        from aioinfer.kernels.adapter_tiles import assign_adapters

        given = self._buffer[: max(tokens, step.padded)]
        assign_adapters(slots, inputs.query_starts, self.of_slots, given)
        return given[:tokens]

    def _sort(self, adapters: torch.Tensor, *, is_sampled: bool) -> None:
        if not self.backend.has_kernels:
            self._by_slot[len(adapters)] = [
                (slot, torch.nonzero(adapters == slot)[:, 0])
                for slot in adapters.unique().tolist()
                if slot >= 0
            ]
            return
        if not len(adapters):
            return
        from aioinfer.kernels.adapter_tiles import sort_by_adapter

        tiles = self._sampled_tiles if is_sampled else self._tiles
        sort_by_adapter(adapters, tiles, self.ranks)

    @contextmanager
    def expecting(self, tokens: int) -> Iterator[None]:
        """See `Extension.expecting`."""
        planned, self._tokens = self._tokens, tokens
        yield
        self._tokens = planned

    def tiles_of(self, rows: int) -> AdapterTiles:
        """Returns the tiles of a product of so many rows: all tokens of the step, or the sampled
        ones."""
        tiles = self._tiles if rows == self._tokens else self._sampled_tiles
        return tiles.views(rows)

    def next_launch(self) -> int:
        """Returns the number of the launch that computes x A^T of a single token next."""
        number = self._launches
        self._launches += 1
        return number

    def may_fuse(self, rows: int, columns: int, inputs: int) -> bool:
        """Whether a kernel may add the adapters to a product of so many rows in its own launch: few
        rows read the matrices B that they need anyway, while many would take arithmetic for each
        column of B beside the input features."""
        if not self.backend.has_kernels or not 0 < rows <= len(self._tiles.shrunk):
            return False
        from aioinfer.kernels.adapter_tiles import MAX_FUSED_ROWS

        return rows <= MAX_FUSED_ROWS or _COLUMN_SHARE * columns <= inputs

    def tokens_of(self, rows: int) -> list[tuple[int, torch.Tensor]]:
        """Returns (slot, int64 tokens) of the adapters in a product of so many rows, in plain
        torch."""
        return self._by_slot[rows]
