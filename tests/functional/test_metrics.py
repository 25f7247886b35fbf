"""`/metrics` of a real server: after each kind of request, every counter has moved by exactly what
happened."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from aioinfer.api.server import HttpServer
from aioinfer.config import load_config
from aioinfer.engine.frontend import Frontend
from aioinfer.sampling_params import SamplingParams
from aioinfer.text.detokenizer import Detokenizer
from tests.functional.conftest import SMOLLM2, Served
from tests.test_metrics import OF_SERVER
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="session")

EXACT = {"temperature": 0, "ignore_eos": True}
#: Histograms with one value for each request that ended by itself.
OF_REQUESTS = (
    "e2e_request_latency_seconds",
    "request_decode_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
)
#: ... and with one for each request that got so far.
OF_BEGINNINGS = (
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "time_to_first_token_seconds",
)


#: How much of it there is depends on when clients close their connections.
OF_CLIENTS = ("aioinfer:open_connections", "aioinfer:asyncio_tasks")


async def scrape(http: aiohttp.ClientSession) -> dict[str, float]:
    """Returns all samples without buckets, and without what depends on the connections that other
    tests have left; what has a label of its own is named `name/value`."""
    async with http.get("/metrics") as response:
        assert response.status == 200
        text = await response.text()
    samples = {}
    for metric in text_string_to_metric_families(text):
        for name, labels, value, *_ in metric.samples:
            if "le" not in labels and metric.name not in OF_CLIENTS:
                assert labels.pop("model_name") == "smollm2"
                of_engine = "loop_lag" not in name and "api_key" not in name
                of_engine &= metric.name not in OF_SERVER
                assert labels.pop("engine", None) == ("0" if of_engine else None)
                samples["/".join([name.partition(":")[2], *labels.values()])] = value
    return samples


class Change:
    """How much the samples have changed since `Change.begin`."""

    def __init__(self, http: aiohttp.ClientSession, before: dict[str, float]):
        self._http = http
        self._before = before

    @classmethod
    async def begin(cls, http: aiohttp.ClientSession) -> Change:
        return cls(http, await scrape(http))

    async def now(self) -> dict[str, float]:
        """Returns the differences that are not zero."""
        after = await scrape(self._http)
        assert after.keys() == self._before.keys()
        return {
            name: after[name] - self._before[name]
            for name in after
            if after[name] != self._before[name]
        }


def check_counts(
    change: dict[str, float], *, prompt: int, tokens: list[int], **reasons: int
) -> None:
    """Checks all that follows from the prompt tokens, the tokens of each completion, and how often
    each finish reason came up."""
    assert change["prompt_tokens_total"] == prompt
    assert change["generation_tokens_total"] == sum(tokens)
    for reason in ("stop", "length", "abort", "error"):
        assert change.get(f"request_success_total/{reason}", 0) == reasons.get(reason, 0), reason
    for name in OF_BEGINNINGS:
        assert change[f"{name}_count"] == len(tokens), name
    whole = reasons.get("stop", 0) + reasons.get("length", 0)
    for name in OF_REQUESTS:
        assert change.get(f"{name}_count", 0) == whole, name
    assert change.get("inter_token_latency_seconds_count", 0) == sum(tokens) - len(tokens)


async def test_one_request(served: Served) -> None:
    change = await Change.begin(served.http)
    begin = time.perf_counter()
    reply = await served.post(
        "/v1/completions", prompt="Metrics of one request:", max_tokens=9, **EXACT
    )
    wall = time.perf_counter() - begin
    moved = await change.now()
    prompt_tokens = reply["usage"]["prompt_tokens"]
    check_counts(moved, prompt=prompt_tokens, tokens=[9], length=1)
    decoding = moved["request_decode_time_seconds_sum"]
    assert moved["inter_token_latency_seconds_sum"] == pytest.approx(decoding)
    assert moved["request_time_per_output_token_seconds_sum"] == pytest.approx(decoding / 8)
    assert moved["request_time_per_output_token_seconds_count"] == 1
    assert moved["e2e_request_latency_seconds_sum"] == pytest.approx(
        moved["time_to_first_token_seconds_sum"] + decoding
    )
    assert 0 < decoding < moved["e2e_request_latency_seconds_sum"] < wall
    assert moved["request_prompt_tokens_sum"] == prompt_tokens
    assert moved["request_generation_tokens_sum"] == 9
    assert moved["prefix_cache_queries_total"] == prompt_tokens
    assert "prefix_cache_hits_total" not in moved
    assert "num_preemptions_total" not in moved


async def test_steps(served: Served) -> None:
    await until(lambda: not served.engine.scheduler.num_in_flight)
    change = await Change.begin(served.http)
    begin = time.perf_counter()
    await served.complete(prompt="Metrics of steps:", max_tokens=6, **EXACT)
    await until(lambda: not served.engine.scheduler.num_in_flight)
    await asyncio.sleep(0.1)  # the timer of the lag comes by, however short the request was
    moved = await change.now()
    wall = time.perf_counter() - begin
    assert moved["steps_total"] == 6, (
        "the prompt and five tokens; the last token is sampled, not computed"
    )
    for phase in ("result", "update", "plan", "post", "emit"):
        assert moved[f"step_phase_seconds_count/{phase}"] == 6
    for phase in ("update", "plan", "post", "emit"):
        assert 0 < moved[f"step_phase_seconds_sum/{phase}"] < wall
    assert 0 < moved["worker_busy_seconds_total"] < wall
    assert 0 < moved["loop_lag_seconds_count"] <= wall / 0.05 + 2, (
        "one timer, however many requests set it"
    )


async def test_the_prefix_cache(served: Served) -> None:
    prompt = "Prefixes that come again are found in the cache. " * 4
    body = {"prompt": prompt, "max_tokens": 2, **EXACT}
    await served.complete(**body)
    change = await Change.begin(served.http)
    usage = (await served.post("/v1/completions", **body))["usage"]
    moved = await change.now()
    assert moved["prefix_cache_queries_total"] == usage["prompt_tokens"]
    assert moved["prefix_cache_hits_total"] == usage["prompt_tokens_details"]["cached_tokens"] >= 32


@pytest.mark.parametrize("stream", [True, False])
async def test_completions_and_prompts(served: Served, stream: bool) -> None:
    """Each completion is a request; each prompt counts once, as in the usage."""
    change = await Change.begin(served.http)
    body: dict[str, Any] = {"prompt": ["One, two,", "Alpha, beta, gamma,"], "n": 3}
    body |= {"max_tokens": 4, "ignore_eos": True}
    if stream:
        options = {"include_usage": True}
        *_, last = await served.stream("/v1/completions", stream_options=options, **body)
    else:
        last = await served.post("/v1/completions", **body)
    prompt = last["usage"]["prompt_tokens"]
    check_counts(await change.now(), prompt=prompt, tokens=[4] * 6, length=6)


async def test_requests_that_are_refused_count_nothing(served: Served) -> None:
    change = await Change.begin(served.http)
    await served.post("/v1/completions", 400, prompt="Too much", max_tokens=5000)
    await served.post("/v1/completions", 400, prompt=[])
    moved = {name for name in await change.now() if "loop_lag" not in name}
    expected = {"api_key_requests_total/anonymous", "http_errors_total/bad_request"}
    assert moved == expected, "they came, and no engine saw them"


async def test_gauges_and_aborts(served: Served) -> None:
    engine = served.engine
    change = await Change.begin(served.http)
    body: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 450, "n": 6} | EXACT
    posting = asyncio.ensure_future(served.post("/v1/completions", **body))

    def four_run() -> bool:
        running = engine.scheduler.running
        return len(running) == 4 and all(request.num_output > 3 for request in running)

    await until(four_run)
    requests = list(engine.scheduler.requests())
    samples = await scrape(served.http)
    assert (samples["num_requests_running"], samples["num_requests_waiting"]) == (4, 2)
    assert 0 < samples["kv_cache_usage_perc"] < 0.5
    posting.cancel()
    await until(lambda: engine.scheduler.is_idle)
    prompt_len = requests[0].prompt_len
    tokens = [request.num_output for request in requests if request.num_output]
    moved = await change.now()
    assert moved["request_success_total/abort"] == 6
    check_counts(moved, prompt=prompt_len, tokens=tokens, abort=6)
    samples = await scrape(served.http)
    gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    assert [samples[name] for name in gauges] == [0, 0, 0]


@pytest.mark.parametrize(("method", "tokens"), [("next", 1), ("flush", 30)])
async def test_a_text_that_fails(
    served: Served, monkeypatch: pytest.MonkeyPatch, method: str, tokens: int
) -> None:
    """At its first token, and at its last, when the scheduler is done with the request."""

    def fail(*arguments: object) -> str:
        raise ValueError("broken on purpose")

    monkeypatch.setattr(Detokenizer, method, fail)
    change = await Change.begin(served.http)
    await served.post("/v1/completions", 500, prompt="This text", max_tokens=30, **EXACT)
    moved = await change.now()
    assert {name: value for name, value in moved.items() if "success" in name} == {
        "request_success_total/error": 1
    }
    assert moved["generation_tokens_total"] == tokens


async def test_preemptions() -> None:
    """A cache that holds two of the four requests: each preemption counts, and no request counts
    twice."""
    settings = {
        "model.path": SMOLLM2, "model.max_model_len": 64, "cache.block_size": 16,
        "cache.num_blocks": 6, "scheduler.max_num_seqs": 4,
        "parallel.executor": "inline", "parallel.cpu_threads": 1, "server.port": 0,
        "server.served_model_names": ["smollm2"],
        "speculation.method": "none",  # a request that is ahead would leave its blocks in time
    }  # fmt: skip
    frontend = await Frontend.launch(load_config(None, settings))
    server = HttpServer(frontend.config, frontend)
    try:
        async with aiohttp.ClientSession(await server.start()) as http:
            change = await Change.begin(http)
            params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=24)
            texts = ("One and", "Two or", "Three of", "Four by")
            prompts = [await frontend.encode(text) for text in texts]
            outputs = [await frontend.submit(prompt, params) for prompt in prompts]
            for output in outputs:
                async for _ in output:
                    pass
            preemptions = sum(output.sequences[0].request.num_preemptions for output in outputs)
            moved = await change.now()
    finally:
        await frontend.close()
        await server.close()
    assert moved["num_preemptions_total"] == preemptions > 0
    check_counts(moved, prompt=sum(map(len, prompts)), tokens=[24] * 4, length=4)
