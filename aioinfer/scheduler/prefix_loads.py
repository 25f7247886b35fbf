"""Prefixes that the store of KV has: which of them are loaded, and the blocks of the requests that
wait for them.

A request that begins with blocks of the store gets blocks of the device for them (`begin`), which
enter the prefix index when they are filled (`end`). `KVCacheManager` owns the `PrefixLoads` of a
store; see `kv_store` for what loading is. Imports neither torch nor aiohttp.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence

from aioinfer.errors import IntegrityError
from aioinfer.ipc.kv_spec import NULL_BLOCK
from aioinfer.scheduler.block_pool import BlockPool
from aioinfer.scheduler.group_blocks import WholeBlocks
from aioinfer.scheduler.kv_connector import KVConnector
from aioinfer.scheduler.kv_store import KVStore
from aioinfer.scheduler.prefix_search import Prefix, PrefixSearch
from aioinfer.scheduler.request import Request


class PrefixLoads:
    """Begins and ends the loads of prefixes."""

    def __init__(
        self,
        store: KVStore,
        pools: Sequence[BlockPool],
        kinds: Sequence[WholeBlocks],
        prefixes: PrefixSearch,
        block_size: int,
        peaks: Callable[[int], Sequence[int]],
        free: Callable[[Request], None],
    ):
        """`peaks` returns the most blocks of each group that a request of so many tokens owns at
        once; `free` takes a request's block tables away."""
        self._store, self._pools, self._kinds = store, pools, kinds
        self._prefixes, self._block_size = prefixes, block_size
        self._peaks, self._free = peaks, free
        # of requests that are loaded: the blocks of each group that they take once they are
        # admitted; others would take blocks that were loaded, which had to be loaded once more
        self._reserved: dict[Request, list[int]] = {}

    def find_stored(self, request: Request, prefix: Prefix) -> int:
        """Returns with how many blocks a request can begin once some are loaded; 0 if that is no
        block more than `prefix`, which the device has, spares computing."""
        hashes = request.block_hashes[: self._prefixes.longest_hit(request) // self._block_size]
        length = self._prefixes.hit_length(hashes, self._store.groups)
        return length if (length - 1) * self._block_size >= prefix.num_tokens else 0

    def find_beyond(self, request: Request, prefix: Prefix) -> tuple[KVConnector, int] | None:
        """Returns a connector, and with how many blocks a request can begin once some are read from
        it; None if no connector makes them more than `prefix` and the host have. `pays` of the
        connector is not asked."""
        store, hashes = self._store, request.block_hashes
        hashes = hashes[: self._prefixes.longest_hit(request) // self._block_size]
        for connector in store.connectors:
            if request.asked_connectors >> connector.number & 1:
                continue
            length = self._hit_length_with(request, connector, hashes)
            if (length - 1) * self._block_size < prefix.num_tokens:
                continue
            if length > self._prefixes.hit_length(hashes, store.groups):
                return connector, length
        return None

    def _hit_length_with(
        self, request: Request, connector: KVConnector, hashes: Sequence[bytes]
    ) -> int:
        """Returns with how many of its first blocks a request can begin that the device, the host
        and a connector have; 0 if the connector has nothing for the request."""
        held = connector.held(request)
        if held is None or len(held) != len(self._store.groups):
            return 0
        both = [_Either(*pair) for pair in zip(self._store.groups, held, strict=True)]
        return self._prefixes.hit_length(hashes, both)

    def begin_read(self, request: Request, connector: KVConnector, length: int) -> bool:
        """Has what a connector has of the first `length` blocks of a request read into memory of
        the host, or as many of them as there is room for. False if none are read; the connector is
        not asked again in any case."""
        request.asked_connectors |= 1 << connector.number
        hashes, store = request.block_hashes, self._store
        wanted = self._missing_on_host(hashes, length)
        end = store.count_room(number for _, number, _ in wanted)
        if end < len(wanted):
            cut = wanted[end][0]
            length = self._hit_length_with(request, connector, hashes[:cut])
            if length <= self._prefixes.hit_length(hashes, store.groups):
                return False
            wanted = self._missing_on_host(hashes, length)
            if store.count_room(number for _, number, _ in wanted) < len(wanted):
                return False  # sliding windows that end earlier begin earlier
        store.use(hashes[:length])
        num_tokens = len({entry for entry, _, _ in wanted}) * self._block_size
        blocks = [(number, block_hash) for _, number, block_hash in wanted]
        return store.read(request, connector, blocks, num_tokens)

    def _missing_on_host(
        self, hashes: Sequence[bytes], length: int
    ) -> list[tuple[int, int, bytes]]:
        """Returns the blocks that a request needs to begin with `length` blocks and that neither
        the device nor the host has: (entry of the block table, group, hash), in this order."""
        return sorted(
            (entry, number, hashes[entry])
            for number, first in self._prefixes.needed(length)
            for entry in range(first, length)
            if not self._pools[number].has(hashes[entry])
            and hashes[entry] not in self._store.groups[number]
        )

    def is_arriving(self, request: Request, length: int) -> bool:
        """Whether a load of another request is on its way that brings any of the first `length`
        blocks of a request, which can share them then."""
        return any(map(self._store.brings, request.block_hashes[:length]))

    def begin(self, request: Request, length: int, num_tokens: int) -> bool:
        """Gives a request its first `length` blocks, of which the store brings those that are not
        on the device, and spares computing `num_tokens` tokens. False, and nothing is changed,
        unless all tokens of the request find room beside those of others that are loaded."""
        tables = [[NULL_BLOCK] * length for _ in self._pools]
        missing: list[list[int]] = [[] for _ in self._pools]
        for number, first in self._prefixes.needed(length):
            for entry in range(first, length):
                block = self._pools[number].find(request.block_hashes[entry])
                if block is None:
                    missing[number].append(entry)
                else:
                    tables[number][entry] = block
        fresh = -(-request.total // self._block_size) - length
        later: list[int] = []
        peaks = self._peaks(request.total)
        for pool, table, entries, peak in zip(self._pools, tables, missing, peaks, strict=True):
            reserved = sum(of_groups[len(later)] for of_groups in self._reserved.values())
            later.append(max(0, min(peak - len(entries), fresh)))
            taken = len(entries) + pool.count_free(_owned(table))
            if taken + later[-1] + reserved > pool.num_free:
                return False
        self._reserved[request] = later
        for pool, table in zip(self._pools, tables, strict=True):
            pool.share(_owned(table))
        wanted: list[tuple[int, int, bytes]] = []
        for number, entries in enumerate(missing):
            for entry, block in zip(
                entries, self._pools[number].allocate(len(entries)), strict=True
            ):
                tables[number][entry] = block
                wanted.append((number, block, request.block_hashes[entry]))
        request.blocks, request.num_blocks = tables, length
        request.states = [length - 1] if self._prefixes.has_states else []
        request.num_computed = request.num_settled = length * self._block_size
        self._store.load(request, wanted, num_tokens)
        return True

    def end(self, request: Request) -> None:
        """Enters the blocks of a request, which have been loaded, into the prefix index, where the
        request finds them when it is admitted. It has none where files were read for it."""
        is_spoiled = self._store.take_spoiled(request)
        self._reserved.pop(request, None)
        if not request.blocks:
            return
        for kind in self._kinds if not is_spoiled else ():
            kind.commit_loaded(request)
        if not is_spoiled:
            self._prefixes.note_tokens(request, 0, request.num_blocks)
        self._free(request)
        request.num_computed = request.num_settled = 0

    def drop(self, request: Request) -> None:
        """Takes the blocks of a request away that has ended while they were loaded."""
        self._store.abandon(request)
        self._reserved.pop(request, None)
        request.asked_connectors = 0
        self._free(request)
        request.num_computed = request.num_settled = 0

    def check_integrity(self, loading: Sequence[Request]) -> None:
        """Raises IntegrityError unless the store's records are right, and blocks are reserved for
        those requests that load some."""
        self._store.check_integrity([pool.index for pool in self._pools], loading)
        if self._reserved.keys() != {request for request in loading if request.blocks}:
            raise IntegrityError("blocks are reserved for a request that loads none")


class _Either:
    """The hashes of two containers."""

    def __init__(self, first: Container[bytes], second: Container[bytes]):
        self._first, self._second = first, second

    def __contains__(self, block_hash: object) -> bool:
        return block_hash in self._first or block_hash in self._second


def _owned(table: Sequence[int]) -> Iterable[int]:
    """Returns the blocks of a table."""
    return (block for block in table if block != NULL_BLOCK)
