"""Which blocks of a state group a step reads and writes, for code that computes in plain torch.

A block of a state group holds one whole state. Entry i of a row's block table is the state at the
end of block i's tokens, or at the row's last computed token in the block that it lies in; see
`ipc.kv_spec`. A step that computes the tokens [start, end) of a row reads entry (start - 1) //
block_size and writes every entry of its range that is a block (not negative): snapshots at the ends
of blocks, and the state after the last token. A row that starts at 0 begins with a state of zeros.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from aioinfer.layers.step import HostRows, Step

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


@dataclass(frozen=True, slots=True)
class StateRows:
    """The rows of a step for one state group, worked out once for all of its layers.

    Attributes:
        decodes: how many of the first rows have one token.
        sources: int64 [decodes], the blocks of their states before the step; any block where the
            sequence starts.
        targets: int64 [decodes], the blocks of their states after it.
        starting: int64 [n], which of them start a sequence; None for none.
        rows: the other rows.
        chunk: tokens of a chunk, which divides the block size: chunks that are aligned in absolute
            positions end where blocks end.
    """

    decodes: int
    sources: torch.Tensor
    targets: torch.Tensor
    starting: torch.Tensor | None
    rows: tuple[StateRow, ...]
    chunk: int

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
            found = _divide(step.host, tables, block_size)
            step.memo[memo] = found
        return found

    def read(self, cache: torch.Tensor) -> torch.Tensor:
        """Returns the states of the decodes before the step [decodes, *shape], a copy, of a layer's
        `cache` [num_blocks, *shape]."""
        states = cache.index_select(0, self.sources)
        if self.starting is not None:  # a former owner of the block may have left NaN there
            states.index_fill_(0, self.starting, 0)
        return states

    def write(self, cache: torch.Tensor, states: torch.Tensor) -> None:
        """Writes the states of the decodes after the step [decodes, *shape]."""
        cache.index_copy_(0, self.targets, states)


def _divide(host: HostRows, tables: torch.Tensor, block_size: int) -> StateRows:
    """Returns the rows of a step with the block tables int32 [R, max_blocks]."""
    entries, device = tables.cpu().numpy(), tables.device
    decodes = sum(1 for _ in takewhile(lambda count: count == 1, host.query_lens))
    ends = np.asarray(host.seq_lens[:decodes], np.int64)
    numbers = np.arange(decodes)
    targets = entries[numbers, (ends - 1) // block_size]
    sources = entries[numbers, np.maximum(ends - 2, 0) // block_size]
    starting = np.flatnonzero(ends == 1)
    rows, first = [], decodes
    for row in range(decodes, len(host.query_lens)):
        count, end = host.query_lens[row], host.seq_lens[row]
        rows.append(_row(entries[row], first, end - count, end, block_size))
        first += count

    def on_device(blocks: npt.NDArray[np.integer]) -> torch.Tensor:
        return torch.from_numpy(blocks.astype(np.int64)).to(device)

    return StateRows(
        decodes,
        on_device(np.maximum(sources, 0)),
        on_device(targets),
        on_device(starting) if len(starting) else None,
        tuple(rows),
        math.gcd(block_size, _MAX_CHUNK),
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
