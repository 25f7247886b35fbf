"""The choice of drafts: against the best fixed number of drafts on simulated machines, where drafts
are kept by chance."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from aioinfer.config import load_config
from aioinfer.features.masks.planning import Constrained
from aioinfer.features.speculation.acceptance import Acceptance
from aioinfer.features.speculation.costs import SIZES, StepCosts
from aioinfer.features.speculation.planning import Planning
from aioinfer.scheduler.request import Request
from tests.test_scheduler import make_request

MOST = 5


def memory_bound(rows: int) -> float:
    """A dense model on a GPU: weights until some hundred rows, then arithmetic; 1 s is a row's."""
    return max(1.0 + 0.004 * rows, 0.012 * rows)


def of_experts(rows: int) -> float:
    """Each row reads experts of its own, until all are read."""
    return 0.4 + 0.6 * min(8.0, rows**0.75)


def of_cpu(rows: int) -> float:
    return 1.0 + 0.17 * (rows - 1)


@dataclass
class Metrics:
    counts: Counter[str] = field(default_factory=Counter)

    def count(self, name: str, times: int = 1) -> None:
        self.counts[name] += times


def make_planning(measured=()) -> Planning:
    config = load_config(
        overrides={"model.path": "m", "speculation.method": "ngram",
                   "speculation.max_draft_tokens": MOST}
    )  # fmt: skip
    limits = SimpleNamespace(row_seconds=measured)
    host = SimpleNamespace(
        scheduler=lambda: SimpleNamespace(limits=limits), metrics=Metrics(), config=config
    )
    return Planning(host)


class Simulation:
    """Requests whose drafts are kept with given probabilities, on a machine of which `seconds` says
    how long a step takes. Results come one step late, as in the engine."""

    def __init__(self, seconds, streams: int, first: float, further: float, *, is_measured: bool):
        self.seconds, self.first, self.further = seconds, first, further
        self.chance = random.Random(5)
        self.requests = [make_request(str(n), [1], 9) for n in range(streams)]
        measured = [(rows, seconds(rows)) for rows in SIZES] if is_measured else ()
        self.planning = make_planning(measured)
        self.drafts: Counter[int] = Counter()
        self._late: list = []

    def rate(self, steps: int, fixed: int | None = None) -> float:
        """Returns the tokens a second of so many steps."""
        tokens = time = 0.0
        for _ in range(steps):
            ahead = dict.fromkeys(self.requests, fixed)
            if fixed is None:
                ahead = self.planning.lookahead(self.requests) or {}
            outcomes = [(r, ahead.get(r, 0)) for r in self.requests]
            outcomes = [(r, count, self._keep(count)) for r, count in outcomes]
            rows = sum(1 + count for _, count, _ in outcomes)
            took = self.seconds(rows)
            time += took
            tokens += sum(1 + kept for _, _, kept in outcomes)
            self.drafts.update(count for _, count, _ in outcomes)
            self._late.append((rows, took, outcomes))
            if len(self._late) > 1:
                self._take(*self._late.pop(0))
        return tokens / time

    def _keep(self, count: int) -> int:
        kept, chance = 0, self.first
        while kept < count and self.chance.random() < chance:
            kept, chance = kept + 1, self.further
        return kept

    def _take(self, rows: int, took: float, outcomes: list) -> None:
        self.planning.note_step(rows, took * self.chance.uniform(0.97, 1.03))
        for request, count, kept in outcomes:
            if count:
                self.planning.take_lookahead(request, count, kept)


MACHINES = pytest.mark.parametrize("machine", [memory_bound, of_experts, of_cpu])


@MACHINES
@pytest.mark.parametrize("streams", [1, 8, 64, 256])
@pytest.mark.parametrize("is_measured", [True, False])
def test_drafts_that_are_never_kept_cost_little(machine, streams: int, is_measured: bool) -> None:
    simulation = Simulation(machine, streams, 0.0, 0.0, is_measured=is_measured)
    plain = streams / machine(streams)
    simulation.rate(100)
    assert simulation.rate(200 if streams > 64 else 500) >= 0.985 * plain
    assert sum(simulation.drafts.values()) > 0


def test_first_steps_that_took_too_long_do_not_decide_for_good() -> None:
    """Steps without drafts are measured again, and then known to be faster."""
    simulation = Simulation(of_cpu, 1, 0.04, 0.04, is_measured=False)
    simulation.planning.lookahead([])
    for _ in range(4):
        simulation.planning.note_step(1, 5.0 * of_cpu(1))
    simulation.rate(1500)
    assert simulation.rate(500) >= 0.98 / of_cpu(1)


@MACHINES
@pytest.mark.parametrize("streams", [1, 8, 48])
@pytest.mark.parametrize(("first", "further"), [(0.8, 0.8), (0.95, 0.97), (0.3, 0.5)])
def test_the_choice_is_near_the_best_fixed_number(machine, streams, first, further) -> None:
    def rate(fixed: int | None) -> float:
        measured = machine is not of_cpu  # a GPU's steps are measured at the start
        simulation = Simulation(machine, streams, first, further, is_measured=measured)
        simulation.rate(100, fixed)
        return simulation.rate(1200 // streams + 100, fixed)

    best = max(rate(fixed) for fixed in range(MOST + 1))
    assert rate(None) >= 0.92 * best


@pytest.mark.parametrize("streams", [1, 8])
def test_drafts_come_back_when_the_text_begins_to_repeat(streams: int) -> None:
    simulation = Simulation(memory_bound, streams, 0.0, 0.0, is_measured=True)
    simulation.rate(300)
    simulation.first, simulation.further = 0.95, 0.95
    simulation.rate(30)
    simulation.drafts.clear()
    simulation.rate(10)
    assert simulation.drafts[MOST] > 8 * streams / 2


def test_each_request_has_the_drafts_that_it_deserves() -> None:
    planning = make_planning([(rows, memory_bound(rows)) for rows in SIZES])
    good, bad, constrained = (make_request(name, [1], 9) for name in "abc")
    constrained.uses = (Constrained(None),)
    good.lookahead_state, bad.lookahead_state = Acceptance(0.9, 0.9), Acceptance(0.001, 0.1)
    chosen = planning.lookahead([good, bad, constrained])
    assert chosen == {good: MOST}


def test_nothing_is_planned_before_any_step_was_measured() -> None:
    planning = make_planning()
    requests: list[Request] = [make_request("a", [1], 9)]
    assert planning.lookahead(requests) is None
    for _ in range(4):
        assert planning.lookahead(requests) is None
        planning.note_step(1, 0.01)
    assert planning.lookahead(requests)
    planning.restart()
    assert planning.lookahead(requests) is None


def test_costs_follow_what_is_measured() -> None:
    costs = StepCosts([(1, 1.0), (32, 1.5), (64, 3.0)])
    assert costs.seconds(32) == 1.5
    assert 1.0 < costs.seconds(8) <= 1.5
    assert costs.seconds(128) > 3.0
    costs.learn(32, 60.0)
    assert costs.seconds(32) < 1.7, "an outlier counts for little"
    for _ in range(60):
        costs.learn(32, 2.0)
    assert costs.seconds(32) == pytest.approx(2.0, rel=0.01)
    costs.learn(10**6, 1.0)  # more rows than there are values for
