"""`/metrics` for Prometheus: reads the metrics of engines, HTTP server and API keys for each
scrape, and keeps none of its own.

Metrics that mean the same as in vLLM have vLLM's names, so that dashboards made for it work; the
rest is named `aioinfer:…`. `docs/grafana.json` is a dashboard of all of it. Counters are listed
here without the `_total` that the text adds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from aiohttp import web
from prometheus_client import generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from aioinfer.api.connections import CONNECTIONS, ConnectionServer
from aioinfer.api.context import FRONTEND
from aioinfer.api.experts import expert_load
from aioinfer.api.limits import ACCOUNTS, Accounts
from aioinfer.features.expert_load.planning import imbalance

if TYPE_CHECKING:
    from aioinfer.engine.engine import Engine
    from aioinfer.engine.frontend import Frontend
    from aioinfer.engine.metrics import EngineMetrics, Histogram

_TEXT = "text/plain; version=0.0.4; charset=utf-8"


async def show_metrics(request: web.Request) -> web.Response:
    """Returns all metrics as text.

    Between two of them the event loop does other work: the whole takes milliseconds.
    """
    parts = []
    frontend = request.app[FRONTEND]
    collectors = (
        EngineCollector(frontend),
        ServerCollector(frontend, request.app[CONNECTIONS]),
        KeyCollector(frontend, request.app[ACCOUNTS]),
    )
    for metric in chain.from_iterable(collector.collect() for collector in collectors):
        parts.append(generate_latest(_Only(metric)))
        await asyncio.sleep(0)
    return web.Response(body=b"".join(parts), headers={"Content-Type": _TEXT})


class _Only(Collector):
    """One metric as a collector, which is what prometheus-client can format as text."""

    def __init__(self, metric: Metric):
        self._metric = metric

    def collect(self) -> Iterable[Metric]:
        return (self._metric,)


#: Measurements of the package's own features, which have a text each.
_ROWS, _FILLING = "constrained_rows", "mask_fill_seconds"


def _count_of(name: str, engine: Engine) -> float:
    return engine.metrics.counts[name]


def _histogram_of(name: str, metrics: EngineMetrics) -> Histogram:
    return metrics.observed[name]


class EngineCollector(Collector):
    """The metrics of all engines; all but the event loop's carry the labels `model_name` and
    `engine`. Reading them changes nothing."""

    def __init__(self, frontend: Frontend):
        self._frontend = frontend
        self._model = frontend.config.served_model_names[0]

    def collect(self) -> Iterator[Metric]:
        """Yields each metric with its values of now."""
        yield from self._gauges()
        yield from self._counters()
        yield from self._stage_counters()
        yield from self._request_histograms()
        yield from self._step_histograms()
        yield from self._features()
        yield from self._experts()
        yield self._loop_lag()

    def _gauges(self) -> Iterator[Metric]:
        show = self._gauge
        yield show(
            "vllm:num_requests_running",
            "Requests that hold a slot and KV blocks.",
            lambda e: e.scheduler.num_running,
        )
        yield show(
            "vllm:num_requests_waiting",
            "Requests that wait for a slot or for KV blocks.",
            lambda e: e.scheduler.num_waiting,
        )
        yield show(
            "vllm:kv_cache_usage_perc",
            "Fraction of the KV blocks that requests use, 0 to 1.",
            lambda e: e.scheduler.kv_cache.usage,
        )

        yield show(
            "aioinfer:engine_serving",
            "1 while the engine serves; 0 while its workers are restarted, and once it is dead.",
            lambda e: float(e.metrics.is_serving),
        )

    def _counters(self) -> Iterator[Metric]:
        show = self._counter
        about = "Attempts to restart an engine's workers after they died or hung."
        yield show("aioinfer:worker_restarts", about, lambda e: e.metrics.restarts)
        about = "Requests that ran when an engine's workers were lost."
        yield show("aioinfer:interrupted_requests", about, lambda e: e.metrics.interrupted)
        about = "Requests that went on with another engine when an engine died."
        yield show("aioinfer:moved_requests", about, lambda e: e.metrics.moved)
        about = "Checks of the scheduler's and the engine's records that failed."
        yield show("aioinfer:integrity_violations", about, lambda e: e.metrics.violations)
        about = "Requests whose KV blocks were given to older ones, and that were recomputed."
        yield show("vllm:num_preemptions", about, lambda e: e.scheduler.stats.preemptions)
        yield show(
            "vllm:prefix_cache_queries",
            "Prompt tokens looked up in the prefix cache.",
            lambda e: e.scheduler.stats.prefix_queried,
        )
        yield show(
            "vllm:prefix_cache_hits",
            "Prompt tokens found in the prefix cache.",
            lambda e: e.scheduler.stats.prefix_hit,
        )
        yield show(
            "vllm:prompt_tokens",
            "Prompt tokens of requests that got a first token.",
            lambda e: e.metrics.prompt_tokens,
        )
        yield show(
            "vllm:generation_tokens",
            "Generated tokens, end tokens included.",
            lambda e: e.metrics.generation_tokens,
        )
        finished = CounterMetricFamily(
            "vllm:request_success",
            "Ended requests.",
            labels=("model_name", "engine", "finished_reason"),
        )
        for labels, engine in self._engines():
            for reason, number in engine.metrics.finished.items():
                finished.add_metric((*labels, reason), number)
        yield finished
        yield show("aioinfer:steps", "Steps that were planned.", lambda e: e.scheduler.stats.steps)
        about = "Rows computed for requests that had ended meanwhile."
        yield show("aioinfer:wasted_rows", about, lambda e: e.scheduler.stats.wasted_rows)
        about = "Seconds of steps whose time was predicted: from when workers could begin with it."
        yield show("aioinfer:step_seconds", about, lambda e: e.scheduler.pacing.step_s)
        about = "Seconds by which steps took more or less than was predicted."
        yield show(
            "aioinfer:step_prediction_error_seconds", about, lambda e: e.scheduler.pacing.error_s
        )
        about = "Rows that were sampled under a mask of allowed tokens."
        yield show(f"aioinfer:{_ROWS}", about, lambda e: e.metrics.counts[_ROWS])
        about = "Seconds that the first worker of an engine spent on steps."
        yield show("aioinfer:worker_busy_seconds", about, lambda e: e.metrics.worker_busy_ns * 1e-9)

    def _stage_counters(self) -> Iterator[Metric]:
        """Where the workers are a pipeline: busy and idle time of its stages while steps were in
        flight."""
        labels = "model_name", "engine", "stage"
        busy = CounterMetricFamily(
            "aioinfer:stage_busy_seconds",
            "Seconds that the first worker of a pipeline stage computed.",
            labels=labels,
        )
        idle = CounterMetricFamily(
            "aioinfer:stage_idle_seconds",
            "Seconds that it did not, while steps were in flight: bubbles.",
            labels=labels,
        )
        for of_engine, engine in self._engines():
            for number, time in enumerate(engine.stage_times()):
                busy.add_metric((*of_engine, str(number)), time.busy_s)
                idle.add_metric((*of_engine, str(number)), time.idle_s)
        if busy.samples:
            yield busy
            yield idle

    def _request_histograms(self) -> Iterator[Metric]:
        show = self._histogram
        yield show(
            "vllm:time_to_first_token_seconds",
            "From the submission to the first token.",
            lambda m: m.time_to_first_token,
        )
        yield show(
            "vllm:inter_token_latency_seconds",
            "Between two tokens of a request.",
            lambda m: m.inter_token_latency,
        )
        yield show(
            "vllm:request_time_per_output_token_seconds",
            "Mean of that in a request.",
            lambda m: m.time_per_output_token,
        )
        yield show(
            "vllm:e2e_request_latency_seconds",
            "From the submission to the last token.",
            lambda m: m.e2e_latency,
        )
        yield show(
            "vllm:request_queue_time_seconds",
            "From joining the queue to the first step.",
            lambda m: m.queue_time,
        )
        yield show(
            "vllm:request_prefill_time_seconds",
            "From the first step to the first token.",
            lambda m: m.prefill_time,
        )
        yield show(
            "vllm:request_decode_time_seconds",
            "From the first token to the last.",
            lambda m: m.decode_time,
        )
        yield show(
            "vllm:request_prompt_tokens",
            "Prompt tokens of a request.",
            lambda m: m.request_prompt_tokens,
        )
        yield show(
            "vllm:request_generation_tokens",
            "Generated tokens of a request.",
            lambda m: m.request_generation_tokens,
        )

    def _step_histograms(self) -> Iterator[Metric]:
        about = (
            "Time of the event loop for a phase of a step: reading its result, updating the "
            "scheduler, planning, posting, emitting text."
        )
        metric = HistogramMetricFamily(
            "aioinfer:step_phase_seconds", about, labels=("model_name", "engine", "phase")
        )
        for labels, engine in self._engines():
            for phase, histogram in engine.metrics.phases.items():
                metric.add_metric((*labels, phase), _cumulative(histogram), histogram.sum)
        yield metric

        about = "Time in which the masks of a step with constrained rows were filled."
        yield self._histogram(f"aioinfer:{_FILLING}", about, lambda m: m.observed[_FILLING])

    def _features(self) -> Iterator[Metric]:
        """Yields what features of other packages have measured."""
        measured = [engine.metrics for _, engine in self._engines()]
        about = "Measured by a step feature of another package."
        for name in sorted({name for each in measured for name in each.counts} - {_ROWS}):
            yield self._counter(f"aioinfer:feature_{name}", about, partial(_count_of, name))
        for name in sorted({name for each in measured for name in each.observed} - {_FILLING}):
            yield self._histogram(f"aioinfer:feature_{name}", about, partial(_histogram_of, name))

    def _experts(self) -> Iterator[Metric]:
        """Yields the load of experts, of models that have any: a series for each layer and rank,
        not for each expert, which `GET /experts` lists."""
        loads = [
            (labels, expert_load(engine))
            for labels, engine in self._engines()
            if expert_load(engine).version
        ]
        if not loads:
            return
        names = ("model_name", "engine")
        about = "Tokens that experts were given: each as often as it has experts, in all layers."
        routed = CounterMetricFamily("aioinfer:expert_tokens", about, labels=names)
        about = "Those of the experts that a rank has."
        of_rank = CounterMetricFamily("aioinfer:expert_rank_tokens", about, labels=(*names, "rank"))
        about = "Tokens of a layer's busiest expert over the mean of its experts, last minutes."
        uneven = GaugeMetricFamily("aioinfer:expert_imbalance", about, labels=(*names, "layer"))
        about = "Tokens of the busiest rank over the mean of the ranks: how long a layer's experts "
        about += "take, beside evenly loaded ones, in the last minutes."
        uneven_ranks = GaugeMetricFamily(
            "aioinfer:expert_rank_imbalance", about, labels=(*names, "layer")
        )
        for labels, load in loads:
            routed.add_metric(labels, int(load.totals.sum()))
            for rank, tokens in enumerate(load.by_rank(load.totals).sum(axis=0).tolist()):
                of_rank.add_metric((*labels, str(rank)), tokens)
            by_rank = load.by_rank(load.recent)
            for layer, value, of_ranks in zip(
                load.layers, imbalance(load.by_expert(load.recent)), imbalance(by_rank), strict=True
            ):
                uneven.add_metric((*labels, str(layer)), float(value))
                if by_rank.shape[1]:
                    uneven_ranks.add_metric((*labels, str(layer)), float(of_ranks))
        yield from (routed, of_rank, uneven, uneven_ranks)

    def _loop_lag(self) -> Metric:
        lag = self._frontend.loop_lag.seconds
        metric = HistogramMetricFamily(
            "aioinfer:loop_lag_seconds",
            "Lateness of a timer on the event loop.",
            labels=("model_name",),
        )
        metric.add_metric((self._model,), _cumulative(lag), lag.sum)
        return metric

    def _engines(self) -> Iterator[tuple[tuple[str, str], Engine]]:
        """Yields each engine behind the values of its labels."""
        for engine in self._frontend.engines:
            yield (self._model, str(engine.number)), engine

    def _gauge(self, name: str, about: str, value: Callable[[Engine], float]) -> Metric:
        metric = GaugeMetricFamily(name, about, labels=("model_name", "engine"))
        for labels, engine in self._engines():
            metric.add_metric(labels, value(engine))
        return metric

    def _counter(self, name: str, about: str, value: Callable[[Engine], float]) -> Metric:
        metric = CounterMetricFamily(name, about, labels=("model_name", "engine"))
        for labels, engine in self._engines():
            metric.add_metric(labels, value(engine))
        return metric

    def _histogram(self, name: str, about: str, of: Callable[[EngineMetrics], Histogram]) -> Metric:
        metric = HistogramMetricFamily(name, about, labels=("model_name", "engine"))
        for labels, engine in self._engines():
            histogram = of(engine.metrics)
            metric.add_metric(labels, _cumulative(histogram), histogram.sum)
        return metric


class ServerCollector(Collector):
    """Metrics of the HTTP server: open connections, rejections, time-outs and errors; all carry the
    label `model_name`."""

    def __init__(self, frontend: Frontend, connections: ConnectionServer):
        self._model = frontend.config.served_model_names[0]
        self._connections = connections

    def collect(self) -> Iterator[Metric]:
        """Yields each metric with its values of now."""
        counts = self._connections.counts
        about = "Connections, idle ones included."
        yield self._gauge("aioinfer:open_connections", about, len(self._connections.open))
        about = "Tasks of the event loop."
        yield self._gauge("aioinfer:asyncio_tasks", about, len(asyncio.all_tasks()))
        about = "New connections beyond server.max_connections, answered 503 or dropped."
        yield self._counter("aioinfer:connection_rejections", about, counts.no_room)
        about = "Connections without a request that were closed to make room for new ones."
        yield self._counter("aioinfer:connections_closed_for_room", about, counts.closed_for_room)
        yield self._counters(
            "aioinfer:client_timeouts",
            "Clients that were ended since they were too slow to send a head or a body or to read "
            "a reply, and idle connections that were closed.",
            "kind",
            counts.timeouts,
        )
        yield self._counters(
            "aioinfer:http_errors",
            "Requests that were answered with an error status, by reason.",
            "reason",
            counts.errors,
        )

    def _gauge(self, name: str, about: str, value: float) -> Metric:
        metric = GaugeMetricFamily(name, about, labels=("model_name",))
        metric.add_metric((self._model,), value)
        return metric

    def _counter(self, name: str, about: str, value: int) -> Metric:
        metric = CounterMetricFamily(name, about, labels=("model_name",))
        metric.add_metric((self._model,), value)
        return metric

    def _counters(self, name: str, about: str, label: str, values: Mapping[str, int]) -> Metric:
        metric = CounterMetricFamily(name, about, labels=("model_name", label))
        for value, number in values.items():
            metric.add_metric((self._model, value), number)
        return metric


class KeyCollector(Collector):
    """Metrics of the use of each API key; all carry the labels `model_name` and `key`, its name."""

    def __init__(self, frontend: Frontend, accounts: Accounts):
        self._model = frontend.config.served_model_names[0]
        self._accounts = accounts

    def collect(self) -> Iterator[Metric]:
        """Yields each metric with its values of now."""
        labels = ("model_name", "key")
        running = GaugeMetricFamily(
            "aioinfer:api_key_requests_running", "Requests being answered.", labels=labels
        )
        requests = CounterMetricFamily(
            "aioinfer:api_key_requests", "POST requests within the limits.", labels=labels
        )
        rejected = CounterMetricFamily(
            "aioinfer:api_key_rejections",
            "POST requests beyond a limit, answered 429.",
            labels=(*labels, "limit"),
        )
        prompt = CounterMetricFamily(
            "aioinfer:api_key_prompt_tokens", "Prompt tokens of ended requests.", labels=labels
        )
        generated = CounterMetricFamily(
            "aioinfer:api_key_generation_tokens",
            "Generated tokens of ended requests.",
            labels=labels,
        )
        for account in self._accounts:
            values = self._model, account.key.name
            running.add_metric(values, account.num_concurrent)
            requests.add_metric(values, account.num_requests)
            prompt.add_metric(values, account.num_prompt_tokens)
            generated.add_metric(values, account.num_generated_tokens)
            for limit, number in account.num_rejected.items():
                rejected.add_metric((*values, limit), number)
        yield from (running, requests, rejected, prompt, generated)


def _cumulative(histogram: Histogram) -> list[tuple[str, float]]:
    """Returns (upper bound, values up to it) for each bucket, as Prometheus has them."""
    buckets: list[tuple[str, float]] = []
    total = 0
    for bound, count in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
        total += count
        buckets.append((floatToGoString(bound), total))
    return buckets
