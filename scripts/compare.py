"""Our server over HTTP beside `generate` of transformers, on this machine, in the same run.

    python scripts/compare.py [--rounds 3] [--output result.json]

Start-up is timed twice, with an empty cache folder and with the cache that the first start wrote
(the weights' file itself may be in the system's page cache both times). Then, round by round,
transformers completes one prompt (float32, greedy, batch 1), and the server completes as many as
each number of streams requests (closed loop, greedy, streamed): so their ratio is right even if the
machine's speed drifts. Medians over the rounds are printed. The figures are the same as in
bench.py; for transformers they are the new tokens over the time of `generate`, prompt included.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
from collections.abc import Sequence
from functools import reduce
from itertools import islice
from operator import getitem
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from aioinfer.checkpoint.source import resolve_model
from aioinfer.config import load_config
from benchlib.client import Client
from benchlib.load import run_load
from benchlib.report import summarize
from benchlib.server_process import ROOT, ServerProcess
from benchlib.workload import Call, IntRange, RequestShape, random_token_calls

TOKEN_IDS = IntRange(1000, 10_000)
IDLE_S = 10.0
#: transformers cannot read converted GGUF files that stay quantized.
_AS_FLOAT32 = "model.quantization=none"


def parse_arguments() -> argparse.Namespace:
    """Returns the options of the command line."""
    parser = argparse.ArgumentParser(description="Measures the server beside transformers.")
    parser.add_argument("--config", default=ROOT / "configs" / "smollm2.toml", type=Path)
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="for the server (repeatable)",
    )
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--requests-per-stream",
        type=int,
        default=2,
        help="at least 4 in all (default: %(default)s)",
    )
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--no-transformers", dest="transformers", action="store_false")
    parser.add_argument("--no-startup", dest="startup", action="store_false")
    parser.add_argument("--output", type=Path, help="file for all figures as JSON")
    return parser.parse_args()


def time_startup(options: argparse.Namespace) -> dict[str, float]:
    """Returns the seconds until the server is ready, without and with a cache of the converted
    weights."""
    seconds = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("first", "second"):
            with ServerProcess(options.config, options.set, {"XDG_CACHE_HOME": folder}) as server:
                seconds[name] = server.ready_s
    return seconds


class Peer:
    """`generate` of transformers on the model that the server serves."""

    def __init__(self, folder: Path):
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokens_per_s([1, 2, 3], 4)  # the first call is slower than the others

    def tokens_per_s(self, prompt: Sequence[int], output_len: int) -> float:
        """Returns the new tokens a second for one prompt, completed greedily to exactly
        `output_len` tokens."""
        ids = torch.tensor([list(prompt)])
        begin = perf_counter()
        with torch.inference_mode():
            output = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=output_len,
                max_new_tokens=output_len,
                pad_token_id=0,
            )
        assert output.shape[1] == len(prompt) + output_len
        return output_len / (perf_counter() - begin)


def make_calls(
    options: argparse.Namespace, shape: RequestShape, count: int, seed: int
) -> list[Call]:
    """Returns requests of the configured lengths; no two seeds share a prompt, so that there are no
    prefix-cache hits."""
    lengths = (
        IntRange(options.input_len, options.input_len),
        IntRange(options.output_len, options.output_len),
    )
    return list(islice(random_token_calls(shape, *lengths, TOKEN_IDS, seed), count))


async def load_server(
    url: str, shape: RequestShape, calls: Sequence[Call], streams: int
) -> dict[str, Any]:
    """Returns the figures of a closed loop. Raises `RuntimeError` if a request failed."""
    async with Client(url) as client:
        figures = summarize(
            await run_load(client, shape, calls, num_requests=len(calls), concurrency=streams)
        )
    if figures["requests"]["failed"] or figures["tokens"]["requests_shorter_than_asked"]:
        raise RuntimeError(
            f"requests failed or ended early: {figures['errors'] or figures['tokens']}"
        )
    return figures


def run_rounds(
    options: argparse.Namespace, server: ServerProcess, peer: Peer | None
) -> list[dict[str, Any]]:
    """Returns the figures of each round: by the number of streams, and under "transformers" its
    tokens a second."""
    shape = RequestShape(
        load_config(options.config, options.set).served_model_names[0], ignore_eos=True
    )
    warmup = make_calls(argparse.Namespace(input_len=16, output_len=8), shape, 4, seed=0)
    asyncio.run(load_server(server.url, shape, warmup, streams=4))
    rounds = []
    with Progress(transient=True) as progress:
        task = progress.add_task("rounds", total=options.rounds * (len(options.streams) + 1))
        for number in range(options.rounds):
            figures: dict[str, Any] = {}
            if peer is not None:
                [call] = make_calls(options, shape, 1, seed=1000 + number)
                figures["transformers"] = peer.tokens_per_s(
                    json.loads(call.body)["prompt"], options.output_len
                )
            progress.advance(task)
            for streams in options.streams:
                count = max(4, streams * options.requests_per_stream)
                calls = make_calls(options, shape, count, seed=2000 + 100 * number + streams)
                figures[str(streams)] = asyncio.run(load_server(server.url, shape, calls, streams))
                progress.advance(task)
            rounds.append(figures)
    return rounds


def median(rounds: list[dict[str, Any]], *path: str) -> float:
    """Returns the median over the rounds of the figure at `path`."""
    values: list[Any] = [reduce(getitem, path, figures) for figures in rounds]
    return statistics.median(values)


def show(
    options: argparse.Namespace,
    rounds: list[dict[str, Any]],
    idle: float,
    startup: dict[str, float] | None,
) -> None:
    """Prints the medians."""
    title = (
        f"{options.config.name}, {options.input_len} in / {options.output_len} out, greedy; "
        f"medians of {options.rounds}; ms"
    )
    table = Table(
        "server",
        "output tokens/s",
        "TTFT p50",
        "ITL p50",
        "ITL p99",
        title=title,
        title_justify="left",
    )
    for column in table.columns:
        column.no_wrap = True
        column.justify = "left" if column is table.columns[0] else "right"
    for streams in map(str, options.streams):
        rate = median(rounds, streams, "throughput", "output_tokens_per_s")
        latencies = [
            median(rounds, streams, "latency_ms", *path)
            for path in (("ttft", "p50"), ("itl", "p50"), ("itl", "p99"))
        ]
        table.add_row(
            f"aioinfer, {streams} stream{'s' * (streams != '1')}",
            *(f"{value:.1f}" for value in (rate, *latencies)),
        )
    console = Console()
    if options.transformers:
        table.add_row("transformers", f"{median(rounds, 'transformers'):.1f}", "", "", "")
    console.print(table)
    if options.transformers and 1 in options.streams:
        ratio = statistics.median(
            figures["1"]["throughput"]["output_tokens_per_s"] / figures["transformers"]
            for figures in rounds
        )
        console.print(f"one stream against transformers: {ratio:.2f} times")
    console.print(f"idle: {idle:.2%} of a core over {IDLE_S:g} s")
    if startup is not None:
        console.print(
            f"ready after {startup['first']:.1f} s the first time, "
            f"{startup['second']:.1f} s the second"
        )


def main() -> None:
    """Measures and prints."""
    options = parse_arguments()
    startup = time_startup(options) if options.startup else None
    peer = (
        Peer(resolve_model(load_config(options.config, [*options.set, _AS_FLOAT32]).model))
        if options.transformers
        else None
    )
    with ServerProcess(options.config, options.set) as server:
        idle = server.cpu_share(IDLE_S)
        rounds = run_rounds(options, server, peer)
    show(options, rounds, idle, startup)
    if options.output:
        result = {
            "settings": vars(options),
            "startup_s": startup,
            "idle_cpu": idle,
            "rounds": rounds,
        }
        options.output.write_text(json.dumps(result, indent=2, default=str) + "\n", "utf-8")


if __name__ == "__main__":
    main()
