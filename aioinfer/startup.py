"""What a person sees while the engine starts: a progress bar for each phase, and at the end a table."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from aioinfer.executor.base import WorkerReport


class StartupDisplay:
    """Progress bars on stderr, as a context manager; `on_progress` goes to `Engine.launch`."""

    def __init__(self, *, quiet: bool = False):
        self.console = Console(stderr=True, quiet=quiet)
        self._progress = Progress(
            TextColumn("{task.description:<20}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"), TimeElapsedColumn(),
            console=self.console, transient=True,
        )  # fmt: skip
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> StartupDisplay:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._progress.stop()

    def on_progress(self, phase: str, done: int, total: int) -> None:
        """Moves the bar of a phase; `done` and `total` are in the phase's own unit."""
        if phase not in self._tasks:
            self._tasks[phase] = self._progress.add_task(phase, total=total)
        self._progress.update(self._tasks[phase], completed=done, total=total)

    def show(self, report: WorkerReport, names: list[str]) -> None:
        """Prints what the workers made, and how long each phase took."""
        table = Table(title=f"aioinfer: {names[0]}", title_justify="left", show_header=False)
        rows = {
            "device": report.device,
            "arithmetic": report.dtype,
            "weights": f"{_size(report.weights_bytes)} a worker",
            "KV cache": f"{_size(report.kv_cache_bytes)} a worker: {report.num_blocks} blocks of {report.block_size} tokens",
            "longest request": f"{report.max_model_len} tokens"
            + (f" ({report.max_model_len_reason})" if report.max_model_len_reason else ""),
        }
        if report.graph_bytes:
            rows["CUDA graphs"] = f"{_size(report.graph_bytes)} a worker"
        for name, value in rows.items():
            table.add_row(name, value)
        table.add_section()
        for phase, seconds in report.phases:
            table.add_row(phase, f"{seconds:.2f} s")
        self.console.print(table)


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
