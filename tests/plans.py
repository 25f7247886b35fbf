"""Plans of one step, made by hand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from aioinfer.ipc.plan import I32, StepPlan
from aioinfer.ipc.sections import Section


def ids(*values: int) -> I32:
    return np.array(values, np.int32)


def make_plan(
    step_id: int = 0,
    rows: Iterable[Sequence[int]] = (),
    growth: Iterable[Sequence[int]] = (),
    sections: Sequence[Section] = (),
) -> StepPlan:
    """Returns a plan with rows (slot, start, length, samples) and growth of block tables (row,
    index, block)."""
    of_rows = np.array(list(rows), np.int32).reshape(-1, 4).T.copy()
    of_growth = np.array(list(growth), np.int32).reshape(-1, 3).T.copy()
    return StepPlan(step_id, *of_rows, *of_growth, ids(), ids(), sections)
