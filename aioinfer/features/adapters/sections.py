"""What engine and workers tell each other of adapters."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from aioinfer.ipc.sections import I32, Section, array

#: In the place of a slot: the adapter is to be read into memory of the host, or it need not be
#: there any more.
READ, DROP = -1, -2
#: Adapters that workers read at a time, at most: more than they have threads, since the next ones
#: begin behind a step, and one with long prompts takes as long as several reads.
MAX_READING = 16


class AdapterFiles(NamedTuple):
    """The files of an adapter.

    Attributes:
        folder: with them.
        sample: `Adapter.sample`.
    """

    folder: str
    sample: str


class Change(NamedTuple):
    """What becomes of an adapter, as `AdapterChanges` has it; `files` of one that is to be read."""

    number: int
    slot: int
    waits: bool = False
    files: AdapterFiles | None = None


@dataclass(frozen=True, slots=True)
class AdapterChanges(Section):
    """What becomes of adapters before a step is computed. A plan that has nothing else is posted to
    hear of adapters that are being read.

    Attributes:
        numbers, slots: int32 [C], the adapter with this number enters this slot, or `READ`, or
            `DROP`.
        waits: int32 [C], 1 if the step's rows need it, and 0 if only later ones do.
        rows, adapters: int32 [A], slots of requests that the step admits, and the adapter slot of
            each; those without an adapter are left out.
        files: int32 [N], `AdapterFiles` of the adapters that are to be read, in their order: UTF-8
            JSON, filled up with spaces.
    """

    numbers: I32 = array(np.int32)
    slots: I32 = array(np.int32)
    waits: I32 = array(np.int32)
    rows: I32 = array(np.int32)
    adapters: I32 = array(np.int32)
    files: I32 = array(np.int32)

    @classmethod
    def of(cls, changes: Sequence[Change], admitted: Sequence[tuple[int, int]]) -> AdapterChanges:
        """Returns the section of changes and of (row, adapter)."""
        numbers, slots, waits = np.array([c[:3] for c in changes], np.int32).reshape(-1, 3).T
        rows, adapters = np.array(admitted, np.int32).reshape(-1, 2).T
        text = json.dumps([change.files for change in changes if change.files]).encode()
        packed = np.frombuffer(text.ljust(-(-len(text) // 4) * 4), np.int32)
        return cls(numbers, slots, waits, rows, adapters, packed)

    def changes(self) -> list[Change]:
        """Returns the changes."""
        files = (AdapterFiles(*each) for each in json.loads(self.files.tobytes()))
        columns = (self.numbers.tolist(), self.slots.tolist(), self.waits.tolist())
        return [
            Change(number, slot, bool(waits), next(files) if slot == READ else None)
            for number, slot, waits in zip(*columns, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class AdapterReads(Section):
    """The reads of adapters that have ended on all ranks since the last report.

    Attributes:
        numbers: int32 [A], of the adapters.
        rooms: int32 [A], for how many adapters each rank has memory of the host beside those that
            are being read; 0 where a rank cannot read this one.
    """

    numbers: I32 = array(np.int32)
    rooms: I32 = array(np.int32)
