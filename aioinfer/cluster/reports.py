"""Reports of a replica to routers: its load, and the prefixes that its cache holds; and the number
of replicas that their loads call for.

A stream of reports begins with all block hashes of the replica's prefix cache, in portions, and
goes on with the hashes that were added and removed since the report before. A reader that missed a
report has to start again with a first report. On the wire a report is its length in four bytes,
little endian, and MessagePack.

Pure Python: imported by routers, replicas and the simulator.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import msgspec

#: Hashes in a report; a longer list is divided. One such report takes about 150 KB.
MAX_HASHES = 8192
_LENGTH_BYTES = 4
#: A longer report is none of ours.
_MAX_REPORT_BYTES = 4 * 2**20


class ReplicaLoad(msgspec.Struct, frozen=True, array_like=True):
    """The load of a replica, of all its engines together.

    Attributes:
        running: sequences that have slots.
        waiting: requests that wait, for whatever it is.
        prefill_tokens: prompt tokens that no plan has had computed yet.
        used_tokens: tokens whose KV blocks have an owner.
        waiting_tokens: prompt tokens of the requests that wait for slots or blocks.
        max_tokens: tokens that the KV cache can hold.
        max_requests: slots.
    """

    running: int = 0
    waiting: int = 0
    prefill_tokens: int = 0
    used_tokens: int = 0
    waiting_tokens: int = 0
    max_tokens: int = 0
    max_requests: int = 0

    @property
    def utilization(self) -> float:
        """The fraction of the replica's capacity that its requests use or wait for: of its slots,
        or of its KV cache, whichever is higher. Above 1 where requests wait."""
        slots = (self.running + self.waiting) / max(1, self.max_requests)
        return max(slots, (self.used_tokens + self.waiting_tokens) / max(1, self.max_tokens))


class Report(msgspec.Struct, frozen=True):
    """A replica's message to routers.

    Attributes:
        load: of now.
        added, removed: hashes of blocks that the prefix cache holds, and no longer holds; of a
            model with states the hashes of snapshots.
        block_size: tokens a block; 0 without a prefix cache.
        is_first: whether all earlier reports are void.
        is_leaving: whether the replica finishes its requests and takes no more.
        of_snapshots: whether the hashes are of snapshots: a request begins behind the last one that
            is held, whether or not the ones before it are.
    """

    load: ReplicaLoad
    added: Sequence[bytes] = ()
    removed: Sequence[bytes] = ()
    block_size: int = 0
    is_first: bool = False
    is_leaving: bool = False
    of_snapshots: bool = False


def divided(report: Report) -> Iterator[Report]:
    """Yields a report in portions of at most `MAX_HASHES` added and as many removed hashes."""
    size = max(len(report.added), len(report.removed), 1)
    for start in range(0, size, MAX_HASHES):
        part = slice(start, start + MAX_HASHES)
        yield msgspec.structs.replace(
            report,
            added=report.added[part],
            removed=report.removed[part],
            is_first=report.is_first and start == 0,
        )


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Report)


def encode(report: Report) -> bytes:
    """Returns a report as it is sent."""
    body = _encoder.encode(report)
    return len(body).to_bytes(_LENGTH_BYTES, "little") + body


class ReportReader:
    """Takes the bytes of a stream of reports, in whatever portions they come."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Report]:
        """Yields the reports that are complete with `data`. Raises ValueError (of which msgspec's
        errors are) for bytes that are no report."""
        buffer = self._buffer
        buffer += data
        while len(buffer) >= _LENGTH_BYTES:
            length = int.from_bytes(buffer[:_LENGTH_BYTES], "little")
            if length > _MAX_REPORT_BYTES:
                raise ValueError(f"a report of {length} bytes")
            end = _LENGTH_BYTES + length
            if len(buffer) < end:
                return
            report = _decoder.decode(memoryview(buffer)[_LENGTH_BYTES:end].tobytes())
            del buffer[:end]
            yield report


def wanted_replicas(utilizations: Sequence[float], target: float, current: int) -> int:
    """Returns the number of replicas at which each would have the utilization `target`.

    A change within a tenth of the target is none: it would be reverted at once.

    Args:
        utilizations: of the replicas that report, each `ReplicaLoad.utilization`.
        target: above 0.
        current: replicas that are wanted now.
    """
    if not utilizations:
        return current
    mean = math.fsum(utilizations) / len(utilizations)
    serving = max(1, len(utilizations))
    if abs(mean - target) <= 0.1 * target:
        return current
    return max(1, math.ceil(serving * mean / target))
