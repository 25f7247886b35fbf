r"""A load generator for any OpenAI-compatible server.

    python scripts/bench.py --concurrency 8 --num-requests 64 --input-len 128 --output-len 128 \
        --ignore-eos
    python scripts/bench.py --rate 4 --input-len 100-1024 --output-len 100-1024 \
        --slo ttft=200ms,itl=30ms
    python scripts/bench.py --sweep concurrency=1,2,4,8 --warmup 4 --output result.json \
        --plot result.png
    python scripts/bench.py --workload multi-turn --turns 4 --endpoint chat
    python scripts/bench.py --compare before.json after.json

A closed loop keeps `--concurrency` requests in flight; an open loop (`--rate`) sends them at the
times of a Poisson process, whether or not the server keeps up. A sweep runs either at several
values. The script needs aiohttp, numpy and rich, and nothing of aioinfer; with orjson and uvloop it
takes half the CPU time. docs/benchmarking.md describes the options.

What the figures mean (only requests that succeeded count, failed ones are reported apart):
    output tokens    the server's `usage`; chunks are counted apart, since a chunk may contain
                     several tokens, or a token no text. Without `usage`, chunks are counted as
                     tokens, and the report shows it.
    output tokens/s  output tokens over the time from the first request's sending to the last
                     reply's end.
    TTFT             time to first token: from sending a request, connection included, to its first
                     chunk that contains output (text, a tool call, token ids), not just a role.
    ITL              inter-token latency: the time between two chunks that contain output, over all
                     requests. Chunks that arrive in one read are 0 apart.
    TPOT             time per output token of a request: (e2e - TTFT) / (output tokens - 1).
    end to end       from sending a request to the end of its reply.
    chunks per token chunks that contain output over output tokens, of the replies with `usage`:
                     much below 1, tokens were merged, and the ITL is that of several tokens.
    cached           the fraction of prompt tokens that the server reports as prefix-cache hits.
    goodput          the requests within every limit of `--slo`, as a fraction of all sent and per
                     second. The limit `itl` applies to the 99th percentile of a request's own gaps,
                     `tpot` to the figure above.
    client's CPU     of each client process; near 100 % of a core the client is the bottleneck.

The exit status is 1 if a request failed. Random prompts differ from each other, so that they are no
prefix-cache hits; the same `--seed` gives the same prompts in the next run: change it, or restart
the server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from benchlib.client import Client, ReplyError
from benchlib.client_processes import ClientProcesses, Target
from benchlib.comparison import compare, read_result, show_comparison
from benchlib.conversation import Conversations
from benchlib.load import Load, Run
from benchlib.options import make_loads, make_workload, parse_arguments, settings_of
from benchlib.plot import plot_run, plot_sweep
from benchlib.report import count_errors, show, summarize
from benchlib.sweep import best_point, show_sweep
from benchlib.workload import RequestShape, Workload

#: Columns of a table in a file or a pipe, so that no cell is wrapped.
FILE_WIDTH = 180


@dataclass(slots=True)
class Bench:
    """Sends the points of a benchmark one after another, no two with the same items.

    Attributes:
        warmup: items that are sent before each point and do not count.
        next_item: the number of the workload's next item.
    """

    clients: ClientProcesses
    target: Target
    workload: Workload
    warmup: int
    progress: LoadProgress
    next_item: int = 0

    def run_point(self, name: str, load: Load) -> Run:
        """Warms up and sends a load.

        Raises `ReplyError` if a request of the warm-up fails, `RuntimeError` if a client process
        does.
        """
        if self.warmup:
            run = self._send(
                f"{name}, warm-up", Load(min(load.concurrency, self.warmup), num_items=self.warmup)
            )
            for error in count_errors(run):
                raise ReplyError(
                    error["kind"], f"warm-up failed: {error['kind']}: {error['example']}"
                )
        return self._send(name, load)

    def _send(self, name: str, load: Load) -> Run:
        # requests are counted
        total = None if isinstance(self.workload, Conversations) else load.num_items
        on_progress = self.progress.add_load(name, total)
        run = self.clients.send(
            self.target, self.workload, load, first=self.next_item, on_progress=on_progress
        )
        self.next_item += run.num_items
        return run


class LoadProgress(Progress):
    """A progress bar on stderr for each part of a load."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        # a file or a pipe gets no bar
        super().__init__(
            *columns,
            console=console,
            disable=not console.is_terminal,
            transient=True,
            refresh_per_second=4,
        )

    def add_load(self, name: str, total: int | None) -> Callable[[int, int], None]:
        """Adds a bar, and returns the function that moves it to the numbers of requests that have
        ended and that have failed."""
        task = self.add_task(name, total=total)

        def on_progress(done: int, failed: int) -> None:
            self.update(
                task, completed=done, description=f"{name}, {failed} failed" if failed else name
            )

        return on_progress


async def find_model(url: str, headers: dict[str, str], timeout_s: float) -> str:
    """Returns the first model that the server lists. Raises `ReplyError`."""
    async with Client(url, timeout_s=timeout_s, headers=headers) as client:
        return await client.first_model()


def bench(options: argparse.Namespace) -> int:
    """Sends the load of the options, and prints and writes its figures.

    Returns the exit status. Raises as `main` catches.
    """
    headers = {
        name.strip(): value.strip()
        for name, _, value in (header.partition(":") for header in options.header)
    }
    model = options.model or asyncio.run(find_model(options.url, headers, options.timeout))
    shape = RequestShape(
        model, options.endpoint == "chat", options.stream, options.temperature, options.ignore_eos
    )
    workload = make_workload(options, shape)
    loads = make_loads(options, workload)
    target = Target(options.url, shape, headers, options.timeout)
    title = f"{model} at {options.url}"
    head = {"model": model, "settings": settings_of(options)}
    with ClientProcesses(options.processes) as clients, LoadProgress() as progress:
        runner = Bench(clients, target, workload, options.warmup, progress)
        if options.sweep is None:
            run = runner.run_point("load", loads[0][1])
        else:
            points = run_sweep(runner, options, loads)
    if options.sweep is not None:
        return report_sweep(options, points, title, head)
    return report_run(options, run, title, head)


def report_run(options: argparse.Namespace, run: Run, title: str, head: dict[str, Any]) -> int:
    """Prints, writes and plots the figures of a single point. Returns the exit status."""
    figures = summarize(run, options.slo)
    show(figures, title, Console())
    write_result(options, head | figures)
    if options.plot:
        plot_run(run.records, title, options.plot)
    return 1 if figures["requests"]["failed"] else 0


def run_sweep(
    runner: Bench, options: argparse.Namespace, loads: list[tuple[float | None, Load]]
) -> list[dict[str, Any]]:
    """Returns the figures of the points with their `value`, up to one at which nothing succeeds.

    Raises as `Bench.run_point` does.
    """
    points: list[dict[str, Any]] = []
    for value, load in loads:
        name = f"{options.sweep.kind} {value:g}"
        try:
            figures = summarize(runner.run_point(name, load), options.slo)
        except ReplyError as error:
            if not points:
                raise
            sys.stderr.write(f"bench: the sweep stopped at {name}: {error}\n")
            break
        points.append({"value": value, **figures})
        if figures["requests"]["sent"] and not figures["requests"]["succeeded"]:
            sys.stderr.write(
                f"bench: the sweep stopped at {name}: none of "
                f"{figures['requests']['sent']} requests succeeded\n"
            )
            break
    return points


def report_sweep(
    options: argparse.Namespace, points: list[dict[str, Any]], title: str, head: dict[str, Any]
) -> int:
    """Prints, writes and plots the figures of a sweep. Returns the exit status."""
    console = Console()
    show_sweep(
        points,
        options.sweep.kind,
        title,
        console if console.is_terminal else Console(width=FILE_WIDTH),
    )
    best = best_point(points)
    # JSON has no infinity
    plain = [
        point | {"value": "inf" if point["value"] == float("inf") else point["value"]}
        for point in points
    ]
    best_value = None if best is None else plain[points.index(best)]["value"]
    write_result(
        options,
        head | {"sweep": options.sweep.kind, "best_goodput_at": best_value, "points": plain},
    )
    if options.plot:
        plot_sweep(points, options.sweep.kind, title, options.plot)
    complete = len(points) == len(options.sweep.values)
    return 0 if complete and not any(point["requests"]["failed"] for point in points) else 1


def write_result(options: argparse.Namespace, result: dict[str, Any]) -> None:
    """Writes the figures as JSON with `--output`."""
    if options.output:
        options.output.write_text(json.dumps(result, indent=2) + "\n", "utf-8")


def compare_files(options: argparse.Namespace) -> int:
    """Prints two result files beside each other.

    Returns the exit status. Raises `ValueError` if they are not to be compared.
    """
    first, second = (read_result(file) for file in options.compare)
    found = compare(first, second, settings_of(parse_arguments([])), force=options.force)
    console = Console()
    show_comparison(first, second, (str(options.compare[0]), str(options.compare[1])), console)
    if found:
        console.print(f"The workloads differ in {', '.join(found)}.", style="yellow")
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Runs a load, or compares two. Returns the exit status."""
    options = parse_arguments(arguments)
    try:
        return compare_files(options) if options.compare else bench(options)
    except (ReplyError, OSError, ValueError, RuntimeError) as error:
        sys.stderr.write(f"bench: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
