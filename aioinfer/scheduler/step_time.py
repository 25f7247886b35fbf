"""Predicted times of steps, by a cost law that is linear in a few features of the step. Its
coefficients are learned from the steps that were measured.

`PrefillPacing` asks it how many prefill tokens fit into a given time. The measured time of a step
is the time from the moment at which workers could begin with it (the result before it had come,
and it was posted) to its own result. While steps are back to back that is the time between two
results, whatever is in flight.

The coefficients are a random walk that a Kalman filter follows (recursive least squares with a
memory of some hundred steps, in which only measured coefficients are forgotten: after an hour
without prompts the cost of a prefill token is still known). The change by a measurement is bounded
(Huber 1964), so a step that was compiled or held up by the host spoils nothing, unless many say the
same.

Pure Python, 2 to 12 us a step. Imports neither torch nor aiohttp.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import NamedTuple

#: Features of a step, in the order of the coefficients: 1 if it only decodes, 1 if it computes
#: prompts, decode rows, keys that decodes read, prefill tokens, pairs of a prefill token and a key.
#: The costs are relative to a prefill token's, as they are on a GPU and on a CPU within a factor of
#: ten; measured steps give the unit, and then each cost by itself.
_USUAL_COSTS = (100.0, 100.0, 0.5, 1e-3, 1.0, 5e-5)
_NUM = len(_USUAL_COSTS)
_ALL = tuple(range(_NUM))
#: Steps from which the unit is found.
_NUM_FIRST = 5
#: Relative standard deviations: of a measured time, of a coefficient before it is measured, and of
#: its change from one step to the next.
_NOISE, _UNKNOWN, _DRIFT = 0.1, 2.0, 0.01
#: Standard deviations beyond which a measurement counts as if it were there; after so many on the
#: same side the machine has changed, and the coefficients count as unknown.
_OUTLIER, _NUM_OUTLIERS = 3.0, 8
#: Of the steps that only decode, one in so many is learned from: they resemble each other.
_DECODE_INTERVAL = 4
#: Weight of a step in the mean relative error, and the error that is assumed before any is
#: measured.
_ERROR_WEIGHT, _FIRST_ERROR = 0.05, 0.2


class StepWork(NamedTuple):
    """The work of a step: counts of its tokens and keys.

    Attributes:
        decodes: rows of one token that are sampled.
        decode_keys: keys that they attend to.
        prefill_tokens: tokens of all other rows.
        prefill_pairs: for each of these tokens the keys it attends to, summed up.
    """

    decodes: int
    decode_keys: int
    prefill_tokens: int = 0
    prefill_pairs: float = 0.0

    def features(self, *, is_mixed: bool) -> tuple[float, ...]:
        """Returns the features; `is_mixed` counts the step as one with prompts."""
        return (
            float(not is_mixed), float(is_mixed), self.decodes, self.decode_keys,
            self.prefill_tokens, self.prefill_pairs,
        )  # fmt: skip


class StepTimes:
    """Predicts and learns the times of steps.

    Attributes:
        costs: seconds for each feature (see `_USUAL_COSTS`), none below 0.
        mean_error: the mean relative error of late, of steps that compute prompts.
        is_known: whether enough steps are measured to predict any.
    """

    def __init__(self) -> None:
        self.costs = [0.0] * _NUM
        self.mean_error = _FIRST_ERROR
        self.is_known = False
        self._covariance: list[list[float]] = []
        self._first: list[tuple[StepWork, float]] = []
        self._outliers = 0  # in a row; negative if they were faster than predicted
        self._until_decode = 0

    def predict(self, work: StepWork, *, is_mixed: bool | None = None) -> float:
        """Returns the seconds that a step is going to take, 0.0 if nothing is known.

        Args:
            work: of the step.
            is_mixed: whether it computes prompts; by default as `work` says.
        """
        is_mixed = work.prefill_tokens > 0 if is_mixed is None else is_mixed
        return _dot(self.costs, work.features(is_mixed=is_mixed))

    def prefill_seconds(self, tokens: int, start: int) -> float:
        """Returns the predicted seconds for `tokens` tokens of one prompt from position `start` on,
        beyond the time of the step without them."""
        return self.costs[4] * tokens + self.costs[5] * (start + tokens / 2) * tokens

    def prefill_tokens_within(self, seconds: float, start: int) -> float:
        """Returns how many tokens of a prompt from position `start` on are computed in `seconds`:
        the inverse of `prefill_seconds`."""
        if seconds <= 0.0:
            return 0.0
        linear, square = self.costs[4] + self.costs[5] * start, 2.0 * self.costs[5] * seconds
        divisor = linear + sqrt(linear * linear + square)
        return 2.0 * seconds / divisor if divisor > 0.0 else float("inf")

    def learn(self, work: StepWork, seconds: float) -> float | None:
        """Takes in a measured step. Returns the relative error of its prediction, (predicted -
        measured) / measured, or None if nothing was predicted."""
        if seconds <= 0.0:
            return None
        if not self.is_known:
            self._first.append((work, seconds))
            if len(self._first) >= _NUM_FIRST:
                self._begin()
            return None
        predicted = self.predict(work)
        error = predicted / seconds - 1.0
        if work.prefill_tokens:
            size = min(abs(error), 1.0)
            self.mean_error += _ERROR_WEIGHT * (size - self.mean_error)
        elif self._until_decode:
            self._until_decode -= 1
            return error
        else:
            self._until_decode = _DECODE_INTERVAL - 1
        self._correct(work, seconds - predicted, max(predicted, seconds))
        return error

    def _begin(self) -> None:
        """Finds the unit of the costs from the first steps: the lowest that any gives, since
        a first step may have been compiled. Then learns from all of them."""
        features = [work.features(is_mixed=work.prefill_tokens > 0) for work, _ in self._first]
        unit = min(
            seconds / _dot(_USUAL_COSTS, feature)
            for feature, (_, seconds) in zip(features, self._first, strict=True)
        )
        self.costs = [unit * cost for cost in _USUAL_COSTS]
        self._forget()
        self.is_known = True
        for work, seconds in self._first:
            predicted = self.predict(work)
            self._correct(work, seconds - predicted, max(predicted, seconds))
        self._first.clear()
        self._outliers = 0

    def _forget(self) -> None:
        """Resets the variances of the costs to unknown; the costs stay as first estimates."""
        unit = max(cost / usual for cost, usual in zip(self.costs, _USUAL_COSTS, strict=True))
        variances = [
            (_UNKNOWN * max(cost, unit * usual)) ** 2
            for cost, usual in zip(self.costs, _USUAL_COSTS, strict=True)
        ]
        self._covariance = [[variances[i] if i == j else 0.0 for j in _ALL] for i in _ALL]

    def _correct(self, work: StepWork, residual: float, size: float) -> None:
        """Corrects the costs by a measurement that is `residual` seconds beyond its prediction, of
        steps that take about `size` seconds."""
        features = work.features(is_mixed=work.prefill_tokens > 0)
        present = [i for i in _ALL if features[i]]
        covariance = self._covariance
        drift = _DRIFT * _DRIFT
        for i in present:
            covariance[i][i] += drift * self.costs[i] * self.costs[i]
        gain = [sum(row[i] * features[i] for i in present) for row in covariance]
        variance = sum(gain[i] * features[i] for i in present) + (_NOISE * size) ** 2
        limit = _OUTLIER * sqrt(variance)
        if abs(residual) <= limit:
            self._outliers = 0
        else:
            self._count_outlier(residual)
            residual = limit if residual > 0 else -limit
        costs = self.costs
        for i in _ALL:
            if gain[i]:
                share = gain[i] / variance
                costs[i] = max(0.0, costs[i] + share * residual)
                row = covariance[i]
                for j in _ALL:
                    row[j] -= share * gain[j]
        if abs(self._outliers) >= _NUM_OUTLIERS:
            self._outliers = 0
            self._forget()

    def _count_outlier(self, residual: float) -> None:
        side = 1 if residual > 0 else -1
        self._outliers = self._outliers + side if self._outliers * side > 0 else side


def _dot(costs: Sequence[float], features: Sequence[float]) -> float:
    return sum([cost * feature for cost, feature in zip(costs, features, strict=True)])
