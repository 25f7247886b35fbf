"""The sizes for which CUDA graphs are captured.

That graphs compute what launches do is tested on a GPU: tests/gpu/test_mixed_steps.py.
"""

from __future__ import annotations

import pytest

from aioinfer.worker.cuda_graphs import CudaGraphs, decode_sizes, mixed_sizes


@pytest.mark.parametrize("sizes", [decode_sizes, mixed_sizes])
@pytest.mark.parametrize("max_size", [1, 2, 7, 64, 65, 256, 511, 512, 513, 2304, 2560])
def test_sizes_ascend_to_the_maximum(sizes, max_size):
    found = sizes(max_size)
    assert found == sorted(set(found))
    assert found[0] >= 1
    assert found[-1] == max_size


def test_a_decode_step_is_padded_by_a_quarter_at_most():
    sizes = decode_sizes(512)
    for rows in range(32, 513):
        assert next(size for size in sizes if size >= rows) <= 1.25 * rows


def test_nothing_fits_before_the_capture():
    assert CudaGraphs().fit(1) == 0
