"""The tokens that penalties count: one row over the vocabulary for each request that has penalties.

`Slots` is the only writer but for the step's own kernel, which counts the sampled tokens. Which
rows are used is known on the host, so that admissions never wait for the device.

Memory. Rows are taken from the lowest on, in a tensor whose capacity is one of the sizes
`ceil(max_num_seqs / 2**i)`. It grows to the next size that holds the rows in use, and shrinks when
a quarter of it would do: between the two lies a factor of two, so that requests that come and go do
not reallocate it each time. While it is copied, both sizes exist (`max_bytes`).
"""

from __future__ import annotations

import heapq

import numpy as np
import torch

#: The bit of an occurrence that is set if the token is in the prompt; the bits below count the
#: output. `kernels.penalties` has the same.
IN_PROMPT = 1 << 30
_MIN_ROWS = 4


class Occurrences:
    """Counts of tokens, for the slots of requests with penalties: which tokens a request holds, and
    how often it generated them.

    Attributes:
        rows: int32 [capacity, vocab_size] on the device; the bit `IN_PROMPT` is set if the token is
            in the prompt, the bits below it count it in the output.
        row_of_slot: int32 [max_num_seqs] on the device, the row of each slot, or -1. Written by
            `Slots` from `host_rows`.
        host_rows: the same on the host.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device):
        self.rows = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self.row_of_slot = torch.full((max_num_seqs,), -1, dtype=torch.int32, device=device)
        self.host_rows = np.full(max_num_seqs, -1, np.int32)
        self._free = list(range(max_num_seqs))  # a heap
        self._used: set[int] = set()

    @staticmethod
    def max_bytes(max_num_seqs: int, vocab_size: int) -> int:
        """Returns the device memory of `rows` at its worst: while it grows to its full size."""
        return (max_num_seqs + -(-max_num_seqs // 2)) * vocab_size * 4

    def start(self, slot: int) -> int:
        """Gives a slot a row, if it has none, and returns its number; `fit` is due before the row
        is written."""
        row = int(self.host_rows[slot])
        if row < 0:
            row = heapq.heappop(self._free)
            self.host_rows[slot] = row
            self._used.add(row)
        return row

    def stop(self, slot: int) -> None:
        """Takes the row of a slot back, if it has one."""
        row = int(self.host_rows[slot])
        if row >= 0:
            self.host_rows[slot] = -1
            self._used.remove(row)
            heapq.heappush(self._free, row)

    def fit(self) -> None:
        """Makes the capacity suit the rows in use; their contents stay."""
        capacity, limit = len(self.rows), len(self.host_rows)
        needed = max(self._used, default=-1) + 1
        if needed > capacity:
            size = _size_for(max(needed, _MIN_ROWS), limit)
        elif 4 * needed <= capacity and capacity > min(_MIN_ROWS, limit):
            size = _size_for(max(2 * needed, _MIN_ROWS), limit)
        else:
            return
        rows = torch.zeros((size, self.rows.shape[1]), dtype=torch.int32, device=self.rows.device)
        kept = min(size, capacity)
        rows[:kept] = self.rows[:kept]
        self.rows = rows

    def count(self, row: int, tokens: torch.Tensor, prompt_len: int) -> None:
        """Begins a row with the tokens of a request so far (int32 [n], prompt and output), as
        `kernels.penalties.count_occurrences` does on a GPU."""
        self.rows[row] = torch.bincount(tokens[prompt_len:], minlength=self.rows.shape[1])
        self.rows[row, tokens[:prompt_len].long()] |= IN_PROMPT

    def add(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """Counts one token for each of `slots` (both int64 [n]; no slot twice)."""
        self.rows[self.row_of_slot[slots].long(), tokens] += 1

    def add_many(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """Counts tokens of slots (both int32 [n]), also several of one slot; skips negative tokens,
        and tokens of slots without a row."""
        if not self._used:
            return
        rows = self.row_of_slot[slots.long()]
        counted = ((rows >= 0) & (tokens >= 0)).to(self.rows.dtype)
        where = rows.clamp(min=0).long(), tokens.clamp(min=0).long()
        self.rows.index_put_(where, counted, accumulate=True)


def _size_for(needed: int, limit: int) -> int:
    """Returns the smallest of the sizes `ceil(limit / 2**i)` that is at least `needed`, or
    `limit`."""
    size = limit
    while size > 1 and -(-size // 2) >= needed:
        size = -(-size // 2)
    return size
