"""Prefix hits: with which cached blocks a request can begin.

The blocks of all groups carry the same hashes. A hit of h blocks needs, where all tokens are
attended to, all of them; with a window only the last ones, which hold the `window - 1` tokens
before the hit's end; of states the last one. The hit is the longest that every group can serve.
The block of a source is no part of it: it is found by itself, or computed once more
(`source_blocks.py`).

Behind the hit, a cached block that begins with the next tokens of the prompt is copied
(`partial_blocks`), in models without states. Workers copy before a step computes anything: the
block must have been computed by an earlier step, and its next owner may be in the same step.

`KVCacheManager` owns a `PrefixSearch`. Imports neither torch nor aiohttp.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from aioinfer.ipc.kv_spec import NULL_BLOCK
from aioinfer.scheduler.block_pool import (
    MIN_COPIED_TOKENS,
    BlockPool,
    PartialBlocks,
    extend_hashes,
    touched,
)
from aioinfer.scheduler.group_blocks import Stored, WholeBlocks
from aioinfer.scheduler.request import Request
from aioinfer.scheduler.snapshots import MIN_SHARED_BLOCKS, StateBlocks


@dataclass(slots=True)
class Prefix:
    """A prefix hit: the blocks with which a request can begin, since other requests computed them.

    Attributes:
        num_tokens: tokens that need not be computed.
        num_blocks: entries of each block table that share their blocks.
        blocks: these entries, one list a group.
        copied: (group, block) of the blocks that hold the tokens after these entries, to be copied.
        cache_era: see `Request`; -1 of blocks that the prefix index knows.
    """

    num_tokens: int
    num_blocks: int
    blocks: list[list[int]]
    copied: list[tuple[int, int]]
    cache_era: int = -1


class PrefixSearch:
    """Finds the cached blocks that begin like a request."""

    def __init__(
        self,
        pools: Sequence[BlockPool],
        kinds: Sequence[WholeBlocks],
        states: StateBlocks | None,
        leading_pool: BlockPool,
        block_size: int,
        *,
        prefix_caching: bool,
    ):
        """`kinds`: the groups by kind, `states` the one of states among them. Blocks of
        `leading_pool` that leave its index are not copied any more."""
        self._pools, self._kinds, self._states = pools, kinds, states
        self._leading_pool = leading_pool
        self._block_size = block_size
        self._prefix_caching = prefix_caching
        self._no_stored: Stored = [()] * len(pools)
        # the blocks that can be copied; parent and tokens, by hash, of the blocks that the step
        # being planned may compute, which cannot be copied before the next step
        self._partial: PartialBlocks | None = None
        self._computing: dict[bytes, tuple[bytes, bytes]] = {}
        if prefix_caching and block_size > MIN_COPIED_TOKENS and states is None:
            self._partial = leading_pool.partial = PartialBlocks()

    @property
    def has_states(self) -> bool:
        """Whether a group keeps states."""
        return self._states is not None

    def find(self, request: Request) -> Prefix:
        """Returns the longest prefix of a request's known tokens that all groups have cached.

        It leaves at least one token to compute, since that token's logits are needed, and all
        tokens whose rows a feature needs.
        """
        if not self._prefix_caching:
            return self.none()
        longest = self.longest_hit(request)
        hashes = request.block_hashes[: longest // self._block_size]
        length = self.hit_length(hashes)
        blocks: list[list[int]] = [[] for _ in self._pools]
        if length:
            for number, first in self.needed(length):
                found = self._pools[number].lookup(hashes[first:length])
                blocks[number] = [NULL_BLOCK] * first + found
        copied, num_copied = self._find_partial(request, length, longest)
        return Prefix(length * self._block_size + num_copied, length, blocks, copied)

    def none(self) -> Prefix:
        """Returns the prefix of a request that computes all of its tokens."""
        return Prefix(0, 0, [[] for _ in self._pools], [])

    def needed(self, length: int) -> Iterator[tuple[int, int]]:
        """Yields (group, first entry) of what block tables of `length` entries need; see
        `WholeBlocks.needed`."""
        for kind in self._kinds:
            yield from kind.needed(length)

    def longest_hit(self, request: Request) -> int:
        """Returns how many tokens of a request may be taken from the cache; their blocks have
        hashes then."""
        self.extend_hashes(request)
        longest = request.total - 1
        for use in request.uses:
            if use.max_cached is not None:
                longest = min(longest, use.max_cached)
        return longest

    def extend_hashes(self, request: Request) -> None:
        """Appends the missing hashes of a request's full blocks."""
        extend_hashes(
            request.block_hashes, request.tokens, self._block_size, request.hash_root, request.spans
        )

    def _find_partial(
        self, request: Request, length: int, longest: int
    ) -> tuple[list[tuple[int, int]], int]:
        """Returns a cached block of each group that begins with the tokens of a request behind its
        first `length` blocks, and how many of its tokens are equal, up to token `longest` of the
        request; no blocks and 0 if there is none that every group has."""
        start = length * self._block_size
        room = min(longest - start, self._block_size)
        for span in touched(request.spans, start, start + room):
            room = max(0, min(room, span.start - start))  # only tokens are compared
        if self._partial is None or room < MIN_COPIED_TOKENS:
            return [], 0
        parent = request.block_hashes[length - 1] if length else request.hash_root
        found, count = self._partial.find(parent, request.tokens[start : start + room].tobytes())
        if not found or found in self._computing:  # one group may have it, and another compute it
            return [], 0
        copied = [each for kind in self._kinds for each in kind.copied]
        if not all(pool.has(found) for _, pool in copied):
            return [], 0
        return [(number, pool.lookup([found])[0]) for number, pool in copied], count

    def want_shared(self, request: Request, waiting: Iterable[Request]) -> None:
        """Has a request that computes its prompt keep the states behind the tokens that `waiting`
        requests begin with, too."""
        if self._states is None or not self._prefix_caching:
            return
        for other in waiting:
            self.extend_hashes(other)
            shared = _count_common(request.block_hashes, other.block_hashes)
            shared = min(shared, (other.total - 1) // self._block_size)
            before = [n for n in request.snapshots if n <= shared]
            if before and shared - before[-1] >= MIN_SHARED_BLOCKS:  # behind where it began
                insort(request.snapshots, shared)

    def computes_state(self, request: Request) -> bool:
        """Whether the step being planned computes a state with which a waiting request can begin
        in the next one, and which is worth waiting for. It is not waited for twice."""
        if self._states is None or not self._states.has_fresh:
            return False
        hashes = request.block_hashes[: self.longest_hit(request) // self._block_size]
        least = max(self.hit_length(hashes) + MIN_SHARED_BLOCKS, request.num_awaited + 1)
        found = self._states.count_fresh(hashes)
        if found < least:
            return False
        request.num_awaited = found
        return True

    def count_cached(self, hashes: Sequence[bytes]) -> int:
        """Returns how many of a prompt's blocks, from its start on, need not be computed."""
        return self.hit_length(hashes) if self._prefix_caching else 0

    def hit_length(self, hashes: Sequence[bytes], stored: Stored | None = None) -> int:
        """Returns the greatest number of leading blocks that every group can serve, from its pool
        and from `stored`.

        Each group shortens the hit to the longest that it can serve. With a window that may be at
        any earlier place, so the others are searched again until all agree.
        """
        length, agreed, kinds = len(hashes), 0, self._kinds
        while agreed < len(kinds):
            for kind in kinds:
                found = kind.count_served(hashes, length, stored or self._no_stored)
                agreed = agreed + 1 if found == length else 1
                length = found
        return length

    def note_tokens(self, request: Request, first: int, end: int) -> None:
        """Notes the tokens of the blocks `first` to `end` of a request, which are in the prefix
        index, for `publish`."""
        if self._partial is None:
            return
        hashes, size = request.block_hashes, self._block_size
        for index in range(first, end):
            if touched(request.spans, index * size, (index + 1) * size):
                continue
            parent = hashes[index - 1] if index else request.hash_root
            tokens = request.tokens[index * size : (index + 1) * size].tobytes()
            self._computing[hashes[index]] = parent, tokens

    def publish(self) -> None:
        """Lets requests begin with copies of the blocks that the steps planned by now compute."""
        if self._partial is None:
            return
        for block_hash, (parent, tokens) in self._computing.items():
            if self._leading_pool.has(block_hash):
                self._partial.add(block_hash, parent, tokens)
        self._computing.clear()


def _count_common(first: Sequence[bytes], second: Sequence[bytes]) -> int:
    """Returns the length of the common start of two sequences' hashes: each depends on all before
    it."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[middle - 1] == second[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
