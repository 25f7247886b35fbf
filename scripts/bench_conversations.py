r"""Measures conversations over HTTP: which prompt tokens the prefix cache finds, and the time to
the first token beside that of a server without the cache.

    python scripts/bench_conversations.py --model FOLDER --json conversations.json
    python scripts/bench_conversations.py --model FOLDER --set cache.dtype=fp8 --think 10
    python scripts/bench_conversations.py --url http://127.0.0.1:8000 --model-name NAME

A folder contains config.json; its weights are random and no tokenizer is needed: prompts and
answers are token ids, so that the history holds exactly what was generated. (Texts of random
tokens would be encoded to other tokens than were generated.) Two servers are started one after the
other, with the cache and without; with `--url` a running server is measured, once.

The defaults are 64 conversations at once, of six turns: a system prompt of 4 000 tokens that all
share, 600 tokens a turn, and answers of 300 tokens, whatever the model writes. A turn is sent
`--think` seconds (exponentially distributed) after the answer before it.

What the figures mean: "found" is `cached_tokens` of the usage over the prompt tokens. TTFT is the
time from sending a turn to its first event with a token, "ratio" that with the cache over that
without. `simulate_conversations.py` predicts "found" without a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import aiohttp
import numpy as np

from benchlib.report import percentiles
from benchlib.server_process import ServerProcess, exiting_at_signals


@dataclass(slots=True)
class TurnRecord:
    """What one turn of a conversation took.

    Attributes:
        turn: from 1 on.
        prompt_tokens, cached_tokens: as the server counts them.
        ttft_s, e2e_s: seconds to the first token and to the end.
    """

    turn: int
    prompt_tokens: int
    cached_tokens: int
    ttft_s: float
    e2e_s: float


async def read_events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """Yields the events of a stream. Raises `RuntimeError` for a reply that is an error."""
    if response.status != 200:
        raise RuntimeError(f"status {response.status}: {(await response.text())[:300]}")
    async for line in response.content:
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(str(event["error"]))
            yield event


async def send_turn(
    session: aiohttp.ClientSession, options: argparse.Namespace, turn: int, history: list[int]
) -> TurnRecord:
    """Sends a turn, appends the answer to the history, and returns its record."""
    body = {
        "model": options.model_name,
        "prompt": history,
        "max_tokens": options.output,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    answer: list[int] = []
    usage: dict[str, Any] = {}
    begin = perf_counter()
    first = 0.0
    async with session.post(f"{options.url}/v1/completions", json=body) as response:
        async for event in read_events(response):
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                answer += choice.get("token_ids") or ()
            first = first or (perf_counter() if answer else 0.0)
    if len(answer) != options.output:
        raise RuntimeError(f"{len(answer)} tokens instead of {options.output}")
    history += answer
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    end = perf_counter()
    return TurnRecord(turn, usage["prompt_tokens"], cached, first - begin, end - begin)


async def converse(
    session: aiohttp.ClientSession,
    options: argparse.Namespace,
    slots: asyncio.Semaphore,
    number: int,
) -> list[TurnRecord]:
    """Returns the records of conversation `number`."""
    low, high = options.token_ids
    shared, random = (np.random.default_rng([options.seed, n]) for n in (0, number + 1))
    history: list[int] = shared.integers(low, high, options.system).tolist()
    records = []
    async with slots:
        for turn in range(1, options.turns + 1):
            if turn > 1 and options.think:
                await asyncio.sleep(random.exponential(options.think))
            history += random.integers(low, high, options.input).tolist()
            records.append(await send_turn(session, options, turn, history))
    return records


async def run_load(options: argparse.Namespace) -> list[TurnRecord]:
    """Runs all conversations. Raises `RuntimeError` if a turn fails."""
    slots = asyncio.Semaphore(options.concurrency or options.conversations)
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=options.timeout)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        if options.model_name is None:
            async with session.get(f"{options.url}/v1/models") as response:
                options.model_name = (await response.json())["data"][0]["id"]
        numbers = range(options.conversations)
        found = await asyncio.gather(*(converse(session, options, slots, n) for n in numbers))
    return [record for records in found for record in records]


def measure(options: argparse.Namespace, *, with_cache: bool) -> list[TurnRecord]:
    """Returns the records of a run on a server of its own, with the prefix cache or without."""
    settings = [
        f"model.path={options.model}",
        "model.load_format=dummy",
        "model.tokenizer=none",
        *options.set,
        f"cache.enable_prefix_caching={'true' if with_cache else 'false'}",
    ]
    with ServerProcess(os.devnull, settings) as server:
        print(f"ready after {server.ready_s:.1f} s", file=sys.stderr)
        options.url, options.model_name = server.url, None
        return asyncio.run(run_load(options))


def of_turns(records: list[TurnRecord], turns: range) -> dict[str, Any]:
    """Returns the figures of some turns: prompt tokens, the part that was found, and TTFT in ms."""
    chosen = [record for record in records if record.turn in turns]
    prompt = sum(record.prompt_tokens for record in chosen)
    found = sum(record.cached_tokens for record in chosen) / prompt
    ttft = percentiles([record.ttft_s for record in chosen])
    return {"prompt_tokens": prompt, "found": found, "ttft_ms": ttft}


def show(turns: int, cached: list[TurnRecord], cold: list[TurnRecord]) -> None:
    """Prints a table of the turns."""
    print("| turns | prompt tokens | found | TTFT ms mean / p50 / p99 | without cache | ratio |")
    print("|--|--:|--:|--:|--:|--:|")
    rows = [(str(turn), range(turn, turn + 1)) for turn in range(1, turns + 1)]
    for name, which in (*rows, (f"2-{turns}", range(2, turns + 1)), ("all", range(1, turns + 1))):
        if not which:
            continue
        here = of_turns(cached, which)
        there = of_turns(cold, which)["ttft_ms"] if cold else None
        times = [
            " / ".join(f"{ttft[key]:.0f}" for key in ("mean", "p50", "p99")) if ttft else ""
            for ttft in (here["ttft_ms"], there)
        ]
        ratio = f"{here['ttft_ms']['mean'] / there['mean']:.2f}" if there else ""
        cells = name, here["prompt_tokens"], f"{here['found']:.1%}", *times, ratio
        print("|", " | ".join(map(str, cells)), "|")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    server = parser.add_mutually_exclusive_group(required=True)
    server.add_argument("--model", type=Path, metavar="FOLDER", help="servers are started for it")
    server.add_argument("--url", help="a running server instead, with a prefix cache")
    parser.add_argument("--model-name", help="with --url; default: the first that it lists")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--conversations", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=0, help="conversations at once; 0: all")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--system", type=int, default=4000, help="tokens that all share")
    parser.add_argument("--input", type=int, default=600, help="tokens of a turn")
    parser.add_argument("--output", type=int, default=300, help="tokens of an answer")
    parser.add_argument("--think", type=float, default=0.0, help="mean seconds before a turn")
    parser.add_argument("--token-ids", type=int, nargs=2, default=(1000, 100_000))
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds of a turn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="for all records")
    options = parser.parse_args(arguments)
    with exiting_at_signals():
        if options.url:
            cached, cold = asyncio.run(run_load(options)), []
        else:
            cached, cold = (measure(options, with_cache=on) for on in (True, False))
    show(options.turns, cached, cold)
    if options.json:
        runs = {"cached": [*map(asdict, cached)], "cold": [*map(asdict, cold)]}
        options.json.write_text(json.dumps(runs))


if __name__ == "__main__":
    main()
