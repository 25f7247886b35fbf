"""Places beyond memory of the host that have KV blocks, such as files. The planning half.

A `KVConnector` says which blocks of a request are there, and which saved blocks it keeps; the
worker half (`worker.kv_connector`) moves their bytes. Whatever comes from a connector crosses
memory of the host: blocks are read into places of it, enter its index when they came whole, and are
loaded from there. `KVStore` owns the connectors of an engine and asks them in their order.

The powers are those of vLLM's `KVConnectorBase_V1`; docs/kv-store.md compares the two call by call.
Imports neither torch nor aiohttp.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from aioinfer.scheduler.block_pool import HASH_BYTES
from aioinfer.scheduler.copy_rates import Rate
from aioinfer.scheduler.group_blocks import Stored
from aioinfer.scheduler.handover import Handover
from aioinfer.scheduler.request import Request
from aioinfer.scheduler.retention import Retention
from aioinfer.scheduler.stored_blocks import StoredBlocks

#: See `KVConnector.take_deletes`.
ALL_BLOCKS = (-1, bytes(HASH_BYTES))


class KVConnector:
    """A place beyond memory of the host. A connector overrides what it needs.

    Attributes:
        number: by which plans name it: below 31.
        rate: how fast tokens come from it.
    """

    number: ClassVar[int]

    def __init__(self) -> None:
        self.rate = Rate()

    def held(self, request: Request) -> Stored | None:
        """Returns the hashes that it has, by group, as far as they concern a request; None if it
        has nothing for it. A hash may turn out to be missing when it is read."""
        return None

    def pays(self, computing: Rate) -> bool:
        """Whether reading from it takes no longer than computing."""
        return True

    def source_of(self, request: Request) -> str:
        """Returns where workers read a request's blocks, in words of the connector's own."""
        return ""

    def offer(self, request: Request, groups: Sequence[StoredBlocks]) -> Handover | None:
        """Returns what another server may read of the blocks of a request that has ended, of which
        `groups` are on the host; None if nothing."""
        return None

    def use(self, group: int, block_hash: bytes) -> None:
        """Counts a block as used now."""

    def retain(self, group: int, hashes: Sequence[bytes], seconds: float) -> None:
        """Has the blocks of a prefix leave last for so long."""

    def keep(self, group: int, block_hash: bytes) -> bool:
        """Whether it keeps a block that is being saved on the host."""
        return False

    def lose(self, group: int, block_hash: bytes) -> None:
        """Notes that a block could not be read."""

    def drop(self, group: int, block_hash: bytes) -> None:
        """Forgets a block: its contents cannot be trusted."""

    def clear(self) -> None:
        """Forgets all blocks."""

    def take_deletes(self) -> list[tuple[int, bytes]]:
        """Returns (group, hash) of the blocks that workers are to delete, behind the saves. A group
        of -1 stands for all blocks, which are forgotten before the plan's reads begin, and says
        that the weights may be others from now on."""
        return []

    def succeed(self, former: KVConnector) -> None:
        """Takes over what outlives the records of a store that is given up."""


@dataclass(frozen=True, slots=True)
class DiskLimits:
    """What the disk holds.

    Attributes:
        num_files: the maximum of files of each group.
        files: the hashes that have files, of each group, the least recently used first.
    """

    num_files: Sequence[int]
    files: Sequence[Sequence[bytes]]


class DiskConnector(KVConnector):
    """Files, which outlive the server. What is saved on the host is written to a file as well.

    Attributes:
        files: of each group, the hashes that have files, the least recently used first. A file may
            turn out to be broken, or not to be there.
    """

    number = 0

    def __init__(self, limits: DiskLimits):
        super().__init__()
        self.files = [OrderedDict[bytes, None].fromkeys(found) for found in limits.files]
        self._num_files = limits.num_files
        self._retentions = [Retention(count) for count in limits.num_files]
        self._deletes: list[tuple[int, bytes]] = []
        for group in range(len(self.files)):
            self._trim(group)

    def held(self, request: Request) -> Stored | None:
        """See `KVConnector.held`."""
        return self.files

    def pays(self, computing: Rate) -> bool:
        """See `KVConnector.pays`."""
        return self.rate.pays(computing)

    def use(self, group: int, block_hash: bytes) -> None:
        """See `KVConnector.use`."""
        if block_hash in self.files[group]:
            self.files[group].move_to_end(block_hash)

    def keep(self, group: int, block_hash: bytes) -> bool:
        """See `KVConnector.keep`."""
        if block_hash in self.files[group] or not self._num_files[group]:
            return False
        self.files[group][block_hash] = None
        self._trim(group)
        return True

    def _trim(self, group: int) -> None:
        files, retention = self.files[group], self._retentions[group]
        while len(files) > self._num_files[group]:
            for _ in range(len(files) if retention else 0):
                if (block_hash := next(iter(files))) not in retention:
                    break
                files.move_to_end(block_hash)
            self._deletes.append((group, files.popitem(last=False)[0]))

    def retain(self, group: int, hashes: Sequence[bytes], seconds: float) -> None:
        """See `KVConnector.retain`."""
        here = [block_hash for block_hash in hashes if block_hash in self.files[group]]
        self._retentions[group].keep(here, seconds)

    def lose(self, group: int, block_hash: bytes) -> None:
        """See `KVConnector.lose`."""
        self.drop(group, block_hash)  # other ranks may have their files

    def drop(self, group: int, block_hash: bytes) -> None:
        """See `KVConnector.drop`."""
        if block_hash in self.files[group]:
            del self.files[group][block_hash]
            self._deletes.append((group, block_hash))

    def clear(self) -> None:
        """See `KVConnector.clear`."""
        self._deletes.append(ALL_BLOCKS)
        for group, files in enumerate(self.files):
            self._deletes += [(group, block_hash) for block_hash in files]
            files.clear()

    def take_deletes(self) -> list[tuple[int, bytes]]:
        """See `KVConnector.take_deletes`."""
        deletes, self._deletes = self._deletes, []
        return deletes

    def succeed(self, former: KVConnector) -> None:
        """See `KVConnector.succeed`."""
        assert isinstance(former, DiskConnector)
        self.files, self._deletes = former.files, former._deletes
