"""The engine's metrics (`engine.metrics`), their text for Prometheus (`api.admin.metrics`), and the
dashboard that queries it."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from array import array
from bisect import bisect_left
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import numpy as np
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from aioinfer.api.server import HttpServer
from aioinfer.config import load_config
from aioinfer.engine.frontend import Frontend
from aioinfer.engine.metrics import PHASES, EngineMetrics, Histogram, LoopLag
from aioinfer.engine.model_control import ModelControl
from aioinfer.executor.base import StageTime
from aioinfer.features.expert_load.planning import Planning as ExpertReports
from aioinfer.features.expert_load.sections import ExpertTokens
from aioinfer.features.speculation.planning import ACCEPTED, ACCEPTED_AT, DRAFT_TOKENS, DRAFTS
from aioinfer.ipc.plan import StepResult
from aioinfer.sampling_params import SamplingParams
from aioinfer.scheduler.features import StepFeatures
from aioinfer.scheduler.limits import SchedulerLimits
from aioinfer.scheduler.request import Request
from aioinfer.scheduler.scheduler import Scheduler
from tests.plans import make_plan
from tests.waiting import until

DASHBOARD: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "docs" / "grafana.json").read_text("utf-8")
)
#: The text of `/metrics` in `test_the_whole_text`, with all buckets of a histogram in one line.
TEXT = Path(__file__).parent / "metrics.txt"
OF_BUCKET = re.compile(r'(.*_bucket){(.*,)le="(.*?)",(.*)} (.*)')

#: What the HTTP server itself holds, refuses and ends.
OF_SERVER = {
    "aioinfer:open_connections", "aioinfer:asyncio_tasks", "aioinfer:connection_rejections",
    "aioinfer:connections_closed_for_room", "aioinfer:client_timeouts", "aioinfer:http_errors",
}  # fmt: skip


def make_request(slot: int = 0, prompt_len: int = 3, num_output: int = 0) -> Request:
    request = Request("test", array("i", [1] * prompt_len), prompt_len, SamplingParams(), 100)
    request.slot = slot
    request.tokens.extend([2] * num_output)
    return request


def begun(metrics: EngineMetrics, number: int) -> list[Request]:
    requests = [make_request(slot) for slot in range(number)]
    for request in requests:
        metrics.begin(request, time.perf_counter(), counts_prompt=True)
    return requests


def test_a_value_belongs_to_the_first_bound_that_is_not_less() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        histogram.add(value)
    histogram.add(1.25, 3)
    assert histogram.counts == [2, 5, 1]
    assert histogram.count == 8
    assert histogram.sum == pytest.approx(0.5 + 1 + 1.5 + 2 + 9 + 3 * 1.25)


async def test_the_times_of_a_request() -> None:
    metrics = EngineMetrics()
    request = make_request(prompt_len=5)
    before = time.perf_counter()
    metrics.begin(request, before - 1.0, counts_prompt=True)
    after = time.perf_counter()
    metrics.record_admissions([request], [0], before + 2.0)
    for now in (3.0, 3.5, 4.5):
        metrics.record_tokens([request], [7], before + now)
    metrics.end(request, "stop", 3)
    assert 2.0 - (after - before) <= metrics.queue_time.sum <= 2.0
    assert metrics.prefill_time.sum == pytest.approx(1.0)
    assert metrics.time_to_first_token.sum == pytest.approx(4.0)
    assert metrics.inter_token_latency.sum == pytest.approx(1.5)
    assert metrics.time_per_output_token.sum == pytest.approx(0.75)
    assert metrics.decode_time.sum == pytest.approx(1.5)
    assert metrics.e2e_latency.sum == pytest.approx(5.5)
    assert (metrics.request_prompt_tokens.sum, metrics.request_generation_tokens.sum) == (5, 3)
    assert (metrics.prompt_tokens, metrics.generation_tokens) == (5, 3)
    assert metrics.inter_token_latency.count == 2


async def test_steps_of_any_requests_count_as_if_each_token_were_looked_at() -> None:
    metrics, rng = EngineMetrics(), random.Random(1)
    requests = begun(metrics, 12)
    last: dict[Request, float] = {}
    naive: Counter[int] = Counter()
    total, now = 0.0, 0.0
    for _ in range(200):
        now += rng.choice([0.001, 0.004, 0.0045, 0.3, 90.0])
        sampled = rng.sample(requests, rng.randint(0, len(requests)))
        for request in sampled:
            if request in last:
                naive[bisect_left(metrics.inter_token_latency.bounds, now - last[request])] += 1
                total += now - last[request]
            last[request] = now
        metrics.record_tokens(sampled, [3] * len(sampled), now)
    counts = enumerate(metrics.inter_token_latency.counts)
    assert {bucket: count for bucket, count in counts if count} == dict(naive)
    assert metrics.inter_token_latency.sum == pytest.approx(total)
    assert metrics.time_to_first_token.count == len(requests)
    assert metrics.generation_tokens == naive.total() + len(requests)


async def test_rows_that_failed_or_ended_bring_no_token() -> None:
    metrics = EngineMetrics()
    failed, ended, well = begun(metrics, 3)
    metrics.end(ended, "abort")
    metrics.record_tokens([failed, ended, well], [-1, 4, 5], 1.0)
    assert (metrics.generation_tokens, metrics.time_to_first_token.count) == (1, 1)


async def test_an_end_counts_once_and_only_a_whole_request_has_a_latency() -> None:
    metrics = EngineMetrics()
    requests = begun(metrics, 5)
    metrics.record_tokens(requests, [1] * 5, 1.0)
    reasons = ("stop", "length", "abort", "error", "abort")
    for request, reason in zip(requests, reasons, strict=True):
        metrics.end(request, reason)
        metrics.end(request, "stop")
    assert metrics.finished == {"stop": 1, "length": 1, "abort": 2, "error": 1}
    assert metrics.e2e_latency.count == 2
    assert metrics.time_per_output_token.count == 0, "one token has no inter-token latency"


async def test_death_ends_all_with_an_error() -> None:
    metrics = EngineMetrics()
    begun(metrics, 3)
    metrics.end_all("error")
    metrics.end_all("error")
    assert metrics.finished["error"] == 3


async def test_the_completions_of_a_prompt_count_it_once() -> None:
    metrics = EngineMetrics()
    requests = [make_request(slot) for slot in range(3)]
    for index, request in enumerate(requests):
        metrics.begin(request, 0.0, counts_prompt=index == 0)
    metrics.record_tokens(requests, [1, 1, 1], 1.0)
    assert (metrics.prompt_tokens, metrics.generation_tokens) == (3, 3)


async def test_a_prompt_counts_with_its_first_token() -> None:
    metrics = EngineMetrics()
    (request,) = begun(metrics, 1)
    assert metrics.prompt_tokens == 0
    metrics.end(request, "abort")
    assert metrics.prompt_tokens == 0


async def test_only_the_first_admission_ends_the_queue_time() -> None:
    metrics = EngineMetrics()
    old, new = begun(metrics, 2)
    now = time.perf_counter()
    metrics.record_admissions([old, new], [1], now)
    assert metrics.queue_time.count == 1
    # the new one was preempted, and comes back
    metrics.record_admissions([old, new], [1, 0], now + 50)
    assert metrics.queue_time.count == 2
    assert metrics.queue_time.sum > 50
    metrics.record_tokens([new], [1], now + 2)
    assert metrics.prefill_time.sum == pytest.approx(2)


async def test_a_blocked_loop_is_seen_and_an_idle_one_left_alone() -> None:
    busy = True
    lag = LoopLag(lambda: busy)
    lag.watch()
    lag.watch()
    time.sleep(0.15)  # noqa: ASYNC251  # what must be noticed
    async with asyncio.timeout(5):
        await until(lambda: lag.seconds.count)
        assert lag.seconds.count == 1, "one timer, however many need it"
        assert 0.09 < lag.seconds.sum < 1
        assert lag.is_watched
        busy = False
        await until(lambda: not lag.is_watched)


def test_the_phases_of_a_step() -> None:
    metrics = EngineMetrics()
    timer = metrics.timer
    timer.plan.seconds, timer.post.seconds = 2.0, 3.0
    metrics.record_plan(make_plan(), [])
    timer.update.seconds, timer.emit.seconds = 4.0, 5.0
    result = StepResult(0, np.empty(0, np.int32), busy_ns=7, take_ns=1_000_000_000)
    metrics.record_step(result, [], [])
    assert timer.emit.seconds == 0.0, "the text of the next step is measured anew"
    expected = {"result": 1.0, "update": 4.0, "plan": 2.0, "post": 3.0, "emit": 5.0}
    assert {phase: metrics.phases[phase].sum for phase in PHASES} == expected
    assert metrics.worker_busy_ns == 7


async def scrape(*metrics: EngineMetrics) -> list[Metric]:
    """Returns the metrics of a server with engines that have no workers."""
    return list(text_string_to_metric_families(await scrape_text(*metrics)))


async def scrape_text(*metrics: EngineMetrics, report: ExpertTokens | None = None) -> str:
    """Returns the same as text; with a `report` the model has experts."""
    features = StepFeatures([ExpertReports(None)])
    if report is not None:
        features.of(ExpertReports).take_report(report)
    names = ['a "model"', "alias"]
    settings = {"model.path": "none", "server.port": 0, "server.served_model_names": names}
    config = load_config(None, settings)
    limits = SchedulerLimits(
        num_blocks=(8,), block_size=4, max_num_seqs=2, token_budget=16, prefill_cap=16
    )
    engines = [
        SimpleNamespace(
            number=number, metrics=one, scheduler=Scheduler(limits), features=features,
            stage_times=lambda: [StageTime(0.0, 0.0)] * 2,
            report=SimpleNamespace(device="cpu", dtype="", cache_dtype="", implementation=""),
        )
        for number, one in enumerate(metrics)
    ]  # fmt: skip
    frontend = SimpleNamespace(
        control=ModelControl([]),
        config=config, engines=engines, loop_lag=LoopLag(lambda: False), is_healthy=lambda: True,
        max_model_len=8,
    )  # fmt: skip
    server = HttpServer(config, cast(Frontend, frontend))
    url = await server.start()
    async with aiohttp.ClientSession(url) as http, http.get("/metrics") as response:
        assert response.status == 200
        assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        text = await response.text()
    await server.close()
    return text


async def test_the_text_is_whole_from_the_start() -> None:
    metrics = await scrape(EngineMetrics())
    assert len({metric.name for metric in metrics}) == len(metrics)
    for metric in metrics:
        assert metric.type in ("counter", "gauge", "histogram")
        assert metric.documentation
        assert metric.samples, f"{metric.name} is not there before it is first counted"
        assert all(sample.labels["model_name"] == 'a "model"' for sample in metric.samples)
        engines = {sample.labels.get("engine") for sample in metric.samples}
        of_engine = "loop_lag" not in metric.name and "api_key" not in metric.name
        of_engine &= metric.name not in OF_SERVER
        assert engines == ({"0"} if of_engine else {None})
        if metric.name not in ("aioinfer:open_connections", "aioinfer:asyncio_tasks"):
            assert all(sample.value == 0 for sample in metric.samples)
    (finished,) = (metric for metric in metrics if metric.name == "vllm:request_success")
    reasons = {sample.labels["finished_reason"] for sample in finished.samples}
    assert reasons == {"stop", "length", "abort", "error"}


async def test_each_engine_has_its_own_samples() -> None:
    first, second = EngineMetrics(), EngineMetrics()
    second.generation_tokens = 7
    second.finished["stop"] = 3
    second.e2e_latency.add(2.0)
    second.phases["plan"].add(0.5)
    metrics = {metric.name: metric for metric in await scrape(first, second)}
    found = {
        sample.name: sample
        for metric in metrics.values()
        for sample in metric.samples
        if sample.value and "le" not in sample.labels and metric.name not in OF_SERVER
    }
    assert {name: sample.value for name, sample in found.items()} == {
        "vllm:generation_tokens_total": 7, "vllm:request_success_total": 3,
        "vllm:e2e_request_latency_seconds_count": 1, "vllm:e2e_request_latency_seconds_sum": 2,
        "aioinfer:step_phase_seconds_count": 1, "aioinfer:step_phase_seconds_sum": 0.5,
    }  # fmt: skip
    assert {sample.labels["engine"] for sample in found.values()} == {"1"}
    running = metrics["vllm:num_requests_running"].samples
    assert [sample.labels["engine"] for sample in running] == ["0", "1"]


async def test_the_whole_text() -> None:
    """Names, help, types, labels and values are the ones of the file, in its order."""
    metrics = EngineMetrics()
    metrics.prompt_tokens, metrics.generation_tokens, metrics.worker_busy_ns = 5, 7, 2_500_000_000
    metrics.restarts, metrics.interrupted, metrics.moved, metrics.violations = 1, 2, 3, 4
    metrics.is_serving = True
    metrics.finished |= {"stop": 6, "abort": 2}
    for name, histogram in vars(metrics).items():
        if isinstance(histogram, Histogram):
            histogram.add(0.01 * len(name), len(name))
    for phase in PHASES:
        metrics.phases[phase].add(len(phase) * 1e-4)
    metrics.count("constrained_rows", 9)
    for number, name in enumerate((DRAFTS, DRAFT_TOKENS, ACCEPTED, f"{ACCEPTED_AT}1"), 2):
        metrics.count(name, number)
    metrics.count("words", 3)
    metrics.observe("mask_fill_seconds", 0.003)
    metrics.observe("waiting", 0.5)
    places = np.array([[0, 1, 2, 0]], np.int32)
    report = ExpertTokens(
        np.array([5], np.int32), places, places // 2, np.array([[4, 1, 3, 2]], np.int32)
    )
    text = await scrape_text(metrics, report=report)
    of_connections = re.compile(r"^(aioinfer:(?:open_connections|asyncio_tasks){.*}) .*$", re.M)
    lines = list[str]()
    for line in of_connections.sub(r"\1 _", text).splitlines():
        if (bucket := OF_BUCKET.fullmatch(line)) is None:
            lines.append(line)
            continue
        series = bucket.expand(r"\1{\2\4}")
        if not lines[-1].startswith(series):
            lines.append(series)
        lines[-1] += bucket.expand(r" \3:\5")
    assert lines == TEXT.read_text("utf-8").splitlines()


async def test_buckets_are_cumulative() -> None:
    metrics = EngineMetrics()
    bounds = metrics.inter_token_latency.bounds
    metrics.inter_token_latency.add(bounds[3], 5)
    metrics.inter_token_latency.add(bounds[-1] * 2, 2)
    name, infinite = "vllm:inter_token_latency_seconds", float("inf")
    (metric,) = (metric for metric in await scrape(metrics) if metric.name == name)
    of_buckets = [sample for sample in metric.samples if sample.name.endswith("_bucket")]
    buckets = {float(sample.labels["le"]): sample.value for sample in of_buckets}
    assert list(buckets) == [*bounds, infinite]
    chosen = (bounds[2], bounds[3], bounds[-1], infinite)
    assert [buckets[bound] for bound in chosen] == [0, 5, 5, 7]
    values = {sample.name: sample.value for sample in metric.samples}
    assert values[f"{name}_count"] == 7
    assert values[f"{name}_sum"] == pytest.approx(5 * bounds[3] + 4 * bounds[-1])


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


async def test_the_dashboard_queries_all_metrics_and_no_others() -> None:
    metrics = await scrape(EngineMetrics())
    names = {sample.name: metric.name for metric in metrics for sample in metric.samples}
    variables = [
        variable["definition"]
        for variable in DASHBOARD["templating"]["list"]
        if variable["type"] == "query"
    ]
    queries = [target["expr"] for panel in panels() for target in panel["targets"]]
    queried = {name for query in [*queries, *variables] for name in re.findall(r"\w+:\w+", query)}
    assert queried - names.keys() == set(), "the dashboard queries what /metrics does not have"
    assert {names[name] for name in queried} == {metric.name for metric in metrics}, (
        "no panel shows this"
    )
    labels = {label for metric in metrics for sample in metric.samples for label in sample.labels}
    groups = [group for query in queries for group in re.findall(r"by \((.*?)\)", query)]
    assert {label for group in groups for label in group.split(", ")} <= labels


def test_the_dashboard_is_in_order() -> None:
    names = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    assert names == {"datasource", "model_name"}
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    cells: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        covered = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & covered, f"{panel['title']} lies on another panel"
        assert max(x for x, _ in covered) < 24
        cells |= covered
    for panel in panels():
        letters = "ABCDEFGH"[: len(panel["targets"])]
        assert "".join(target["refId"] for target in panel["targets"]) == letters
        for query in (target["expr"] for target in panel["targets"]):
            assert query.count("(") == query.count(")")
            assert "$model_name" in query
