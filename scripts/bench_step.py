r"""Measures a step of the worker: the host's time, the GPU's time, and the gap between two decode
steps on the GPU.

    python scripts/bench_step.py --model FOLDER [--rows 1,64,256] [--context 512] [--kernels] \
        [--trace FILE] [--set model.quantization=fp8]
    python scripts/bench_step.py --model FOLDER --rows 256 --prompts 1x512,4x448,8x512 [--kernels]
    python scripts/bench_step.py --model FOLDER --rows 0,60 --prompts 1x2048@30000

Drives a worker as its process does, without engine and HTTP: plans are encoded and decoded, and two
are in flight, the third is launched when the result of the first is there. Needs a GPU with kernels
for the model; weights are random (the folder needs a config.json only). Events before and after
each graph give the gap: from the end of a step's graph to the beginning of the next one's, the copy
of the plan between them included. The host's time is from a plan's bytes to the launch of the copy
of its results. `--trace` writes the start and end of every step in microseconds, as JSON. With
`--prompts NxT@K`, steps of each number of streams (0: none) beside chunks of T tokens of N prompts,
the same in every step; each chunk begins behind K tokens (without `@K` at the first token). "GPU
ms" is then the time in which any kernel ran, by torch's profiler, in a few steps more. `--kernels`
adds the profiler's figures for each kernel, by the kernel that was launched before it: launches in
a step, the microseconds of one, and by how many of them it ended later than all before it ("adds").
A kernel that is launched as a programmatic dependent waits within its own time, so that only these
parts add up to the time of a step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

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
from aioinfer.worker.gpu_device import GpuDevice
from aioinfer.worker.runner import PendingResult
from aioinfer.worker.worker import Worker

STEPS = 200
IN_FLIGHT = 2
MIXED_STEPS = 40
SHOWN_KERNELS = 20
PROFILED_STEPS = 5
#: Tokens of a prompt that are computed at a time before steps are measured.
FILL_CHUNK = 2048


class TimedGraph:
    """A CUDA graph that records an event before and after each replay."""

    def __init__(self, graph: torch.cuda.CUDAGraph):
        self.graph = graph
        self.events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def replay(self) -> None:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        self.graph.replay()
        end.record()
        self.events.append((begin, end))


@dataclass(frozen=True)
class Chunks:
    """Chunks of prompts that are computed beside streams.

    Attributes:
        number: how many, each of another prompt.
        length: tokens of each.
        start: tokens of each prompt before its chunk.
    """

    number: int
    length: int
    start: int

    @classmethod
    def parse(cls, text: str) -> Chunks:
        """Returns the chunks that `NxT` or `NxT@K` describes."""
        number, _, length = text.partition("x")
        length, _, start = length.partition("@")
        return cls(int(number), int(length), int(start or 0))

    def __str__(self) -> str:
        return f"{self.number} x {self.length}" + (f" @ {self.start}" if self.start else "")


def start_worker(
    folder: Path, tokens: Sequence[int], settings: Sequence[str]
) -> tuple[Worker, GpuDevice]:
    """Returns a worker that is ready, with a slot for each of `tokens` and KV blocks for as many
    tokens in it, and its device; `settings` are further keys of the configuration."""
    settings = [
        f"model.path={folder}",
        "model.load_format=dummy",
        f"scheduler.max_num_seqs={len(tokens)}",
        "parallel.device=cuda",
        *settings,
    ]
    worker = Worker(load_config(None, settings), folder, ProcessGroups.single())
    report = worker.load(lambda done, total: None)
    if report.num_blocks[0] < sum(-(-number // worker.block_size) for number in tokens):
        raise SystemExit(f"{len(tokens)} rows do not fit into the GPU's memory")
    worker.allocate(report.num_blocks, max(tokens))
    worker.warm_up()
    device = worker.runner.device
    if not isinstance(device, GpuDevice):
        raise SystemExit("there are no kernels for this model")
    return worker, device


def make_plan(step: int, slots: I32, start: int, length: int, samples: int) -> StepPlan:
    """Returns the plan in which each slot computes `length` tokens from `start`."""
    none = np.empty(0, np.int32)
    starts, lengths, sampling = (
        np.full(len(slots), value, np.int32) for value in (start, length, samples)
    )
    return StepPlan(step, slots, starts, lengths, sampling, none, none, none, none, none)


def fill(worker: Worker, contexts: Sequence[int], tokens: Sequence[int]) -> None:
    """Gives each slot its KV blocks and a prompt of which `contexts` tokens are computed, a request
    at a time; lengths as for `start_worker`."""
    random = np.random.default_rng(0)
    greedy = SamplingParams(temperature=0)
    blocks = 0
    for slot, (context, length) in enumerate(zip(contexts, tokens, strict=True)):
        slots = np.array([slot], np.int32)
        own = np.arange(-(-length // worker.block_size), dtype=np.int32)
        prompt = random.integers(3, 1000, length, np.int32)
        for begun in range(0, max(context, 1), FILL_CHUNK):
            plan = make_plan(0, slots, begun, max(1, min(context - begun, FILL_CHUNK)), 0)
            if not begun:
                plan.table_rows = np.full(len(own), slot, np.int32)
                plan.table_indices, plan.table_blocks = own, own + blocks
                plan.sections = [Admissions.of([Admission(slot, prompt, length, greedy)])]
            worker.runner.step(plan).wait()
        blocks += len(own)


def drive(worker: Worker, plans: Sequence[StepPlan]) -> tuple[float, list[float]]:
    """Executes plans as a worker's process does.

    Returns the seconds of all, and the host's for each.
    """
    messages = [b"".join(plan.encode()) for plan in plans]
    pending: deque[PendingResult] = deque()
    host: list[float] = []
    torch.cuda.synchronize()
    began = perf_counter()
    for message in messages:
        if len(pending) == IN_FLIGHT:
            pending.popleft().wait()
        at = perf_counter()
        pending.append(worker.runner.step(StepPlan.decode(message)))
        host.append(perf_counter() - at)
    while pending:
        pending.popleft().wait()
    return perf_counter() - began, host


@dataclass(frozen=True)
class KernelTime:
    """What the launches of a kernel behind another one took.

    Attributes:
        name, before: of the kernel, and of the one that was launched before it.
        launches: a step.
        us: mean microseconds from the start of a launch to its end.
        added_us: mean microseconds by which a launch ended later than all before it.
    """

    name: str
    before: str
    launches: float
    us: float
    added_us: float


def observe(worker: Worker, plans: Sequence[StepPlan]) -> tuple[float, list[KernelTime]]:
    """Executes plans under torch's profiler.

    Returns the microseconds in which some kernel ran, and the times of each kernel, those that add
    most to a step first.
    """
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        drive(worker, plans)
        torch.cuda.synchronize()
    ran = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
    busy, last, before = 0.0, 0.0, ""
    times: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for event in sorted(ran, key=lambda event: event.time_range.start):
        span = event.time_range
        busy += max(0.0, span.end - max(span.start, last))
        if last:  # the first one has none before it
            added = max(0.0, span.end - last)
            times[event.name, before].append((span.end - span.start, added))
        last, before = max(last, span.end), event.name
    kernels = [
        KernelTime(*names, len(spans) / len(plans), *map(statistics.mean, zip(*spans, strict=True)))
        for names, spans in times.items()
    ]
    return busy, sorted(kernels, key=lambda kernel: -kernel.launches * kernel.added_us)


def mix(worker: Worker, rows: int, context: int, first: int, chunks: Chunks) -> dict[str, object]:
    """Executes steps of `rows` decodes beside chunks of prompts, of which slot `first` has the
    first one; returns the figures."""
    none = np.empty(0, np.int32)
    counts = [rows, chunks.number]
    starts = np.repeat(np.array([context, chunks.start], np.int32), counts)
    lengths = np.repeat(np.array([1, chunks.length], np.int32), counts)
    prompts = np.arange(first, first + chunks.number, dtype=np.int32)
    slots = np.concatenate([np.arange(rows, dtype=np.int32), prompts])
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
        "prompts": str(chunks),
        "step_ms": wall / len(plans) * 1e3,
        "gpu_ms": busy / PROFILED_STEPS / 1e3,
        "host_us": statistics.median(host) * 1e6,
        "kernels": kernels,
    }


def decode(
    worker: Worker, device: GpuDevice, rows: int, context: int, kernels: bool
) -> dict[str, object]:
    """Decodes `STEPS` tokens in each of `rows` slots; returns the figures and the trace, with
    `kernels` the time of each kernel."""
    slots = np.arange(rows, dtype=np.int32)
    graphs = device.graphs.decode.graphs
    size = device.graphs.decode.fit(rows)
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
        "kernels": observe(worker, plans[:PROFILED_STEPS])[1] if kernels else [],
    }


COLUMNS = {
    "streams": ("rows", "{}"), "prompts": ("prompts", "{}"), "step ms": ("step_ms", "{:.3f}"),
    "GPU ms": ("gpu_ms", "{:.3f}"),
    "gap us": ("gap_us", "{:.1f}"), "largest gap us": ("gap_max_us", "{:.1f}"),
    "GPU idle": ("idle_share", "{:.2%}"),
    "host us": ("host_us", "{:.0f}"),
}  # fmt: skip


def show(title: str, results: Sequence[dict[str, object]]) -> None:
    """Prints a table of the figures that `decode` or `mix` returned."""
    columns = {name: column for name, column in COLUMNS.items() if column[0] in results[0]}
    table = Table(title=title, title_justify="left")
    for name in columns:
        table.add_column(name, justify="right")
    for result in results:
        table.add_row(*(form.format(result[key]) for key, form in columns.values()))
    Console(width=120).print(table)


def show_kernels(results: Sequence[dict[str, Any]]) -> None:
    """Prints the kernels of each result, those that add most to a step first."""
    for result in results:
        table = Table(
            title=f"{result['rows']} streams, prompts {result.get('prompts', 'none')}",
            title_justify="left",
        )
        for name in ("kernel", "after"):
            table.add_column(name, no_wrap=True)
        for name in ("launches", "us", "adds us", "ms a step"):
            table.add_column(name, justify="right")
        for kernel in result["kernels"][:SHOWN_KERNELS]:
            table.add_row(
                kernel.name[:46], kernel.before[:24], f"{kernel.launches:g}", f"{kernel.us:.2f}",
                f"{kernel.added_us:.2f}", f"{kernel.launches * kernel.added_us / 1e3:.3f}",
            )  # fmt: skip
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
        metavar="NxT[@K],...",
        help="mixed steps instead: chunks of T tokens of N prompts, behind K tokens of each",
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
    context = arguments.context
    mixed = [Chunks.parse(text) for text in (arguments.prompts or "").split(",") if text]
    # the streams' slots, and behind them the prompts' slots, each as long as the longest
    streams, prompts = max(numbers), max((chunks.number for chunks in mixed), default=0)
    longest = max((chunks.start + chunks.length + 1 for chunks in mixed), default=0)
    contexts = [context] * streams + [longest - 1] * prompts
    tokens = [context + STEPS + 1] * streams + [longest] * prompts
    worker, device = start_worker(arguments.model, tokens, arguments.set)
    fill(worker, contexts, tokens)
    if mixed:
        results = [
            mix(worker, rows, context, streams, chunks) for rows in numbers for chunks in mixed
        ]
    else:
        results = [decode(worker, device, rows, context, arguments.kernels) for rows in numbers]
    show(f"{arguments.model.name}, {context} tokens of context", results)
    if arguments.kernels:
        show_kernels(results)
    if arguments.trace:
        arguments.trace.write_text(json.dumps(results, default=asdict), "utf-8")


if __name__ == "__main__":
    main()
