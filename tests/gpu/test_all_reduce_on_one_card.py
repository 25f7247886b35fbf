"""All-reduce of ranks that share a GPU: each has a stream and memory of its own, in one process.

The kernels of all ranks have to run at the same time, which one GPU does for grids this small.
`test_all_reduce.py` has the same with a GPU for each rank, against NCCL.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from aioinfer.kernels.all_reduce import AllReduce, AllReduceLayout, _push_kernel, _two_shot_kernel
from aioinfer.kernels.quantize import InputFormat, quantize
from aioinfer.kernels.symmetric_memory import SymmetricBuffer
from cases import normal
from references import all_reduce_reference
from scaled_cases import check_quantized_sums

from aioinfer.worker.compilation import compile_only

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

DEVICE = "cuda"
HIDDEN, MAX_ROWS, PUSHED_ROWS, PROGRAMS, EPS = 4096, 300, 16, 8, 1e-6
ROWS = (1, 2, 7, 16, 17, 64, 100, 300)
FORMATS = [
    InputFormat(torch.float8_e4m3fn),
    InputFormat(torch.float8_e4m3fn, is_grouped=True),
    InputFormat(torch.int8),
]


def make_ranks(size: int, dtype: torch.dtype) -> list[tuple[AllReduce, torch.cuda.Stream]]:
    """Returns the all-reduce of each rank with its stream."""
    layout = AllReduceLayout.of(
        size, MAX_ROWS, HIDDEN, dtype, pushed_rows=PUSHED_ROWS, programs=PROGRAMS
    )
    memory = [torch.zeros(layout.nbytes, dtype=torch.uint8, device=DEVICE) for _ in range(size)]
    addresses = torch.tensor([each.data_ptr() for each in memory], device=DEVICE)
    torch.cuda.synchronize()
    return [
        (
            AllReduce(SymmetricBuffer(local, addresses, rank, size), layout, HIDDEN, dtype),
            torch.cuda.Stream(),
        )
        for rank, local in enumerate(memory)
    ]


def load_kernels(ranks: list[tuple[AllReduce, torch.cuda.Stream]], dtype: torch.dtype) -> None:
    """Compiles and loads what all ranks launch: loading a kernel may wait for those that run, and
    these wait for the other ranks'."""
    weight = torch.ones(HIDDEN, dtype=dtype, device=DEVICE)
    with compile_only():
        for all_reduce, _ in ranks:
            for rows in (PUSHED_ROWS, MAX_ROWS):
                part, total = all_reduce.partial[:rows], weight.new_zeros(rows, HIDDEN)
                all_reduce.add(part, total, weight, EPS)
                for format in FORMATS:
                    all_reduce.add_quantized(part, total, weight, EPS, format)
    for kernel in (_push_kernel, _two_shot_kernel):
        for compiled in kernel.device_caches[torch.cuda.current_device()][0].values():
            compiled._init_handles()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_norms_and_their_quantization(dtype: torch.dtype, size: int) -> None:
    """By both kernels, the one that pushes rows and the one in two shots; 25 times each, since the
    order of the ranks is another every time."""
    ranks = make_ranks(size, dtype)
    load_kernels(ranks, dtype)
    weight = torch.rand(HIDDEN, device=DEVICE).to(dtype)
    for number in range(25):
        for rows in ROWS:
            partials = [normal(rows, HIDDEN, dtype=dtype, device=DEVICE) for _ in range(size)]
            residual = normal(rows, HIDDEN, dtype=dtype, device=DEVICE)
            format = FORMATS[number % 3]
            summed, quantized = [], []
            torch.cuda.synchronize()
            for (all_reduce, stream), partial in zip(ranks, partials, strict=True):
                with torch.cuda.stream(stream):
                    mine, total, other = (
                        all_reduce.partial[:rows],
                        residual.clone(),
                        partial.clone(),
                    )
                    mine.copy_(partial)
                    normed = all_reduce.add(mine, total, weight, EPS)
                    summed.append((total, normed))
                    mine.copy_(other)
                    total = residual.clone()
                    found = all_reduce.add_quantized(mine, total, weight, EPS, format)
                    quantized.append((total, found))
            torch.cuda.synchronize()
            exact, exact_norm = all_reduce_reference(
                [each.double() for each in partials], residual.double(), weight.double(), EPS
            )
            first, first_norm = summed[0]
            for found, expected in ((first, exact), (first_norm, exact_norm)):
                assert (found.double() - expected).norm() / expected.norm() < 5e-3
            theirs = quantize(first, format, norm_weight=weight, eps=EPS)
            for (total, normed), (again, inputs) in zip(summed, quantized, strict=True):
                assert torch.equal(total, first)
                assert torch.equal(again, first)
                assert torch.equal(normed, first_norm)
                check_quantized_sums(inputs, theirs)
