"""What engine and workers tell each other of adapters."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from aioinfer.ipc.sections import I32, Section, array

#: In the place of a slot: the adapter is to be read into memory of the host.
READ = -1
#: In the place of a slot: the host's memory need not have the adapter any more.
DROP = -2


@dataclass(frozen=True, slots=True)
class AdapterChanges(Section):
    """What becomes of adapters before a step is computed.

    Attributes:
        numbers, slots: int32 [C], the adapter with this number enters this slot, or `READ`, or
            `DROP`.
        waits: int32 [C], 1 if the step's rows need it, and 0 if only later ones do.
        folders: int32 [N], the folder of each adapter of `numbers` that is not dropped: UTF-8 JSON
            of an object by number, filled up with spaces.
    """

    numbers: I32 = array(np.int32)
    slots: I32 = array(np.int32)
    waits: I32 = array(np.int32)
    folders: I32 = array(np.int32)

    @classmethod
    def of(
        cls, changes: Iterable[tuple[int, int, bool]], folders: Mapping[int, str]
    ) -> AdapterChanges:
        """Returns the section of (number, slot, waits)."""
        numbers, slots, waits = np.array(list(changes), np.int32).reshape(-1, 3).T
        text = json.dumps(folders).encode()
        packed = np.frombuffer(text.ljust(-(-len(text) // 4) * 4), np.int32)
        return cls(numbers, slots, waits, packed)

    def folders_by_number(self) -> dict[int, str]:
        """Returns the folders."""
        return {int(number): path for number, path in json.loads(self.folders.tobytes()).items()}


@dataclass(frozen=True, slots=True)
class AdapterStates(Section):
    """Adapters that have been read since the last report.

    Attributes:
        numbers: int32 [A].
        failed: int32 [A], 1 if that was not possible.
    """

    numbers: I32 = array(np.int32)
    failed: I32 = array(np.int32)
