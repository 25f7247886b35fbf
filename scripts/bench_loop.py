r"""Measures the event loop's CPU time for a streamed token, and the phases of a step: the engine
and the HTTP server over a worker that computes nothing.

    python scripts/bench_loop.py [--streams 1,64,256,512,1024] [--runs 5] [--delay-ms 0] \
        [--tokens 128]

The scheduler, the detokenizer (SmolLM2's tokenizer), the HTTP server and the sockets are real; the
clients are other processes that read bytes and count events. Instead of a worker, an executor
answers each plan after `--delay-ms` (in the next iteration of the event loop if that is 0) with
tokens of a text in many scripts. Requests have 128 tokens in and a stop string that never occurs.
CPU time is that of the event loop's thread, from the first request to the last event, over all
tokens streamed. The same run measures a baseline: the same engine, and for each token an object on
an asyncio.Queue, a dict, `json.dumps` and `StreamResponse.write`. It also measures our path without
sockets, up to the bytes that would be written: the difference is the system's time for them. The
phases of a step are the same as in `/metrics`.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import uvloop
from aiohttp import web
from rich.console import Console
from rich.table import Table

from aioinfer.api.delivery import DirectSink
from aioinfer.api.openai.completions import Completion, CompletionRequest, CompletionWriter
from aioinfer.api.server import HttpServer
from aioinfer.checkpoint.source import resolve_model
from aioinfer.config import Config, load_config
from aioinfer.engine.frontend import Frontend
from aioinfer.engine.output import Delta
from aioinfer.executor.base import ProgressCallback, WorkerReport
from aioinfer.ipc.kv_spec import AttentionSpec, KVGroup
from aioinfer.ipc.masks import NUM_MASK_BUFFERS, ConstrainedRows, buffer_of, mask_words
from aioinfer.ipc.plan import I32, StepPlan, StepResult
from aioinfer.ipc.sections import Section
from aioinfer.sampling_params import SamplingParams

CONFIG = Path(__file__).parent.parent / "configs" / "smollm2.toml"
ONE_GROUP = KVGroup(AttentionSpec(1, 1), (0,))
PROMPT_LEN = 128
CLIENTS = 2
_VOCAB_SIZE = 49_152  # of SmolLM2
STOP = "\u2063never\u2063"
TEXT = (
    "The quick brown fox jumps over the lazy dog. Zwölf Boxkämpfer jagen Viktor quer über den "
    "großen Sylter Deich. "
    "人类社会的发展离不开语言和文字。いろはにほへと ちりぬるを。"
    "Съешь же ещё этих мягких французских булок. "
    "नमस्ते दुनिया, आप कैसे हैं? مرحبا بالعالم. 😀🚀🌍 def f(x): return x ** 2  # naïve façade, "
    "3.14159\n"
)


class EchoExecutor:
    """Answers plans without computing: position p of slot s gets token p + 7919 s of a text, modulo
    its length, and a constrained row the lowest token that its mask allows."""

    def __init__(self, config: Config, delay_s: float):
        self._config = config
        self._delay_s = delay_s
        self.text = np.zeros(1, np.int32)
        rows, words = config.scheduler.max_num_seqs, mask_words(_VOCAB_SIZE)
        self._masks = np.zeros((NUM_MASK_BUFFERS, rows, words), np.int32)
        self._held: dict[int, tuple[StepResult, I32]] = {}  # results that wait for masks, by step

    def set_text(self, tokens: list[int]) -> None:
        """Sets the text, as token ids."""
        self.text = np.array(tokens, np.int32)

    async def start(
        self,
        on_result: Callable[[StepResult], None],
        on_failure: Callable[[Exception], None],
        on_progress: ProgressCallback,
    ) -> WorkerReport:
        """See `Executor.start`."""
        self._loop = asyncio.get_running_loop()
        self._on_result = on_result
        max_model_len = self._config.model.max_model_len
        assert max_model_len is not None
        # as many blocks as all slots can fill: more would only be counted
        num_blocks = min(80_000, self._config.scheduler.max_num_seqs * -(-max_model_len // 16))
        return WorkerReport("none", "none", 0, 0, 16, (ONE_GROUP,), (num_blocks,), max_model_len)

    def post(self, plan: StepPlan) -> None:
        """See `Executor.post`. Plans are encoded and decoded, as on their way to a worker."""
        plan = StepPlan.decode(b"".join(plan.encode()))
        rows = plan.samples.astype(bool)
        places = (plan.starts + plan.lengths)[rows] + 7919 * plan.slots[rows]
        result = StepResult(plan.step_id, self.text[places % len(self.text)])
        constrained = plan.section(ConstrainedRows)
        if constrained is None:
            self._answer(result)
        else:
            self._held[plan.step_id] = result, constrained.rows

    def post_section(self, section: Section) -> None:
        """See `Executor.post_section`: no feature takes it."""

    def masks_of(self, step_id: int) -> I32:
        """See `Executor.masks_of`."""
        return self._masks[buffer_of(step_id)]

    def post_masks(self, step_id: int) -> None:
        """See `Executor.post_masks`."""
        result, rows = self._held.pop(step_id)
        for row, mask in zip(rows.tolist(), self.masks_of(step_id), strict=False):
            allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")
            result.tokens[row] = allowed.argmax() if allowed.any() else -1
        self._answer(result)

    def _answer(self, result: StepResult) -> None:
        if self._delay_s:
            self._loop.call_later(self._delay_s, self._on_result, result)
        else:
            self._loop.call_soon(self._on_result, result)

    async def call(
        self, method: str, arguments: Mapping[str, Any], timeout_s: float
    ) -> Sequence[Any]:
        """See `Executor.call`."""
        return [None]

    def stage_times(self) -> tuple[()]:
        """Returns no times: there is one stage."""
        return ()

    async def shutdown(self) -> None:
        """See `Executor.shutdown`."""


async def make_frontend(
    streams: int, delay_s: float, settings: Mapping[str, Any] | None = None
) -> Frontend:
    """Returns a ready frontend over `EchoExecutor`s, configured as in production but for
    `settings`."""
    usual = {
        "scheduler.max_num_seqs": streams,
        "model.max_model_len": 2048,
        "server.port": 0,
        "scheduler.max_num_batched_tokens": 16384,
    }
    config = await asyncio.to_thread(load_config, CONFIG, usual | dict(settings or {}))
    executors = [EchoExecutor(config, delay_s) for _ in range(config.parallel.data_parallel_size)]
    frontend = Frontend(config, executors)
    await frontend.start(await asyncio.to_thread(resolve_model, config.model))
    for executor in executors:
        executor.set_text(frontend.require_tokenizer().encode(TEXT, False))
    return frontend


class PlainServer:
    """The baseline: streaming through a queue, dicts and `StreamResponse.write`, on the same
    engine."""

    def __init__(self, frontend: Frontend):
        app = web.Application()
        self._frontend = frontend
        app.router.add_post("/v1/completions", self._complete)
        self._runner = web.AppRunner(app, access_log=None)

    async def start(self) -> str:
        """Listens on a free port and returns the URL."""
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0, backlog=2048).start()
        host, port = self._runner.addresses[0][:2]
        return f"http://{host}:{port}"

    async def close(self) -> None:
        """Stops listening."""
        await self._runner.cleanup()

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        params = SamplingParams(
            temperature=0.0,
            max_tokens=body["max_tokens"],
            ignore_eos=True,
            stop=tuple(body["stop"]),
        )
        output = await self._frontend.submit(body["prompt"], params)
        queue: asyncio.Queue[Delta] = asyncio.Queue()
        output.put = queue.put_nowait  # type: ignore[method-assign, assignment]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        while True:
            delta = await queue.get()
            choice = {
                "index": 0,
                "text": delta.text,
                "logprobs": None,
                "finish_reason": delta.finish_reason,
            }
            chunk = {
                "id": "cmpl-0",
                "object": "text_completion",
                "created": int(time.time()),
                "model": "m",
                "choices": [choice],
            }
            await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
            if delta.finish_reason is not None:
                break
        await response.write(b"data: [DONE]\n\n")
        return response


def read_streams(url: str, streams: int, tokens: int, seed: int, begin: Any, counts: Any) -> None:
    """A client process: opens connections, sends a request on each at the same time, and counts the
    events of the replies."""

    async def one(host: str, port: int, prompt: list[int]) -> int:
        reader, writer = await asyncio.open_connection(host, port, limit=2**20)
        body = json.dumps(
            {
                "prompt": prompt,
                "max_tokens": tokens,
                "temperature": 0,
                "stream": True,
                "ignore_eos": True,
                "stop": [STOP],
            }
        ).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n"
        )
        writer.write(head.encode() + b"Connection: close\r\n\r\n" + body)
        events = 0
        while data := await reader.read(65536):
            events += data.count(b"data: {")
        writer.close()
        return events

    async def run() -> int:
        host, _, port = url.removeprefix("http://").rpartition(":")
        random = np.random.default_rng(seed)
        prompts = random.integers(3, 40_000, (streams, PROMPT_LEN)).tolist()
        return sum(await asyncio.gather(*(one(host, int(port), prompt) for prompt in prompts)))

    begin.wait()
    counts.put(uvloop.run(run()))


@dataclass(slots=True)
class Figures:
    """One load: CPU time of the event loop and wall time in µs a token, events a token, µs a token
    of each phase of a step, and the bound of the longest lag of the loop."""

    cpu_us: float
    wall_us: float
    events: float
    parts_us: dict[str, float]
    lag_ms: float


async def measure(
    frontend: Frontend, server: HttpServer | PlainServer, streams: int, tokens: int, seed: int
) -> Figures:
    """Streams `tokens` tokens to each of `streams` clients."""
    url = await server.start()
    context = multiprocessing.get_context("spawn")
    begin, counts = context.Event(), context.Queue()
    shares = [
        streams // CLIENTS + (number < streams % CLIENTS) for number in range(min(CLIENTS, streams))
    ]
    clients = [
        context.Process(
            target=read_streams,
            args=(url, share, tokens, seed * 100 + number, begin, counts),
            daemon=True,
        )
        for number, share in enumerate(shares)
    ]
    for client in clients:
        client.start()
    await asyncio.sleep(1.5)  # the clients import what they need
    gc.collect()
    gc.freeze()
    phases = {name: part.sum for name, part in frontend.engines[0].metrics.phases.items()}
    lags = list(frontend.loop_lag.seconds.counts)
    cpu, wall = time.thread_time(), time.perf_counter()
    begin.set()
    events = sum([await asyncio.to_thread(counts.get, timeout=120) for _ in clients])
    cpu, wall = time.thread_time() - cpu, time.perf_counter() - wall
    for client in clients:
        await asyncio.to_thread(client.join)
    await server.close()
    total = streams * tokens
    worst = max(
        (
            i
            for i, (was, now) in enumerate(zip(lags, frontend.loop_lag.seconds.counts, strict=True))
            if now > was
        ),
        default=0,
    )
    bounds = (*frontend.loop_lag.seconds.bounds, float("inf"))
    parts = {
        name: (part.sum - phases[name]) / total * 1e6
        for name, part in frontend.engines[0].metrics.phases.items()
    }
    return Figures(
        cpu / total * 1e6, wall / total * 1e6, events / total, parts, bounds[worst] * 1e3
    )


class NoTransport:
    """A transport that discards all writes."""

    def get_write_buffer_size(self) -> int:
        """Returns 0: no write waits."""
        return 0

    def is_closing(self) -> bool:
        """Returns False: the transport never closes."""
        return False

    def write(self, data: bytes) -> None:
        """Takes bytes."""


async def measure_without_sockets(streams: int, tokens: int, delay_s: float) -> float:
    """Returns the CPU time in us a token of the same work, up to the bytes of each event, over
    `NoTransport`s."""
    frontend = await make_frontend(streams, delay_s)
    chunk = Completion(
        id="cmpl-0123456789abcdef01234567",
        created=int(time.time()),
        model="m",
        system_fingerprint=None,
    )
    body = CompletionRequest(prompt="", stream=True)
    dialect: Any = SimpleNamespace(body=body, chunk=chunk, names=None, with_ids=False, echoes=[""])
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, stop=(STOP,))
    for number in range(streams):
        output = await frontend.submit([number + 5] * PROMPT_LEN, params)
        writer = CompletionWriter(dialect, output, 0)
        transport: Any = NoTransport()
        output.attach(DirectSink(transport, [writer], is_marked=False))
    gc.collect()
    gc.freeze()
    cpu = time.thread_time()
    await frontend.drain(120)
    cpu = time.thread_time() - cpu
    await frontend.close()
    return cpu / (streams * tokens) * 1e6


async def compare(streams: int, tokens: int, delay_s: float, seed: int) -> tuple[Figures, Figures]:
    """Returns the figures of the server and of the baseline, each on an engine of its own."""
    figures = []
    for is_plain in (False, True):
        frontend = await make_frontend(streams, delay_s)
        server = PlainServer(frontend) if is_plain else HttpServer(frontend.config, frontend)
        figures.append(await measure(frontend, server, streams, tokens, seed))
        await frontend.close()
    return figures[0], figures[1]


def median(values: list[float]) -> float:
    return statistics.median(values)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Measures the event loop's CPU time a streamed token."
    )
    parser.add_argument("--streams", default="1,64,256,512,1024", help="default: %(default)s")
    parser.add_argument(
        "--runs", type=int, default=5, help="medians of so many (default: %(default)s)"
    )
    parser.add_argument(
        "--tokens", type=int, default=128, help="tokens a stream (default: %(default)s)"
    )
    parser.add_argument(
        "--delay-ms", type=float, default=0.0, help="what a step takes (default: %(default)s)"
    )
    arguments = parser.parse_args()
    table = Table(title="the event loop, us a streamed token (medians)", title_justify="left")
    names = ("result", "update", "plan", "post", "emit")
    for name in (
        "streams",
        "CPU",
        "baseline",
        "ratio",
        "no sockets",
        *names,
        "events a token",
        "lag up to ms",
    ):
        table.add_column(name, justify="right")
    for streams in map(int, arguments.streams.split(",")):
        runs = [
            uvloop.run(compare(streams, arguments.tokens, arguments.delay_ms / 1e3, seed))
            for seed in range(arguments.runs)
        ]
        ours, plain = [a for a, _ in runs], [b for _, b in runs]
        bare = [
            uvloop.run(measure_without_sockets(streams, arguments.tokens, arguments.delay_ms / 1e3))
            for _ in range(arguments.runs)
        ]
        table.add_row(
            f"{streams}",
            f"{median([f.cpu_us for f in ours]):.1f}",
            f"{median([f.cpu_us for f in plain]):.1f}",
            f"{median([b.cpu_us / a.cpu_us for a, b in runs]):.2f}",
            f"{median(bare):.1f}",
            *(f"{median([f.parts_us[name] for f in ours]):.2f}" for name in names),
            f"{median([f.events for f in ours]):.3f}",
            f"{max(f.lag_ms for f in ours):g}",
        )
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
