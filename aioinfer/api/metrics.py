"""`/metrics` for Prometheus: reads the engine's books when it is asked, and keeps none of its own.

What means the same as in vLLM has vLLM's name, so that dashboards made for it work; the rest is named `aioinfer:…`.
`docs/grafana.json` is a dashboard of all of it. Counters are listed here without the `_total` that the text adds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from aiohttp import web
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from aioinfer.api.context import ENGINE

if TYPE_CHECKING:
    from aioinfer.engine.engine import Engine
    from aioinfer.engine.metrics import Histogram

_TEXT = "text/plain; version=0.0.4; charset=utf-8"


async def show_metrics(request: web.Request) -> web.Response:
    """Returns all metrics as text. Between two of them the event loop does other work: the whole takes milliseconds."""
    parts = []
    for metric in EngineCollector(request.app[ENGINE]).collect():
        parts.append(generate_latest(_Only(metric)))
        await asyncio.sleep(0)
    return web.Response(body=b"".join(parts), headers={"Content-Type": _TEXT})


class _Only(Collector):
    """One metric as a collector, which is what prometheus-client can turn into text."""

    def __init__(self, metric: Metric):
        self._metric = metric

    def collect(self) -> Iterable[Metric]:
        return (self._metric,)


class EngineCollector(Collector):
    """The metrics of an engine; all carry the label `model_name`. Reading them changes nothing."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._model = engine.config.served_model_names[0]

    def collect(self) -> Iterator[Metric]:
        """Yields each metric with its value of now."""
        yield from self._gauges()
        yield from self._counters()
        yield from self._request_histograms()
        yield from self._step_histograms()

    def _gauges(self) -> Iterator[Metric]:
        scheduler = self._engine.scheduler
        yield self._gauge("vllm:num_requests_running", "Requests that hold a slot and KV blocks.", len(scheduler.running))
        yield self._gauge("vllm:num_requests_waiting", "Requests that wait for a slot or for KV blocks.", scheduler.num_waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of the KV blocks that requests own, 0 to 1.", scheduler.pool.usage)

    def _counters(self) -> Iterator[Metric]:
        books, totals = self._engine.metrics, self._engine.scheduler.stats
        count = self._counter
        yield count("vllm:num_preemptions", "Requests that lost their KV blocks to older ones and began anew.", totals.preemptions)
        yield count("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", totals.prefix_queried)
        yield count("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", totals.prefix_hit)
        yield count("vllm:prompt_tokens", "Prompt tokens of requests that got a first token.", books.prompt_tokens)
        yield count("vllm:generation_tokens", "Generated tokens, end tokens included.", books.generation_tokens)
        finished = CounterMetricFamily("vllm:request_success", "Ended requests.", labels=("model_name", "finished_reason"))
        for reason, number in books.finished.items():
            finished.add_metric((self._model, reason), number)
        yield finished
        yield count("aioinfer:steps", "Steps that were planned.", totals.steps)
        yield count("aioinfer:wasted_rows", "Rows computed for requests that had ended meanwhile.", totals.wasted_rows)
        yield count("aioinfer:worker_busy_seconds", "Seconds that the first worker spent on steps.", books.worker_busy_ns * 1e-9)

    def _request_histograms(self) -> Iterator[Metric]:
        books, show = self._engine.metrics, self._histogram
        yield show("vllm:time_to_first_token_seconds", "From the submission to the first token.", books.time_to_first_token)
        yield show("vllm:inter_token_latency_seconds", "Between two tokens of a request.", books.inter_token_latency)
        yield show("vllm:request_time_per_output_token_seconds", "Mean of that in a request.", books.time_per_output_token)
        yield show("vllm:e2e_request_latency_seconds", "From the submission to the last token.", books.e2e_latency)
        yield show("vllm:request_queue_time_seconds", "From joining the queue to the first step.", books.queue_time)
        yield show("vllm:request_prefill_time_seconds", "From the first step to the first token.", books.prefill_time)
        yield show("vllm:request_decode_time_seconds", "From the first token to the last.", books.decode_time)
        yield show("vllm:request_prompt_tokens", "Prompt tokens of a request.", books.request_prompt_tokens)
        yield show("vllm:request_generation_tokens", "Generated tokens of a request.", books.request_generation_tokens)

    def _step_histograms(self) -> Iterator[Metric]:
        books = self._engine.metrics
        about = "Time of the event loop for a part of a step: taking its result, updating the books, planning, posting, making text."
        yield self._histograms("aioinfer:step_phase_seconds", about, "phase", books.phases)
        yield self._histogram("aioinfer:loop_lag_seconds", "Lateness of a timer on the event loop.", books.loop_lag)

    def _gauge(self, name: str, about: str, value: float) -> Metric:
        metric = GaugeMetricFamily(name, about, labels=("model_name",))
        metric.add_metric((self._model,), value)
        return metric

    def _counter(self, name: str, about: str, value: float) -> Metric:
        metric = CounterMetricFamily(name, about, labels=("model_name",))
        metric.add_metric((self._model,), value)
        return metric

    def _histogram(self, name: str, about: str, histogram: Histogram) -> Metric:
        metric = HistogramMetricFamily(name, about, labels=("model_name",))
        metric.add_metric((self._model,), _cumulative(histogram), histogram.sum)
        return metric

    def _histograms(self, name: str, about: str, label: str, histograms: Mapping[str, Histogram]) -> Metric:
        metric = HistogramMetricFamily(name, about, labels=("model_name", label))
        for value, histogram in histograms.items():
            metric.add_metric((self._model, value), _cumulative(histogram), histogram.sum)
        return metric


def _cumulative(histogram: Histogram) -> list[tuple[str, float]]:
    """Returns (upper bound, values up to it) for each bucket, as Prometheus has them."""
    buckets: list[tuple[str, float]] = []
    total = 0
    for bound, count in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
        total += count
        buckets.append((floatToGoString(bound), total))
    return buckets
