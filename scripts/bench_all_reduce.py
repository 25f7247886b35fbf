r"""Times the all-reduce of the tensor-parallel ranks on this machine's GPUs: ours, NCCL, and
torch's symmetric memory, in the same run.

    python scripts/bench_all_reduce.py [--size 2] [--hidden 4096] [--rows 1,8,64,256,8192] \
        [--rounds 5]

The timed work is a transformer layer's: the partial products summed over the ranks, added to the
residual stream, and normed. Ours is one kernel; the others are followed by the fused add and norm.
Each is captured many times in a CUDA graph, as in a decode step, and replayed; the figures are
medians of the rounds, in microseconds for one all-reduce. Both kernels of ours are timed at every
size that they support; `PUSHED_ROWS` was chosen by these figures. bf16, no multicast.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing

sys.path.insert(0, str(Path(__file__).parent.parent))

from aioinfer.layers.parallel import ParallelGroup

DTYPE = torch.bfloat16
EPS = 1e-6
MAX_PUSHED_ROWS = 1024


def parse_arguments() -> argparse.Namespace:
    """Returns the options."""
    parser = argparse.ArgumentParser(
        description="Times the all-reduce of the ranks on the GPUs of this machine."
    )
    parser.add_argument("--size", type=int, default=2, help="GPUs (default: %(default)s)")
    parser.add_argument(
        "--hidden", type=int, default=4096, help="numbers a row (default: %(default)s)"
    )
    parser.add_argument(
        "--rows", default="1,2,4,8,16,32,64,128,256,512,2048,8192", help="default: %(default)s"
    )
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument(
        "--programs", default="264,528,1056", help="of the two-shot kernel (default: %(default)s)"
    )
    return parser.parse_args()


def measure(rank: int, options: argparse.Namespace, folder: str) -> None:
    """The body of a rank; the first one prints."""
    from aioinfer.kernels.all_reduce import AllReduce, AllReduceLayout
    from aioinfer.kernels.norm import add_rms_norm

    size, hidden = options.size, options.hidden
    lengths = [int(rows) for rows in options.rows.split(",")]
    torch.cuda.set_device(rank)
    group = ParallelGroup.connect(
        rank, size, dist.FileStore(f"{folder}/store", size), torch.device("cuda", rank)
    )
    assert dist.group.WORLD is not None
    name = dist.group.WORLD.group_name
    plain = torch.zeros(max(lengths), hidden, dtype=DTYPE, device="cuda")
    residual, weight = torch.zeros_like(plain), torch.ones(hidden, dtype=DTYPE, device="cuda")

    def make(pushed_rows: int, programs: int) -> AllReduce:
        layout = AllReduceLayout.of(
            size, max(lengths), hidden, DTYPE, pushed_rows=pushed_rows, programs=programs
        )
        return AllReduce(group.symmetric_buffer(layout.nbytes), layout, hidden, DTYPE)

    ours = {"push": make(MAX_PUSHED_ROWS, 1)} | {
        f"two-shot, {n}": make(0, int(n)) for n in options.programs.split(",")
    }
    symmetric = group.symmetric_buffer(plain.nbytes).local.view(DTYPE).view(plain.shape)

    def all_reduce_rows(all_reduce: AllReduce, rows: int) -> None:
        all_reduce.add(all_reduce.partial[:rows], residual[:rows], weight, EPS)

    def reduce_rows(reduce: Callable[[], torch.Tensor], rows: int) -> None:
        add_rms_norm(reduce().view(rows, hidden), residual[:rows], weight, EPS)

    def reduce_with_nccl(values: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(values)
        return values

    def variants(rows: int) -> dict[str, Callable[[], object]]:
        fitting = {
            kind: all_reduce
            for kind, all_reduce in ours.items()
            if kind != "push" or rows <= MAX_PUSHED_ROWS
        }
        runs: dict[str, Callable[[], object]] = {
            kind: partial(all_reduce_rows, all_reduce, rows) for kind, all_reduce in fitting.items()
        }
        runs["NCCL"] = partial(reduce_rows, partial(reduce_with_nccl, plain[:rows]), rows)
        for kind, operation in (("one", "one_shot_all_reduce"), ("two", "two_shot_all_reduce_")):
            reduce = getattr(torch.ops.symm_mem, operation)
            runs[f"torch {kind}-shot"] = partial(
                reduce_rows, partial(reduce, symmetric[:rows].view(-1), "sum", name), rows
            )
        return runs

    for rows in lengths:
        for kind, run in variants(rows).items():
            microseconds = time_in_graph(run, max(4, min(64, 16384 // rows)), options.rounds)
            if rank == 0:
                print(
                    f"{rows:6d} rows  {rows * hidden * 2 / 1024:9.0f} KiB  {kind:16s} "
                    f"{microseconds:9.2f} us",
                    flush=True,
                )
    dist.destroy_process_group()


def time_in_graph(run: Callable[[], object], count: int, rounds: int) -> float:
    """Returns the median microseconds of one `run` in a graph of `count`."""
    run()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            run()
    times = []
    for _ in range(rounds + 1):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        dist.barrier()
        begin.record()
        graph.replay()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / (2 * count))
    return statistics.median(times[1:])


def main() -> None:
    """Runs a process for each GPU."""
    options = parse_arguments()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(measure, args=(options, folder), nprocs=options.size)


if __name__ == "__main__":
    main()
