"""Which blocks of a state group a step reads and writes, for code that computes in plain torch.

A block of a state group holds one whole state. Entry i of a row's block table is the state at the
end of block i's tokens, or at the row's last computed token in the block that it lies in; see
`ipc.kv_spec`. A step that computes the tokens [start, end) of a row reads entry (start - 1) //
block_size and writes every entry of its range that is a block (not negative): snapshots at the ends
of blocks, and the state after the last token. A row that starts at 0 begins with a state of zeros.

Lookahead rows leave no state: see `step.Replays`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from aioinfer.layers.step import HostRows, Replays, Step

#: Chunks of recurrences that are computed as products have so many tokens at most.
_MAX_CHUNK = 64


class StateEnd(NamedTuple):
    """A state to be kept.

    Attributes:
        length: after how many of the row's tokens in this step.
        block: where.
    """

    length: int
    block: int


@dataclass(frozen=True, slots=True)
class StateRow:
    """A row of several tokens.

    Attributes:
        first, count: its tokens in the step.
        start: the position of the first of them.
        source: the block of the state before them; None at the start of a sequence.
        ends: the states to be kept, ascending.
    """

    first: int
    count: int
    start: int
    source: int | None
    ends: tuple[StateEnd, ...]

    @property
    def tokens(self) -> slice:
        """The row's tokens in the step."""
        return slice(self.first, self.first + self.count)

    def initial(self, cache: torch.Tensor) -> torch.Tensor:
        """Returns the state before the row's tokens [*shape], of a layer's `cache` [num_blocks,
        *shape]; not to be written to."""
        if self.source is None:
            return torch.zeros_like(cache[0])
        return cache[self.source]


class Wave(NamedTuple):
    """One token of each of several sequences, of which a step computes one or few.

    Attributes:
        sequences: int64 [n], their numbers; None for all of them.
        tokens: their tokens in the step, int64 [n] or a slice.
        kept: int64 [m], which of the n states are written behind these tokens; None for all.
        blocks: int64 [m], where they are written.
    """

    sequences: torch.Tensor | None
    tokens: slice | torch.Tensor
    kept: torch.Tensor | None
    blocks: torch.Tensor


@dataclass(frozen=True, slots=True)
class StateRows:
    """The rows of a step for one state group, worked out once for all of its layers.

    With `StepInputs.replays` the tokens of a step have the replayed ones before them, which
    `SavedInputs.extend` adds.

    Attributes:
        sources: int64 [G], the blocks of the states of the sequences with rows of one token, before
            the step; any block where the sequence starts.
        starting: int64 [n], which of them start a sequence; None for none.
        waves: their tokens, in order.
        rows: the other rows.
        chunk: tokens of a chunk, which divides the block size: chunks that are aligned in absolute
            positions end where blocks end.
        replayed: int64 [2, P], the slots of the replayed tokens and their numbers in these.
        saved: int64 [3, n], tokens of the step (the replayed ones not counted) whose inputs are
            kept, their slots, and their numbers in these.
    """

    sources: torch.Tensor
    starting: torch.Tensor | None
    waves: tuple[Wave, ...]
    rows: tuple[StateRow, ...]
    chunk: int
    replayed: torch.Tensor
    saved: torch.Tensor

    @classmethod
    def of_step(cls, step: Step, group: int, block_size: int) -> StateRows:
        """Returns the rows of a step, which has `host` and no padding.

        Args:
            group: the number of the state group.
            block_size: tokens a block.
        """
        memo = StateRows, group
        found: StateRows | None = step.memo.get(memo)
        if found is None:
            assert step.host is not None
            tables = step.inputs.groups[group].block_tables
            found = _divide(step.host, tables, block_size, step.inputs.replays)
            step.memo[memo] = found
        return found

    @property
    def num_replayed(self) -> int:
        """How many replayed tokens are before the step's."""
        return self.replayed.shape[1]

    def advance(
        self,
        cache: torch.Tensor,
        compute: Callable[[slice | torch.Tensor, torch.Tensor], torch.Tensor],
        dtype: torch.dtype,
    ) -> None:
        """Computes the sequences with rows of one token, and writes their states.

        Args:
            cache: [num_blocks, *shape], of the layer.
            compute: called with tokens and the states before them [n, *shape], which it may
                overwrite; returns the states behind them. What it does with the tokens is its own.
            dtype: of the states that it takes.
        """
        states = cache.index_select(0, self.sources)
        if self.starting is not None:  # a former owner of the block may have left NaN there
            states.index_fill_(0, self.starting, 0)
        for wave in self.waves:
            before = states if wave.sequences is None else states[wave.sequences]
            # rounded after each token, whatever the number of tokens in the step
            after = compute(wave.tokens, before.to(dtype)).to(cache.dtype)
            cache.index_copy_(0, wave.blocks, after if wave.kept is None else after[wave.kept])
            if wave.sequences is None:
                states = after
            else:
                states[wave.sequences] = after


class SavedInputs:
    """The inputs of lookahead rows by which a layer advances its states, of each slot.

    Args:
        slots: the number of slots; 0 where no row looks ahead.
        rows: the maximum of lookahead rows of a slot.
        sizes: channels of each of the inputs.
        dtype, device: of these.

    Attributes:
        tensors: [slots, rows, size] of each of the inputs.
    """

    def __init__(
        self, slots: int, rows: int, sizes: Sequence[int], dtype: torch.dtype, device: torch.device
    ):
        self.tensors = [
            torch.zeros(slots, rows, size, dtype=dtype, device=device) for size in sizes
        ]

    def extend(self, inputs: Sequence[torch.Tensor], rows: StateRows) -> Sequence[torch.Tensor]:
        """Returns the inputs of a step's tokens ([T, size] each) behind those of the tokens that it
        replays, and keeps those of its lookahead rows."""
        slots, numbers = rows.replayed
        extended = inputs
        if len(slots):
            extended = [
                torch.cat((saved[slots, numbers], x))
                for saved, x in zip(self.tensors, inputs, strict=True)
            ]
        tokens, slots, numbers = rows.saved
        if len(tokens):
            for saved, x in zip(self.tensors, inputs, strict=True):
                saved[slots, numbers] = x[tokens]
        return extended


def _divide(
    host: HostRows, tables: torch.Tensor, block_size: int, replays: Replays | None
) -> StateRows:
    """Returns the rows of a step with the block tables int32 [R, max_blocks]."""
    entries, device = tables.cpu().numpy(), tables.device
    singles = sum(1 for _ in takewhile(lambda count: count == 1, host.query_lens))
    pending, counts, slots = np.zeros(singles, np.int64), np.ones(singles, np.int64), None
    if replays is not None:
        slots, pending, counts = (each.cpu().numpy()[:singles] for each in replays)
    firsts = np.flatnonzero(counts)
    pending, counts = pending[firsts].astype(np.int64), counts[firsts].astype(np.int64)
    starts = np.asarray(host.seq_lens, np.int64)[firsts] - 1 - pending
    sources = entries[firsts, np.maximum(starts - 1, 0) // block_size]
    starting = np.flatnonzero(starts == 0)
    replayed = int(pending.sum())

    def on_device(numbers: npt.ArrayLike) -> torch.Tensor:
        return torch.from_numpy(np.asarray(numbers, np.int64)).to(device)

    rows, first = [], replayed + singles
    for row in range(singles, len(host.query_lens)):
        count, end = host.query_lens[row], host.seq_lens[row]
        rows.append(_row(entries[row], first, end - count, end, block_size))
        first += count
    sequences = _Sequences(firsts, starts, pending, counts, entries, block_size)
    slots = np.zeros_like(firsts) if slots is None else slots[firsts]
    return StateRows(
        on_device(np.maximum(sources, 0)),
        on_device(starting) if len(starting) else None,
        tuple(sequences.waves(on_device)),
        tuple(rows),
        math.gcd(block_size, _MAX_CHUNK),
        *(on_device(each) for each in sequences.places(slots)),
    )


class _Sequences(NamedTuple):
    """The sequences with rows of one token, G of them, int64.

    Attributes:
        firsts: [G], their first rows, which are tokens of the step.
        starts: [G], the positions behind the states in memory.
        pending, counts: [G], see `Replays`.
        entries: [R, max_blocks], the block tables of all rows.
        block_size: tokens a block.
    """

    firsts: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    pending: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    entries: npt.NDArray[np.int32]
    block_size: int

    def waves(self, on_device: Callable[[npt.ArrayLike], torch.Tensor]) -> Iterator[Wave]:
        """Yields their tokens, in order."""
        replayed = int(self.pending.sum())
        lengths = self.pending + self.counts
        places = np.cumsum(self.pending) - self.pending  # of their replayed tokens
        for number in range(int(lengths.max(initial=0))):
            some = np.flatnonzero(lengths > number)
            own = replayed + self.firsts[some] + number - self.pending[some]
            tokens = np.where(number < self.pending[some], places[some] + number, own)
            kept, blocks = self._kept(some, number)
            in_order = np.array_equal(tokens, np.arange(len(some)))
            yield Wave(
                None if len(some) == len(lengths) else on_device(some),
                slice(0, len(some)) if in_order else on_device(tokens),
                None if len(kept) == len(some) else on_device(kept),
                on_device(blocks),
            )

    def _kept(
        self, some: npt.NDArray[np.int64], number: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        """Returns which of some sequences keep their states behind token `number` of each, and
        where: behind the first row, and at ends of blocks before it."""
        ends = self.starts[some] + number + 1
        blocks = self.entries[self.firsts[some], (ends - 1) // self.block_size]
        is_end = (number < self.pending[some]) & (ends % self.block_size == 0) & (blocks >= 0)
        kept = np.flatnonzero((number == self.pending[some]) | is_end)
        return kept, blocks[kept]

    def places(
        self, slots: npt.NDArray[np.integer]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Returns `StateRows.replayed` and `StateRows.saved`, of the sequences' slots [G]."""
        replayed = [
            (slot, n) for slot, count in zip(slots, self.pending, strict=True) for n in range(count)
        ]
        saved = [
            (first + n + 1, slot, n)
            for first, slot, count in zip(self.firsts, slots, self.counts, strict=True)
            for n in range(count - 1)
        ]
        return (
            np.array(replayed, np.int64).reshape(-1, 2).T,
            np.array(saved, np.int64).reshape(-1, 3).T,
        )


def _row(
    table: npt.NDArray[np.integer], first: int, start: int, end: int, block_size: int
) -> StateRow:
    """Returns the row of the tokens [start, end) of a sequence with a block table."""
    kept = (
        StateEnd(min((entry + 1) * block_size, end) - start, int(table[entry]))
        for entry in range(start // block_size, (end - 1) // block_size + 1)
    )
    source = int(table[(start - 1) // block_size]) if start else None
    wanted = tuple(one for one in kept if one.block >= 0)
    return StateRow(first, end - start, start, source, wanted)
