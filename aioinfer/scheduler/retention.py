"""Cached blocks that are evicted last until their time is over: the prefixes that clients ask to be
kept (`cache_control`, `prompt_cache_retention`), and those of conversations that wait for tools.

Each pool of blocks, and each group on the host and on the disk, has a `Retention` of its own, which
holds half of its blocks at most: what was retained longest ago makes room. A retained block can
still be evicted where every other one is in use or retained as well. Imports neither torch nor
aiohttp.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

#: Of the blocks of a pool, one in so many may be retained.
_SHARE = 2


class Retention:
    """Hashes of blocks that are evicted last, and until when."""

    def __init__(self, num_blocks: int, clock: Callable[[], float] = time.perf_counter):
        """For a pool of `num_blocks`; `clock` returns seconds."""
        self._max_blocks = num_blocks // _SHARE
        self._clock = clock
        self._until: OrderedDict[bytes, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._until)

    def keep(self, hashes: Sequence[bytes], seconds: float) -> None:
        """Retains the blocks of a prefix for so long from now on, its head at least."""
        until = self._clock() + seconds
        for block_hash in reversed(hashes[: self._max_blocks]):
            self._until[block_hash] = max(until, self._until.get(block_hash, 0.0))
            self._until.move_to_end(block_hash)
        while len(self._until) > self._max_blocks:
            self._until.popitem(last=False)

    def __contains__(self, block_hash: bytes | None) -> bool:
        """Whether a block is retained; its entry goes when its time is over."""
        until = self._until.get(block_hash) if block_hash is not None else None
        if until is None or block_hash is None:
            return False
        if until > self._clock():
            return True
        del self._until[block_hash]
        return False
