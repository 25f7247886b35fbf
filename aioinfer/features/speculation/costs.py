"""Seconds of a decode step by its number of rows, measured: without lookahead, and with it.

On a GPU both are graphs of their own, captured for other numbers of rows, and a step with lookahead
has more to launch. The first values come from the workers' start, where there are any. While steps
are executed, each corrects the value of its number of rows; so the values follow the lengths of the
contexts, and whatever else runs on the machine.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

#: Numbers of rows that have a value; others have that of the next larger one.
SIZES = (
    *(1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256, 320),
    *(384, 448, 512, 640, 768, 896, 1024),
)  # fmt: skip
#: Weight of a step, more for the first ones of a size, as in a plain average (with times of the
#: start up to the maximum), and more, up to the maximum, by its part of so many steps since the
#: last one of its size. A step counts as no longer than so many times what was expected.
_WEIGHT, _MAX_WEIGHT, _MEMORY, _OUTLIER = 0.1, 0.3, 300, 2.0
#: Without times of the start a size is known once so many steps were measured, until so many others
#: were. With them a step of any size corrects the others, and only after so many without any are
#: all out of date.
_MIN_SAMPLES, _MAX_AGE = 4, 100
#: Where nothing is measured, time is assumed to grow with this power of the rows.
_POWER = 0.35


class RowTimes:
    """The measured times of steps of one kind.

    Attributes:
        is_known: whether any step was measured.
        factor: by which steps take longer than what was measured at the start.
    """

    def __init__(self) -> None:
        self.is_known, self.factor = False, 1.0
        self._start = [0.0] * len(SIZES)  # seconds as measured at the start
        self._seconds = [0.0] * len(SIZES)
        self._samples = [0] * len(SIZES)
        self._last = [0] * len(SIZES)  # the step at which each size was measured last

    def start_with(self, rows: int, seconds: float) -> None:
        """Takes in what was measured at the start."""
        if rows <= SIZES[-1]:
            self._start[_index(rows)], self.is_known = seconds, True

    def at_start(self, rows: int) -> float:
        """Returns the seconds of a step of so many rows as measured at the start; 0.0 if it was
        not."""
        return self._start[_index(rows)]

    def learn(self, rows: int, seconds: float, step: int) -> None:
        """Takes in step number `step`."""
        index = _index(rows)
        age, self._last[index] = step - self._last[index], step
        known, samples = self._seconds[index], self._samples[index]
        self._samples[index] += 1
        weight = max(_WEIGHT, 1.0 / (samples + 1), min(_MAX_WEIGHT, age / _MEMORY))
        if self._has_start:  # a first step may have had to wait until its graph was captured
            known, weight = known or self.seconds(rows), min(_MAX_WEIGHT, weight)
        known = known or seconds
        known += weight * (min(seconds, _OUTLIER * known) - known)
        self._seconds[index], self.is_known = known, True
        self.limit(index - 1, known)

    def limit(self, index: int, seconds: float) -> None:
        """Notes that steps of `SIZES[index]` rows take no longer than so many seconds, and fewer
        rows neither: what was measured before is out of date."""
        for smaller in range(index, -1, -1):
            if 0.0 < self._seconds[smaller] <= seconds:
                break
            if self._seconds[smaller]:
                self._seconds[smaller] = seconds

    def is_stale(self, rows: int, step: int) -> bool:
        """Whether steps of so many rows have to be measured by step number `step`."""
        if self._has_start:
            return step - max(self._last) > _MAX_AGE
        index = _index(rows)
        return self._samples[index] < _MIN_SAMPLES or step - self._last[index] > _MAX_AGE

    def knows(self, rows: int) -> bool:
        """Whether steps of at least so many rows were measured."""
        index = _index(rows)
        return any(self._seconds[index:]) or any(self._start[index:])

    def seconds(self, rows: int) -> float:
        """Returns the seconds of a step of so many rows; 0.0 if nothing is known."""
        index = _index(rows)
        if known := self._value(index):
            return known
        below = next((i for i in range(index - 1, -1, -1) if self._value(i)), None)
        above = next((i for i in range(index + 1, len(SIZES)) if self._value(i)), None)
        if above is not None and self._start[above]:
            return self._value(above)  # a graph, which computes as many rows for fewer, too
        if below is None:
            return 0.0 if above is None else self._value(above)
        known = self._value(below)
        guess = known * (SIZES[index] / SIZES[below]) ** _POWER
        return guess if above is None else min(guess, max(self._value(above), known))

    @property
    def _has_start(self) -> bool:
        """Whether any size was measured at the start."""
        return any(self._start)

    def _value(self, index: int) -> float:
        return self._seconds[index] or self.factor * self._start[index]


class StepCosts:
    """The measured times of decode steps.

    Args:
        measured: (rows, seconds, whether with lookahead) at the workers' start.
    """

    def __init__(self, measured: Iterable[tuple[int, float, bool]] = ()):
        self._plain, self._ahead = RowTimes(), RowTimes()
        self._step = 0
        for rows, seconds, has_lookahead in measured:
            (self._ahead if has_lookahead else self._plain).start_with(rows, seconds)

    def learn(self, rows: int, seconds: float, *, has_lookahead: bool) -> None:
        """Takes in a step of so many rows. What was measured at the start knows neither the
        requests' contexts nor how they are sampled: sizes that were measured then alone are
        corrected by each step."""
        if seconds <= 0.0 or rows > SIZES[-1]:
            return
        self._step += 1
        times = self._ahead if has_lookahead else self._plain
        expected = self.with_lookahead(rows) if has_lookahead else self.plain(rows)
        if expected:  # the first steps of a size may be slower
            seconds = min(seconds, _OUTLIER * expected)
        times.learn(rows, seconds, self._step)
        if has_lookahead:  # or drafts would seem to save time by themselves
            self._plain.limit(_index(rows), times.seconds(rows))
        if at_start := times.at_start(rows):
            factor = times.factor + max(_WEIGHT, 1.0 / self._step) * (
                seconds / at_start - times.factor
            )
            self._plain.factor = self._ahead.factor = factor

    def is_stale(self, rows: int) -> bool:
        """Whether steps of so many rows without lookahead have to be measured before they are
        compared with others: if all steps had drafts, nothing would show that steps without are
        faster by now."""
        return self._plain.is_stale(rows, self._step)

    def plain(self, rows: int) -> float:
        """Returns the seconds of a step of so many rows without lookahead; 0.0 if nothing is
        known."""
        return self._plain.seconds(rows)

    def with_lookahead(self, rows: int) -> float:
        """Returns the seconds of a step of so many rows with lookahead; 0.0 if nothing is known.
        Steps without tell what no step with lookahead has shown yet."""
        knows = self._ahead.is_known and (self._ahead.knows(rows) or not self._plain.knows(rows))
        return (self._ahead if knows else self._plain).seconds(rows)


def _index(rows: int) -> int:
    """Returns the index of the value of so many rows."""
    return min(bisect_left(SIZES, rows), len(SIZES) - 1)
