"""What a decode step costs: the worker's host time, the GPU's time, and the gap between two steps on the GPU.

    python scripts/bench_step.py --model FOLDER [--rows 1,64,256] [--context 512] [--trace FILE]

Drives a worker as its process does, without engine and HTTP: plans are encoded and decoded, and two are in flight, the
third is launched when the first has come back. Needs a GPU with kernels for the model; weights are random (the folder
needs a config.json only). Events before and behind each graph give the gap: from the end of a step's graph to
the beginning of the next one's, the copy of the plan between them included. The host's time is from a plan's bytes to
the launch of the copy of its results. `--trace` writes the start and end of every step in microseconds, as JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import deque
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent.parent))

from aioinfer.config import load_config
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.sampling_params import SamplingParams
from aioinfer.scheduler.plan import I32, Admission, StepPlan
from aioinfer.worker.model_runner import ModelRunner
from aioinfer.worker.worker import Worker

if TYPE_CHECKING:
    from aioinfer.worker.gpu_runner import GpuModelRunner, PendingGpuResult

STEPS = 200
IN_FLIGHT = 2


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


def start_worker(folder: Path, rows: int, longest: int) -> tuple[Worker, GpuModelRunner]:
    """Returns a worker that is ready, with a slot for each row and KV blocks for `longest` tokens in each."""
    settings = {"model.path": str(folder), "model.load_format": "dummy", "scheduler.max_num_seqs": rows, "parallel.device": "cuda"}
    worker = Worker(load_config(None, settings), folder, ParallelGroup.single())
    report = worker.load(lambda done, total: None)
    if report.max_blocks * worker.block_size < rows * longest:
        raise SystemExit(f"{rows} rows of {longest} tokens do not fit into the GPU's memory")
    worker.allocate(report.max_blocks, longest)
    worker.warm_up()
    if isinstance(worker._runner, ModelRunner):
        raise SystemExit("there are no kernels for this model")
    return worker, worker._runner


def make_plan(step: int, slots: I32, start: int, length: int, samples: int) -> StepPlan:
    """Returns the plan in which each slot computes `length` tokens from `start`."""
    none = np.empty(0, np.int32)
    starts, lengths, sampling = (np.full(len(slots), value, np.int32) for value in (start, length, samples))
    return StepPlan(step, slots, starts, lengths, sampling, none, none, none, none, none)


def fill(worker: Worker, rows: int, context: int, blocks: int) -> None:
    """Gives each slot a prompt of `context` tokens with its KV blocks, computed 16 requests at a time."""
    random = np.random.default_rng(0)
    for first in range(0, rows, 16):
        slots = np.arange(first, min(rows, first + 16), dtype=np.int32)
        prompts = random.integers(3, 1000, (len(slots), context), np.int32)
        begun = 0
        while begun < context:
            length = min(context - begun, 512)
            plan = make_plan(0, slots, begun, length, 0)
            if not begun:
                plan.table_slots = np.repeat(slots, blocks)
                plan.table_indices = np.tile(np.arange(blocks, dtype=np.int32), len(slots))
                plan.table_blocks = np.arange(first * blocks, (first + len(slots)) * blocks, dtype=np.int32)
                greedy = SamplingParams(temperature=0)
                plan.admissions = [Admission(int(slot), prompt, context, greedy, 0) for slot, prompt in zip(slots, prompts, strict=True)]
            worker.execute(plan).wait()
            begun += length


def decode(worker: Worker, runner: GpuModelRunner, rows: int, context: int) -> dict[str, object]:
    """Decodes `STEPS` tokens in each of `rows` slots; returns the figures and the trace."""
    slots = np.arange(rows, dtype=np.int32)
    size = next(size for size in sorted(runner._graphs) if size >= rows)
    timed = TimedGraph(runner._graphs[size])
    runner._graphs[size] = timed  # type: ignore[assignment]
    messages = [b"".join(make_plan(step, slots, context + step, 1, 1).encode()) for step in range(STEPS)]
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
    wall = perf_counter() - began
    runner._graphs[size] = timed.graph
    torch.cuda.synchronize()
    origin = timed.events[0][0]
    trace = [(origin.elapsed_time(begin) * 1e3, origin.elapsed_time(end) * 1e3) for begin, end in timed.events]
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
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures decode steps of a worker on a GPU.")
    parser.add_argument("--model", type=Path, required=True, metavar="FOLDER", help="with a config.json")
    parser.add_argument("--rows", default="1,64,256", help="numbers of streams (default: %(default)s)")
    parser.add_argument("--context", type=int, default=512, help="tokens in each stream at first (default: %(default)s)")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="for the figures with the start and end of every step")
    arguments = parser.parse_args()
    numbers = [int(number) for number in arguments.rows.split(",")]
    longest = arguments.context + STEPS + 1
    worker, runner = start_worker(arguments.model, max(numbers), longest)
    fill(worker, max(numbers), arguments.context, -(-longest // worker.block_size))
    results = [decode(worker, runner, rows, arguments.context) for rows in numbers]
    table = Table(title=f"{arguments.model.name}: decode steps, {arguments.context} tokens of context", title_justify="left")
    for name in ("streams", "step ms", "GPU ms", "gap us", "largest gap us", "GPU idle", "host us"):
        table.add_column(name, justify="right")
    for result in results:
        table.add_row(
            f"{result['rows']}", f"{result['step_ms']:.3f}", f"{result['gpu_ms']:.3f}", f"{result['gap_us']:.1f}",
            f"{result['gap_max_us']:.1f}", f"{result['idle_share']:.2%}", f"{result['host_us']:.0f}",
        )  # fmt: skip
    Console(width=120).print(table)
    if arguments.trace:
        arguments.trace.write_text(json.dumps(results), "utf-8")


if __name__ == "__main__":
    main()
