"""Measures bursts: many requests at the same moment, over a worker that computes nothing.

    python scripts/bench_burst.py [--requests 512] [--words 48] [--tokens 2] [--runs 3] \
        [--delay-ms 0] [--profile FILE]

HTTP server, text encoding (SmolLM2's tokenizer), scheduler and sockets are real; see
`bench_loop.py`. Each request comes on a connection of its own and streams `--tokens` tokens. Prints
the CPU time of the event loop's thread a request, and the mean and the p99 of the time to the first
event, which clients in other processes measure. With `--profile`, a profile of the loop's thread by
its CPU time goes to a file, to be read with `pstats`; taking it costs several times the work.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import json
import multiprocessing
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from aioinfer.api.server import HttpServer
from bench_loop import CLIENTS, make_frontend


def read_burst(
    url: str, requests: int, words: int, tokens: int, seed: int, ready: Any, begin: Any, times: Any
) -> None:
    """A client process: connects, sends a request on each connection at once, and puts the seconds
    until the first event of each."""

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes) -> float:
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        sent = time.perf_counter()
        writer.write(head.encode() + body)
        first, received = 0.0, b""
        while data := await reader.read(65536):
            if not first:
                received += data
                if b"data: {" in received:
                    first = time.perf_counter() - sent
        writer.close()
        return first

    async def run() -> list[float]:
        host, _, port = url.removeprefix("http://").rpartition(":")
        random = np.random.default_rng(seed)
        bodies = []
        for _ in range(requests):
            numbers = random.integers(0, 10_000, words)
            prompt = " ".join("and" if number % 3 else f"word{number}" for number in numbers)
            fields = {"prompt": prompt, "max_tokens": tokens, "stream": True, "ignore_eos": True}
            bodies.append(json.dumps(fields).encode())
        ends = [await asyncio.open_connection(host, int(port), limit=2**20) for _ in bodies]
        ready.put(None)
        await asyncio.to_thread(begin.wait)
        pairs = zip(ends, bodies, strict=True)
        return await asyncio.gather(*(one(*end, body) for end, body in pairs))

    times.put(uvloop.run(run()))


async def measure(options: argparse.Namespace, seed: int) -> tuple[float, list[float]]:
    """Returns the CPU time of the event loop's thread in us a request, and the seconds until the
    first event of each request."""
    frontend = await make_frontend(options.requests, options.delay_ms / 1e3)
    server = HttpServer(frontend.config, frontend)
    url = await server.start()
    context = multiprocessing.get_context("spawn")
    ready, begin, times = context.Queue(), context.Event(), context.Queue()
    share = options.requests // CLIENTS
    clients = [
        context.Process(
            target=read_burst, daemon=True,
            args=(url, share, options.words, options.tokens, 100 * seed + n, ready, begin, times),
        )
        for n in range(CLIENTS)
    ]  # fmt: skip
    for client in clients:
        client.start()
    for _ in clients:
        await asyncio.to_thread(ready.get, timeout=120)
    gc.collect()
    gc.freeze()
    profile = cProfile.Profile(time.thread_time) if options.profile else None
    if profile:
        profile.enable()
    cpu = time.thread_time()
    begin.set()
    firsts: list[float] = []
    for _ in clients:
        firsts += await asyncio.to_thread(times.get, timeout=120)
    cpu = time.thread_time() - cpu
    if profile:
        profile.disable()
        profile.dump_stats(options.profile)
    for client in clients:
        await asyncio.to_thread(client.join)
    await server.close()
    await frontend.close()
    return cpu / (share * CLIENTS) * 1e6, sorted(firsts)


def main() -> None:
    """Runs the bursts and prints a line each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--words", type=int, default=48, help="of a prompt, a token or two each")
    parser.add_argument("--tokens", type=int, default=2)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--delay-ms", type=float, default=0.0, help="what a step takes")
    parser.add_argument("--profile", type=Path)
    options = parser.parse_args()
    for seed in range(options.runs):
        cpu, firsts = uvloop.run(measure(options, seed))
        print(
            f"{options.requests} requests: {cpu:.0f} us of CPU a request; first event after "
            f"{statistics.mean(firsts) * 1e3:.0f} ms on average, "
            f"p99 {firsts[int(0.99 * len(firsts))] * 1e3:.0f} ms"
        )


if __name__ == "__main__":
    main()
