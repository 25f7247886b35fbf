"""The blocks of one KV group that memory of the host has, by their hashes: the place of each, and
which blocks of the device are to be saved.

`KVStore` has one for each group, and the group's `BlockPool` tells it what becomes known on the
device and what is lost there. Imports neither torch nor aiohttp.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from aioinfer.errors import IntegrityError
from aioinfer.scheduler.retention import Retention


@dataclass(frozen=True, slots=True)
class Move:
    """A block on its way between the device, the host and a connector.

    Attributes:
        group: of the block.
        place: on the host.
        block: on the device.
        ticket: of the load or the read; -1 for a save.
        block_hash: of a block that is saved or read; empty for a load.
        connectors: of a read the number of the connector, of a save a bit for each that keeps it.
    """

    group: int
    place: int
    block: int = -1
    ticket: int = -1
    block_hash: bytes = b""
    connectors: int = 0


class StoredBlocks:
    """The blocks of one group on the host, and those to be saved.

    Attributes:
        num_places: blocks that the host holds.
        retention: which blocks leave last.
    """

    def __init__(self, num_places: int):
        self.num_places = num_places
        self.retention = Retention(num_places)
        self._num_reading = 0
        self._places: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._free = list(range(num_places - 1, -1, -1))
        # hash -> block of the device: noted since the last `publish`; and to be saved
        self._noted: dict[bytes, int] = {}
        self._due: dict[bytes, int] = {}

    def __contains__(self, block_hash: object) -> bool:
        """Whether the host has the block of a hash."""
        return block_hash in self._places

    def expects(self, block_hash: bytes | None) -> bool:
        """Whether the block of a hash is to be saved."""
        return block_hash in self._noted or block_hash in self._due

    def __len__(self) -> int:
        return len(self._places)

    @property
    def has_due(self) -> bool:
        """Whether blocks are to be saved."""
        return bool(self._due)

    def note(self, block_hash: bytes, block: int) -> None:
        """Notes that a block of the device has become known by its hash, or was used."""
        if block_hash in self._places:
            self._places.move_to_end(block_hash)
        elif block_hash not in self._due and self.num_places:
            self._noted[block_hash] = block

    def lose(self, block_hash: bytes) -> None:
        """Notes that the device does not have the block of a hash any more."""
        if self._noted.pop(block_hash, None) is None:
            self._due.pop(block_hash, None)

    def use(self, hashes: Sequence[bytes]) -> None:
        """Counts the blocks of a prefix as used now, as far as they are here: its head last, since
        the blocks behind it are of no use without it."""
        for block_hash in reversed(hashes):
            if block_hash in self._places:
                self._places.move_to_end(block_hash)

    def place_of(self, block_hash: bytes) -> int:
        """Returns where a block is."""
        return self._places[block_hash]

    def publish(self) -> None:
        """Makes the blocks that were noted due: by now their plan is posted."""
        self._due.update(self._noted)
        self._noted.clear()

    def take_saves(self, group: int) -> Iterator[Move]:
        """Gives the due blocks, which the plans before have computed, their places and yields their
        copies."""
        due, self._due = self._due, {}
        for block_hash, block in due.items():
            if not self._free and not self._places:
                return  # connectors read into all places
            place = self._places[block_hash] = self._take_place()
            yield Move(group, place, block, block_hash=block_hash)

    def _take_place(self) -> int:
        if self._free:
            return self._free.pop()
        for _ in range(len(self._places) if self.retention else 0):
            block_hash, place = self._places.popitem(last=False)
            if block_hash not in self.retention:
                return place
            self._places[block_hash] = place
        return self._places.popitem(last=False)[1]

    def retain(self, hashes: Iterable[bytes], seconds: float) -> None:
        """Has the blocks of a prefix leave last for so long, as far as they are here."""
        here = [each for each in hashes if each in self._places or self.expects(each)]
        self.retention.keep(here, seconds)

    @property
    def max_reads(self) -> int:
        """Blocks that may be read from a connector for a further request."""
        return self.num_places // 2 - self._num_reading

    def begin_read(self) -> int:
        """Returns a place for a block from a connector; nothing else uses it until `end_read`."""
        self._num_reading += 1
        return self._take_place()

    def end_read(self, block_hash: bytes | None, place: int, *, is_whole: bool) -> None:
        """Enters a block that a connector has read; without a hash, no request may use it. One that
        was computed meanwhile is on the device, and is here or gets its place when it is saved."""
        self._num_reading -= 1
        is_wanted = is_whole and not (block_hash in self._places or self.expects(block_hash))
        if block_hash is not None and is_wanted:
            self._places[block_hash] = place
        else:
            self._free.append(place)

    def reserve(self, place: int) -> None:
        """Has nothing use a free place until `end_read`."""
        self._free.remove(place)
        self._num_reading += 1

    def drop(self, hashes: Iterable[bytes]) -> None:
        """Forgets blocks: their contents cannot be trusted."""
        for block_hash in hashes:
            self.lose(block_hash)
            place = self._places.pop(block_hash, None)
            if place is not None:
                self._free.append(place)

    def clear(self) -> None:
        """Forgets all blocks."""
        self.drop([*self._places, *self._noted, *self._due])

    def check_integrity(self, cached: Mapping[bytes, int]) -> None:
        """Raises IntegrityError unless every place is free or has one block, and the device has the
        blocks that are to be saved: `cached` is its prefix index."""
        places = [*self._places.values(), *self._free]
        if len(set(places)) != len(places) or len(places) + self._num_reading != self.num_places:
            raise IntegrityError("a place of the KV store was lost or given twice")
        for block_hash, block in (*self._noted.items(), *self._due.items()):
            if cached.get(block_hash) != block:
                raise IntegrityError(f"block {block} is to be saved and does not have its hash")
