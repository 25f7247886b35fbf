r"""Measures the store of KV over HTTP: a server with `cache.host_bytes` beside one without, each
with a KV cache of `--blocks` blocks, which the load exceeds.

    python scripts/bench_kv_store.py --model FOLDER --json kv-store.json

A folder contains config.json; its weights are random and no tokenizer is needed. Four phases on
each of the two servers, below five minutes in all for Qwen3-8B on one H200:

- prefix: the time to the first token of a prompt of `--prompt` tokens when it is new, and again
  when other prompts have displaced its blocks. `--streams` streams decode beside the second: the
  median time between their tokens, alone and beside it. "GB/s" is what the store brought, over the
  whole time to the first token;
- conversations: `--conversations` of `--turns` turns, one turn of all after the other, so that the
  blocks of each have left the device when its next turn comes; tokens found, and tokens per second,
  prompts included. A turn brings `--later` tokens and the first one the rest of `--history`, or all
  bring as many;
- misses: prompts of 2 000 tokens that are all different, with 16 tokens of output;
- preemption: prompts of 2 000 tokens with 500 of output, twice as many as the blocks hold.

`--restart FOLDER` measures the disk tier in their place, with files below that folder: prompts of
`--prompt` tokens are sent, the server ends, the kernel forgets the files, and a new server gets
each prompt again: the time to the first token when it was new and after the restart, what was
found, and the GB/s over the whole time to the first token. Nothing is read where the model computes
faster than the disk reads; but the first prompt is, by which the server learns how fast that is.

200 conversations of 32 000 tokens of Qwen3-8B would take 900 GiB of the host. A scaled row, 320 000
tokens or 44 GiB beyond a device of 102 000, beside servers that start in 40 s each about 2 minutes
(estimate); `found_of_history`, and the ratio of `tokens_per_s`, are what it is for:

    python scripts/bench_kv_store.py --model FOLDER --phases conversations --conversations 40 \
        --history 8000 --blocks 800 --host-gib 64

`--set cache.disk_path=FOLDER` adds the disk tier to the first server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from time import perf_counter, sleep
from typing import Any, TypeVar

import aiohttp
import numpy as np

from bench_conversations import TurnRecord, read_events, send_turn
from bench_kv_files import forget_file
from benchlib.server_process import ServerProcess, exiting_at_signals

T = TypeVar("T")
Figures = dict[str, float]
_MISS_PROMPT, _MISS_OUTPUT = 2000, 16
_LONG_OUTPUT = 500
_DISPLACED = 1.3  # so many times the device's tokens displace a prompt


class Load:
    """Requests to one server.

    Args:
        session: to send them.
        options: of the command line.
        url, model: of the server.
    """

    def __init__(
        self, session: aiohttp.ClientSession, options: argparse.Namespace, url: str, model: str
    ):
        self._session, self.options = session, options
        self._url, self._model = url, model
        self._random = np.random.default_rng(options.seed)

    def prompt(self, length: int) -> list[int]:
        """Returns a prompt that no other one begins like."""
        low, high = self.options.token_ids
        tokens: list[int] = self._random.integers(low, high, length).tolist()
        return tokens

    async def send(self, history: list[int], output: int, turn: int = 1) -> TurnRecord:
        """Sends a prompt, appends the answer, and returns the record."""
        fields = argparse.Namespace(url=self._url, model_name=self._model, output=output)
        return await send_turn(self._session, fields, turn, history)

    async def send_all(self, prompts: Sequence[list[int]], output: int) -> tuple[Figures, float]:
        """Sends prompts at the same moment. Returns the figures, and the part that was found."""
        began = perf_counter()
        records = await asyncio.gather(*(self.send(prompt, output) for prompt in prompts))
        seconds = perf_counter() - began
        prompt_tokens = sum(record.prompt_tokens for record in records)
        found = sum(record.cached_tokens for record in records) / prompt_tokens
        tokens = prompt_tokens + output * len(records)
        return {"seconds": seconds, "tokens_per_s": tokens / seconds}, found

    async def stream(self, times: list[float], ends: asyncio.Event) -> None:
        """Appends the times between the tokens of streams to `times` until `ends`."""
        while not ends.is_set():
            body = {
                "model": self._model, "prompt": self.prompt(16), "max_tokens": 200,
                "ignore_eos": True, "stream": True, "return_token_ids": True,
            }  # fmt: skip
            last = 0.0
            async with self._session.post(f"{self._url}/v1/completions", json=body) as response:
                async for _ in read_events(response):
                    now = perf_counter()
                    if last:
                        times.append(now - last)
                    last = now

    async def displace(self) -> None:
        """Has prompts take all blocks of the device."""
        options = self.options
        count = 1 + int(_DISPLACED * options.blocks * options.block_size / options.prompt)
        for _ in range(count):
            await self.send(self.prompt(options.prompt), 1)


async def measure_prefix(load: Load) -> Figures:
    """See the module's docstring."""
    prompts = [load.prompt(load.options.prompt) for _ in range(3)]
    cold = [(await load.send(list(prompt), 1)).ttft_s for prompt in prompts]
    await load.displace()
    alone, beside, ends = [], [], asyncio.Event()
    times: list[float] = []
    streams = [asyncio.create_task(load.stream(times, ends)) for _ in range(load.options.streams)]
    await asyncio.sleep(load.options.quiet_s)
    alone, times[:] = list(times), []
    again = []
    for prompt in prompts:
        again.append(await load.send(list(prompt), 1))
        await asyncio.sleep(0.1)
    beside = list(times)
    ends.set()
    await asyncio.gather(*streams)
    ttft = statistics.median(record.ttft_s for record in again)
    found = statistics.median(record.cached_tokens for record in again)
    return {
        "ttft_new_s": statistics.median(cold),
        "ttft_again_s": ttft,
        "found": found / load.options.prompt,
        "gb_per_s": found * load.options.token_bytes / ttft / 1e9,
        "itl_alone_ms": 1000 * statistics.median(alone or [0.0]),
        "itl_beside_ms": 1000 * statistics.median(beside or [0.0]),
    }


async def measure_conversations(load: Load) -> Figures:
    """See the module's docstring."""
    options = load.options
    per_turn = options.later or options.history // options.turns
    first = options.history - (options.turns - 1) * per_turn if options.later else per_turn
    histories: list[list[int]] = [[] for _ in range(options.conversations)]
    prompt_tokens = cached = later = 0
    began = perf_counter()
    for turn in range(1, options.turns + 1):
        new = first if turn == 1 else per_turn
        for history in histories:
            history += load.prompt(new)
        records = await asyncio.gather(*(load.send(history, 32, turn) for history in histories))
        prompt_tokens += sum(record.prompt_tokens for record in records)
        if turn > 1:
            cached += sum(record.cached_tokens for record in records)
            later += sum(record.prompt_tokens for record in records) - new * len(records)
    seconds = perf_counter() - began
    return {
        "found_of_history": cached / max(1, later),
        "tokens_per_s": prompt_tokens / seconds,
        "seconds": seconds,
    }


async def measure_misses(load: Load) -> Figures:
    """See the module's docstring."""
    prompts = [load.prompt(_MISS_PROMPT) for _ in range(load.options.misses)]
    return (await load.send_all(prompts, _MISS_OUTPUT))[0]


async def measure_preemption(load: Load) -> Figures:
    """See the module's docstring."""
    options = load.options
    capacity = options.blocks * options.block_size
    count = max(2, 2 * capacity // (_MISS_PROMPT + _LONG_OUTPUT))
    prompts = [load.prompt(_MISS_PROMPT) for _ in range(min(count, options.max_preempted))]
    return (await load.send_all(prompts, _LONG_OUTPUT))[0]


PHASES: dict[str, Callable[[Load], Coroutine[Any, Any, Figures]]] = {
    "prefix": measure_prefix,
    "conversations": measure_conversations,
    "misses": measure_misses,
    "preemption": measure_preemption,
}


async def with_load(
    options: argparse.Namespace, url: str, run: Callable[[Load], Coroutine[Any, Any, T]]
) -> T:
    """Returns what `run` returns of a load of the server."""
    timeout = aiohttp.ClientTimeout(total=600)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        async with session.get(f"{url}/v1/models") as response:
            model = (await response.json())["data"][0]["id"]
        return await run(Load(session, options, url, model))


async def run_phases(load: Load) -> dict[str, Figures]:
    """Returns the figures of the phases on a server."""
    found = {}
    for name in load.options.phases:
        found[name] = await PHASES[name](load)
        print(f"{name}: {found[name]}", file=sys.stderr)
    return found


def settings_of(options: argparse.Namespace) -> list[str]:
    """Returns the settings of a server with the store in memory of the host."""
    return [
        f"model.path={options.model}",
        "model.load_format=dummy",
        "model.tokenizer=none",
        f"cache.num_blocks={options.blocks}",
        f"cache.block_size={options.block_size}",
        f"cache.host_bytes={int(options.host_gib * 2**30)}",
        *options.set,
    ]


def measure(options: argparse.Namespace, *, with_store: bool) -> dict[str, Figures]:
    """Returns the figures of a server of its own, with the store or without."""
    settings = settings_of(options)
    if not with_store:
        settings = [
            item for item in settings if not item.startswith(("cache.disk_", "cache.host_"))
        ]
    with ServerProcess(os.devnull, settings) as server:
        print(f"ready after {server.ready_s:.1f} s", file=sys.stderr)
        return asyncio.run(with_load(options, server.url, run_phases))


def await_files(folder: Path) -> list[Path]:
    """Returns the files of KV blocks once no more of them have come for two seconds."""
    before, found = -1, list(folder.glob("**/*.kv"))
    while len(found) != before:
        before = len(found)
        sleep(2.0)
        found = list(folder.glob("**/*.kv"))
    return found


def measure_restart(options: argparse.Namespace) -> Figures:
    """See the module's docstring."""

    async def send(load: Load) -> list[TurnRecord]:
        await load.send(load.prompt(options.block_size), 1)
        prompts = [load.prompt(options.prompt) for _ in range(3)]  # the same for both servers
        return [await load.send(prompt, 1) for prompt in prompts]

    with tempfile.TemporaryDirectory(dir=options.restart) as folder:
        settings = [*settings_of(options), f"cache.disk_path={folder}"]
        with ServerProcess(os.devnull, settings) as server:
            new = asyncio.run(with_load(options, server.url, send))
            files = await_files(Path(folder))
        for file in files:
            forget_file(file)
        with ServerProcess(os.devnull, settings) as server:
            again = asyncio.run(with_load(options, server.url, send))
    ttft = statistics.median(record.ttft_s for record in again)
    found = statistics.median(record.cached_tokens for record in again)
    return {
        "files": len(files),
        "ttft_new_s": statistics.median(record.ttft_s for record in new),
        "ttft_again_s": ttft,
        "found": found / options.prompt,
        "found_of_the_first": again[0].cached_tokens / options.prompt,
        "gb_per_s": found * options.token_bytes / ttft / 1e9,
    }


def show(with_store: dict[str, Figures], without: dict[str, Figures]) -> None:
    """Prints a table of all figures."""
    print("| phase | figure | with the store | without | ratio |\n|--|--|--:|--:|--:|")
    for phase, figures in with_store.items():
        for name, here in figures.items():
            there = without[phase][name]
            ratio = f"{here / there:.3f}" if there else ""
            print(f"| {phase} | {name} | {here:.4g} | {there:.4g} | {ratio} |")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, metavar="FOLDER", required=True)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=list(PHASES))
    parser.add_argument("--restart", type=Path, metavar="FOLDER", help="see above")
    parser.add_argument("--blocks", type=int, default=1000, help="of the device")
    parser.add_argument("--block-size", type=int, default=128)
    parser.add_argument("--host-gib", type=float, default=100.0, help="of the store")
    parser.add_argument("--token-bytes", type=int, default=147_456, help="of a token's keys")
    parser.add_argument("--prompt", type=int, default=32_000, help="tokens of a prefix")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--quiet-s", type=float, default=2.0, help="of the streams alone")
    parser.add_argument("--conversations", type=int, default=16)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--history", type=int, default=32_000, help="tokens of a conversation")
    parser.add_argument("--later", type=int, help="new tokens of each turn behind the first")
    parser.add_argument("--misses", type=int, default=200)
    parser.add_argument("--max-preempted", type=int, default=120)
    parser.add_argument("--token-ids", type=int, nargs=2, default=(1000, 100_000))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    if options.later is not None and not 0 < options.later * options.turns <= options.history:
        parser.error("--later: the first turn must bring at least as many tokens")
    with exiting_at_signals():
        if options.restart:
            text = json.dumps(measure_restart(options))
            print(text)
            if options.json:
                options.json.write_text(text)
            return
        with_store, without = (measure(options, with_store=on) for on in (True, False))
    show(with_store, without)
    if options.json:
        options.json.write_text(json.dumps({"with": with_store, "without": without}))


if __name__ == "__main__":
    main()
