"""The store of KV behind the pools: which blocks memory of the host has, which of them are on their
way in either direction, and which requests wait for them.

A block here is one of the device's in the form of bytes: keys and values of `block_size` tokens of
all layers of a group, or a state. It is found by the same hash as on the device, so that equal
tokens have one copy, however many requests share them. `KVCacheManager` owns the store; workers
have the memory, and `features.kv_store` brings transfers to them and tells of their end.

Saving. A block is saved once, soon after it has become full, and not when it leaves the device: its
next owner would have to wait for the copy. What is written this way is what the model computes, a
few percent of what a host's link carries, and a preempted request finds its blocks here. The copy
is posted with a plan behind the one that computes the block, and workers read the block before that
plan's own rows write anything. A block that is lost on the device before its turn is not saved.
States are large and superseded soon: of them, the snapshots are saved that a request leaves for
good (see `snapshots`).

Loading. A request at the head of the queue whose prefix goes on in the store gets device blocks for
it, and is LOADING: it owns these blocks, and is in no step until workers report that they are
filled. Then they enter the prefix index, and the request is admitted like any other with a prefix
hit. A load whose request has ended needs no care: its blocks are free and have no hash.

Connectors (`kv_connector`) are behind the host: files, which get what is saved on the host and stay
when its place has gone to another block, or the server has ended; other servers. A request whose
prefix goes on there is LOADING, too, and has no blocks yet: its blocks are read into places of the
host, which enter the index when they came whole, and then the request is next in the queue again.
Each connector is asked once for it. A block counts as read when every rank has its part of it. The
blocks of a read are in the order of their prefix, and none counts that is behind a missing one:
these are computed again, and saved again.

Neither is done where the measured rates say that computing is faster (`copy_rates`).

Order. Workers execute the transfers of a plan before its rows, loads before saves, and keep the
order of all that touch one place of the host or one block of the device. So a place is given to
another block at once. The least recently used block loses its place. A request uses the blocks of
its prefix when it is admitted, wherever they were found, and all of its blocks when it ends.

Imports neither torch nor aiohttp.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from aioinfer.errors import IntegrityError
from aioinfer.ipc.read_tally import MAX_READS
from aioinfer.scheduler.copy_rates import CopyRates
from aioinfer.scheduler.handover import Handover
from aioinfer.scheduler.kv_connector import KVConnector
from aioinfer.scheduler.request import Request
from aioinfer.scheduler.stored_blocks import Move, StoredBlocks


class KVStore:
    """The blocks on the host, by group, and the loads on their way.

    Attributes:
        groups: the blocks of each group.
        connectors: places beyond the host, in the order in which they are asked.
        rates: how fast tokens are copied and computed.
        is_awaited: whether the plan that is being made has nothing but transfers, and its result is
            to come when loads have ended.
    """

    def __init__(
        self,
        num_places: Sequence[int],
        tickets: Iterator[int],
        connectors: Sequence[KVConnector] = (),
        clock: Callable[[], float] = time.perf_counter,
    ):
        """Makes the host's memory empty.

        Args:
            num_places: blocks that the host holds of each group.
            tickets: numbers of loads, none of which workers have seen.
            connectors: see the attribute.
            clock: returns seconds.
        """
        self.rates = CopyRates()
        self._clock = clock
        # by ticket: tokens that it brings, when it began, and the hashes of its blocks
        self._begun: dict[int, tuple[int, float, list[bytes]]] = {}
        self.groups = tuple(map(StoredBlocks, num_places))
        self.connectors = tuple(connectors)
        self._by_number = {connector.number: connector for connector in connectors}
        # for the next plan: reads, and by ticket where from
        self._reads: list[Move] = []
        self._sources: dict[int, str] = {}
        # by ticket; without a hash, no request may use the block
        self._reading: dict[int, list[tuple[Move, bytes | None]]] = {}
        self._tickets = tickets
        self._loads: list[Move] = []  # for the next plan
        self._loading: dict[int, Request] = {}
        self._arriving: dict[bytes, int] = {}  # hash -> ticket of the load that brings its block
        self._loaded: list[Request] = []
        self._spoiled: set[Request] = set()
        self.is_awaited = False

    @property
    def is_loading(self) -> bool:
        """Whether a load is on its way."""
        return bool(self._loading)

    @property
    def has_saves(self) -> bool:
        """Whether blocks are to be saved."""
        return any(group.has_due for group in self.groups)

    @property
    def has_loads(self) -> bool:
        """Whether loads have not been sent to the workers yet."""
        return bool(self._loads or self._reads)

    @property
    def num_blocks(self) -> int:
        """Blocks of all groups on the host."""
        return sum(map(len, self.groups))

    def publish(self) -> None:
        """See `StoredBlocks.publish`; called before a step is planned."""
        for group in self.groups:
            group.publish()

    def load(
        self, request: Request, wanted: Iterable[tuple[int, int, bytes]], num_tokens: int
    ) -> None:
        """Has the next plan bring blocks of a request: (group, block of the device, hash), which
        spares computing `num_tokens` tokens."""
        wanted = list(wanted)
        ticket = self._begin(request, num_tokens, [block_hash for *_, block_hash in wanted])
        for group, block, block_hash in wanted:
            stored = self.groups[group]
            self._loads.append(Move(group, stored.place_of(block_hash), block, ticket))

    def _begin(self, request: Request, num_tokens: int, hashes: list[bytes]) -> int:
        """Returns the ticket of a load or a read that begins, of blocks with these hashes."""
        ticket = next(self._tickets)
        self._loading[ticket] = request
        self._begun[ticket] = num_tokens, self._clock(), hashes
        self._arriving.update(dict.fromkeys(hashes, ticket))
        return ticket

    def count_room(self, groups: Iterable[int]) -> int:
        """Returns how many blocks may be read from a connector now: of a list of blocks, of which
        `groups` has the group of each, the first that the host has room for."""
        room = [group.max_reads for group in self.groups]
        count = 0
        for group in groups:
            if room[group] <= 0:
                break
            room[group] -= 1
            count += 1
        return count

    def read(
        self,
        request: Request,
        connector: KVConnector,
        wanted: Sequence[tuple[int, bytes]],
        num_tokens: int,
    ) -> bool:
        """Has the next plan bring blocks from a connector to the host for a request, which begins
        with them later: (group, hash) in the order of the prefix, of `num_tokens` tokens, for which
        there is room (see `count_room`). False, and nothing is changed, if too many reads are on
        their way."""
        if len(self._reading) >= MAX_READS:
            return False
        ticket = self._begin(request, num_tokens, [block_hash for _, block_hash in wanted])
        reads = [
            Move(
                group,
                self.groups[group].begin_read(),
                ticket=ticket,
                block_hash=block_hash,
                connectors=connector.number,
            )
            for group, block_hash in wanted
        ]
        self._reads += reads
        if source := connector.source_of(request):
            self._sources[ticket] = source
        self._reading[ticket] = [(move, move.block_hash) for move in reads]
        return True

    def brings(self, block_hash: bytes) -> bool:
        """Whether a load is on its way that brings a block of a hash."""
        return block_hash in self._arriving

    def take_loads(self) -> list[Move]:
        """Returns the loads for the plan that is being made, in the order of their tickets."""
        loads, self._loads = self._loads, []
        return loads

    def take_reads(self) -> list[Move]:
        """Returns the reads for the plan that is being made, in the order of their tickets."""
        reads, self._reads = self._reads, []
        return reads

    def take_sources(self) -> dict[int, str]:
        """Returns where the reads of some tickets come from, behind `take_reads`."""
        sources, self._sources = self._sources, {}
        return sources

    def take_deletes(self) -> list[tuple[int, int, bytes]]:
        """Returns (connector, group, hash) of what workers are to delete, behind `take_saves`."""
        return [(each.number, *name) for each in self.connectors for name in each.take_deletes()]

    def take_saves(self) -> list[Move]:
        """Returns the saves for the plan that is being made, behind `take_loads`."""
        moves = [move for n, group in enumerate(self.groups) for move in group.take_saves(n)]
        return [replace(move, connectors=self._keepers(move)) for move in moves]

    def _keepers(self, move: Move) -> int:
        """Returns a bit for each connector that keeps a block which is being saved."""
        keeping = (each for each in self.connectors if each.keep(move.group, move.block_hash))
        return sum(1 << each.number for each in keeping)

    def take_awaited(self) -> list[int]:
        """Returns the tickets that the result of the plan which is being made waits for."""
        awaited, self.is_awaited = self.is_awaited, False
        return list(self._loading) if awaited else []

    def finish(self, ticket: int, count: int = -1, seconds: float | None = None) -> None:
        """Notes that workers have filled the blocks of a load, if it is still wanted, by copies
        that took so many seconds; or that they have read the first `count` blocks of a read. From
        the plan to the report a load also waits for steps, which would count as slow copies."""
        reads = self._reading.pop(ticket, ())
        if ticket in self._begun:
            num_tokens, began, hashes = self._begun.pop(ticket)
            rate = self._by_number[reads[0][0].connectors].rate if reads else self.rates.loads
            now = self._clock()
            rate.add(num_tokens, began if seconds is None else now - seconds, now)
            self._end_arrival(ticket, hashes)
        for number, (move, block_hash) in enumerate(reads):
            self.groups[move.group].end_read(block_hash, move.place, is_whole=number < count)
            if number >= count and block_hash is not None:
                self._by_number[move.connectors].lose(move.group, block_hash)
        request = self._loading.pop(ticket, None)
        if request is not None:
            self._loaded.append(request)

    def take_loaded(self) -> list[Request]:
        """Returns the requests whose loads have come since the last call."""
        loaded, self._loaded = self._loaded, []
        return loaded

    def abandon(self, request: Request) -> None:
        """Forgets the load of a request that has ended."""
        for ticket in [t for t, waiting in self._loading.items() if waiting is request]:
            del self._loading[ticket]
            self._end_arrival(ticket, self._begun[ticket][2])
            kept = [move for move in self._loads if move.ticket != ticket]
            if len(kept) < len(self._loads):  # not sent: its end will not be reported
                self._loads = kept
                del self._begun[ticket]
        if request in self._loaded:
            self._loaded.remove(request)
        self._spoiled.discard(request)

    def _end_arrival(self, ticket: int, hashes: Sequence[bytes]) -> None:
        """Notes that no request can share the blocks of a load or a read any more before they are
        there."""
        for block_hash in hashes:
            if self._arriving.get(block_hash) == ticket:
                del self._arriving[block_hash]

    def spoil_loads(self) -> None:
        """Lets nothing be found of what loads on their way bring."""
        self._spoiled.update(self._loading.values(), self._loaded)

    def take_spoiled(self, request: Request) -> bool:
        """Whether what was loaded for a request may not be used; called once."""
        is_spoiled = request in self._spoiled
        self._spoiled.discard(request)
        return is_spoiled

    def offer(self, request: Request) -> Handover | None:
        """See `KVConnector.offer`."""
        offers = (connector.offer(request, self.groups) for connector in self.connectors)
        return next((found for found in offers if found is not None), None)

    def use(self, hashes: Sequence[bytes]) -> None:
        """Counts the blocks of a prefix as used now, wherever they are."""
        for number, group in enumerate(self.groups):
            group.use(hashes)
            for connector in self.connectors:
                for block_hash in reversed(hashes):
                    connector.use(number, block_hash)

    def retain(self, hashes: Sequence[bytes], seconds: float) -> None:
        """Has the blocks of a prefix leave last for so long, wherever they are."""
        for number, group in enumerate(self.groups):
            group.retain(hashes, seconds)
            for connector in self.connectors:
                connector.retain(number, hashes, seconds)

    def drop(self, hashes: Sequence[bytes]) -> None:
        """Forgets blocks whose contents cannot be trusted, and what loads on their way bring."""
        self.spoil_loads()
        for number, group in enumerate(self.groups):
            group.drop(hashes)
            for connector in self.connectors:
                for block_hash in hashes:
                    connector.drop(number, block_hash)

    def clear(self) -> None:
        """Forgets all blocks, those on their way included."""
        self.spoil_loads()
        for connector in self.connectors:
            connector.clear()
        for group in self.groups:
            group.clear()
        for ticket, reads in self._reading.items():
            self._reading[ticket] = [(move, None) for move, _ in reads]

    def succeed(self, former: KVStore) -> None:
        """Takes over what workers still do for a store whose other records are given up: the places
        that they read files into are not used before the end of the read is reported, and the files
        stay."""
        unsent = {move.ticket for move in former._reads}
        for ticket, reads in former._reading.items():
            if ticket not in unsent:
                self._reading[ticket] = [(move, None) for move, _ in reads]
                for move, _ in reads:
                    self.groups[move.group].reserve(move.place)
        for own, other in zip(self.connectors, former.connectors, strict=True):
            own.succeed(other)

    def check_integrity(
        self, pools: Sequence[Mapping[bytes, int]], loading: Sequence[Request]
    ) -> None:
        """Raises IntegrityError unless the records agree with the prefix index of each group and
        with the requests that are LOADING."""
        for group, cached in zip(self.groups, pools, strict=True):
            group.check_integrity(cached)
        waited_for = [*self._loading.values(), *self._loaded]
        if sorted(map(id, waited_for)) != sorted(map(id, loading)):
            raise IntegrityError("a request waits for no load, or a load has no request")
