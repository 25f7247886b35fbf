"""The blocks of the groups that keep the keys and values of sources, for cross attention: one block
a request, which holds all of its source.

A block is found again by the key of the source, whatever the tokens of the request are. It enters
the index as it is taken, since the step that is being planned then writes it before any layer reads
it. Imports neither torch nor aiohttp.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from aioinfer.errors import IntegrityError
from aioinfer.ipc.kv_spec import NULL_BLOCK
from aioinfer.scheduler.block_pool import BlockPool
from aioinfer.scheduler.group_blocks import NumberedGroup, Stored, WholeBlocks
from aioinfer.scheduler.request import Request, Source


class SourceBlocks(WholeBlocks):
    """Blocks of the groups of sources: entry 0 of a block table is the block, others are none.

    Args:
        groups, block_size: as of `WholeBlocks`.
        is_shared: whether requests with equal sources share a block.

    Attributes:
        number: of the first group. In all groups a source has the same block: they have as many.
    """

    def __init__(self, groups: Sequence[NumberedGroup], block_size: int, *, is_shared: bool):
        super().__init__(groups, block_size)
        self._is_shared = is_shared
        self.number = groups[0][0]

    @property
    def copied(self) -> Sequence[tuple[int, BlockPool]]:
        """See `WholeBlocks.copied`: none."""
        return ()

    def can_grow(self, request: Request, count: int) -> bool:
        """See `WholeBlocks.can_grow`."""
        return bool(request.num_blocks) or super().can_grow(request, 1)

    def has(self, key: bytes) -> bool:
        """Whether blocks hold the source with a key."""
        return all(pool.has(key) for _, pool in self._pools)

    def grow(self, request: Request, count: int) -> None:
        """See `WholeBlocks.grow`."""
        for number, _ in self._pools:
            request.blocks[number] += [NULL_BLOCK] * count
        self._take(request)

    def share(self, request: Request) -> None:
        """See `WholeBlocks.share`. A prefix that was found by its tokens comes without the source,
        which may have left the cache before them."""
        for number, pool in self._pools:
            pool.share(_owned(request.blocks[number]))
        self._take(request)

    def _take(self, request: Request) -> None:
        """Gives a request whose tables have entries the block of its source, if it lacks it."""
        source = request.source
        assert source is not None, "a model with sources has no requests without them"
        if not request.blocks[self._pools[0][0]]:
            return
        if not self._owns(request):
            source.is_unwritten = not self.has(source.key)
            for number, pool in self._pools:
                request.blocks[number][0] = self._take_from(pool, source)
        source.is_held = True

    def _take_from(self, pool: BlockPool, source: Source) -> int:
        """Returns the block with a source, which it has an owner more then, or a new one."""
        if not source.is_unwritten:
            (block,) = pool.lookup([source.key])
            pool.share([block])
            return block
        (block,) = pool.allocate(1)
        if self._is_shared:
            pool.commit(block, source.key)
        return block

    def _owns(self, request: Request) -> bool:
        return request.blocks[self._pools[0][0]][0] != NULL_BLOCK

    def free(self, request: Request, tables: Sequence[Sequence[int]]) -> None:
        """See `WholeBlocks.free`."""
        for number, pool in self._pools:
            pool.release(_owned(tables[number]))
        if request.source is not None and tables is request.blocks:
            request.source.is_held = request.source.is_unwritten = False

    def count_served(self, hashes: Sequence[bytes], length: int, stored: Stored) -> int:
        """See `WholeBlocks.count_served`: any prefix, since a source can be computed again."""
        return length

    def needed(self, length: int) -> Iterator[tuple[int, int]]:
        """See `WholeBlocks.needed`: no entry is found by the hashes of tokens."""
        for number, _ in self._pools:
            yield number, length

    def commit(self, request: Request, first: int, end: int) -> None:
        """See `WholeBlocks.commit`: blocks of sources are known since they were taken."""

    def forget(self, request: Request) -> None:
        """Takes the block of a request's source out of the index."""
        if request.source is not None:
            for _, pool in self._pools:
                pool.forget([request.source.key])

    def check_tables(self, request: Request) -> None:
        """See `WholeBlocks.check_tables`."""
        if request.blocks[self._pools[0][0]] and not self._owns(request):
            raise IntegrityError(f"request {request.request_id} lacks the block of its source")

    def check_pools(self, requests: Sequence[Request]) -> None:
        """See `WholeBlocks.check_pools`."""
        for number, pool in self._pools:
            pool.check_integrity(_owned(request.blocks[number]) for request in requests)


def _owned(table: Sequence[int]) -> Sequence[int]:
    """Returns the block of a table, if it has one: its first entry."""
    return [block for block in table[:1] if block != NULL_BLOCK]
