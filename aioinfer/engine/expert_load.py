"""The load of a model's experts: tokens by layer and place, as the workers report them.

The step loop calls `accept` for each result with sections; `/metrics`, the page and `GET /experts`
read it. A report comes every second at most (`worker.expert_report`) and takes some 50 us here.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import numpy.typing as npt

from aioinfer.ipc.expert_tokens import ExpertTokens
from aioinfer.ipc.plan import StepResult

#: Seconds in which half of what was counted is forgotten in `ExpertLoad.recent`.
HALF_LIFE_S = 60.0

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class ExpertLoad:
    """What the experts of one engine's model were given. Arrays are [L, P], by layer and place (see
    `ipc.expert_placement`); empty before the first report, and for models without experts.

    Attributes:
        layers: the numbers of the layers.
        experts, ranks: of each place; -1 as in `ExpertTokens`.
        totals: tokens since the start.
        recent: tokens, of which half is forgotten every `HALF_LIFE_S`.
        version: counts the reports.
    """

    def __init__(self) -> None:
        none = np.zeros((0, 0), np.int64)
        self.layers: list[int] = []
        self.experts: Ints = none
        self.ranks: Ints = none
        self.totals: Ints = none
        self.recent: Floats = none.astype(np.float64)
        self.version = 0
        self._reported = 0.0

    def accept(self, result: StepResult) -> None:
        """Adds what a result reports, if it does."""
        found = result.section(ExpertTokens)
        if found is not None:
            self.add(found, time.monotonic())

    def add(self, found: ExpertTokens, now: float) -> None:
        """Adds a report that came at `now`, of `time.monotonic`."""
        if not np.array_equal(self.experts, found.experts):  # the first one
            self.layers = found.layers.tolist()
            self.experts = found.experts.astype(np.int64)
            self.ranks = found.ranks.astype(np.int64)
            self.totals = np.zeros_like(self.experts)
            self.recent = np.zeros(self.experts.shape)
        tokens = found.tokens.view(np.uint32).astype(np.int64)
        self.totals += tokens
        self.recent *= 0.5 ** ((now - self._reported) / HALF_LIFE_S)
        self.recent += tokens
        self._reported = now
        self.version += 1

    @property
    def num_experts(self) -> int:
        """How many experts a layer has; 0 where nothing is known."""
        return int(self.experts.max(initial=-1)) + 1

    def by_expert(self, tokens: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Returns the sums of `tokens` [L, P] over the copies of each expert, [L, num_experts]."""
        return _sum_by(self.experts, tokens, self.num_experts)

    def by_rank(self, tokens: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Returns the sums of `tokens` [L, P] over the places of each rank, [L, ranks]: [L, 0]
        where all ranks compute a part of every expert."""
        return _sum_by(self.ranks, tokens, int(self.ranks.max(initial=-1)) + 1)


def imbalance(loads: npt.NDArray[Any]) -> Floats:
    """Returns the largest load over the mean in each row of `loads` [L, N]; 1 in a row of zeros,
    and where N is 0."""
    if not loads.size:
        return np.ones(len(loads))
    mean = loads.mean(axis=1)
    return np.divide(loads.max(axis=1), mean, out=np.ones(len(loads)), where=mean > 0)


def _sum_by(numbers: Ints, tokens: npt.NDArray[Any], count: int) -> npt.NDArray[Any]:
    """Returns the sums of `tokens` [L, P] by the numbers [L, P] of 0 .. `count`, of which those
    below 0 are left out: [L, count]."""
    sums = np.zeros((len(numbers), count + 1), tokens.dtype)
    np.add.at(sums, (np.arange(len(numbers))[:, None], numbers), tokens)  # -1 is the last column
    return sums[:, :count]
