"""All-reduce among ranks under the interpreter: ranks are processes, symmetric memory is shared
memory."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
from aioinfer.kernels.all_reduce import AllReduce, AllReduceLayout
from aioinfer.kernels.quantize import InputFormat, ScaledInputs, quantize
from aioinfer.kernels.symmetric_memory import SymmetricBuffer
from references import all_reduce_reference
from scaled_cases import check_quantized_sums

from tests.kernels.peer_processes import run_ranks

HIDDEN = 36
PUSHED_ROWS = 5
MAX_ROWS = 17
EPS = 1e-5


def inputs(
    number: int, rows: int, size: int, dtype: torch.dtype, hidden: int = HIDDEN
) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Returns the partial products of all ranks, the residual and the norm's weight for all-reduce
    `number`."""
    generator = torch.Generator().manual_seed(number)
    *partials, residual = (
        torch.randn(rows, hidden, generator=generator).to(dtype) for _ in range(size + 1)
    )
    return partials, residual, torch.rand(hidden, generator=generator).to(dtype)


def all_reduce_all(
    peers: SymmetricBuffer,
    layout: AllReduceLayout,
    calls: list[tuple[int, bool, bool]],
    dtype: torch.dtype,
) -> list[Any]:
    """Makes the calls (rows, is_first, normed) one after the other, with random delays; returns
    (residual, normed) of each."""
    all_reduce = AllReduce(peers, layout, HIDDEN, dtype)
    rng, results = random.Random(peers.rank), []
    for number, (rows, is_first, normed) in enumerate(calls):
        partials, residual, weight = inputs(number, rows, peers.size, dtype)
        partial = all_reduce.partial[:rows]
        partial.copy_(partials[peers.rank])
        time.sleep(rng.choice([0, 0, 0.02]))
        out = all_reduce.add(partial, residual, weight if normed else None, EPS, is_first=is_first)
        results.append((residual.float().tolist(), None if out is None else out.float().tolist()))
    return results


@pytest.mark.parametrize(
    ("size", "dtype", "programs"),
    [(2, torch.float32, 20), (3, torch.float32, 2), (2, torch.float16, 3)],
)
def test_every_rank_gets_the_sum_and_its_norm(size: int, dtype: torch.dtype, programs: int) -> None:
    rng = random.Random(size)
    lengths = [1, 2, 1, PUSHED_ROWS + 1, 3, MAX_ROWS, PUSHED_ROWS + 6, 0, 4, 1]
    calls = [(rows, rng.random() < 0.3, rng.random() < 0.7) for rows in lengths]
    layout = AllReduceLayout.of(
        size, MAX_ROWS, HIDDEN, dtype, pushed_rows=PUSHED_ROWS, programs=programs
    )
    ranks = run_ranks(size, layout.nbytes, all_reduce_all, layout, calls, dtype)
    assert all(rank == ranks[0] for rank in ranks), "the ranks must have the same bits"
    tolerance = 1e-5 if dtype == torch.float32 else 3e-3
    for number, (rows, is_first, normed) in enumerate(calls):
        partials, residual, weight = (
            t if isinstance(t, list) else t.double() for t in inputs(number, rows, size, dtype)
        )
        total, norm = all_reduce_reference(
            [p.double() for p in partials], residual * (not is_first), weight, EPS
        )
        got_total, got_norm = ranks[0][number]
        torch.testing.assert_close(
            torch.tensor(got_total).double().view(rows, HIDDEN),
            total,
            rtol=tolerance,
            atol=tolerance,
        )
        assert (got_norm is not None) == normed
        if normed:
            torch.testing.assert_close(
                torch.tensor(got_norm).double().view(rows, HIDDEN),
                norm,
                rtol=tolerance,
                atol=tolerance,
            )


def quantize_all(
    peers: SymmetricBuffer, layout: AllReduceLayout, hidden: int,
    calls: list[tuple[int, bool, int]], dtype: torch.dtype, formats: list[InputFormat],
) -> list[Any]:  # fmt: skip
    """Makes the calls (rows, is_first, number of the format); returns (residual, values, scales) of
    each."""
    all_reduce, results = AllReduce(peers, layout, hidden, dtype), []
    for number, (rows, is_first, format) in enumerate(calls):
        partials, residual, weight = inputs(number, rows, peers.size, dtype, hidden)
        partial = all_reduce.partial[:rows]
        partial.copy_(partials[peers.rank])
        found = all_reduce.add_quantized(
            partial, residual, weight, EPS, formats[format], is_first=is_first
        )
        results.append((residual, found.values.float(), found.scales.clone()))
    return results


@pytest.mark.parametrize(
    ("dtype", "hidden"), [(torch.float32, HIDDEN), (torch.float16, 300), (torch.bfloat16, 300)]
)
def test_the_norm_is_quantized_as_by_itself(dtype: torch.dtype, hidden: int) -> None:
    """In float8 and int8, with scales of tokens, groups, and a static one; the last group is not
    whole."""
    formats = [
        InputFormat(torch.float8_e4m3fn),
        InputFormat(torch.float8_e4m3fn, is_grouped=True),
        InputFormat(torch.float8_e4m3fn, static_scale=torch.tensor([0.01])),
        InputFormat(torch.int8),
    ]
    lengths = [1, PUSHED_ROWS, PUSHED_ROWS + 1, MAX_ROWS, 0]
    calls = [(rows, number % 2 == 0, number) for number in range(4) for rows in lengths]
    layout = AllReduceLayout.of(2, MAX_ROWS, hidden, dtype, pushed_rows=PUSHED_ROWS, programs=3)
    ranks = run_ranks(2, layout.nbytes, quantize_all, layout, hidden, calls, dtype, formats)
    for number, (rows, is_first, format) in enumerate(calls):
        for mine, other in zip(ranks[0][number], ranks[1][number], strict=True):
            assert torch.equal(mine, other), "the ranks must have the same bits"
        partials, residual, weight = inputs(number, rows, 2, dtype, hidden)
        total, values, scales = ranks[0][number]
        expected = sum(p.float() for p in partials) + (0 if is_first else residual.float())
        torch.testing.assert_close(total.float(), expected.to(dtype).float(), rtol=1e-2, atol=1e-2)
        # of the sum as it was rounded, so that nothing but the order of sums differs
        theirs = quantize(total, formats[format], norm_weight=weight, eps=EPS)
        check_quantized_sums(ScaledInputs(values, scales), theirs)


def test_partial_products_that_lie_elsewhere_are_rejected() -> None:
    layout = AllReduceLayout.of(2, 4, HIDDEN, torch.float32)
    memory = torch.zeros(layout.nbytes, dtype=torch.uint8)
    all_reduce = AllReduce(
        SymmetricBuffer(memory, torch.tensor([memory.data_ptr()] * 2), 0, 2),
        layout,
        HIDDEN,
        torch.float32,
    )
    residual = torch.zeros(2, HIDDEN)
    for partial in (torch.zeros(2, HIDDEN), all_reduce.partial[1:3], all_reduce.partial[:3]):
        with pytest.raises(ValueError, match=r"first rows of AllReduce\.partial"):
            all_reduce.add(partial, residual, None, EPS)
