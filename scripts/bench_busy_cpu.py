"""One stream's tokens a second on a CPU, beside nothing and beside processes that keep it busy.

    python scripts/bench_busy_cpu.py [--rounds 5] [--busy 1]
    python scripts/bench_busy_cpu.py --variant "" --variant OMP_WAIT_POLICY=PASSIVE \
        --variant parallel.cpu_threads=1 --variant checkout=/tmp/old

Each `--variant` is a server of its own: environment variables, `section.key=value` settings, and
`checkout=FOLDER` for another version of the source, divided by spaces; an empty one is the server
as it is. All are started first and sleep while another is measured. A round measures each variant
beside nothing, and then each beside `--busy` processes that only compute, pinned to no core: pairs
lie close together in time, and every round begins with another variant, so that a machine whose
speed drifts favours none. Medians over the rounds are printed, with the lowest and the highest.

A request has a prompt of its own of `--input-len` tokens, whose time to first token is that of the
prefill, and `--output-len` tokens of output, greedy; tokens a second are those after the first.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from benchlib.client import Client
from benchlib.server_process import ROOT, ServerProcess, exiting_at_signals
from benchlib.workload import IntRange, RequestShape, random_token_calls

TOKEN_IDS = IntRange(1000, 10_000)
BUSY_LOOP = "while True: pass"


class Figures(NamedTuple):
    """What one request measured."""

    tokens_per_s: float
    ttft_ms: float


class Variant:
    """A server that is measured, and the figures of its requests by the number of busy processes.

    Args:
        text: as on the command line.
        config: the TOML file that all variants share.
    """

    def __init__(self, text: str, config: Path):
        self.name = text.strip() or "as it is"
        self.figures: dict[int, list[Figures]] = {}
        settings, environment, checkout = [], {}, ROOT
        for word in text.split():
            name, _, value = word.partition("=")
            if name == "checkout":
                checkout = Path(value)
            elif "." in name:
                settings.append(word)
            else:
                environment[name] = value
        self.server = ServerProcess(config, settings, environment, checkout)

    async def measure(self, options: argparse.Namespace, seed: int, busy: int) -> None:
        """Sends a request and notes its figures. Raises `RuntimeError` if it failed."""
        async with Client(self.server.url) as client:
            shape = RequestShape(await client.first_model(), ignore_eos=True)
            prompt = IntRange(options.input_len, options.input_len)
            output = IntRange(options.output_len, options.output_len)
            call = next(iter(random_token_calls(shape, prompt, output, TOKEN_IDS, seed)))
            record = await client.send(shape, call)
        if record.error or record.ttft is None or not record.tpot:
            raise RuntimeError(f"{self.name}: {record.error} {record.example}")
        self.figures.setdefault(busy, []).append(Figures(1 / record.tpot, 1e3 * record.ttft))


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Keeps so many processes computing during the block."""
    processes = [subprocess.Popen([sys.executable, "-c", BUSY_LOOP]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def run_round(
    variants: list[Variant], options: argparse.Namespace, number: int, console: Console
) -> None:
    """Measures each variant, beside nothing and then beside the busy processes."""
    first = number % len(variants)
    for busy in (0, options.busy):
        with busy_processes(busy):
            for variant in variants[first:] + variants[:first]:
                asyncio.run(variant.measure(options, 1 + 2 * number + (busy > 0), busy))
                found = variant.figures[busy][-1]
                console.print(
                    f"round {number + 1}, {busy} busy: {found.tokens_per_s:.1f} tokens/s, "
                    f"TTFT {found.ttft_ms:.0f} ms: {variant.name}"
                )


def show(variants: list[Variant], busy: int, console: Console) -> None:
    """Prints a row for each variant: medians, and in brackets the lowest and the highest."""
    table = Table(title="one stream", title_justify="left")
    table.add_column("variant")
    for beside in ("nothing", f"{busy} busy"):
        table.add_column(f"tokens/s beside {beside}", justify="right")
        table.add_column("TTFT ms", justify="right")
    for variant in variants:
        cells = []
        for figures in variant.figures.values():
            for values in zip(*figures, strict=True):
                cells.append(f"{median(values):.1f} ({min(values):.1f}-{max(values):.1f})")
        table.add_row(variant.name, *cells)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures a stream on a busy CPU.")
    parser.add_argument("--config", default=ROOT / "configs" / "smollm2.toml", type=Path)
    parser.add_argument("--variant", action="append", help="environment, settings, checkout=FOLDER")
    parser.add_argument("--busy", type=int, default=1, help="processes (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--input-len", type=int, default=128, help="default: %(default)s")
    parser.add_argument("--output-len", type=int, default=128, help="default: %(default)s")
    parser.add_argument("--output", type=Path, help="file for all figures as JSON")
    options = parser.parse_args()
    variants = [Variant(text, options.config) for text in options.variant or [""]]
    console = Console(width=150)
    with exiting_at_signals(), ExitStack() as stack:
        for variant in variants:
            stack.enter_context(variant.server)
        warmup = argparse.Namespace(input_len=16, output_len=8)
        for variant in variants:
            asyncio.run(variant.measure(warmup, 0, 0))
            variant.figures.clear()
        for number in range(options.rounds):
            run_round(variants, options, number, console)
    show(variants, options.busy, console)
    if options.output:
        found = {variant.name: variant.figures for variant in variants}
        options.output.write_text(json.dumps(found, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
