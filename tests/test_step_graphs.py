"""The sizes for which CUDA graphs are captured, and shared prefixes on the host: what plans say,
slots that get new requests, how much is saved.

That graphs compute what launches do is tested on a GPU: tests/gpu/test_mixed_steps.py.
"""

from __future__ import annotations

import numpy as np
import pytest

from aioinfer.ipc.plan import StepPlan
from aioinfer.worker.step_graphs import CudaGraphs, SharedPrefixes, decode_sizes, mixed_sizes
from tests.plans import make_plan

SLOTS = 32


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


# ---------------------------------------------------------------- shared prefixes


def growth(tables: dict[int, list[int]], first: int = 0, group: int = 0) -> StepPlan:
    """Returns a plan in which the block tables of slots grow from index `first` on."""
    entries = [
        (group * SLOTS + slot, first + index, block)
        for slot, blocks in tables.items()
        for index, block in enumerate(blocks)
    ]
    return make_plan(growth=entries)


def prefixes() -> SharedPrefixes:
    """8 rows have to share 10 blocks of 16 tokens, 10 rows 8, 19 rows 4, and so on."""
    return SharedPrefixes(SLOTS, 16, min_rows=8, min_saved=1120)


def slots(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.int32)


def test_rows_that_begin_alike() -> None:
    found = prefixes()
    found.update(growth({slot: [*range(100, 110), slot] for slot in range(8)}))
    assert found.may_save(slots(8))
    assert found.may_save(slots(20))
    assert not found.may_save(slots(7))


def test_rows_that_share_too_little() -> None:
    found = prefixes()
    found.update(growth({slot: [*range(100, 108), 200 + slot, 300 + slot] for slot in range(9)}))
    assert not found.may_save(slots(9))
    found.update(growth({9: [*range(100, 108), 500]}))
    assert found.may_save(slots(10))


def test_short_rows_share_nothing() -> None:
    found = prefixes()
    assert not found.may_save(slots(SLOTS))
    found.update(growth({slot: [slot] for slot in range(SLOTS)}))
    assert not found.may_save(slots(SLOTS))


def test_a_slot_forgets_its_last_request() -> None:
    found = prefixes()
    tables = {slot: list(range(100, 110)) for slot in range(8)}
    found.update(growth(tables))
    assert found.may_save(slots(8))
    found.update(growth({3: [50]}))
    assert not found.may_save(slots(8))
    found.update(growth({3: list(range(101, 110))}, first=1))
    assert found.may_save(slots(8))


def test_other_groups_are_left_out() -> None:
    found = prefixes()
    found.update(growth({slot: list(range(100, 110)) for slot in range(8)}, group=1))
    assert not found.may_save(slots(8))
