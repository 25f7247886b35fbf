"""The choice of drafts: against the best fixed number of drafts on simulated machines, where drafts
are kept by chance."""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import ClassVar
from weakref import ref

import numpy as np
import pytest

from aioinfer.config import load_config
from aioinfer.engine.beam_search import Beam
from aioinfer.features.masks.planning import Constrained
from aioinfer.features.speculation.acceptance import Acceptance
from aioinfer.features.speculation.costs import SIZES, StepCosts
from aioinfer.features.speculation.ngram import LONG, MAX_PREDICTED, MAX_SUFFIX, NONE
from aioinfer.features.speculation.planning import Planning, Predicted
from aioinfer.ipc.lookahead import SKIPPED, LookaheadRows
from aioinfer.ipc.plan import StepPlan, StepResult
from aioinfer.scheduler.features import StepFeatures
from aioinfer.scheduler.limits import SchedulerLimits
from aioinfer.scheduler.request import Finish, Request
from aioinfer.scheduler.scheduler import Scheduler
from aioinfer.scheduler.steps import Row
from tests.test_scheduler import make_request

MOST = 5


def memory_bound(rows: int, ahead: bool = False) -> float:
    """A dense model on a GPU: weights until some hundred rows, then arithmetic; 1 s is a row's."""
    return max(1.0 + 0.004 * rows, 0.012 * rows)


def of_experts(rows: int, ahead: bool = False) -> float:
    """Each row reads experts of its own, until all are read."""
    return 0.4 + 0.6 * min(8.0, rows**0.75)


def of_cpu(rows: int, ahead: bool = False) -> float:
    return 1.0 + 0.17 * (rows - 1)


#: Milliseconds of a captured step of an 8B model on an H200, plain and with lookahead, by its rows
#: (notes/speculation.md).
PLAIN_MS = {1: 4.06, 2: 4.08, 4: 4.12, 8: 4.21, 16: 4.39, 24: 4.54, 32: 4.68, 40: 4.83, 48: 4.97,
            64: 5.19, 80: 5.41, 96: 5.62, 128: 6.11, 160: 6.6, 192: 7.33, 256: 8.71, 320: 9.99,
            384: 11.75, 512: 13.46}  # fmt: skip
AHEAD_MS = {2: 4.27, 3: 4.3, 4: 4.32, 6: 4.37, 8: 4.42, 12: 4.47, 16: 4.52, 24: 4.61, 32: 4.71,
            48: 4.86, 64: 5.01, 96: 5.32, 128: 5.62, 192: 6.98, 256: 8.33, 384: 11.03, 512: 13.74,
            640: 17.19, 768: 20.63, 896: 24.08}  # fmt: skip


def card(rows: int, ahead: bool = False) -> float:
    """Seconds of a step with its rows of a captured size."""
    sizes = AHEAD_MS if ahead else PLAIN_MS
    return next(ms for size, ms in sizes.items() if size >= rows) / 1e3


def start_times(machine) -> list[tuple[int, float, bool]]:
    """Returns what the workers of a machine measure at their start."""
    if machine is card:
        plain, ahead = (
            [(rows, ms / 1e3, is_ahead) for rows, ms in times.items()]
            for times, is_ahead in ((PLAIN_MS, False), (AHEAD_MS, True))
        )
        return plain + ahead
    return [(rows, machine(rows, ahead), ahead) for ahead in (False, True) for rows in SIZES]


@dataclass
class Metrics:
    counts: Counter[str] = field(default_factory=Counter)

    def count(self, name: str, times: int = 1) -> None:
        self.counts[name] += times


def make_planning(
    measured=(), method: str = "ngram", others: str = "", stages: int = 1, **settings: object
) -> Planning:
    """Returns the choice beside a feature of another package, if one is named."""
    config = load_config(
        overrides={"model.path": "m", "speculation.method": method,
                   "speculation.max_draft_tokens": MOST, "model.features": [others] * bool(others),
                   "parallel.pipeline_parallel_size": stages, **settings}
    )  # fmt: skip
    limits = SimpleNamespace(step_times=measured, max_lookahead=384)
    scheduler = SimpleNamespace(limits=limits, running=[None])
    return Planning(SimpleNamespace(scheduler=lambda: scheduler, metrics=Metrics(), config=config))


def enter(planning: Planning, request: Request, acceptance: Acceptance) -> None:
    """Makes what is known of a request's drafts this."""
    known = planning._known(request)
    known.acceptance = [acceptance for _ in known.acceptance]


class Simulation:
    """Requests whose drafts are kept with given probabilities, on a machine of which `seconds` says
    how long a step takes. Results come one step late, as in the engine. `others`: probabilities of
    requests that have others."""

    def __init__(self, seconds, streams: int, first: float, further: float, *, is_measured: bool):
        self.seconds, self.first, self.further = seconds, first, further
        self.chance = random.Random(5)
        self.requests = [make_request(str(n), [1], 9) for n in range(streams)]
        self.planning = make_planning(start_times(seconds) if is_measured else ())
        self.drafts: Counter[int] = Counter()
        self.others: dict[Request, tuple[float, float]] = {}
        self._streams = streams
        self._kept: Counter[Request] = Counter()
        self._late: list = []

    def rate(self, steps: int, fixed: int | None = None) -> float:
        """Returns the tokens a second of so many steps."""
        before = self._kept.total()
        seconds = sum(self._step(fixed) for _ in range(steps))
        return (steps * len(self.requests) + self._kept.total() - before) / seconds

    def batch(self, tokens: int, fixed: int | None = None) -> float:
        """Returns the seconds until new requests, which come together, have so many tokens each."""
        left = {make_request(str(n), [1], 9): tokens for n in range(self._streams)}
        seconds = 0.0
        while left:
            self.requests = [*left]
            before = self._kept.copy()
            seconds += self._step(fixed)
            for request in self.requests:
                left[request] -= 1 + self._kept[request] - before[request]
                if left[request] <= 0:
                    del left[request]
        return seconds

    def _step(self, fixed: int | None) -> float:
        """Executes a step, with `fixed` drafts for each request, or as many as are chosen. Returns
        its seconds."""
        ahead = dict.fromkeys(self.requests, fixed)
        if fixed is None:
            ahead = self.planning.lookahead(self.requests) or {}
        outcomes = [(r, ahead.get(r, 0)) for r in self.requests]
        outcomes = [(r, count, self._keep(r, count)) for r, count in outcomes]
        rows = sum(1 + count for _, count, _ in outcomes)
        has_lookahead = rows > len(outcomes)
        took = self.seconds(rows, has_lookahead)
        for request, count, kept in outcomes:
            self._kept[request] += kept
            self.drafts[count] += 1
        self._late.append((rows, took, has_lookahead, outcomes))
        if len(self._late) > 1:
            self._take(*self._late.pop(0))
        return took

    def _keep(self, request: Request, count: int) -> int:
        chance, further = self.others.get(request, (self.first, self.further))
        kept = 0
        while kept < count and self.chance.random() < chance:
            kept, chance = kept + 1, further
        return kept

    def _take(self, rows: int, took: float, has_lookahead: bool, outcomes: list) -> None:
        took *= self.chance.uniform(0.97, 1.03)
        self.planning.note_step(rows, took, has_lookahead)
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


@pytest.mark.parametrize(("machine", "streams"), [(card, 8), (card, 32), (of_experts, 8)])
@pytest.mark.parametrize("first", [0.05, 0.1, 0.2])
def test_drafts_that_are_seldom_kept_cost_little(machine, streams: int, first: float) -> None:
    """A draft that is kept by chance does not bring many others."""
    simulation = Simulation(machine, streams, first, 0.5, is_measured=True)
    simulation.rate(100)
    assert simulation.rate(600) >= 0.98 * streams / machine(streams)


def test_first_steps_that_took_too_long_do_not_decide_for_good() -> None:
    """Steps without drafts are measured again, and then known to be faster."""
    simulation = Simulation(of_cpu, 1, 0.04, 0.04, is_measured=False)
    simulation.planning.lookahead([])
    for _ in range(4):
        simulation.planning.note_step(1, 5.0 * of_cpu(1), False)
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
    planning = make_planning(start_times(memory_bound))
    good, bad, beam = (make_request(name, [1], 9) for name in "abc")
    beam.uses = (Beam(None),)
    enter(planning, good, Acceptance(0.9, 0.9))
    enter(planning, bad, Acceptance(0.001, 0.1))
    assert planning.lookahead([good, bad, beam]) == {good: MOST}


@pytest.mark.parametrize(
    ("method", "others", "has_drafts"),
    [("ngram", "", True), ("ngram", "recorded_drafts", False), ("mtp", "", False)],
)
def test_a_constrained_request_has_drafts_that_the_engine_can_find(
    method: str, others: str, has_drafts: bool
) -> None:
    planning = make_planning(start_times(memory_bound), method, others)
    plain, constrained = requests = [make_request(name, [1], 9) for name in "ab"]
    constrained.uses = (Constrained(None),)
    for request in requests:
        enter(planning, request, Acceptance(0.9, 0.9))
    planning.lookahead([plain])  # of a drafter the first step has no drafts yet
    expected = [plain, constrained] if has_drafts else [plain]
    assert planning.lookahead(requests) == dict.fromkeys(expected, MOST)


def test_a_text_that_begins_to_repeat_itself_has_drafts_at_once() -> None:
    """Where requests whose end stood earlier in the text kept theirs, and others kept none."""
    planning = make_planning(start_times(of_cpu))
    request = make_request("a", [1, 2, 3, 4, 5, 6], 999)
    planning.means[NONE], planning.means[LONG] = Acceptance(0.01, 0.5), Acceptance(0.8, 0.9)
    enter(planning, request, Acceptance(0.01, 0.5))
    planning._known(request).acceptance[LONG] = Acceptance(0.8, 0.9)
    planning.lookahead([request])  # a probe
    for token in (7, 8, 1, 2, 3):
        assert planning.lookahead([request]) is None, token
        request.tokens.append(token)
    request.tokens.append(4)
    assert planning.lookahead([request]) == {request: MOST}
    request.tokens.append(9)
    assert planning.lookahead([request]) is None


def test_a_long_match_is_told_apart_from_the_drafts_of_a_drafter() -> None:
    """A match of seven tokens, behind which copied tokens take the place of the drafter's, has an
    acceptance of its own; six tokens are none."""
    planning = make_planning(start_times(of_cpu), method="draft")
    request = make_request("a", [*range(1, 9), 1, 2, 3, 4, 5, 6], 999)
    planning.means[NONE] = Acceptance(0.01, 0.1)
    planning._known(request).acceptance[:] = (
        Acceptance(0.01, 0.1),
        Acceptance(),
        Acceptance(0.9, 0.9),
    )
    planning.lookahead([request])
    known = planning._known(request)
    assert known.match == NONE
    request.tokens.append(7)
    planning.lookahead([request])
    assert known.match == LONG
    assert planning.lookahead([request]) == {request: MOST}
    first = known.acceptance[NONE].first
    planning.take_lookahead(request, MOST, MOST)
    assert known.acceptance[NONE].first == first


def test_matches_of_many_requests_are_looked_for_in_turn() -> None:
    """None is as it was for long; what is learned of a draft is of the match that its step had."""
    planning = make_planning(start_times(memory_bound))
    requests = [make_request(str(n), [1, 2, 3, 4, 5], 999) for n in range(40)]
    planning.lookahead(requests)
    for request in requests:
        request.tokens.extend([1, 2, 3, 4])
    planning.lookahead(requests)
    seen = [planning._known(request).match for request in requests]
    assert seen == [NONE] * 16 + [LONG] * 16 + [NONE] * 8
    for request in requests[15:17]:
        before = planning._known(request).acceptance[NONE].first
        planning.take_lookahead(request, 1, 0)  # of the step before the last
        assert planning._known(request).acceptance[NONE].first < before
    for _ in range(2):
        planning.lookahead(requests)
    assert [planning._known(request).match for request in requests] == [LONG] * 40


def test_the_engine_finds_the_drafts_of_the_workers() -> None:
    planning = make_planning()
    assert planning.drafts(make_request("a", [4, 5, 6, 7, 4, 5], 9), 3) == [6, 7, 4]
    assert planning.drafts(make_request("b", [4, 5, 6], 9), 2) == [0, 0]


def test_predicted_texts_are_sent_over_several_plans_and_again_after_a_preemption() -> None:
    """A plan takes 64 texts of full length; drafts are found in a text once it was sent."""
    planning, text = make_planning(), np.arange(MAX_PREDICTED + MAX_SUFFIX, dtype=np.int32)
    requests = [make_request(str(slot), [4, 5, 6, 7], 9) for slot in range(70)]
    for slot, request in enumerate(requests):
        request.slot, request.uses = slot, (Predicted(text),)
    rows = [Row(request, request.uses[0], 3, 4, request.slot) for request in requests]

    def sent() -> list[int]:
        section = planning.plan(rows)
        return [] if section is None else section.slots.tolist()

    assert planning.drafts(requests[0], 2) == [0, 0]
    assert sent() == [*range(64)]
    assert planning.drafts(requests[0], 2) == [8, 9]
    assert planning.drafts(requests[64], 2) == [0, 0]
    assert sent() == [*range(64, 70)]
    assert planning.drafts(requests[64], 2) == [8, 9]
    assert sent() == []
    requests[3].num_preemptions += 1
    requests[5].num_interruptions += 1
    assert planning.drafts(requests[3], 2) == [0, 0]
    assert sent() == [3, 5]


def ended(planning: Planning, tokens: list[int], prompt_len: int = 1, reason: str = "stop") -> None:
    request = make_request("ended", tokens[:prompt_len], 999)
    request.tokens.extend(tokens[prompt_len:])
    request.end(Finish(reason))
    planning.note_end(request)


def test_a_request_that_has_ended_is_not_kept() -> None:
    """Not by the choice of the drafts that it had in its last step."""
    planning = make_planning(start_times(memory_bound))
    request = make_request("a", [1], 9)
    enter(planning, request, Acceptance(0.9, 0.9))
    assert planning.lookahead([request]) == {request: MOST}
    request.end(Finish("length"))
    planning.note_end(request)
    kept = ref(request)
    del request
    assert kept() is None


def test_the_text_of_another_request_is_sent_where_a_request_has_no_match() -> None:
    """At its first step, again when it goes on as yet another text, and not with each step."""
    planning = make_planning(start_times(of_cpu))
    first, other = [*range(100, 140)], [*range(200, 240)]
    ended(planning, first, prompt_len=20)
    ended(planning, other)
    request = make_request("a", first[:20], 999)

    def sent() -> list[int] | None:
        planning.lookahead([request])
        section = planning.plan([Row(request, use, 0, 1, 0) for use in request.uses])
        return None if section is None else section.tokens.tolist()

    assert sent() == first[13:]
    assert planning._known(request).match == LONG
    assert planning.drafts(request, 2) == first[20:22]
    for token in first[20:24]:
        request.tokens.append(token)
        assert sent() is None
    request.tokens.extend([1, 2, 3, *other[:14]])
    assert sent() == other[7:]
    assert planning.drafts(request, 2) == other[14:16]
    assert len(request.uses) == 1
    assert request.use(Predicted) is None


@pytest.mark.parametrize("why", ["no prefix cache", "prediction", "error", "own text", "beams"])
def test_no_text_of_another_request_is_used(why: str) -> None:
    """Without a prefix cache, where the client has predicted a text, of a request that ended with
    an error, where the text itself has the match, and in a beam search."""
    settings = {"cache.enable_prefix_caching": False} if why == "no prefix cache" else {}
    planning, text = make_planning(start_times(of_cpu), **settings), [*range(100, 140)]
    ended(planning, text, reason="error" if why == "error" else "stop")
    request = make_request("a", text[:20] * (2 if why == "own text" else 1), 999)
    if why == "prediction":
        request.uses = (Predicted(np.array([1], np.int32)),)
    if why == "beams":
        request.uses = (Beam(None),)
    before = request.uses
    planning.lookahead([request])
    assert request.uses == before


def test_nothing_is_planned_before_any_step_was_measured() -> None:
    planning = make_planning()
    requests: list[Request] = [make_request("a", [1], 9)]
    assert planning.lookahead(requests) is None
    for _ in range(4):
        assert planning.lookahead(requests) is None
        planning.note_step(1, 0.01, False)
    assert planning.lookahead(requests)
    planning.restart()
    assert planning.lookahead(requests) is None


def test_costs_follow_what_is_measured() -> None:
    costs = StepCosts([(1, 1.0, False), (32, 1.5, False), (64, 3.0, False)])
    assert costs.plain(32) == costs.with_lookahead(32) == 1.5
    assert 1.0 < costs.plain(8) <= 1.5
    assert costs.plain(128) > 3.0
    costs.learn(32, 1.5, has_lookahead=False)
    costs.learn(32, 60.0, has_lookahead=False)
    assert costs.plain(32) < 2.3, "an outlier counts for no more than twice what was expected"
    for _ in range(60):
        costs.learn(32, 2.0, has_lookahead=False)
        costs.learn(32, 2.5, has_lookahead=True)
    assert costs.plain(32) == pytest.approx(2.0, rel=0.01)
    assert costs.with_lookahead(32) == pytest.approx(2.5, rel=0.01)
    assert costs.plain(64) > 3.5, "what was measured at the start alone is corrected with it"
    costs.learn(10**6, 1.0, has_lookahead=False)  # more rows than there are values for


@pytest.mark.parametrize("streams", [1, 8, 32, 128])
def test_a_batch_of_new_requests_loses_nothing_to_drafts(streams: int) -> None:
    """Requests of 256 tokens that begin together, on a card: its recorded drafts pay, nearly as
    much as the best fixed number; equal requests are not kept from drafts, which would end last,
    alone, and while they become fewer hardly a step goes without drafts to measure its time."""
    expected = {1: 2.4, 8: 2.05, 32: 1.78, 128: 1.22}[streams]
    simulation = Simulation(card, streams, 0.8, 0.57, is_measured=True)
    plain = simulation.batch(256, fixed=0)
    assert plain >= expected * simulation.batch(256)
    assert plain >= expected * simulation.batch(256), "with the average of the first batch"


@pytest.mark.parametrize(
    ("machine", "streams"),
    [(card, 1), (card, 8), (card, 32), (card, 128), (of_cpu, 1), (of_cpu, 4)],
)
def test_new_requests_do_not_pay_for_those_before_them(machine, streams: int) -> None:
    """After requests that repeat their prompt come others that repeat nothing."""
    simulation = Simulation(machine, streams, 0.95, 0.95, is_measured=machine is card)
    simulation.batch(256)
    simulation.first = simulation.further = 0.0
    plain = simulation.batch(256, fixed=0)
    for _ in range(2):
        assert plain >= 0.98 * simulation.batch(256)


class LateCaptures:
    """A mixture of experts whose draft head makes steps with lookahead dear, in milliseconds by
    rows; while `missing`, the first step of a size waits until its graph is captured."""

    PLAIN_MS: ClassVar = {1: 2.45, 2: 3.1, 4: 4.1, 8: 5.9}
    AHEAD_MS: ClassVar = {2: 3.9, 4: 5.5, 8: 8.5}

    def __init__(self) -> None:
        self.missing: set[int] = set()

    def __call__(self, rows: int, ahead: bool = False) -> float:
        sizes = self.AHEAD_MS if ahead else self.PLAIN_MS
        size = next(size for size in (*sizes, rows) if size >= rows)
        took = sizes.get(size, 2.0 * rows)
        if ahead and size in self.missing:
            self.missing.remove(size)
            took += 60.0
        return took / 1e3


def test_a_capture_does_not_keep_drafts_away() -> None:
    machine = LateCaptures()
    simulation = Simulation(machine, 1, 0.8, 0.775, is_measured=True)
    plain = simulation.batch(1024, fixed=0)
    machine.missing |= {4, 8}  # with two rows the step was captured at the start
    simulation.batch(1024)
    assert 4 not in machine.missing
    assert plain >= 1.2 * sum(simulation.batch(1024) for _ in range(4)) / 4


def test_one_probe_of_many_requests_shows_whether_drafts_pay() -> None:
    """It has as many drafts as a captured step has rows left, and requests without follow those
    with drafts: of 128 streams, where one draft for each pays, most soon have one."""
    simulation = Simulation(card, 128, 0.8, 0.775, is_measured=True)
    simulation.planning.lookahead(simulation.requests[:1])
    first = next(filter(None, (simulation.planning.lookahead(simulation.requests)
                               for _ in range(9))))  # fmt: skip
    assert len(first) == 64, "192 rows"
    simulation = Simulation(card, 128, 0.8, 0.775, is_measured=True)
    simulation.batch(256)
    simulation.drafts.clear()
    simulation.batch(256)
    assert simulation.drafts[0] < 0.4 * simulation.drafts.total()


def test_of_many_requests_those_that_keep_their_drafts_have_some() -> None:
    """A quarter of 128 keeps nearly all of them, where one draft for each request does not pay:
    probes show that further drafts are kept, too."""
    simulation = Simulation(card, 128, 0.3, 0.5, is_measured=True)
    simulation.others = dict.fromkeys(simulation.requests[::4], (0.95, 0.95))
    simulation.rate(1200)
    assert simulation.rate(300) > 1.06 * 128 / card(128)


def test_equal_requests_get_equally_many_drafts() -> None:
    """Chance does not keep a request from drafts for long."""
    simulation = Simulation(card, 64, 0.8, 0.57, is_measured=True)
    simulation.rate(300)
    kept = simulation._kept
    assert min(kept.values()) > 0.8 * kept.total() / 64


def test_drafts_do_not_seem_to_save_time_by_themselves() -> None:
    """A plain step takes no longer than one with drafts: what was measured while other work ran on
    the machine is out of date."""
    costs = StepCosts()
    for _ in range(6):
        costs.learn(1, 1.0, has_lookahead=False)
        costs.learn(2, 1.2, has_lookahead=True)
    for _ in range(6):
        costs.learn(1, 2.0, has_lookahead=False)
    assert costs.plain(1) > 1.3
    costs.learn(2, 1.2, has_lookahead=True)
    assert costs.plain(1) <= costs.with_lookahead(2) == pytest.approx(1.2)


def test_a_probe_of_a_drafter_waits_for_its_drafts() -> None:
    """A step that looks ahead without drafts makes those that the next one verifies."""
    planning = make_planning(start_times(of_cpu), method="draft")
    requests = [make_request("a", [1], 9)]
    enter(planning, requests[0], Acceptance(0.01, 0.1))
    asked = [planning.lookahead(requests) for _ in range(4)]
    assert {} in asked
    assert asked[asked.index({}) + 1] == {requests[0]: 1}


@pytest.mark.parametrize("first", [0.0, 0.1, 0.8])
def test_in_a_pipeline_drafts_pay_for_the_wait_behind_them(first: float) -> None:
    """A step behind drafts is launched when their result has come, which takes 1.5 ms in the place
    of none; each of two stages takes half of a step. Times as of Qwen3-8B on two H200s."""
    wait, chance = 1.5e-3, random.Random(3)
    times = [(rows, seconds / 2, ahead) for rows, seconds, ahead in start_times(card)]
    planning = make_planning(times, stages=2)
    requests = [make_request("a", [1], 9)]
    seconds = tokens = drafts = 0
    had_drafts = False
    for step in range(600):
        count = (planning.lookahead(requests) or {}).get(requests[0], 0)
        took = card(1 + count, count > 0) + wait * had_drafts
        kept = 0
        while kept < count and chance.random() < first:
            kept += 1
        planning.note_step(1 + count, took, count > 0)
        if count:
            planning.take_lookahead(requests[0], count, kept)
        if step >= 200:
            seconds, tokens, drafts = seconds + took, tokens + 1 + kept, drafts + count
        had_drafts = count > 0
    plain = 1 / card(1)
    assert drafts
    assert tokens / seconds > (0.98 if first < 0.5 else 2.0) * plain


class Pipeline:
    """The production scheduler before two simulated stages, each of which takes half of a step as
    of Qwen3-8B on two H200s: 128 prompt tokens and 256 output tokens a request. A plan takes
    `TO_STAGE_S` to the first stage, and a result `BACK_S`, as was measured with drafts."""

    STAGES, TO_STAGE_S, BACK_S = 2, 0.5e-3, 0.3e-3

    def __init__(self, streams: int, first: float = 0.0, method: str = "ngram"):
        self._first, self._chance = first, random.Random(3)
        times = [(rows, seconds / 2, ahead) for rows, seconds, ahead in start_times(card)]
        planning = make_planning(times, method, stages=self.STAGES)
        planning.host.scheduler = lambda: self.scheduler
        has_drafts = method != "none"
        limits = SchedulerLimits(
            num_blocks=(8 * streams,), block_size=128, max_num_seqs=streams, token_budget=8192,
            prefill_cap=2048, num_stages=self.STAGES, max_lookahead=384 * has_drafts,
            step_times=times if has_drafts else (),
        )  # fmt: skip
        features = StepFeatures([planning] if has_drafts else [])
        self.scheduler = Scheduler(limits, clock=lambda: self._now, features=features)
        self._now, self._free, self._sampled = 0.0, [0.0] * self.STAGES, [0.0] * streams
        for number in range(streams):
            prompt = [self._chance.randrange(8, 100_000) for _ in range(128)]
            self.scheduler.add(make_request(str(number), prompt, 256))

    def seconds(self) -> float:
        """Returns how long all requests take."""
        posted: deque[tuple[StepPlan, float]] = deque()
        while posted or not self.scheduler.is_idle:
            plan = self.scheduler.schedule() if len(posted) <= self.STAGES else None
            if plan is not None:
                self.scheduler.confirm_post()
                posted.append((plan, self._execute(plan)))
                self._now += 1e-4
                continue
            plan, done = posted.popleft()
            self._now = max(self._now, done)
            self.scheduler.update(StepResult(plan.step_id, self._sample(plan)))
        return self._now

    def _execute(self, plan: StepPlan) -> float:
        """Returns when the result comes. Rows need their requests' last tokens."""
        decodes = int((plan.lengths == 1).sum())
        prompt_tokens = plan.num_tokens - decodes
        seconds = (card(decodes, _has_drafts(plan)) if decodes else 2e-3) / self.STAGES
        seconds += 23.4e-6 * prompt_tokens / self.STAGES
        at = max([self._now + self.TO_STAGE_S, *(self._sampled[slot] for slot in plan.slots)])
        for stage in range(self.STAGES):
            at = self._free[stage] = max(at, self._free[stage]) + seconds
        for slot in plan.slots:
            self._sampled[slot] = at
        return at + self.BACK_S

    def _sample(self, plan: StepPlan) -> np.ndarray:
        """Keeps drafts by chance: the first with its probability, further ones with 0.57."""
        lookahead = plan.section(LookaheadRows)
        offsets = np.zeros(len(plan.slots)) if lookahead is None else lookahead.offsets
        tokens, is_kept = [], True
        for offset in offsets[plan.samples == 1].tolist():
            if offset == 0:
                is_kept = True
            else:
                chance = self._first if offset == 1 else 0.57
                is_kept = is_kept and self._chance.random() < chance
            tokens.append(self._chance.randrange(8, 100_000) if is_kept else SKIPPED)
        return np.array(tokens, np.int32)


def _has_drafts(plan: StepPlan) -> bool:
    lookahead = plan.section(LookaheadRows)
    return lookahead is not None and bool(lookahead.offsets.any())


@pytest.mark.parametrize("streams", [1, 8, 32])
@pytest.mark.parametrize("first", [0.0, 0.1, 0.8])
def test_drafts_in_a_full_pipeline(streams: int, first: float) -> None:
    """Requests whose drafts are on their way miss a turn, and micro-batches stay whole."""
    gain = Pipeline(streams, method="none").seconds() / Pipeline(streams, first).seconds()
    assert gain > (0.97 if first < 0.5 else 1.4)
