"""All-reduce of the ranks on real GPUs: against NCCL for all sizes, and 100 000 calls in which
ranks are late at random."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing

from aioinfer.layers.parallel import ParallelGroup

if TYPE_CHECKING:
    from aioinfer.kernels.all_reduce import AllReduce

HIDDEN = 4096
MAX_ROWS = 8192
ROWS = [
    1, 2, 3, 4, 7, 8, 16, 31, 32, 48, 63, 64, 65, 66, 67, 100,
    128, 200, 256, 511, 512, 513, 1000, 1056, 1057, 2048, 4097, 8192,
]  # fmt: skip
EPS = 1e-6
LATE_ROWS = 520
ROUNDS = 100_000
CHECKED = 64  # rows of a round are identified by their number modulo this


def join(rank: int, size: int, folder: Path) -> ParallelGroup:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    torch.manual_seed(rank)
    return ParallelGroup.connect(rank, size, dist.FileStore(str(folder / "store"), size), device)


def check_against_nccl(rank: int, size: int, folder: Path) -> None:
    from aioinfer.kernels.all_reduce import AllReduce, AllReduceLayout
    from references import rms_norm_reference

    group = join(rank, size, folder)
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 5e-3), (torch.float16, 1e-3)):
        layout = AllReduceLayout.of(size, MAX_ROWS, HIDDEN, dtype)
        all_reduce = AllReduce(group.symmetric_buffer(layout.nbytes), layout, HIDDEN, dtype)
        weight = torch.rand(HIDDEN, device="cuda").to(dtype)
        dist.broadcast(weight, 0)
        for number, rows in enumerate(ROWS):
            partial, residual = (
                all_reduce.partial[:rows],
                torch.randn(rows, HIDDEN, device="cuda").to(dtype),
            )
            partial.copy_(torch.randn(rows, HIDDEN, device="cuda"))
            dist.broadcast(residual, 0)
            is_first = number % 3 == 0
            total = partial.double()
            dist.all_reduce(total)
            total += 0 if is_first else residual.double()
            normed = all_reduce.add(partial, residual, weight, EPS, is_first=is_first)
            assert normed is not None
            for result, expected in (
                (residual, total),
                (normed, rms_norm_reference(total, weight.double(), EPS)),
            ):
                error = ((result.double() - expected).norm() / expected.norm()).item()
                assert error < tolerance, (dtype, rows, error)
                others = [torch.empty_like(result) for _ in range(size)]
                dist.all_gather(others, result)
                assert all(torch.equal(other, result) for other in others), (
                    dtype,
                    rows,
                    "the ranks differ",
                )
            check_quantized(all_reduce, partial, weight, is_grouped=number % 2 == 0)
    dist.destroy_process_group()


def check_quantized(
    all_reduce: AllReduce, partial: torch.Tensor, weight: torch.Tensor, *, is_grouped: bool
) -> None:
    """Compares the quantized norm of a sum with `quantize` of the same sum."""
    from aioinfer.kernels.quantize import InputFormat, quantize
    from scaled_cases import check_quantized_sums

    format = InputFormat(torch.float8_e4m3fn, is_grouped)
    total = torch.zeros_like(partial)
    found = all_reduce.add_quantized(partial, total, weight, EPS, format, is_first=True)
    check_quantized_sums(found, quantize(total, format, norm_weight=weight, eps=EPS))


def check_late_ranks(rank: int, size: int, folder: Path) -> None:
    """Calls of both kernels after random waits on the GPU; the values are small integers, so that
    sums are exact."""
    from aioinfer.kernels.all_reduce import AllReduce, AllReduceLayout

    group = join(rank, size, folder)
    layout = AllReduceLayout.of(size, LATE_ROWS, HIDDEN, torch.bfloat16)
    all_reduce = AllReduce(group.symmetric_buffer(layout.nbytes), layout, HIDDEN, torch.bfloat16)
    # the same rows everywhere, other waits
    rounds, waits = random.Random(0), random.Random(rank + 1)
    pattern = torch.arange(HIDDEN + 256 + CHECKED, device="cuda").remainder(13).to(torch.bfloat16)
    residual = torch.empty(LATE_ROWS, HIDDEN, dtype=torch.bfloat16, device="cuda")
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for number in range(ROUNDS):
        rows = rounds.choice((1, 1, 2, 5, 64, 65, 66, 130, 513, 520))
        shift = number % CHECKED
        values = pattern[shift : shift + HIDDEN].expand(rows, HIDDEN)
        if waits.random() < 0.3:
            torch.cuda._sleep(waits.randrange(60_000))  # cycles: up to 30 microseconds
        torch.mul(values, rank + 1, out=all_reduce.partial[:rows])
        all_reduce.add(all_reduce.partial[:rows], residual[:rows], None, EPS, is_first=True)
        if number % 5 == 0:
            wrong += (residual[:rows] != values * (size * (size + 1) // 2)).sum()
    assert wrong.item() == 0
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("work", [check_against_nccl, check_late_ranks])
@pytest.mark.timeout(300)
def test_all_reduce(work, size: int, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")
    torch.multiprocessing.spawn(work, args=(size, tmp_path), nprocs=size)
