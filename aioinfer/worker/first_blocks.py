"""Detection, on the host, of steps with rows that begin with the same KV blocks.

Decode attention finds shared prefixes on the GPU (`kernels.cascade_attention`). A graph that looks
for them costs a launch a layer; so there are graphs with and without, and `StepGraphs` replays a
graph with the search where the block tables say that it may save something.
"""

from __future__ import annotations

import numpy as np

from aioinfer.ipc.plan import I32, StepPlan


class SharedPrefixes:
    """Mirrors the first blocks of every slot of the first KV group.

    Args:
        slots: the maximum of running requests.
        block_size: tokens of a block.
        min_rows: rows that share a prefix at least.
        min_saved: keys that need not be read again at least.
    """

    def __init__(self, slots: int, block_size: int, *, min_rows: int, min_saved: int):
        def needed(blocks: int) -> int:
            """Returns how many rows have to share so many blocks."""
            return max(min_rows, -(-min_saved // (blocks * block_size)) + 1)

        longest = 1
        while needed(longest) > min_rows:
            longest += 1
        doublings = [1 << bits for bits in range(longest.bit_length()) if 1 << bits < longest]
        self._counts = {blocks: needed(blocks) for blocks in (*doublings, longest)}
        # numbers for missing blocks, all different: no two slots share a missing block
        self._none = -1 - np.arange(slots * longest, dtype=np.int32).reshape(slots, longest)
        self._blocks = self._none.copy()
        self._slots: I32 = np.empty(0, np.int32)
        self._found = False

    def update(self, plan: StepPlan) -> None:
        """Takes over the growth of block tables in a plan."""
        slots, longest = self._blocks.shape
        kept = (plan.table_rows < slots) & (plan.table_indices < longest)
        if not kept.any():
            return
        rows, indices = plan.table_rows[kept], plan.table_indices[kept]
        first = rows[indices == 0]  # of a request that enters the slot
        self._blocks[first] = self._none[first]
        self._blocks[rows, indices] = plan.table_blocks[kept]
        self._slots = np.empty(0, np.int32)

    def may_save(self, slots: I32) -> bool:
        """Whether enough of these rows (int32 [R]) have the same blocks at one of some indices."""
        if not np.array_equal(slots, self._slots):
            self._slots = slots.copy()
            self._found = any(
                self._has_equal(slots, blocks - 1, count) for blocks, count in self._counts.items()
            )
        return self._found

    def _has_equal(self, slots: I32, index: int, count: int) -> bool:
        """Whether `count` of the rows have the same block at an index."""
        if len(slots) < count:
            return False
        ordered = np.sort(self._blocks[slots, index])
        return bool((ordered[count - 1 :] == ordered[: len(ordered) - count + 1]).any())
