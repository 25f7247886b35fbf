r"""Measures how other requests and idle connections affect a stream's latency: long prompts that
arrive beside it, and thousands of connections that do nothing.

    python scripts/bench_interference.py [--streams 64] [--prompt-tokens 200000] [--delay-ms 10] \
        [--seconds 8]
    python scripts/bench_interference.py --idle 5000 --streams 1024

The server runs in a process of its own, over a worker that computes nothing and answers each plan
after `--delay-ms` (`bench_loop.EchoExecutor`), so that the event loop alone is measured. A second
process keeps `--streams` streams running and records the time between the events of each; it also
requests `/health` every 20 ms. After a quiet phase, this process sends prompts of `--prompt-tokens`
tokens, one after the other: as text to be encoded, as token ids, and as a chat; then short ones,
many at the same moment. With `--idle`, instead, it opens that many keep-alive connections, each
after one request, and reports the server's memory for each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import time
from dataclasses import dataclass
from typing import Any

import aiohttp
import uvloop
from rich.console import Console
from rich.table import Table
from yarl import URL

from aioinfer.api.server import HttpServer
from aioinfer.startup import settle_process
from bench_loop import TEXT, make_frontend
from benchlib.processes import status_sum

MAX_MODEL_LEN = 262_144
HEALTH_INTERVAL_S = 0.02
#: Tokens of a stream, after which the next one begins on its connection.
STREAM_TOKENS = 800
#: Requests that come at the same moment.
BURST = 256
#: Idle connections that are opened side by side.
OPENED_TOGETHER = 50
#: Tokens of the text with the demo model's tokenizer.
TEXT_TOKENS = 200
#: Stands in a prompt where the number of the request will.
_MARK = "48999"


def serve(streams: int, delay_ms: float, address: Any) -> None:
    """The server's process: answers until it is ended."""

    async def run() -> None:
        settings = {
            "model.max_model_len": MAX_MODEL_LEN,
            "scheduler.max_num_batched_tokens": 65_536,
        }
        frontend = await make_frontend(streams + BURST, delay_ms / 1e3, settings)
        settle_process()
        address.put(await HttpServer(frontend.config, frontend).start())
        await frontend.wait_dead()

    uvloop.run(run())


@dataclass(slots=True)
class Latencies:
    """Milliseconds between two events of a stream, and that `/health` took, in one part of the
    run."""

    between: list[float]
    health: list[float]


class Watch:
    """The watching process: keeps streams running and requests `/health`, and notes how long both
    take in each part of the run."""

    def __init__(self, url: str, num_parts: int, part: Any):
        """`part` is a shared number: which part runs.

        The watching ends when it reaches `num_parts`.
        """
        self._url = url
        self._part = part
        # and one for events after the end
        self._parts = [Latencies([], []) for _ in range(num_parts + 1)]

    @property
    def _now(self) -> Latencies:
        return self._parts[self._part.value]

    async def run(self, streams: int) -> list[Latencies]:
        """Returns the latencies of each part. Raises if a request failed."""
        connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(None)
        async with aiohttp.ClientSession(self._url, connector=connector, timeout=timeout) as http:
            work = [asyncio.ensure_future(self._read(http)) for _ in range(streams)] + [
                asyncio.ensure_future(self._ask_health(http))
            ]
            while self._part.value < len(self._parts) - 1 and not any(one.done() for one in work):  # noqa: ASYNC110  # another process sets it
                await asyncio.sleep(0.01)
            failed = [one for one in work if one.done()]
            for one in work:
                one.cancel()
            await asyncio.gather(*work, return_exceptions=True)
            for one in failed:
                await one
        return self._parts[:-1]

    async def _read(self, http: aiohttp.ClientSession) -> None:
        body = {
            "prompt": [5] * 64,
            "max_tokens": STREAM_TOKENS,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
        }
        while True:
            async with http.post("/v1/completions", json=body) as response:
                response.raise_for_status()
                last = 0.0
                async for _ in response.content.iter_any():
                    now = time.perf_counter()
                    if last:
                        self._now.between.append((now - last) * 1e3)
                    last = now

    async def _ask_health(self, http: aiohttp.ClientSession) -> None:
        while True:
            began, part = time.perf_counter(), self._now
            async with http.get("/health") as response:
                response.raise_for_status()
            part.health.append((time.perf_counter() - began) * 1e3)
            await asyncio.sleep(HEALTH_INTERVAL_S)


def watch(url: str, streams: int, num_parts: int, part: Any, found: Any) -> None:
    """Runs a `Watch` and puts its result on the queue `found`."""
    found.put(uvloop.run(Watch(url, num_parts, part).run(streams)))


@dataclass(slots=True)
class Disturbance:
    """Requests that come beside the streams: `together` of one kind, again and again with `pause_s`
    between."""

    path: str
    body: dict[str, Any]
    together: int = 1
    pause_s: float = 0.0


async def disturb(url: str, kind: Disturbance, seconds: float) -> int:
    """Sends requests for so long.

    Returns how many; each has another prompt for the prefix cache.
    """
    sent, end = 0, time.perf_counter() + seconds
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=connector) as http:

        async def send(data: str) -> None:
            async with http.post(
                kind.path, data=data, headers={"Content-Type": "application/json"}
            ) as response:
                response.raise_for_status()
                await response.read()

        while time.perf_counter() < end:
            bodies = [
                json.dumps(kind.body).replace(_MARK, f"{sent + number + 100}")
                for number in range(kind.together)
            ]
            await asyncio.gather(*map(send, bodies))
            sent += kind.together
            await asyncio.sleep(kind.pause_s)
    return sent


def disturbances(tokens: int) -> dict[str, Disturbance]:
    """Returns a prompt of so many tokens in each form that it may take, and a burst of short
    ones."""
    text = f"{_MARK} " + TEXT * (tokens // TEXT_TOKENS)
    limits = {"max_tokens": 1, "temperature": 0}
    ids = [int(_MARK), *(number % 40_000 + 3 for number in range(tokens))]
    return {
        "text": Disturbance("/v1/completions", {"prompt": text, **limits}),
        "token ids": Disturbance("/v1/completions", {"prompt": ids, **limits}),
        "chat": Disturbance(
            "/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **limits}
        ),
        "tokenize": Disturbance("/tokenize", {"prompt": text}),
        f"{BURST} at once": Disturbance(
            "/v1/completions", {"prompt": ids[:512], **limits}, BURST, pause_s=0.5
        ),
    }


async def open_idle(url: str, number: int) -> list[asyncio.StreamWriter]:
    """Opens so many connections; each requests `/health` once and stays."""
    address = URL(url)
    writers: list[asyncio.StreamWriter] = []

    async def open_one() -> asyncio.StreamWriter:
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 "), head
        return writer

    while len(writers) < number:
        writers += await asyncio.gather(
            *(open_one() for _ in range(min(OPENED_TOGETHER, number - len(writers))))
        )
    return writers


def quantile(values: list[float], share: float) -> float:
    return (
        sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else float("nan")
    )


def show(parts: dict[str, Latencies], notes: dict[str, str]) -> None:
    """Prints a row for each part."""
    table = Table(title="milliseconds", title_justify="left")
    for name in ("beside", "events", "ITL p50", "p99", "worst", "/health p50", "p99", "worst", ""):
        table.add_column(name, justify="left" if name in ("beside", "") else "right")
    for name, seen in parts.items():
        figures = [
            f"{quantile(values, share):.1f}"
            for values in (seen.between, seen.health)
            for share in (0.5, 0.99, 1)
        ]
        table.add_row(name, f"{len(seen.between)}", *figures, notes.get(name, ""))
    Console(width=150).print(table)


async def measure(url: str, server: int, arguments: argparse.Namespace) -> None:
    """Runs the parts one after the other and prints what the watching process saw."""
    context = multiprocessing.get_context("spawn")
    kinds = {} if arguments.idle else disturbances(arguments.prompt_tokens)
    names = (
        ["nothing", f"{arguments.idle} idle connections"] if arguments.idle else ["nothing", *kinds]
    )
    part, found = context.Value("i", 0), context.Queue()
    before = status_sum(server, "VmRSS")
    watcher = context.Process(
        target=watch, args=(url, arguments.streams, len(names), part, found), daemon=True
    )
    watcher.start()
    await asyncio.sleep(arguments.seconds + 2)
    notes = {
        "nothing": f"the server grew by "
        f"{(status_sum(server, 'VmRSS') - before) / arguments.streams:.0f} KiB a stream"
    }
    for name in names[1:]:
        with_streams = status_sum(server, "VmRSS")
        if arguments.idle:
            idle = await open_idle(url, arguments.idle)
            notes[name] = (
                f"{(status_sum(server, 'VmRSS') - with_streams) / arguments.idle:.1f} KiB a "
                f"connection"
            )
        part.value += 1
        if arguments.idle:
            await asyncio.sleep(arguments.seconds)
            for writer in idle:
                writer.close()
        else:
            notes[name] = f"{await disturb(url, kinds[name], arguments.seconds)} requests"
    part.value += 1
    show(dict(zip(names, await asyncio.to_thread(found.get, timeout=60), strict=True)), notes)
    await asyncio.to_thread(watcher.join)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Measures what long prompts and idle connections do to the latency of streams."
    )
    parser.add_argument("--streams", type=int, default=64, help="default: %(default)s")
    parser.add_argument(
        "--prompt-tokens",
        type=int,
        default=200_000,
        help="of the long prompts (default: %(default)s)",
    )
    parser.add_argument(
        "--delay-ms", type=float, default=10.0, help="what a step takes (default: %(default)s)"
    )
    parser.add_argument(
        "--seconds", type=float, default=8.0, help="of each part (default: %(default)s)"
    )
    parser.add_argument(
        "--idle",
        type=int,
        default=0,
        help="connections to open instead of sending prompts (default: %(default)s)",
    )
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    address = context.Queue()
    server = context.Process(
        target=serve, args=(arguments.streams, arguments.delay_ms, address), daemon=True
    )
    server.start()
    assert server.pid is not None
    try:
        asyncio.run(measure(address.get(timeout=60), server.pid, arguments))
    finally:
        server.terminate()
        server.join()


if __name__ == "__main__":
    main()
