"""Seconds of a decode step by its number of rows, measured.

The first values come from the workers' start, where there are any. While steps are executed, each
corrects the value of its number of rows; so the values follow the lengths of the contexts, and
whatever else runs on the machine.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

#: Numbers of rows that have a value; others have that of the next larger one.
SIZES = (
    *(
        1,
        2,
        3,
        4,
        5,
        6,
        8,
        10,
        12,
        16,
        20,
        24,
        32,
        40,
        48,
        64,
        80,
        96,
        128,
        160,
        192,
        256,
        320,
        384,
    ),
    *(448, 512, 640, 768, 896, 1024),
)
#: Weight of a step; a step counts as no longer than so many times its value, once there is one.
_WEIGHT, _OUTLIER = 0.1, 2.0
#: Where nothing is measured, time is assumed to grow with this power of the rows.
_POWER = 0.35


class StepCosts:
    """The measured times of decode steps.

    Args:
        measured: (rows, seconds), ascending.
    """

    def __init__(self, measured: Sequence[tuple[int, float]] = ()):
        self._seconds = [0.0] * len(SIZES)
        for rows, seconds in measured:
            if rows <= SIZES[-1]:
                self._seconds[bisect_left(SIZES, rows)] = seconds
        self.is_known = any(self._seconds)

    def learn(self, rows: int, seconds: float) -> None:
        """Takes in a step of so many rows."""
        index = bisect_left(SIZES, rows)
        if seconds <= 0.0 or index == len(SIZES):
            return
        known = self._seconds[index]
        if not known:
            # the first steps of a size may be slower: the estimate from other sizes bounds them
            estimate = self.seconds(rows) if self.is_known else seconds
            self._seconds[index] = min(seconds, _OUTLIER * estimate)
            self.is_known = True
            return
        self._seconds[index] += _WEIGHT * (min(seconds, _OUTLIER * known) - known)

    def seconds(self, rows: int) -> float:
        """Returns the seconds of a step of so many rows; 0.0 if nothing is known."""
        index = min(bisect_left(SIZES, rows), len(SIZES) - 1)
        known = self._seconds
        if known[index]:
            return known[index]
        below = next((i for i in range(index - 1, -1, -1) if known[i]), None)
        above = next((i for i in range(index + 1, len(SIZES)) if known[i]), None)
        if below is None:
            return known[above] if above is not None else 0.0
        guess = known[below] * (SIZES[index] / SIZES[below]) ** _POWER
        return guess if above is None else min(guess, max(known[above], known[below]))
