"""`/metrics` for Prometheus: tables of all metrics, read for each scrape.

A row of a table has the name of a metric, its kind, where its value is found, and a help text. The
metrics themselves are counted where things happen: by engines (`engine.metrics`, the scheduler),
the HTTP server (`connections.HttpCounts`) and the accounts of API keys (`limits`).

Metrics that mean the same as in vLLM have vLLM's names, so that dashboards made for it work; the
rest is named `aioinfer:…`. `docs/grafana.json` is a dashboard of all of it. Counters are listed
here without the `_total` that the text adds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, NamedTuple

from aiohttp import web
from prometheus_client import core, generate_latest
from prometheus_client.utils import floatToGoString

from aioinfer.api.admin.control import expert_load
from aioinfer.api.context import MODELS
from aioinfer.api.http.connections import CONNECTIONS
from aioinfer.api.http.limits import ACCOUNTS
from aioinfer.engine.engine import Engine
from aioinfer.engine.metrics import Histogram
from aioinfer.features.expert_load.planning import ExpertLoad, imbalance
from aioinfer.features.speculation.planning import ACCEPTED, ACCEPTED_AT, DRAFT_TOKENS, DRAFTS

_TEXT = "text/plain; version=0.0.4; charset=utf-8"

#: A value, or values by the value of a label of the metric's own; None where there is nothing to
#: measure.
Value = float | Histogram | Mapping[str, float] | Mapping[str, Histogram] | None

_COUNTER, _GAUGE = core.CounterMetricFamily, core.GaugeMetricFamily
_HISTOGRAM = core.HistogramMetricFamily


class Row(NamedTuple):
    """A metric.

    Attributes:
        name, kind, about: its name, its type and its help text.
        read: the value of one source: of an engine, for example.
        label: the name of its own label, if it has one.
    """

    name: str
    kind: Callable[..., core.Metric]
    read: Callable[[Any], Value]
    about: str
    label: str | None = None


def _of_metrics(name: str) -> Callable[[Engine], Value]:
    """Returns a function that reads an attribute of an engine's metrics."""
    return attrgetter(f"metrics.{name}")


def _of_stages(name: str) -> Callable[[Engine], Value]:
    """Returns a function that reads a time of the pipeline stages, where there are several."""
    return lambda e: (
        {str(stage): getattr(time, name) for stage, time in enumerate(e.stage_times())} or None
    )


def _of_experts(read: Callable[[ExpertLoad], Value]) -> Callable[[Engine], Value]:
    """Returns a function that reads the load of experts of a model that has any."""

    def find(engine: Engine) -> Value:
        load = expert_load(engine)
        return read(load) if load.version else None

    return find


def _rank_tokens(load: ExpertLoad) -> Value:
    tokens = load.by_rank(load.totals).sum(axis=0).tolist()
    return {str(rank): number for rank, number in enumerate(tokens)}


def _imbalance_of(sums: Callable[..., Any]) -> Callable[[Engine], Value]:
    """Returns a function that reads, by layer, how uneven recent tokens are, summed by `sums`."""

    def find(load: ExpertLoad) -> Value:
        tokens = sums(load, load.recent)
        uneven = imbalance(tokens).tolist() if tokens.shape[1] else []
        return dict(zip(map(str, load.layers), uneven, strict=False))

    return _of_experts(find)


def _by_position(engine: Engine) -> Value:
    counts = engine.metrics.counts
    names = {f"{ACCEPTED_AT}0", *(name for name in counts if name.startswith(ACCEPTED_AT))}
    return {name.removeprefix(ACCEPTED_AT): counts[name] for name in sorted(names)}


#: Measurements of the package's own features, which have rows of their own.
_ROWS, _FILLING = "constrained_rows", "mask_fill_seconds"
_OWN = {_ROWS, DRAFTS, DRAFT_TOKENS, ACCEPTED}

# fmt: off
#: Of each engine: the source is the `Engine`.
_OF_ENGINES = (
    Row("vllm:num_requests_running", _GAUGE, lambda e: e.scheduler.num_running,
        "Requests that hold a slot and KV blocks."),
    Row("vllm:num_requests_waiting", _GAUGE, lambda e: e.scheduler.num_waiting,
        "Requests that wait for a slot or for KV blocks."),
    Row("vllm:kv_cache_usage_perc", _GAUGE, lambda e: e.scheduler.kv_cache.usage,
        "Fraction of the KV blocks that requests use, 0 to 1."),
    Row("aioinfer:engine_serving", _GAUGE, _of_metrics("is_serving"),
        "1 while the engine serves; 0 while its workers are restarted, and once it is dead."),
    Row("aioinfer:worker_restarts", _COUNTER, _of_metrics("restarts"),
        "Attempts to restart an engine's workers after they died or hung."),
    Row("aioinfer:interrupted_requests", _COUNTER, _of_metrics("interrupted"),
        "Requests that ran when an engine's workers were lost."),
    Row("aioinfer:moved_requests", _COUNTER, _of_metrics("moved"),
        "Requests that went on with another engine when an engine died."),
    Row("aioinfer:integrity_violations", _COUNTER, _of_metrics("violations"),
        "Checks of the scheduler's and the engine's records that failed."),
    Row("vllm:num_preemptions", _COUNTER, lambda e: e.scheduler.stats.preemptions,
        "Requests whose KV blocks were given to older ones, and that were recomputed."),
    Row("vllm:prefix_cache_queries", _COUNTER, lambda e: e.scheduler.stats.prefix_queried,
        "Prompt tokens looked up in the prefix cache."),
    Row("vllm:prefix_cache_hits", _COUNTER, lambda e: e.scheduler.stats.prefix_hit,
        "Prompt tokens found in the prefix cache."),
    Row("vllm:external_prefix_cache_hits", _COUNTER, lambda e: e.scheduler.stats.loaded_tokens,
        "Tokens that the device lacked and that were loaded from the store of KV."),
    Row("aioinfer:kv_store_blocks", _GAUGE,
        lambda e: getattr(e.scheduler.kv_cache.store, "num_blocks", None),
        "KV blocks that memory of the host has, beside those of the device."),
    Row("vllm:prompt_tokens", _COUNTER, _of_metrics("prompt_tokens"),
        "Prompt tokens of requests that got a first token."),
    Row("vllm:generation_tokens", _COUNTER, _of_metrics("generation_tokens"),
        "Generated tokens, end tokens included."),
    Row("vllm:request_success", _COUNTER, _of_metrics("finished"),
        "Ended requests.", "finished_reason"),
    Row("aioinfer:steps", _COUNTER, lambda e: e.scheduler.stats.steps,
        "Steps that were planned."),
    Row("aioinfer:wasted_rows", _COUNTER, lambda e: e.scheduler.stats.wasted_rows,
        "Rows computed for requests that had ended meanwhile."),
    Row("aioinfer:step_seconds", _COUNTER, lambda e: e.scheduler.pacing.step_s,
        "Seconds of steps whose time was predicted: from when workers could begin with it."),
    Row("aioinfer:step_prediction_error_seconds", _COUNTER, lambda e: e.scheduler.pacing.error_s,
        "Seconds by which steps took more or less than was predicted."),
    Row("vllm:spec_decode_num_drafts", _COUNTER, lambda e: e.metrics.counts[DRAFTS],
        "Rows of a step with draft tokens: one a request."),
    Row("vllm:spec_decode_num_draft_tokens", _COUNTER, lambda e: e.metrics.counts[DRAFT_TOKENS],
        "Draft tokens that were verified."),
    Row("vllm:spec_decode_num_accepted_tokens", _COUNTER, lambda e: e.metrics.counts[ACCEPTED],
        "Draft tokens that were kept."),
    Row("vllm:spec_decode_num_accepted_tokens_per_pos", _COUNTER, _by_position,
        "Draft tokens that were kept, by their position in the draft.", "position"),
    Row(f"aioinfer:{_ROWS}", _COUNTER, lambda e: e.metrics.counts[_ROWS],
        "Rows that were sampled under a mask of allowed tokens."),
    Row("aioinfer:worker_busy_seconds", _COUNTER, lambda e: e.metrics.worker_busy_ns * 1e-9,
        "Seconds that the first worker of an engine spent on steps."),
    Row("aioinfer:stage_busy_seconds", _COUNTER, _of_stages("busy_s"),
        "Seconds that the first worker of a pipeline stage computed.", "stage"),
    Row("aioinfer:stage_idle_seconds", _COUNTER, _of_stages("idle_s"),
        "Seconds that it did not, while steps were in flight: bubbles.", "stage"),
    Row("vllm:time_to_first_token_seconds", _HISTOGRAM, _of_metrics("time_to_first_token"),
        "From the submission to the first token."),
    Row("vllm:inter_token_latency_seconds", _HISTOGRAM, _of_metrics("inter_token_latency"),
        "Between two tokens of a request."),
    Row("vllm:request_time_per_output_token_seconds", _HISTOGRAM,
        _of_metrics("time_per_output_token"), "Mean of that in a request."),
    Row("vllm:e2e_request_latency_seconds", _HISTOGRAM, _of_metrics("e2e_latency"),
        "From the submission to the last token."),
    Row("vllm:request_queue_time_seconds", _HISTOGRAM, _of_metrics("queue_time"),
        "From joining the queue to the first step."),
    Row("vllm:request_prefill_time_seconds", _HISTOGRAM, _of_metrics("prefill_time"),
        "From the first step to the first token."),
    Row("vllm:request_decode_time_seconds", _HISTOGRAM, _of_metrics("decode_time"),
        "From the first token to the last."),
    Row("vllm:request_prompt_tokens", _HISTOGRAM, _of_metrics("request_prompt_tokens"),
        "Prompt tokens of a request."),
    Row("vllm:request_generation_tokens", _HISTOGRAM, _of_metrics("request_generation_tokens"),
        "Generated tokens of a request."),
    Row("aioinfer:step_phase_seconds", _HISTOGRAM, _of_metrics("phases"),
        "Time of the event loop for a phase of a step: reading its result, updating the "
        "scheduler, planning, posting, emitting text.", "phase"),
    Row(f"aioinfer:{_FILLING}", _HISTOGRAM, lambda e: e.metrics.observed[_FILLING],
        "Time in which the masks of a step with constrained rows were filled."),
)

#: The same, of models that have experts: a series for each layer and rank, not for each expert.
_OF_EXPERTS = (
    Row("aioinfer:expert_tokens", _COUNTER, _of_experts(lambda load: int(load.totals.sum())),
        "Tokens that experts were given: each as often as it has experts, in all layers."),
    Row("aioinfer:expert_rank_tokens", _COUNTER, _of_experts(_rank_tokens),
        "Those of the experts that a rank has.", "rank"),
    Row("aioinfer:expert_imbalance", _GAUGE, _imbalance_of(ExpertLoad.by_expert),
        "Tokens of a layer's busiest expert over the mean of its experts, last minutes.", "layer"),
    Row("aioinfer:expert_rank_imbalance", _GAUGE, _imbalance_of(ExpertLoad.by_rank),
        "Tokens of the busiest rank over the mean of the ranks: how long a layer's experts take, "
        "beside evenly loaded ones, in the last minutes.", "layer"),
)

#: Of the event loop: the source is the `Frontend`.
_OF_LOOP = (
    Row("aioinfer:loop_lag_seconds", _HISTOGRAM, lambda f: f.loop_lag.seconds,
        "Lateness of a timer on the event loop."),
)

#: Of several models: the source is the `Frontend`.
_OF_TURNS = (
    Row("aioinfer:model_awake", _GAUGE, lambda f: float(not f.control.sleep_level),
        "1 while the model has the devices, 0 while it sleeps."),
    Row("aioinfer:model_wakes", _COUNTER, lambda f: f.control.num_wakes,
        "Times that the model has woken up."),
)

#: Of the HTTP server: the source is the `ConnectionServer`.
_OF_SERVER = (
    Row("aioinfer:open_connections", _GAUGE, lambda c: len(c.open),
        "Connections, idle ones included."),
    Row("aioinfer:asyncio_tasks", _GAUGE, lambda _: len(asyncio.all_tasks()),
        "Tasks of the event loop."),
    Row("aioinfer:connection_rejections", _COUNTER, lambda c: c.counts.no_room,
        "New connections beyond the bound, answered 503 or dropped."),
    Row("aioinfer:connections_closed_for_room", _COUNTER, lambda c: c.counts.closed_for_room,
        "Connections without a request that were closed to make room for new ones."),
    Row("aioinfer:client_timeouts", _COUNTER, lambda c: c.counts.timeouts,
        "Clients that were ended since they were too slow to send a head or a body or to read "
        "a reply, and idle connections that were closed.", "kind"),
    Row("aioinfer:http_errors", _COUNTER, lambda c: c.counts.errors,
        "Requests that were answered with an error status, by reason.", "reason"),
)

#: Of the use of each API key: the source is the `Account`.
_OF_KEYS = (
    Row("aioinfer:api_key_requests_running", _GAUGE, lambda a: a.num_concurrent,
        "Requests being answered."),
    Row("aioinfer:api_key_requests", _COUNTER, lambda a: a.num_requests,
        "POST requests within the limits."),
    Row("aioinfer:api_key_rejections", _COUNTER, lambda a: a.num_rejected,
        "POST requests beyond a limit, answered 429.", "limit"),
    Row("aioinfer:api_key_prompt_tokens", _COUNTER, lambda a: a.num_prompt_tokens,
        "Prompt tokens of ended requests."),
    Row("aioinfer:api_key_generation_tokens", _COUNTER, lambda a: a.num_generated_tokens,
        "Generated tokens of ended requests."),
)
# fmt: on


def _of_features(engines: Iterable[Engine]) -> Iterator[Row]:
    """Yields rows for what features of other packages have measured."""
    measured = [engine.metrics for engine in engines]
    about = "Measured by a step feature of another package."
    named = {name for each in measured for name in each.counts} - _OWN
    for name in sorted(name for name in named if not name.startswith(ACCEPTED_AT)):
        yield Row(f"aioinfer:feature_{name}", _COUNTER, _entry("counts", name), about)
    for name in sorted({name for each in measured for name in each.observed} - {_FILLING}):
        yield Row(f"aioinfer:feature_{name}", _HISTOGRAM, _entry("observed", name), about)


def _entry(of: str, name: str) -> Callable[[Engine], Value]:
    return lambda engine: getattr(engine.metrics, of)[name]


async def show_metrics(request: web.Request) -> web.Response:
    """Returns all metrics as text.

    Between two of them the event loop does other work: the whole takes milliseconds.
    """
    app = request.app
    models = app[MODELS]
    named = [((each.config.name,), each) for each in models]
    ((model,), _), *others = named
    engines = [
        ((*name, str(engine.number)), engine) for name, each in named for engine in each.engines
    ]
    accounts = [((model, account.key.name), account) for account in app[ACCOUNTS]]
    of_engine, of_model, of_key = ("model_name", "engine"), ("model_name",), ("model_name", "key")
    tables: tuple[tuple[Iterable[Row], Sequence[str], Sequence[Any]], ...] = (
        (_OF_ENGINES, of_engine, engines),
        (_of_features(engine for _, engine in engines), of_engine, engines),
        (_OF_EXPERTS, of_engine, engines),
        (_OF_LOOP, of_model, named),
        (_OF_TURNS, of_model, named if others else ()),
        (_OF_SERVER, of_model, [((model,), app[CONNECTIONS])]),
        (_OF_KEYS, of_key, accounts),
    )
    parts = []
    for rows, labels, sources in tables:
        for row in rows:
            if (metric := _measure(row, labels, sources)) is not None:
                collector: Any = SimpleNamespace(collect=lambda found=metric: [found])
                parts.append(generate_latest(collector))
            await asyncio.sleep(0)
    return web.Response(body=b"".join(parts), headers={"Content-Type": _TEXT})


def _measure(
    row: Row, labels: Sequence[str], sources: Iterable[tuple[tuple[str, ...], Any]]
) -> core.Metric | None:
    """Returns a metric with its values of now, or None where no source has any.

    Args:
        row: the metric.
        labels: the names of the labels that all metrics of its table have.
        sources: the values of these labels, and what is read.
    """
    names = [*labels, row.label] if row.label else labels
    metric: Any = row.kind(row.name, row.about, labels=names)
    found = False
    for of_source, source in sources:
        value = row.read(source)
        found = found or value is not None
        by_label = value.items() if isinstance(value, Mapping) else [(None, value)]
        for own, each in by_label:
            all_labels = of_source if own is None else (*of_source, own)
            if isinstance(each, Histogram):
                metric.add_metric(all_labels, _cumulative(each), each.sum)
            elif each is not None:
                metric.add_metric(all_labels, each)
    return metric if found else None


def _cumulative(histogram: Histogram) -> list[tuple[str, float]]:
    """Returns (upper bound, values up to it) for each bucket, as Prometheus has them."""
    buckets: list[tuple[str, float]] = []
    total = 0
    for bound, count in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
        total += count
        buckets.append((floatToGoString(bound), total))
    return buckets
