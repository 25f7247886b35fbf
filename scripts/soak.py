"""Runs a server under a mixed load for minutes or hours, and reports which resources grow.

    python scripts/soak.py --minutes 30 [--concurrency 8] [--config FILE] [--set section.key=value]

Starts `python -m aioinfer` on a free port and sends rounds of requests of all kinds (see
`benchlib.soak_load`). After each round, when the server is idle and the clients' connections are
closed, it samples memory, descriptors, threads and KV blocks of the server and its workers. The
first rounds are warm-up: `--warm-up` of them, but half of the time at most, and in no round do
requests begin for longer than a tenth of it. At the end a table shows each figure's first and last
sample and its slope over 1 000 requests. The exit status is 1 if a figure grows beyond its bound, a
request was not answered as it should, the log holds a traceback, or the server does not end with
status 0 at a SIGTERM. A signal that ends the script (SIGINT, SIGTERM, SIGHUP) ends the server
first.

A CPU worker's KV cache becomes resident block by block: by default it is small here, and a warm-up
fills it, so that later growth has another cause.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchlib.server_process import ROOT, ServerProcess, exiting_at_signals
from benchlib.soak_load import MixedLoad
from benchlib.soak_watch import Verdict, Watch, judge

SETTINGS = ["cache.cpu_memory_gib=0.25", "parallel.cpu_threads=1"]
#: For a server to become idle once its clients are gone.
IDLE_TIMEOUT_S = 60.0
#: A run has at least so many rounds.
ROUNDS = 10


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    """Returns the options of the command line."""
    parser = argparse.ArgumentParser(description="Looks for what a server holds on to over time.")
    parser.add_argument(
        "--minutes", type=float, default=30.0, help="of load (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, help="end after so many behind the warm-up")
    parser.add_argument("--round", type=int, default=250, help="requests (default: %(default)s)")
    parser.add_argument("--warm-up", type=int, default=12, help="rounds (default: %(default)s)")
    parser.add_argument("--concurrency", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**6, help="of the load")
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "smollm2.toml")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    return parser.parse_args(arguments)


async def settle(watch: Watch) -> None:
    """Waits until the server is idle and has cleaned up closed connections."""
    deadline = time.monotonic() + IDLE_TIMEOUT_S
    while time.monotonic() < deadline:
        if await asyncio.to_thread(lambda: watch.is_idle):
            break
        await asyncio.sleep(0.05)
    await asyncio.sleep(0.3)


async def soak(
    load: MixedLoad, watch: Watch, options: argparse.Namespace, console: Console
) -> tuple[list[int], list[dict[str, float]]]:
    """Sends rounds until the time is over. Returns the requests that had been sent at each sample,
    and the samples."""
    seconds = options.minutes * 60
    start = time.monotonic()
    requests: list[int] = []
    samples: list[dict[str, float]] = []
    number = warm_up = 0
    while (time.monotonic() < start + seconds or not samples) and len(samples) != options.rounds:
        began, before = time.monotonic(), len(load.faults)
        is_warm_up = warm_up < options.warm_up and began < start + seconds / 2
        end = min(began + seconds / ROUNDS, start + seconds)
        await load.run(options.round, options.concurrency, end)
        took = time.monotonic() - began
        await settle(watch)
        number += 1
        warm_up += is_warm_up
        sample = await asyncio.to_thread(watch.sample)
        if not is_warm_up:
            requests.append(load.total)
            samples.append(sample)
        memory = ", ".join(f"{k} {v:.1f}" for k, v in sample.items() if k.endswith("memory"))
        about = "warm-up" if is_warm_up else "round"
        console.print(f"{about} {number}: {load.total} requests, {took:.1f} s; {memory} MiB")
        for fault in load.faults[before:]:
            console.print(f"  fault: {fault}", markup=False)
    return requests, samples


def show(verdicts: dict[str, Verdict], console: Console) -> None:
    """Prints a row for each figure."""
    table = Table(title="at idle; sizes in MiB", title_justify="left")
    for name in ("figure", "first", "last", "per 1 000 requests", "bound", "verdict"):
        right = name in ("first", "last", "per 1 000 requests")
        table.add_column(name, justify="right" if right else "left")
    for name, verdict in verdicts.items():
        table.add_row(
            name,
            f"{verdict.first:.1f}",
            f"{verdict.last:.1f}",
            f"{verdict.slope:+.2f} ± {2 * verdict.error:.2f}",
            verdict.limit,
            "grows" if verdict.grows else "flat" if verdict.judged else "not judged",
        )
    console.print(table)


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status."""
    options = parse_options(arguments)
    console = Console(width=120)
    console.print(f"seed {options.seed}")
    settings = [*SETTINGS, *options.set]
    with exiting_at_signals(), ServerProcess(options.config, settings) as server:
        load = MixedLoad(server.url, options.seed)
        watch = Watch(server.pid, server.url)
        requests, samples = asyncio.run(soak(load, watch, options, console))
        log, status = server.log(), server.end()
    verdicts = {
        name: judge(name, requests, [sample[name] for sample in samples]) for name in samples[0]
    }
    show(verdicts, console)
    sent = ", ".join(f"{count} {kind}" for kind, count in load.sent.most_common())
    console.print(f"{load.total} requests ({sent}); {load.shed} declined with 429 or 503")
    problems = [f"{name} grows" for name, verdict in verdicts.items() if verdict.grows]
    problems += load.faults[:10]
    if "Traceback" in log:
        problems.append(f"the log holds a traceback: {log[-2000:]}")
    if status:
        problems.append(f"the server ended with status {status} at a SIGTERM")
    for problem in problems:
        console.print(problem, markup=False)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
