"""Other servers as a place that has KV blocks, for prefill and decode on different servers. The
planning half.

One server computes a prompt, and says with a `Handover` which blocks another one may read from its
host. The other reads them as it reads files (`kv_connector`). Blocks are found by their hashes on
both sides, so a block that has left the first server meanwhile is a miss, and computed again.
Imports neither torch nor aiohttp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aioinfer.scheduler.group_blocks import Stored
from aioinfer.scheduler.handover import Handover
from aioinfer.scheduler.kv_connector import ALL_BLOCKS, KVConnector
from aioinfer.scheduler.request import Request
from aioinfer.scheduler.stored_blocks import StoredBlocks

#: Ranges of entries of a group that a `Handover` names.
_MAX_RANGES = 32


@dataclass(frozen=True, slots=True)
class PeerLimits:
    """What an engine hands to other servers.

    Attributes:
        address: see `Handover`; None if it only takes blocks.
        first_rank, num_ranks: see `Handover`.
    """

    address: str | None
    first_rank: int
    num_ranks: int


class PeerConnector(KVConnector):
    """Other servers: one computes a prompt, and another reads its blocks and goes on."""

    number = 1

    def __init__(self, limits: PeerLimits):
        super().__init__()
        self._limits = limits
        self._deletes: list[tuple[int, bytes]] = []

    def held(self, request: Request) -> Stored | None:
        """See `KVConnector.held`: the blocks that the request's `Handover` names."""
        handover, hashes = request.handover, request.block_hashes
        if handover is None or handover.num_ranks != self._limits.num_ranks:
            return None
        return [
            {block_hash for first, end in ranges for block_hash in hashes[max(0, first) : end]}
            for ranges in handover.held
        ]

    def source_of(self, request: Request) -> str:
        """See `KVConnector.source_of`: `HOST:PORT` of the other engine's first rank."""
        assert request.handover is not None
        host, _, port = request.handover.address.rpartition(":")
        return f"{host}:{int(port) + request.handover.first_rank}"

    def keep(self, group: int, block_hash: bytes) -> bool:
        """See `KVConnector.keep`: workers know the hashes of all places that others may read."""
        return self._limits.address is not None

    def drop(self, group: int, block_hash: bytes) -> None:
        """See `KVConnector.drop`."""
        if self._limits.address is not None:
            self._deletes.append((group, block_hash))

    def clear(self) -> None:
        """See `KVConnector.clear`."""
        self._deletes = [ALL_BLOCKS]

    def take_deletes(self) -> list[tuple[int, bytes]]:
        """See `KVConnector.take_deletes`."""
        deletes, self._deletes = self._deletes, []
        return deletes

    def offer(self, request: Request, groups: Sequence[StoredBlocks]) -> Handover | None:
        """See `KVConnector.offer`: the blocks that the host has or is about to have."""
        limits, hashes = self._limits, request.block_hashes
        if limits.address is None:
            return None
        held = [_ranges([h in each or each.expects(h) for h in hashes]) for each in groups]
        if not any(held):
            return None
        return Handover(limits.address, limits.first_rank, limits.num_ranks, held)


def _ranges(flags: Sequence[bool]) -> list[tuple[int, int]]:
    """Returns where `flags` are true, as pairs of a first index and the one behind the last."""
    before, after = [False, *flags], [*flags, False]
    edges = [n for n, pair in enumerate(zip(before, after, strict=True)) if pair[0] != pair[1]]
    return list(zip(edges[::2], edges[1::2], strict=True))[:_MAX_RANGES]
