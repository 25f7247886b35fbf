"""Start-up display: a progress bar for each phase of the engine's start, and at the end a table;
`settle_process` prepares the interpreter for what follows."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from aioinfer.executor.base import WorkerReport

#: The event loop may have to wait so long for a thread that prepares a prompt to let go of the
#: interpreter; Python's own 5 ms are a step.
_SWITCH_INTERVAL_S = 0.0005


class StartupDisplay:
    """Progress bars on stderr, as a context manager; `on_progress` goes to `Frontend.launch`.

    Phases come one after the other. One of unknown length has a bar that moves without an end.
    """

    def __init__(self, *, quiet: bool = False):
        self.console = Console(stderr=True, quiet=quiet)
        self._progress = Progress(
            TextColumn("{task.description:<20}"), BarColumn(),
            TaskProgressColumn("{task.percentage:>3.0f} %"), TimeElapsedColumn(),
            console=self.console, transient=True,
        )  # fmt: skip
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> StartupDisplay:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def on_progress(self, phase: str, done: int, total: int) -> None:
        """Moves the bar of a phase, which ends those before it; `done` and `total` are in the
        phase's own unit, 0 of 0 where it is not known how long it takes."""
        if phase not in self._tasks:
            for task in self._tasks.values():
                self._progress.update(task, completed=1, total=1)
            self._tasks[phase] = self._progress.add_task(phase, total=None)
        self._progress.update(self._tasks[phase], completed=done, total=total or None)

    def show(self, reports: Sequence[WorkerReport], names: list[str]) -> None:
        """Prints the workers' setup from a report for each engine, and how long each phase took on
        the slowest of them."""
        table = Table(title=f"aioinfer: {names[0]}", title_justify="left", show_header=False)
        for name, value in describe_workers(reports).items():
            table.add_row(name, value)
        table.add_section()
        for name, seconds in longest_phases(reports).items():
            table.add_row(name, f"{seconds:.2f} s")
        self.console.print(table)


def describe_workers(reports: Sequence[WorkerReport]) -> dict[str, str]:
    """Returns the workers' setup, by name, from a report for each engine."""
    shortest = min(reports, key=lambda report: report.max_model_len)
    rows = {
        "device": reports[0].device,
        "arithmetic": reports[0].dtype,
        "model": reports[0].implementation,
        "weights": f"{_size(reports[0].weights_bytes)} a worker",
    }
    if reports[0].stages:
        rows["pipeline"] = "\n".join(_stage_text(*each) for each in enumerate(reports[0].stages))
    if len(reports) == 1:
        rows["KV cache"] = _cache_text(reports[0])
    else:
        rows["engines"] = f"{len(reports)}, each with its KV cache"
        rows |= {f"engine {number}": _cache_text(report) for number, report in enumerate(reports)}
    rows["longest request"] = f"{shortest.max_model_len} tokens"
    if shortest.max_model_len_reason:
        rows["longest request"] += f" ({shortest.max_model_len_reason})"
    if reports[0].graph_bytes:
        rows["CUDA graphs"] = f"{_size(reports[0].graph_bytes)} a worker"
    return rows


def longest_phases(reports: Sequence[WorkerReport]) -> dict[str, float]:
    """Returns the seconds that each phase of the start took on the slowest of the engines."""
    return {
        phases[0][0]: max(seconds for _, seconds in phases)
        for phases in zip(*(report.phases for report in reports), strict=True)
    }


def _stage_text(number: int, stage: tuple[range, int]) -> str:
    layers, size = stage
    return f"stage {number}: {_layers_text(layers)}, {_size(size)} a worker"


def _cache_text(report: WorkerReport) -> str:
    """Describes how large a worker's KV cache is and, where layers keep different things, describes
    each group of layers: a line a group."""
    if not report.groups:
        return "none: prompts are computed whole"
    counts = [f"{count} blocks of {report.block_size} tokens" for count in report.num_blocks]
    size = f"{_size(report.kv_cache_bytes)} a worker"
    if report.cache_dtype:
        size += f", {report.cache_dtype}"
    if len(counts) == 1:
        return f"{size}: {counts[0]}"
    lines = [
        f"{_layers_text(group.layers)}: {group.spec}: {count}"
        for group, count in zip(report.groups, counts, strict=True)
    ]
    return "\n".join([size, *lines])


def _layers_text(layers: Sequence[int]) -> str:
    if len(layers) == 1:
        return f"layer {layers[0]}"
    return f"{len(layers)} layers from {layers[0]} to {layers[-1]}"


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def settle_process() -> None:
    """Prepares the interpreter for serving, once everything is loaded."""
    gc.collect()
    # what lives now lives as long as the process: the collector need not look at it again
    gc.freeze()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
