r"""Measures copies of KV blocks between a GPU and pinned memory of the host, without a server.

    python scripts/bench_kv_copies.py --json kv-copies.json       # the shape of Qwen3-8B, one GPU
    python scripts/bench_kv_copies.py --heads 1 --blocks 2000     # pieces of 32 KiB, of 8 ranks

The ways, of which servers take the first that the driver has:

- batched, plain: see `worker.block_crossings`;
- batched, overlapping: the same with the driver's hint to overlap copies with kernels;
- pitched: a copy of rows for each block; see `benchlib.block_crossings`.

For each way and each direction, medians of `--rounds` rounds with `--blocks` blocks:

- GB/s: over the time from the call to the end of the copies;
- host ms: for which the call occupies the thread that launches steps;
- beside GB/s: while steps run, for most of the time;
- step: the time of a step beside the copies, over its time alone. A step is what a decode's is
  bound by: products of 8 rows with `--weights` matrices of 128 MiB.

Ways take turns within a round. Before they are timed, blocks are checked to come back as they were.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from time import perf_counter

import numpy as np
import torch

from aioinfer.ipc.kv_spec import AttentionSpec, KVGroup
from aioinfer.ipc.plan import I32
from aioinfer.worker.block_crossings import (
    BatchedCrossing,
    Crossing,
    PlainCrossing,
    driver_copy,
)
from aioinfer.worker.host_blocks import BlockCopies, CpuCopies, GpuCopies, HostBlocks
from aioinfer.worker.kv_tensors import KVTensors
from benchlib.block_crossings import PitchedCrossing

DIRECTIONS = ("load", "save")
#: Steps that are launched behind the call.
_NUM_STEPS = 100
Figures = dict[str, list[float]]


def ways_of(kv: KVTensors, host: HostBlocks, rng: np.random.Generator) -> dict[str, BlockCopies]:
    """Returns the copies by each way with which blocks come back as they were; on a CPU there is
    one way. What is wrong with another one is printed."""
    places = host.groups
    made: dict[str, Callable[[], Crossing]] = {"plain": lambda: PlainCrossing(kv, places)}
    if kv.device.type == "cuda":
        made = {
            "batched": lambda: _batched(kv, host, flags=0),
            "batched, overlapping": lambda: _batched(kv, host, flags=1),
            "pitched": lambda: PitchedCrossing(kv, places),
        } | made
    ways: dict[str, BlockCopies] = {}
    for name, make in made.items():
        try:
            crossing = make()
            copies = GpuCopies(kv, crossing) if kv.device.type == "cuda" else CpuCopies(crossing)
            check(copies, kv, moves_of(kv.num_blocks[0], rng))
            ways[name] = copies
        except RuntimeError as error:
            print(f"{name}: {error}")
    return ways


def _batched(kv: KVTensors, host: HostBlocks, flags: int) -> Crossing:
    """Returns copies in one call; see `driver_copy`. Raises RuntimeError."""
    copy = driver_copy(flags)
    if copy is None:
        raise RuntimeError("needs a driver of CUDA 12.8")
    return BatchedCrossing(kv, host.groups, copy)


class Steps:
    """Steps on the current stream that read weights, as decodes do."""

    def __init__(self, device: torch.device, matrices: int):
        self._x = torch.ones(8, 4096, dtype=torch.bfloat16, device=device)
        self._weights = [
            torch.zeros(4096, 16384, dtype=torch.bfloat16, device=device) for _ in range(matrices)
        ]
        self._events: list[torch.cuda.Event] = []

    def launch(self, count: int) -> None:
        """Launches so many steps."""
        if not self._weights:
            return
        for _ in range(count):
            self._mark()
            for weight in self._weights:
                torch.mm(self._x, weight)
        self._mark()

    def _mark(self) -> None:
        self._events.append(torch.cuda.Event(enable_timing=True))
        self._events[-1].record()

    def median_ms(self) -> float:
        """Returns the median time of the steps since the last call, once all have ended."""
        events, self._events = self._events, []
        if not events:
            return 1.0
        events[-1].synchronize()
        return statistics.median(first.elapsed_time(last) for first, last in pairwise(events))


def moves_of(count: int, rng: np.random.Generator) -> I32:
    """Returns moves, int32 [n, 3], of all blocks in some order, from or to places in another."""
    moves = np.stack([np.zeros(count), rng.permutation(count), rng.permutation(count)], axis=1)
    return moves.astype(np.int32)


def run(
    copies: BlockCopies, direction: str, moves: I32, steps: Steps | None = None
) -> tuple[float, float]:
    """Returns the seconds of the call, and until the copies have ended, with steps beside them."""
    began = perf_counter()
    if direction == "load":
        copies.load(np.concatenate([moves, np.zeros((len(moves), 1), np.int32)], axis=1))
    else:
        wait = copies.save(moves)
    called = perf_counter() - began
    if steps is not None:
        steps.launch(_NUM_STEPS)
    if direction == "load":
        copies.await_ended()
    else:
        wait()
    return called, perf_counter() - began


def check(copies: BlockCopies, kv: KVTensors, moves: I32) -> None:
    """Raises RuntimeError unless blocks come back as they were."""
    (tensor,) = kv.tensors
    tensor.normal_()
    expected = tensor.clone()
    run(copies, "save", moves)
    tensor.zero_()
    run(copies, "load", moves)
    if not torch.equal(tensor, expected):
        raise RuntimeError("blocks came back as others")


def measure(
    copies: BlockCopies, direction: str, moves: I32, steps: Steps, nbytes: int, found: Figures
) -> None:
    """Adds the figures of a round."""
    called, ended = run(copies, direction, moves)
    steps.launch(_NUM_STEPS)
    alone = steps.median_ms()
    _, ended_beside = run(copies, direction, moves, steps)
    figures = {
        "GB/s": nbytes / ended / 1e9,
        "host ms": 1000 * called,
        "beside GB/s": nbytes / ended_beside / 1e9,
        "step": steps.median_ms() / alone,
    }
    for name, figure in figures.items():
        found.setdefault(name, []).append(figure)


def main(arguments: list[str] | None = None) -> None:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--blocks", type=int, default=250)
    parser.add_argument("--block-size", type=int, default=128)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--heads", type=int, default=8, help="of keys and values, on a rank")
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--weights", type=int, default=16, help="matrices of a step")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    device, count = torch.device(options.device), options.blocks
    group = KVGroup(AttentionSpec(options.heads, options.head_size), tuple(range(options.layers)))
    kv = KVTensors([group], [count], options.block_size, torch.bfloat16, device)
    host = HostBlocks(kv, [count], pinned=device.type == "cuda")
    rng = np.random.default_rng(0)
    ways, steps = ways_of(kv, host, rng), Steps(device, options.weights)
    found: dict[str, dict[str, Figures]] = {
        each: {name: {} for name in ways} for each in DIRECTIONS
    }
    for _ in range(options.rounds):
        for direction in DIRECTIONS:
            for name, copies in ways.items():
                moves = moves_of(count, rng)
                measure(copies, direction, moves, steps, kv.nbytes, found[direction][name])
    if device.type == "cuda":
        print(torch.cuda.get_device_name(device))
    print(f"{count} blocks, {kv.nbytes / 1e9:.2f} GB")
    for direction, by_way in found.items():
        for name, figures in by_way.items():
            medians = (f"{key} {statistics.median(all_):.4g}" for key, all_ in figures.items())
            print(f"{direction:5} {name:20} {', '.join(medians)}")
    if options.json:
        options.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
