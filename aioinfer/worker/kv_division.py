"""Division of the KV cache's memory among groups of layers.

Each group has blocks of its own, so their numbers decide how many requests run side by side, and
the right proportion depends on how long these are: a long request needs many blocks where all
tokens are attended to, but with a sliding window no more than the window takes. A division that is
made for short requests wastes the blocks of the windows when requests are long, and one for long
requests leaves too few of them for many short ones.

The rule. A division for a reference length gives every group as many blocks as the same number of
requests of that length own. Among the divisions for all reference lengths (the longest request,
half of it, a quarter, and so on) that one is taken whose worst case is best. Its worst case is the
minimum, over all lengths, of the ratio between the requests of that length that it runs at once
and the requests that the division made for that very length would run. So no group starves the
others, whatever comes: with windows that take five times as many bytes a token as full attention
(Gemma 3) the worst ratio is about 0.55, and with plenty of memory it is 1.

Bounds. No group has fewer blocks than one request of the longest length needs. Groups with windows
have no more than all running requests together can own (`enough_blocks`); the rest goes
to the groups that keep all tokens, where it makes room for longer requests and for more blocks of
the prefix cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aioinfer.ipc.kv_spec import KVGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheDemand:
    """The scheduler's demand on the KV cache.

    Attributes:
        groups: the groups of layers.
        block_bytes: bytes of a block of each group.
        block_size: tokens a block.
        max_num_seqs: requests that run at once.
        max_chunk: tokens of a step.
    """

    groups: tuple[KVGroup, ...]
    block_bytes: tuple[int, ...]
    block_size: int
    max_num_seqs: int
    max_chunk: int

    @property
    def len_of_full_windows(self) -> int:
        """The length from which on a request needs no more blocks of any window."""
        longest = max((group.window or 0 for group in self.groups), default=0)
        return longest + self.max_chunk + 2 * self.block_size if longest else self.block_size

    def total_bytes(self, num_blocks: Sequence[int]) -> int:
        """Returns the bytes of so many blocks of each group."""
        return sum(n * size for n, size in zip(num_blocks, self.block_bytes, strict=True))

    def blocks_of_one(self, num_tokens: int) -> list[int]:
        """Returns the blocks of each group that one request of `num_tokens` tokens needs."""
        return [g.max_blocks(num_tokens, self.block_size, self.max_chunk) for g in self.groups]

    def blocks_of_many(self, num_tokens: int, count: float) -> list[float]:
        """Returns the blocks of each group that `count` requests of `num_tokens` tokens own, of
        which one computes its prompt and the others decode."""
        return [
            peak + (count - 1) * group.max_blocks(num_tokens, self.block_size, 1)
            for group, peak in zip(self.groups, self.blocks_of_one(num_tokens), strict=True)
        ]

    def num_running(self, num_blocks: Sequence[int], num_tokens: int) -> float:
        """Returns how many requests of `num_tokens` tokens so many blocks hold at once."""
        running = float(self.max_num_seqs)
        peaks = self.blocks_of_one(num_tokens)
        for group, blocks, peak in zip(self.groups, num_blocks, peaks, strict=True):
            decode = group.max_blocks(num_tokens, self.block_size, 1)
            running = min(running, 1 + (blocks - peak) / decode)
        return max(0.0, running)

    def enough_blocks(self, num_tokens: int) -> list[int | None]:
        """Returns the blocks of each group that running requests of at most `num_tokens` tokens
        never exceed; None where all tokens are kept, since a prefix cache has use for any number.

        A request of which a step computes c tokens owns at most (window + c + 2 * block_size - 3)
        / block_size blocks (see `KVGroup.max_blocks`), with c = 1 if it is in none. All c of a step
        together are at most `max_chunk`.
        """
        seqs, size = self.max_num_seqs, self.block_size
        enough: list[int | None] = []
        for group in self.groups:
            if group.window is None:
                enough.append(None)
            else:
                tokens = seqs * (group.window + 2 * size - 2) + self.max_chunk
                enough.append(min(tokens // size, seqs * -(-num_tokens // size)))
        return enough

    def longest_alone(self, available: int, limit: int) -> int:
        """Returns the length of the longest request, of whole blocks and at most about `limit`
        tokens, whose blocks take at most `available` bytes; 0 if there is none."""
        low, high = 0, -(-limit // self.block_size)
        while low < high:
            middle = (low + high + 1) // 2
            if self.total_bytes(self.blocks_of_one(middle * self.block_size)) <= available:
                low = middle
            else:
                high = middle - 1
        return low * self.block_size


def divide_memory(demand: CacheDemand, available: int, min_len: int, max_len: int) -> list[int]:
    """Returns the number of blocks of each group. See the module's docstring for the rule.

    Args:
        demand: of the scheduler.
        available: bytes. One request of `min_len` tokens fits.
        min_len: the length of a request that must fit.
        max_len: the length that no request exceeds, at least `min_len`.
    """
    longest = max(min_len, demand.longest_alone(available, max_len))
    lengths = [longest]
    while lengths[-1] > demand.block_size:
        lengths.append(-(-lengths[-1] // 2))
    divisions = [
        _divide_for(demand, available, reference, min_len, max_len) for reference in lengths
    ]
    best = [demand.num_running(division, n) for division, n in zip(divisions, lengths, strict=True)]

    def worst_case(division: list[int]) -> float:
        return min(
            demand.num_running(division, length) / max(1.0, running)
            for length, running in zip(lengths, best, strict=True)
        )

    return max(divisions, key=worst_case)


def _divide_for(
    demand: CacheDemand, available: int, reference: int, min_len: int, max_len: int
) -> list[int]:
    """Returns the division that runs as many requests of `reference` tokens as possible."""
    minimum, enough = demand.blocks_of_one(min_len), demand.enough_blocks(max_len)

    def blocks_for(count: float) -> list[int]:
        return [
            max(low, int(blocks) if high is None else min(high, int(blocks)))
            for low, high, blocks in zip(
                minimum, enough, demand.blocks_of_many(reference, count), strict=True
            )
        ]

    low, high = 0.0, 1.0 + available / min(demand.block_bytes)
    for _ in range(64):
        middle = (low + high) / 2
        if demand.total_bytes(blocks_for(middle)) <= available:
            low = middle
        else:
            high = middle
    division = blocks_for(low)
    keep_all = [number for number, blocks in enumerate(enough) if blocks is None]
    if keep_all:
        left = available - demand.total_bytes(division)
        more = left // sum(demand.block_bytes[number] for number in keep_all)
        for number in keep_all:
            division[number] += more
    return division
