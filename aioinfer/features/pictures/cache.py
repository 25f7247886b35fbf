"""Records of the embeddings that the workers keep: of which pictures they are, and in which rows of
the cache."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

import numpy as np

from aioinfer.ipc.sections import I32


class EmbeddingCache:
    """Rows of the workers' cache by the key of a picture; the least recently used go first.

    Workers execute plans in order, so rows may be given to another picture as soon as no step that
    is still to be planned needs them: the planner of a step names the pictures that stay.

    Attributes:
        capacity: rows.
    """

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.clear()

    def __contains__(self, key: bytes) -> bool:
        return key in self._rows

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def num_used(self) -> int:
        """Rows with an embedding."""
        return self.capacity - self._num_free

    def use(self, key: bytes) -> I32:
        """Returns the rows of a picture that is there, which becomes the most recently used."""
        self._rows.move_to_end(key)
        return self._rows[key]

    def add(self, key: bytes, count: int, kept: Collection[bytes]) -> I32:
        """Returns `count` rows for a new picture, int32; others make room, but not those of `kept`.
        The caller knows that there is room."""
        while self._num_free < count:
            oldest = next(each for each in self._rows if each not in kept)
            rows = self._rows.pop(oldest)
            self._free[self._num_free : self._num_free + len(rows)] = rows
            self._num_free += len(rows)
        self._num_free -= count
        rows = self._free[self._num_free : self._num_free + count].copy()
        self._rows[key] = rows
        return rows

    def clear(self) -> None:
        """Forgets all pictures."""
        self._rows: OrderedDict[bytes, I32] = OrderedDict()
        self._free = np.arange(self.capacity, dtype=np.int32)
        self._num_free = self.capacity
