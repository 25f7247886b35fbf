"""Step features: when the scheduler and the recovery call them, and what they can do. The feature
here tags sampled rows in the plan; a worker answers with the token of each tagged row."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch  # noqa: F401  # the worker halves import it, and a process can do so once
from hypothesis import given, settings
from hypothesis import strategies as st

from aioinfer import features
from aioinfer.engine import recovery
from aioinfer.engine.emission import Emission
from aioinfer.engine.metrics import EngineMetrics
from aioinfer.engine.open_requests import OpenRequests
from aioinfer.engine.output import OutputSequence, RequestOutput
from aioinfer.engine.recovery import EngineState, Recovery, Workers
from aioinfer.errors import ConfigError
from aioinfer.features import FEATURES, load_halves
from aioinfer.ipc.plan import StepPlan, StepResult
from aioinfer.ipc.sections import I32, Section
from aioinfer.ipc.sections import array as column
from aioinfer.sampling_params import SamplingParams
from aioinfer.scheduler.features import MAX_RESULT_BYTES, StepFeature, StepFeatures
from aioinfer.scheduler.request import Finish, ForkGroup, Request, RequestStatus, Use
from aioinfer.scheduler.steps import StepOutput
from tests.symbolic_worker import SymbolicWorker, expected_output
from tests.test_scheduler import Harness, assert_complete, make_request


@dataclass(frozen=True, slots=True)
class TagRows(Section):
    """The places of the sampled rows of a plan that have tags, and the tags."""

    rows: I32 = column(np.int32)  # noqa: RUF009
    tags: I32 = column(np.int32)  # noqa: RUF009


@dataclass(frozen=True, slots=True)
class TaggedTokens(Section):
    """1000 times the tag plus the sampled token, of each row of `TagRows`."""

    values: I32 = column(np.int32)  # noqa: RUF009


@dataclass(frozen=True, slots=True)
class Overheat(Section):
    """Sent by a worker on its own."""

    degrees: I32 = column(np.int32)  # noqa: RUF009


class Tagged(Use):
    """A request whose sampled rows have a tag; with `all_rows`, all of its rows concern it."""

    __slots__ = ("all_rows", "done", "extra", "known", "most", "size", "tag")
    feature: ClassVar[str] = "tags"

    def __init__(
        self, tag: int = 0, *, size: int = 0, known: int | None = None, all_rows: bool = False,
        extra: int = 0,
    ):  # fmt: skip
        self.tag, self.size, self.known, self.all_rows = tag, size, known, all_rows
        self.extra = extra
        self.done, self.most = True, 10**9

    @property
    def result_bytes(self) -> int:
        return self.size

    @property
    def is_done(self) -> bool:
        return self.done

    @property
    def max_cached(self) -> int | None:
        return self.known

    def covers(self, start: int, end: int, samples: bool) -> bool:
        return samples or self.all_rows


class Tags(StepFeature):
    """Notes how it is called; `limit` is as many tokens as `Tagged.most` says, and `change` may
    change outputs."""

    name = "tags"
    reports = Overheat

    def __init__(self) -> None:
        super().__init__(None)
        self.calls: Counter[str] = Counter()
        self.values: list[tuple[Request, int, int]] = []  # request, position, value
        self.posted: list[int] = []
        self.taken: list[int] = []
        self.dropped: list[Request] = []
        self.degrees: list[int] = []
        self.change = lambda rows, output: output

    def limit(self, use, wanted, rows, start):
        self.calls["limit"] += 1
        return min(wanted, use.most)

    def fit(self, use, tokens, start, more, rows):
        return tokens, use.extra if start == 0 else 0

    def plan(self, rows):
        self.calls["plan"] += 1
        assert rows
        tagged = [(row.place, row.use.tag) for row in rows if row.place >= 0]
        return TagRows(*np.array(tagged, np.int32).reshape(-1, 2).T)

    def confirm_post(self, step_id, rows):
        assert rows
        self.posted.append(step_id)

    def take(self, rows, result, output):
        assert rows
        self.taken.append(result.step_id)
        found = result.section(TaggedTokens)
        sampled = [row for row in rows if row.place >= 0]
        values = [] if found is None else found.values.tolist()
        for row, value in zip(sampled, values, strict=True):
            self.values.append((row.request, row.end, value))
        return self.change(rows, output)

    def take_report(self, section):
        self.degrees += section.degrees.tolist()

    def drop(self, request):
        assert request.status is RequestStatus.FINISHED
        self.dropped.append(request)

    def lose(self):
        self.calls["lose"] += 1

    def restart(self):
        self.calls["restart"] += 1


class TaggingWorker(SymbolicWorker):
    """Answers to tags."""

    def _execute(self, plan: StepPlan) -> StepResult:
        result = super()._execute(plan)
        tagged = plan.section(TagRows)
        if tagged is not None:
            result.sections = [TaggedTokens(1000 * tagged.tags + result.tokens[tagged.rows])]
        return StepResult.decode(b"".join(bytes(part) for part in result.encode()))


class TagHarness(Harness):
    """Steps the scheduler as an engine does, which confirms each posted plan."""

    def __init__(self, **limits: Any):
        self.tags = Tags()
        self.num_with_rows = 0
        super().__init__(features=[self.tags], **limits)

    def new_worker(self) -> SymbolicWorker:
        worker = super().new_worker()
        worker.__class__ = TaggingWorker
        return worker

    def post(self) -> bool:
        posted = super().post()
        if posted:
            section, last = self.plans[-1].section(TagRows), self.scheduler._posted.last
            assert (section is not None) == ("tags" in last.rows)
            self.num_with_rows += section is not None
            self.scheduler.confirm_post()
        return posted


def assert_values(tags: Tags, requests: list[Request]) -> None:
    """Each sampled row of the requests brought the tag and token of its own request."""
    for request in requests:
        outputs = expected_output(request)
        found = [(at, value) for owner, at, value in tags.values if owner is request]
        tag = request.use(Tagged).tag
        length = request.prompt_len
        assert (
            sorted(set(found))
            == [(length + number, 1000 * tag + token) for number, token in enumerate(outputs)][
                : len(set(found))
            ]
        )
        assert len(set(found)) >= request.num_output


# ---------------------------------------------------------------- calls


def test_only_steps_with_its_rows_call_a_feature() -> None:
    harness = TagHarness(token_budget=8, prefill_cap=8)
    plain = [make_request(str(number), [number] * 9, 6) for number in range(2)]
    harness.serve(*plain)
    assert not harness.tags.calls
    assert (harness.tags.posted, harness.tags.taken, harness.tags.dropped) == ([], [], [])
    tagged = make_request("tagged", list(range(20)), 4, uses=(Tagged(7),))
    other = make_request("other", list(range(30, 33)), 20)
    begun = len(harness.plans)
    harness.add(tagged, other)
    harness.end(other)
    sections = [plan.section(TagRows) for plan in harness.plans[begun:]]
    assert [s is not None for s in sections[:6]] == [False, False, True, True, True, True]
    assert not any(sections[6:])
    assert harness.tags.calls["plan"] == 4
    assert harness.tags.posted == harness.tags.taken == [begun + 2 + step for step in range(4)]
    assert harness.tags.dropped == [tagged]
    assert_values(harness.tags, [tagged])


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_places_are_those_of_the_results_rows(data) -> None:
    """Whatever decodes, ends a prompt or is in the middle of one in a step; with and without a
    pipeline, preemptions and aborts."""
    draw = data.draw
    budget = draw(st.integers(1, 24), "budget")
    stages = draw(st.sampled_from([1, 2]), "stages")
    harness = TagHarness(
        depth=stages + 1, num_stages=stages, token_budget=budget, prefill_cap=budget,
        num_blocks=draw(st.integers(9, 40), "blocks"),
        max_num_seqs=draw(st.integers(1, 6), "max_num_seqs"),
        prefix_caching=draw(st.booleans(), "caching"),
    )  # fmt: skip
    requests = []
    for number in range(draw(st.integers(1, 9), "arrivals")):
        kinds = Tagged(number), Tagged(number, all_rows=True), Tagged(number, extra=3 * number)
        uses = draw(st.sampled_from([(), *((use,) for use in kinds)]))
        length = draw(st.integers(1, 20))
        prompt = [draw(st.integers(0, 2)) for _ in range(length)]
        requests.append(
            make_request(str(number), prompt, draw(st.integers(1, 12)), seed=number, uses=uses)
        )
        harness.add(requests[-1])
        for _ in range(draw(st.integers(0, 4))):
            harness.step()
        if draw(st.integers(0, 9)) == 0:
            harness.scheduler.finish(draw(st.sampled_from(requests)), "abort")
    harness.run()
    assert len(harness.tags.posted) == len(harness.tags.taken) == harness.num_with_rows
    assert_values(harness.tags, [request for request in requests if request.uses])
    assert Counter(harness.tags.dropped) == Counter(r for r in requests if r.uses)


def test_rows_without_a_token_have_no_place() -> None:
    """Rows in the order of their places; the ones that sample nothing come first."""
    harness = TagHarness(token_budget=10, prefill_cap=10, depth=1)
    decode = make_request("decode", [1, 2], 9, uses=(Tagged(1, all_rows=True),))
    harness.add(decode)
    harness.step()
    ends = make_request("ends", [3, 4, 5], 9, uses=(Tagged(2, all_rows=True),))
    plain = make_request("plain", [6, 7], 9)
    long = make_request("long", list(range(10, 30)), 9, uses=(Tagged(3, all_rows=True),))
    harness.add(plain, ends, long)
    harness.post()
    rows = harness.scheduler._posted.last.rows["tags"]
    found = [(row.request.request_id, row.start, row.end, row.place) for row in rows]
    assert found == [("long", 0, 4, -1), ("decode", 2, 3, 0), ("ends", 0, 3, 2)]
    assert harness.plans[-1].section(TagRows).rows.tolist() == [0, 2]
    harness.run()


# ---------------------------------------------------------------- what keeps requests back


def test_a_limit_of_0_keeps_a_request_out() -> None:
    """A waiting one, which none overtakes, and then a running one, beside which others go on."""
    harness = TagHarness(depth=1)
    use = Tagged(1)
    use.most = 0
    limited = make_request("limited", list(range(9)), 4, uses=(use,))
    before = make_request("before", [1, 2, 3], 30)
    behind = make_request("behind", [4, 5, 6], 4)
    harness.add(before, limited, behind)
    for _ in range(3):
        harness.step()
        assert harness.scheduler.running == [before]
    use.most = 5
    harness.step()
    assert (limited.num_computed, behind.num_computed) == (5, 3)
    use.most = 0
    for _ in range(5):
        harness.step()
        assert limited.num_computed == 5
    assert behind.status is RequestStatus.FINISHED
    use.most = 1
    for computed in (6, 7, 8, 9, 10):
        harness.step()
        assert limited.num_computed == computed
    harness.end(before, limited, behind)


def test_what_features_compute_counts_as_prefill() -> None:
    """Beside a decode: all that the first prompt needs, and of others what is below the cap."""
    harness = TagHarness(depth=1, token_budget=40, prefill_cap=10)
    harness.add(make_request("decode", [1, 2], 90))
    harness.step()
    uses = {"large": 6, "small": 2, "plain": 0, "last": 6}
    requests = [
        make_request(name, [number] * 5, 3, uses=(Tagged(extra=extra),) if extra else ())
        for number, (name, extra) in enumerate(uses.items(), 3)
    ]
    harness.add(*requests)
    for computed in ([5, 0, 0, 0], [6, 5, 3, 0], [7, 6, 5, 5]):
        harness.post()
        assert [request.num_computed for request in requests] == computed
        harness.update()
    harness.end(*requests)
    assert harness.scheduler.features.fit(requests[0], 0, 0, 9, {}) == (0, 0), "no token, no work"


def test_bytes_of_results_are_bounded() -> None:
    """Requests of 40 % of the bound each: two run at a time. One that exceeds it runs alone."""
    size = MAX_RESULT_BYTES * 2 // 5
    harness = TagHarness()
    requests = [make_request(str(i), [i, 1], 5, uses=(Tagged(i, size=size),)) for i in range(5)]
    huge = make_request("huge", [9, 1], 5, uses=(Tagged(9, size=2 * MAX_RESULT_BYTES),))
    plain = make_request("plain", [8, 1], 5)
    harness.add(*requests, huge, plain)
    together = set()
    while not harness.scheduler.is_idle:
        harness.step()
        running = harness.scheduler.running
        together.add(tuple(sorted(r.request_id for r in running if r.uses)))
    sizes = [len(names) for names in together]
    assert max(sizes) == 2
    assert not any("huge" in names for names in together if len(names) > 1)
    assert ("huge",) in together
    for request in (*requests, huge, plain):
        assert_complete(request)


def test_a_feature_bounds_what_the_prefix_cache_gives() -> None:
    harness = TagHarness()
    prompt = list(range(40))
    harness.add(make_request("first", prompt, 1))
    harness.run()
    uses = {
        36: (Tagged(),),
        8: (Tagged(known=8), Tagged(known=20)),
        20: (Tagged(known=23),),
        0: (Tagged(known=0),),
    }
    for expected, of_request in uses.items():
        request = make_request("again", prompt, 1, uses=of_request)
        harness.serve(request)
        assert request.num_cached == expected
        assert_complete(request)


def test_siblings_wait_until_uses_are_done() -> None:
    harness = TagHarness()
    use = Tagged(1)
    use.done = False
    siblings = [
        make_request(str(number), list(range(9)), 20, seed=number, uses=() if number else (use,))
        for number in range(3)
    ]
    group = ForkGroup(awaited=siblings[0].uses)
    for sibling in siblings:
        sibling.group = group
    behind = make_request("behind", [1, 2, 3], 2)
    harness.add(*siblings, behind)
    for _ in range(6):
        harness.step()
        assert [sibling.slot >= 0 for sibling in siblings] == [True, False, False]
    assert behind.status is RequestStatus.FINISHED, "others overtake siblings that are held back"
    use.done = True
    harness.step()
    assert [sibling.slot >= 0 for sibling in siblings] == [True, True, True]
    harness.end(*siblings)


# ---------------------------------------------------------------- outputs and ends


@pytest.mark.parametrize("depth", [1, 2])
def test_a_feature_may_append_tokens_and_end_requests(depth: int) -> None:
    """As if they had been sampled: the first time three tokens, and an end after eight."""
    harness = TagHarness(depth=depth)
    request = make_request("tagged", [1, 2, 3], 30, uses=(Tagged(1),))
    other = make_request("other", [4, 5, 6], 30, uses=(Tagged(2),))
    outputs: list[StepOutput] = []

    def change(rows, output: StepOutput) -> StepOutput:
        (place,) = [i for i, each in enumerate(output.requests) if each is request] or [None]
        if place is None:
            return output
        added: list[int] = []
        finished = dict(output.finished)
        if request.num_output == 1:
            wanted = expected_output(request)[1:4]
            assert harness.scheduler.append(request, wanted) == (3, None)
            added = wanted
        elif request.num_output == 8:
            harness.scheduler.finish(request, "stop", 77)
            finished[place] = Finish("stop", 77)
        return dataclasses.replace(
            output,
            requests=[*output.requests, *[request] * len(added)],
            tokens=[*output.tokens, *added],
            rows=[*output.rows, *[output.rows[place]] * len(added)],
            finished=finished,
        )

    harness.tags.change = change
    update = harness.update

    def collect() -> StepOutput:
        outputs.append(update())
        return outputs[-1]

    harness.update = collect  # type: ignore[method-assign]
    harness.add(request, other)
    harness.run()
    assert (request.finish_reason, request.stop_reason) == ("stop", 77)
    for each in (request, other):
        tokens = [
            token
            for output in outputs
            for owner, token in zip(output.requests, output.tokens, strict=True)
            if owner is each
        ]
        assert tokens == each.tokens[3:].tolist() == expected_output(each)[: len(tokens)]
    assert (request.num_output, other.num_output) == (8, 30)
    assert outputs[-1].finished == {0: Finish("length")}
    ends = [finish for output in outputs for finish in output.finished.values()]
    assert ends == [Finish("stop", 77), Finish("length")]
    assert harness.tags.dropped == [request, other]


def test_each_end_drops_a_request_once() -> None:
    """By an end token, the length, an error, an abort while it waits, runs or is preempted, and
    where the scheduler's records are rebuilt."""
    harness = TagHarness(num_blocks=32, max_num_seqs=5, depth=1)
    scheduler, dropped = harness.scheduler, harness.tags.dropped

    def add(name: str, new: int = 50, **fields: Any) -> Request:
        prompt = [len(name), *name.encode()[:2]]
        request = make_request(name, prompt, new, uses=(Tagged(),), **fields)
        harness.add(request)
        return request

    length = add("length", 1)
    harness.step()
    assert dropped == [length]
    stop = add("stop")
    stop.end_tokens = frozenset([expected_output(stop)[0]])
    harness.step()
    assert dropped[1:] == [stop]
    assert stop.finish_reason == "stop"
    error = add("error")
    harness.post()
    result = harness.worker.results.popleft()
    result.tokens = np.array([-1], np.int32)
    scheduler.update(result)
    assert dropped[2:] == [error]
    waits, runs, preempted = add("waits"), add("runs"), add("preempted")
    scheduler.finish(waits, "abort")
    harness.step()
    scheduler._running.preempt(preempted)
    scheduler.finish(preempted, "abort")
    scheduler.finish(runs, "abort")
    scheduler.finish(runs, "abort")
    assert dropped[3:] == [waits, preempted, runs]
    rebuilt, kept = add("rebuilt", 3), None
    harness.post()
    kept = add("kept", 3)
    scheduler.rebuild([kept], [rebuilt])
    assert dropped[6:] == [rebuilt]
    harness.end(kept)
    assert dropped[7:] == [kept]


def test_reports_come_in_any_step() -> None:
    """Beside rows of the feature or without them, and of no step's rows at all."""
    harness = TagHarness(depth=1)
    tagged = make_request("tagged", [1, 2, 3], 2, uses=(Tagged(5),))
    plain = make_request("plain", [4, 5, 6], 6)
    harness.add(tagged, plain)
    number = 0
    while not harness.scheduler.is_idle:
        harness.post()
        result = harness.worker.results[-1]
        if number % 2 == 0:
            result.sections = [*result.sections, Overheat(np.array([number], np.int32))]
        harness.update()
        number += 1
    assert harness.tags.degrees == [0, 2, 4]
    assert_values(harness.tags, [tagged])


def test_features_are_found_by_class_and_wait_together() -> None:
    class Waiting(StepFeature):
        name = "waiting"

    tags, waiting = Tags(), Waiting(None)
    both = StepFeatures([tags, waiting])
    assert both.of(Tags) is tags
    assert list(both) == [tags, waiting]
    with pytest.raises(LookupError, match="no feature Waiting"):
        StepFeatures([tags]).of(Waiting)
    assert not both.are_waiting
    waiting.is_waiting = True
    assert both.are_waiting


# ---------------------------------------------------------------- lost workers


class FakeExecutor:
    """Starts at once, and reports a maximum length."""

    def __init__(self, events: list[str]):
        self.events = events

    async def start(self, on_result, on_loss, on_progress):
        self.events.append("start")
        return SimpleNamespace(max_model_len=64)

    async def shutdown(self) -> None:
        self.events.append("shutdown")


async def test_a_feature_learns_of_lost_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """`lose` when they are gone, before requests end for it, and `restart` before new ones get a
    plan. The results of posted steps are never taken; the requests are not dropped."""
    monkeypatch.setattr(recovery, "_FIRST_DELAY_S", 0.0)
    harness = TagHarness(depth=2)
    tags, events = harness.tags, []
    tags.lose = lambda: events.append("lose")  # type: ignore[method-assign]
    tags.restart = lambda: events.append("restart")  # type: ignore[method-assign]
    metrics = EngineMetrics()
    requests = OpenRequests(metrics, lambda: events.append("plan"))
    requests.scheduler = harness.scheduler
    emission = Emission(requests, lambda error: None)
    workers = Workers(FakeExecutor(events), lambda result: None, lambda error: None)
    workers.report, workers.start_s = SimpleNamespace(max_model_len=64), 0.0
    engine = Recovery(
        "", requests, workers, emission, harness.scheduler.features, lambda _: harness.limits, 2,
        lambda: FakeExecutor(events), lambda reason: events.append("dead"),
    )  # fmt: skip
    engine.begin_service()
    output = RequestOutput("r", [1, 2, 3], SamplingParams(n=2, temperature=0))
    for number in range(2):
        request = make_request(str(number), [1, 2, 3], 9, uses=(Tagged(number),), seed=number)
        output.sequences.append(OutputSequence(number, request, output, None))
    requests.add(output, 0.0)
    running = [sequence.request for sequence in output.sequences]
    harness.step()
    harness.post()
    taken = list(tags.taken)
    engine.handle_loss(RuntimeError("worker 0 was killed"))
    assert engine.state is EngineState.RESTARTING
    assert events == ["lose"]
    assert harness.scheduler.num_in_flight == 0
    assert [request.num_pending for request in running] == [0, 0]
    await asyncio.wait_for(asyncio.shield(engine._task), 10)
    assert engine.state is EngineState.SERVING
    assert events == ["lose", "shutdown", "start", "restart", "plan"]
    assert (tags.taken, tags.dropped) == (taken, [])
    harness.worker = harness.new_worker()
    harness.end(*running)
    assert_values(tags, running)
    assert tags.dropped == running
    engine.policy.max_restarts = 0
    engine.handle_loss(RuntimeError("worker 0 was killed again"))
    assert engine.state is EngineState.DEAD
    assert events[5:] == ["dead"]
    await engine.end()


# ---------------------------------------------------------------- features of other packages


def offer(monkeypatch: pytest.MonkeyPatch, **packages: str) -> None:
    points = [SimpleNamespace(name=name, value=value) for name, value in packages.items()]
    monkeypatch.setattr(
        features, "entry_points", lambda group: points if group == "aioinfer.features" else []
    )


def test_an_unknown_feature_is_named_with_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, watermark="watermarks", clock="clocks")
    with pytest.raises(ConfigError, match=r"offers 'watermrk' .*; offered are clock, watermark$"):
        list(load_halves("planning", ("watermrk",)))
    offer(monkeypatch)
    with pytest.raises(ConfigError, match=r"offers 'clock' .*; offered are none$"):
        list(load_halves("planning", ("clock",)))


def test_halves_of_other_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The half that a package has is loaded behind the ones of this package."""
    package = tmp_path / "tests_halved_feature"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "planning.py").write_text("Planning = 'the planning half'\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    offer(monkeypatch, halved="tests_halved_feature", gone="tests_no_such_package")
    *own, other = load_halves("planning", ("halved",))
    assert [module.__name__ for module in own] == [
        f"aioinfer.features.{name}.planning" for name in FEATURES
    ]
    assert other.Planning == "the planning half"
    assert "tests_halved_feature.worker" not in {m.__name__ for m in load_halves("worker")}
    with pytest.raises(ConfigError, match="tests_no_such_package cannot be imported"):
        list(load_halves("planning", ("gone",)))
