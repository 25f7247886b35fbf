r"""Measures a step of the worker: the host's time, the GPU's time, and the gap between two decode
steps on the GPU.

    python scripts/bench_step.py --model FOLDER [--rows 1,64,256] [--context 512] [--kernels] \
        [--trace FILE] [--set model.quantization=fp8]
    python scripts/bench_step.py --model FOLDER --rows 256 --prompts 1x512,4x448,8x512 [--kernels]

Drives a worker as its process does, without engine and HTTP: plans are encoded and decoded, and two
are in flight, the third is launched when the result of the first is there. Needs a GPU with kernels
for the model; weights are random (the folder needs a config.json only). Events before and after
each graph give the gap: from the end of a step's graph to the beginning of the next one's, the copy
of the plan between them included. The host's time is from a plan's bytes to the launch of the copy
of its results. `--trace` writes the start and end of every step in microseconds, as JSON. With
`--prompts NxT`, steps of each number of streams beside N prompts of T tokens each, which start from
their first token in every step; "GPU ms" is then the time in which any kernel ran, by torch's
profiler, in a few steps more. `--kernels` adds the profiler's figures for each kernel: launches in
a step, and microseconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict, deque
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parent.parent))

from aioinfer.config import load_config
from aioinfer.ipc.plan import I32, Admission, Admissions, StepPlan
from aioinfer.layers.parallel import ProcessGroups
from aioinfer.sampling_params import SamplingParams
from aioinfer.worker.model_runner import ModelRunner
from aioinfer.worker.worker import Worker

if TYPE_CHECKING:
    from aioinfer.worker.gpu_runner import GpuModelRunner, PendingGpuResult

STEPS = 200
IN_FLIGHT = 2
MIXED_STEPS = 40
SHOWN_KERNELS = 20
PROFILED_STEPS = 5


class TimedGraph:
    """A CUDA graph that records an event before and behind each replay."""

    def __init__(self, graph: torch.cuda.CUDAGraph):
        self.graph = graph
        self.events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def replay(self) -> None:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        self.graph.replay()
        end.record()
        self.events.append((begin, end))


def start_worker(
    folder: Path, rows: int, longest: int, settings: Sequence[str]
) -> tuple[Worker, GpuModelRunner]:
    """Returns a worker that is ready, with a slot for each row and KV blocks for `longest` tokens
    in each; `settings` are further keys of the configuration."""
    settings = [
        f"model.path={folder}",
        "model.load_format=dummy",
        f"scheduler.max_num_seqs={rows}",
        "parallel.device=cuda",
        *settings,
    ]
    worker = Worker(load_config(None, settings), folder, ProcessGroups.single())
    report = worker.load(lambda done, total: None)
    if report.num_blocks[0] * worker.block_size < rows * longest:
        raise SystemExit(f"{rows} rows of {longest} tokens do not fit into the GPU's memory")
    worker.allocate(report.num_blocks, longest)
    worker.warm_up()
    if isinstance(worker._runner, ModelRunner):
        raise SystemExit("there are no kernels for this model")
    return worker, worker._runner


def make_plan(step: int, slots: I32, start: int, length: int, samples: int) -> StepPlan:
    """Returns the plan in which each slot computes `length` tokens from `start`."""
    none = np.empty(0, np.int32)
    starts, lengths, sampling = (
        np.full(len(slots), value, np.int32) for value in (start, length, samples)
    )
    return StepPlan(step, slots, starts, lengths, sampling, none, none, none, none, none)


def fill(worker: Worker, rows: int, context: int, blocks: int) -> None:
    """Gives each slot a prompt of `context` tokens with its KV blocks, computed 16 requests at a
    time."""
    random = np.random.default_rng(0)
    for first in range(0, rows, 16):
        slots = np.arange(first, min(rows, first + 16), dtype=np.int32)
        prompts = random.integers(3, 1000, (len(slots), context), np.int32)
        begun = 0
        while begun < context:
            length = min(context - begun, 512)
            plan = make_plan(0, slots, begun, length, 0)
            if not begun:
                plan.table_rows = np.repeat(slots, blocks)
                plan.table_indices = np.tile(np.arange(blocks, dtype=np.int32), len(slots))
                plan.table_blocks = np.arange(
                    first * blocks, (first + len(slots)) * blocks, dtype=np.int32
                )
                greedy = SamplingParams(temperature=0)
                admissions = [
                    Admission(int(slot), prompt, context, greedy)
                    for slot, prompt in zip(slots, prompts, strict=True)
                ]
                plan.sections = [Admissions.of(admissions)]
            worker.execute(plan).wait()
            begun += length


def drive(worker: Worker, plans: Sequence[StepPlan]) -> tuple[float, list[float]]:
    """Executes plans as a worker's process does.

    Returns the seconds of all, and the host's for each.
    """
    messages = [b"".join(plan.encode()) for plan in plans]
    pending: deque[PendingGpuResult] = deque()
    host: list[float] = []
    torch.cuda.synchronize()
    began = perf_counter()
    for message in messages:
        if len(pending) == IN_FLIGHT:
            pending.popleft().wait()
        at = perf_counter()
        pending.append(worker.execute(StepPlan.decode(message)))  # type: ignore[arg-type]
        host.append(perf_counter() - at)
    while pending:
        pending.popleft().wait()
    return perf_counter() - began, host


def observe(
    worker: Worker, plans: Sequence[StepPlan]
) -> tuple[float, dict[str, tuple[float, float]]]:
    """Executes plans under torch's profiler.

    Returns the microseconds in which some kernel ran, and of each kernel the launches a step and
    the mean microseconds of a launch.
    """
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        drive(worker, plans)
        torch.cuda.synchronize()
    ran = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
    busy, last = 0.0, 0.0
    times: dict[str, list[float]] = defaultdict(list)
    for event in sorted(ran, key=lambda event: event.time_range.start):
        span = event.time_range
        busy += max(0.0, span.end - max(span.start, last))
        last = max(last, span.end)
        times[event.name].append(span.end - span.start)
    return busy, {
        name: (len(spans) / len(plans), statistics.mean(spans)) for name, spans in times.items()
    }


def mix(worker: Worker, rows: int, context: int, prompts: int, length: int) -> dict[str, object]:
    """Executes steps of `rows` decodes beside `prompts` prompts in the slots behind theirs; returns
    the figures."""
    none = np.empty(0, np.int32)
    starts = np.repeat(np.array([context, 0], np.int32), [rows, prompts])
    lengths = np.repeat(np.array([1, length], np.int32), [rows, prompts])
    slots = np.arange(rows + prompts, dtype=np.int32)
    plans = [
        StepPlan(step, slots, starts, lengths, np.ones_like(slots), none, none, none, none, none)
        for step in range(MIXED_STEPS)
    ]
    drive(worker, plans[:IN_FLIGHT])
    wall, host = drive(worker, plans)
    busy, kernels = observe(worker, plans[:PROFILED_STEPS])
    return {
        "rows": rows,
        "context": context,
        "prompts": f"{prompts} x {length}",
        "step_ms": wall / len(plans) * 1e3,
        "gpu_ms": busy / PROFILED_STEPS / 1e3,
        "host_us": statistics.median(host) * 1e6,
        "kernels": kernels,
    }


def decode(
    worker: Worker, runner: GpuModelRunner, rows: int, context: int, kernels: bool
) -> dict[str, object]:
    """Decodes `STEPS` tokens in each of `rows` slots; returns the figures and the trace, with
    `kernels` what each kernel took."""
    slots = np.arange(rows, dtype=np.int32)
    graphs = runner.graphs.decode.graphs
    size = runner.graphs.decode.fit(rows)
    timed = TimedGraph(graphs[size])
    graphs[size] = timed  # type: ignore[assignment]
    plans = [make_plan(step, slots, context + step, 1, 1) for step in range(STEPS)]
    wall, host = drive(worker, plans)
    graphs[size] = timed.graph
    torch.cuda.synchronize()
    origin = timed.events[0][0]
    trace = [
        (origin.elapsed_time(begin) * 1e3, origin.elapsed_time(end) * 1e3)
        for begin, end in timed.events
    ]
    gaps = [after[0] - before[1] for before, after in pairwise(trace)]
    return {
        "rows": rows,
        "context": context,
        "step_ms": wall / STEPS * 1e3,
        "gpu_ms": statistics.median(end - begin for begin, end in trace) / 1e3,
        "gap_us": statistics.median(gaps),
        "gap_max_us": max(gaps),
        "idle_share": sum(gaps) / (trace[-1][1] - trace[0][0]),
        "host_us": statistics.median(host) * 1e6,
        "trace_us": trace,
        "kernels": observe(worker, plans[:PROFILED_STEPS])[1] if kernels else {},
    }


COLUMNS = {
    "streams": ("rows", "{}"), "prompts": ("prompts", "{}"), "step ms": ("step_ms", "{:.3f}"),
    "GPU ms": ("gpu_ms", "{:.3f}"),
    "gap us": ("gap_us", "{:.1f}"), "largest gap us": ("gap_max_us", "{:.1f}"),
    "GPU idle": ("idle_share", "{:.2%}"),
    "host us": ("host_us", "{:.0f}"),
}  # fmt: skip


def show(title: str, results: Sequence[dict[str, object]]) -> None:
    """Prints a table of what `decode` or `mix` returned."""
    columns = {name: column for name, column in COLUMNS.items() if column[0] in results[0]}
    table = Table(title=title, title_justify="left")
    for name in columns:
        table.add_column(name, justify="right")
    for result in results:
        table.add_row(*(form.format(result[key]) for key, form in columns.values()))
    Console(width=120).print(table)


def show_kernels(results: Sequence[dict[str, Any]]) -> None:
    """Prints the kernels of each result, those that take most of a step first."""
    for result in results:
        table = Table(
            title=f"{result['rows']} streams, prompts {result.get('prompts', 'none')}",
            title_justify="left",
        )
        for name in ("kernel", "launches", "us", "ms a step"):
            table.add_column(name, justify="left" if name == "kernel" else "right")
        for name, (count, mean) in sorted(
            result["kernels"].items(), key=lambda item: -item[1][0] * item[1][1]
        )[:SHOWN_KERNELS]:
            table.add_row(name[:70], f"{count:g}", f"{mean:.2f}", f"{count * mean / 1e3:.3f}")
        Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures decode steps of a worker on a GPU.")
    parser.add_argument(
        "--model", type=Path, required=True, metavar="FOLDER", help="with a config.json"
    )
    parser.add_argument(
        "--rows", default="1,64,256", help="numbers of streams (default: %(default)s)"
    )
    parser.add_argument(
        "--context",
        type=int,
        default=512,
        help="tokens in each stream at first (default: %(default)s)",
    )
    parser.add_argument(
        "--prompts",
        metavar="NxT,...",
        help="mixed steps instead: so many prompts of so many tokens beside the streams",
    )
    parser.add_argument("--kernels", action="store_true", help="show what each kernel takes")
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="for the figures with the start and end of every step",
    )
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    arguments = parser.parse_args()
    numbers = [int(number) for number in arguments.rows.split(",")]
    prompts = (
        [tuple(map(int, text.split("x"))) for text in arguments.prompts.split(",")]
        if arguments.prompts
        else []
    )
    context = arguments.context
    longest = max([context + STEPS + 1, *(length + 1 for _, length in prompts)])
    slots = max(numbers) + max([0, *(number for number, _ in prompts)])
    worker, runner = start_worker(arguments.model, slots, longest, arguments.set)
    fill(worker, slots, context, -(-longest // worker.block_size))
    if prompts:
        results = [
            mix(worker, rows, context, number, length)
            for rows in numbers
            for number, length in prompts
        ]
    else:
        results = [decode(worker, runner, rows, context, arguments.kernels) for rows in numbers]
    show(f"{arguments.model.name}, {context} tokens of context", results)
    if arguments.kernels:
        show_kernels(results)
    if arguments.trace:
        arguments.trace.write_text(json.dumps(results), "utf-8")


if __name__ == "__main__":
    main()
