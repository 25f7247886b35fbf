"""The blocks of the groups of one kind: how the block tables grow, which entries are needed, which
prefixes the groups can serve.

`KVCacheManager` is the only caller and has an object for each kind that a model has: groups in
which a token attends to all before it (`WholeBlocks`), groups with a sliding window
(`WindowBlocks`), and groups of states (`snapshots.StateBlocks`). Imports neither torch nor aiohttp.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Iterator, Sequence
from itertools import islice

from aioinfer.errors import IntegrityError
from aioinfer.ipc.kv_spec import MAX_ATTENTION_TILE, NULL_BLOCK, KVGroup
from aioinfer.scheduler.block_pool import BlockPool
from aioinfer.scheduler.request import Request

#: (number in the model, group, pool)
NumberedGroup = tuple[int, KVGroup, BlockPool]
#: By group, the hashes of blocks that are not in the pools and can be loaded.
Stored = Sequence[Container[bytes]]


class WholeBlocks:
    """Blocks of the groups in which a token attends to all before it: a request keeps all of its
    blocks."""

    def __init__(self, groups: Sequence[NumberedGroup], block_size: int):
        self._pools = [(number, pool) for number, _, pool in groups]
        self._block_size = block_size

    @property
    def copied(self) -> Sequence[tuple[int, BlockPool]]:
        """The groups, and their pools, whose blocks are copied where a sequence goes on within a
        block of another one."""
        return self._pools

    def can_grow(self, request: Request, count: int) -> bool:
        """Whether the block tables of a request can get `count` more entries."""
        return all(pool.num_free >= count for _, pool in self._pools)

    def grow(self, request: Request, count: int) -> None:
        """Appends `count` entries to each block table. The caller has checked `can_grow`."""
        for number, pool in self._pools:
            request.blocks[number] += pool.allocate(count)

    def share(self, request: Request) -> None:
        """Makes a request an owner of all blocks in its tables, which are another request's or
        cached ones."""
        for number, pool in self._pools:
            pool.share(_owned(request.blocks[number]))

    def free(self, request: Request, tables: Sequence[Sequence[int]]) -> None:
        """Removes a request as an owner of the blocks of `tables`, one table for each group of the
        model."""
        for number, pool in self._pools:
            pool.release(_owned(tables[number]))

    def free_unread(self, request: Request, start: int) -> None:
        """Frees the blocks that no step reads which computes tokens from position `start` on."""

    def count_served(self, hashes: Sequence[bytes], length: int, stored: Stored) -> int:
        """Returns the greatest number of leading blocks, at most `length`, with which a request can
        begin that finds blocks in the pools and in `stored`."""
        for number, pool in self._pools:
            length = pool.count_cached(islice(hashes, length), stored[number])
        return length

    def needed(self, length: int) -> Iterator[tuple[int, int]]:
        """Yields (group, first entry) of the entries, up to its end, that a block table of `length`
        entries needs where a request begins behind them."""
        for number, _ in self._pools:
            yield number, 0

    def forked_tables(
        self, leader: Request, num_tokens: int
    ) -> Iterator[tuple[int, list[int] | None]]:
        """Yields (group, block table) of a request that begins with the first `num_tokens` tokens
        of `leader`, without the block that is copied; None where blocks are missing."""
        full = num_tokens // self._block_size
        for number, _ in self._pools:
            yield number, leader.blocks[number][:full]

    def commit(self, request: Request, first: int, end: int) -> None:
        """Enters the blocks `first` to `end` of a request, whose tokens are known, into the prefix
        index."""
        hashes = request.block_hashes
        for number, pool in self._pools:
            table = request.blocks[number]
            for index in range(first, end):
                if table[index] != NULL_BLOCK:
                    pool.commit(table[index], hashes[index])

    def commit_loaded(self, request: Request) -> None:
        """Enters the blocks of a request, which were loaded, into the prefix index."""
        WholeBlocks.commit(self, request, 0, request.num_blocks)

    def check_tables(self, request: Request) -> None:
        """Raises IntegrityError unless a request has all blocks that it reads."""
        for number, _ in self._pools:
            if NULL_BLOCK in request.blocks[number]:
                raise IntegrityError(f"request {request.request_id} lacks a block that it reads")

    def check_pools(self, requests: Sequence[Request]) -> None:
        """Raises IntegrityError unless the requests are the only owners of blocks."""
        for number, pool in self._pools:
            pool.check_integrity(_owned(request.blocks[number]) for request in requests)


class WindowBlocks(WholeBlocks):
    """Blocks of the groups with a sliding window: blocks behind it are freed while their request
    runs, and a prefix is served by the blocks before its end.

    A step that computes tokens from position s on reads keys from s - window + 1 on.
    """

    def __init__(self, groups: Sequence[NumberedGroup], block_size: int):
        super().__init__(groups, block_size)
        self._windows = [(number, group.window or 1) for number, group, _ in groups]
        self._blocks_per_tile = max(1, MAX_ATTENTION_TILE // block_size)
        # requests that have lost blocks behind a window since the last plan, or begin without them
        self._moved: dict[Request, None] = {}

    @property
    def max_replacement_blocks(self) -> int:
        """The maximum of entries that `take_replacement_blocks` yields for a request."""
        return len(self._windows) * (self._blocks_per_tile - 1)

    def share(self, request: Request) -> None:
        """See `WholeBlocks.share`."""
        super().share(request)
        self._moved[request] = None

    def free_unread(self, request: Request, start: int) -> None:
        """See `WholeBlocks.free_unread`."""
        for (number, window), (_, pool) in zip(self._windows, self._pools, strict=True):
            table = request.blocks[number]
            first = end = max(0, start - window + 1) // self._block_size
            while first and table[first - 1] != NULL_BLOCK:
                first -= 1
            if first < end:
                pool.release(table[first:end])
                table[first:end] = [NULL_BLOCK] * (end - first)
                self._moved[request] = None

    def leave(self, request: Request) -> None:
        """Forgets a request, which loses its blocks."""
        self._moved.pop(request, None)

    def take_replacement_blocks(self) -> Iterator[tuple[Request, int, int, int]]:
        """See `KVCacheManager.take_replacement_blocks`."""
        moved, self._moved = self._moved, {}
        if not self.max_replacement_blocks:
            return  # a tile reads one block, which is owned
        for request in moved:
            for group, _ in self._windows if request.blocks else ():
                table = request.blocks[group]
                owned = bisect_left(table, True, key=_is_block)
                if owned == len(table):  # it gets a block before it is planned again
                    self._moved[request] = None
                    continue
                for index in range(owned - owned % self._blocks_per_tile, owned):
                    yield request, group, index, table[owned]

    def count_served(self, hashes: Sequence[bytes], length: int, stored: Stored) -> int:
        """See `WholeBlocks.count_served`. With a window that may be at any place before `length`,
        so groups are searched again until all agree."""
        agreed = 0
        while agreed < len(self._windows):
            for (number, window), (_, pool) in zip(self._windows, self._pools, strict=True):
                reach = self._reach(window)
                found = pool.count_cached_before(hashes, length, reach, stored[number])
                agreed = agreed + 1 if found == length else 1
                length = found
        return length

    def needed(self, length: int) -> Iterator[tuple[int, int]]:
        """See `WholeBlocks.needed`."""
        for number, window in self._windows:
            yield number, max(0, length - self._reach(window))

    def forked_tables(
        self, leader: Request, num_tokens: int
    ) -> Iterator[tuple[int, list[int] | None]]:
        """See `WholeBlocks.forked_tables`."""
        full = num_tokens // self._block_size
        for number, window in self._windows:
            table = leader.blocks[number]
            first = max(0, num_tokens - window + 1) // self._block_size
            if NULL_BLOCK in table[first : full + 1]:
                yield number, None
            else:
                yield number, [NULL_BLOCK] * min(first, full) + table[first:full]

    def _reach(self, window: int) -> int:
        """Returns how many blocks before a block's first token that token reads."""
        return -(-(window - 1) // self._block_size)

    def check_tables(self, request: Request) -> None:
        """See `WholeBlocks.check_tables`."""
        for number, window in self._windows:
            freed = max(0, request.min_computed - window + 1) // self._block_size
            if NULL_BLOCK in request.blocks[number][freed:]:
                raise IntegrityError(f"request {request.request_id} lacks a block that it reads")


def _is_block(entry: int) -> bool:
    return entry != NULL_BLOCK


def _owned(table: Sequence[int]) -> Sequence[int]:
    """Returns the blocks of a table; entries without one stand at its start."""
    if not table or table[0] != NULL_BLOCK:
        return table
    return [block for block in table if block != NULL_BLOCK]
