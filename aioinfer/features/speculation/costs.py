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
    *(1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256, 320),
    *(384, 448, 512, 640, 768, 896, 1024),
)  # fmt: skip
#: Weight of a step; a step counts as no longer than so many times its value, once there is one.
_WEIGHT, _OUTLIER = 0.1, 2.0
#: A size is known once so many steps were measured, or the workers' start measured it, which counts
#: as many; the first steps weigh more, as in a plain average. After so many steps of other sizes it
#: is to be measured again.
_MIN_SAMPLES, _SAMPLES_OF_START, _MAX_AGE = 4, 10, 100
#: Where nothing is measured, time is assumed to grow with this power of the rows.
_POWER = 0.35


class StepCosts:
    """The measured times of decode steps.

    Args:
        measured: (rows, seconds), ascending.
    """

    def __init__(self, measured: Sequence[tuple[int, float]] = ()):
        self._seconds = [0.0] * len(SIZES)
        self._samples = [0] * len(SIZES)
        self._last = [0] * len(SIZES)  # the step at which each size was measured last
        self._step = 0
        for rows, seconds in measured:
            if rows <= SIZES[-1]:
                index = bisect_left(SIZES, rows)
                self._seconds[index], self._samples[index] = seconds, _SAMPLES_OF_START
        self.is_known = any(self._seconds)

    def learn(self, rows: int, seconds: float) -> None:
        """Takes in a step of so many rows."""
        index = bisect_left(SIZES, rows)
        if seconds <= 0.0 or index == len(SIZES):
            return
        self._step += 1
        self._last[index], samples = self._step, self._samples[index]
        self._samples[index] += 1
        known = self._seconds[index]
        if not known:
            # the first steps of a size may be slower: the estimate from other sizes bounds them
            estimate = self.seconds(rows) if self.is_known else seconds
            known = min(seconds, _OUTLIER * estimate)
            self.is_known = True
        else:
            weight = max(_WEIGHT, 1.0 / (samples + 1))
            known += weight * (min(seconds, _OUTLIER * known) - known)
        self._seconds[index] = known
        for smaller in range(index):  # fewer rows take no longer: what says so is out of date
            self._seconds[smaller] = min(self._seconds[smaller], known)

    def is_stale(self, rows: int) -> bool:
        """Whether steps of so many rows have to be measured before they are compared with others:
        if all steps had drafts, nothing would show that steps without are faster by now."""
        index = min(bisect_left(SIZES, rows), len(SIZES) - 1)
        age = self._step - self._last[index]
        return self._samples[index] < _MIN_SAMPLES or age > _MAX_AGE

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
