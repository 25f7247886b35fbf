"""The interpreter with `fast_interpreter` gives operations the types, shapes and errors that Triton
gives them."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError


@triton.jit
def _broadcast_kernel(grid, row, number, selected, total):
    """Blocks of (8, 1), (1, 16) and (16,), a scalar, and numbers of Python, in one expression."""
    rows, columns = tl.arange(0, 8)[:, None], tl.arange(0, 16)
    places = rows * 16 + columns
    values = (1.5 - tl.load(row + columns)) * rows - tl.load(number)
    tl.static_assert(values.shape[0] == 8)
    tl.static_assert(values.dtype == tl.float32)
    tl.store(grid + places, values)
    kept = tl.where(rows > 2, 3, tl.where(columns == 5, rows, -1))
    tl.store(selected + places, kept)
    tl.store(total, tl.sum(tl.where(True, 2.0, tl.load(row + columns))))


def test_operands_of_several_shapes() -> None:
    row, number = torch.randn(16), torch.tensor([0.25])
    grid, selected, total = torch.empty(8, 16), torch.empty(8, 16, dtype=torch.int32), torch.ones(1)
    _broadcast_kernel[(1,)](grid, row, number, selected, total)
    rows, columns = torch.arange(8)[:, None], torch.arange(16)
    assert torch.equal(grid, (1.5 - row) * rows - number)
    expected = torch.where(rows > 2, 3, torch.where(columns == 5, rows, -1))
    assert torch.equal(selected, expected.int())
    assert total.item() == 32


@triton.jit
def _types_kernel(near, far, wide, narrow, large, small):
    """Integers of two sizes, numbers beside integers and floats, and pointers at a distance."""
    places = tl.arange(0, 8)
    few, many = tl.load(narrow + places), tl.load(wide + places)
    tl.static_assert(few.dtype == tl.int8)
    tl.static_assert((few + many).dtype == tl.int64)
    tl.static_assert((many - few).dtype == tl.int64)
    tl.static_assert((few * 1).dtype == tl.int8)
    tl.static_assert((few * 1.0).dtype == tl.float32)
    tl.static_assert((few < 1).dtype == tl.int1)
    tl.store(large + places, (few + many) * (few != 0))
    tl.store(small + places, few * 2 + (many > 1))
    tl.store(near + 1 + places, few * 1.0)
    tl.store(far + (8 - places), few + 0.5)


def test_operands_of_several_types() -> None:
    narrow = torch.tensor([0, 1, -2, 3, 100, 5, 6, -7], dtype=torch.int8)
    wide = torch.arange(8) + 2**40
    near, far, large = torch.zeros(9), torch.zeros(9), torch.zeros(8, dtype=torch.int64)
    small = torch.zeros(8, dtype=torch.int8)
    _types_kernel[(1,)](near, far, wide, narrow, large, small)
    assert torch.equal(large, (narrow + wide) * (narrow != 0))
    assert torch.equal(small, (narrow * 2 + 1).to(torch.int8))  # 100 * 2 overflows as on a GPU
    assert near.tolist() == [0, *narrow.tolist()]
    assert far.flip(0).tolist() == [*(narrow + 0.5).tolist(), 0]


@triton.jit
def _shapes_kernel(out):
    tl.store(out + tl.arange(0, 8), tl.arange(0, 8) + tl.arange(0, 16))


@triton.jit
def _offset_kernel(out):
    tl.store(out + tl.arange(0, 8) * 1.0, 1.0)


@triton.jit
def _range_kernel(out):
    tl.store(out + tl.arange(0, 8), tl.arange(0, 8).to(tl.int8) + 1000)


@triton.jit
def _two_pointers_kernel(out):
    tl.store(out + out, 1.0)


@pytest.mark.parametrize(
    "kernel", [_shapes_kernel, _offset_kernel, _range_kernel, _two_pointers_kernel]
)
def test_what_does_not_fit_is_an_error(kernel: triton.JITFunction) -> None:
    with pytest.raises(InterpreterError):
        kernel[(1,)](torch.zeros(16))
