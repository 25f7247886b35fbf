"""Index of the KV blocks that replicas hold: a map from block hash to a set of replicas, of bounded
size.

A set of replicas is an integer with a bit for each: sets of a thousand replicas are intersected in
some 30 ns. Where the map is full, the hash that was used least recently is forgotten; a prefix of
which a block is forgotten counts up to that block only.

Of a model with states, replicas report the hashes of their snapshots (`PrefixIndex.of_snapshots`).
Each is held by itself: a request begins behind the last one, whether or not there are any before
it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

#: Hashes that `sweep` looks at in one go, in some 0.2 ms.
_SWEPT = 256


class PrefixIndex:
    """The blocks that replicas hold or have promised, by hash.

    Attributes:
        of_snapshots: whether a hash stands for all tokens up to its block's end, and not for the
            block alone.
    """

    def __init__(self, max_hashes: int, max_promised: int):
        self.of_snapshots = False
        self._max_hashes, self._max_promised = max_hashes, max_promised
        self._holders: OrderedDict[bytes, int] = OrderedDict()
        # hash to (replicas, when it ends): prompts that were routed and may not be computed yet
        self._promised: OrderedDict[bytes, tuple[int, float]] = OrderedDict()
        # replicas that are gone: the replicas whose bits are being removed, and how many hashes are
        # left to look at; replicas that wait to be removed; and replicas that promises may name
        # until a time
        self._sweeping = self._left = self._unswept = 0
        self._promising: deque[tuple[float, int]] = deque()

    def __len__(self) -> int:
        return len(self._holders)

    @property
    def unswept(self) -> int:
        """The replicas of which the map may still hold blocks that they no longer have."""
        mask = self._unswept | self._sweeping
        for _, bit in self._promising:
            mask |= bit
        return mask

    def add(self, hashes: Iterable[bytes], bit: int) -> None:
        """Records that a replica, given as its bit, holds blocks."""
        holders = self._holders
        for block_hash in hashes:
            known = holders.get(block_hash)
            if known is None:
                holders[block_hash] = bit  # one object for all hashes that one replica holds
                if len(holders) > self._max_hashes:
                    holders.popitem(last=False)
            elif not known & bit:
                holders[block_hash] = known | bit

    def remove(self, hashes: Iterable[bytes], bits: int) -> None:
        """Records that replicas no longer hold blocks."""
        holders = self._holders
        for block_hash in hashes:
            known = holders.get(block_hash, 0)
            if left := known & ~bits:
                if left != known:
                    holders[block_hash] = left
            elif known:
                del holders[block_hash]

    def promise(self, hashes: Iterable[bytes], bit: int, end: float) -> None:
        """Records that a replica is about to compute blocks, which counts until `end`."""
        promised = self._promised
        for block_hash in hashes:
            before, _ = promised.pop(block_hash, (0, 0.0))
            promised[block_hash] = before | bit, end
        while len(promised) > self._max_promised:
            promised.popitem(last=False)

    def expire(self, now: float) -> None:
        """Forgets promises that have ended. They were made in the order in which they end."""
        promised = self._promised
        while promised and next(iter(promised.values()))[1] <= now:
            promised.popitem(last=False)
        while self._promising and self._promising[0][0] <= now:
            self._promising.popleft()

    def levels(self, hashes: Sequence[bytes], replicas: int) -> list[tuple[int, int]]:
        """Returns (number of leading blocks, replicas that can begin behind at least these) for
        each number at which the set becomes smaller, ascending; of `replicas` alone."""
        if self.of_snapshots:
            return self._levels_of_snapshots(hashes, replicas)
        found: list[tuple[int, int]] = []
        for count, block_hash in enumerate(hashes):
            mask = self._mask(block_hash)
            if mask & replicas != replicas:
                if count and replicas:
                    found.append((count, replicas))
                replicas &= mask
                if not replicas:
                    return found
        if hashes and replicas:
            found.append((len(hashes), replicas))
        return found

    def _levels_of_snapshots(self, hashes: Sequence[bytes], replicas: int) -> list[tuple[int, int]]:
        """Does what `levels` does, from the last block to the first."""
        found: list[tuple[int, int]] = []
        able = 0
        for count in range(len(hashes), 0, -1):
            if more := self._mask(hashes[count - 1]) & replicas & ~able:
                able |= more
                found.append((count, able))
                if able == replicas:
                    break
        return found[::-1]

    def _mask(self, block_hash: bytes) -> int:
        """Returns the replicas that hold a block or have promised it."""
        mask = self._holders.get(block_hash, 0)
        promise = self._promised.get(block_hash)
        return mask if promise is None else mask | promise[0]

    def touch(self, hashes: Iterable[bytes]) -> None:
        """Records that blocks were used."""
        holders, gone = self._holders, self._sweeping
        for block_hash in hashes:
            if (mask := holders.get(block_hash)) is None:
                continue
            if mask & gone:  # the sweep will not come across it where it is now
                self.remove([block_hash], mask & gone)
            if block_hash in holders:
                holders.move_to_end(block_hash)

    # ---------------------------------------------------------------- replicas that are gone

    def forget(self, bit: int) -> None:
        """Records that a replica holds nothing. Its entries in the map are removed in portions, by
        `sweep`; until then it is among `unswept`, and its bit must not stand for another."""
        self._unswept |= bit
        if self._promised:
            _, end = next(reversed(self._promised.values()))
            self._promising.append((end, bit))

    def sweep(self) -> None:
        """Removes a portion of the entries of replicas that were forgotten.

        The map is turned round once, from its oldest entry on, which keeps its order.
        """
        if not self._sweeping:
            if not self._unswept:
                return
            self._sweeping, self._unswept = self._unswept, 0
            self._left = len(self._holders)
        holders, kept = self._holders, ~self._sweeping
        for _ in range(min(_SWEPT, self._left, len(holders))):
            block_hash, mask = holders.popitem(last=False)
            if mask & kept:
                holders[block_hash] = mask & kept
        self._left -= _SWEPT
        if self._left <= 0:
            self._sweeping = 0
