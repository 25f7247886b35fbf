"""The sizes for which CUDA graphs are captured, and shared prefixes on the host: what plans say,
slots that get new requests, how much is saved.

That graphs compute what launches do is tested on a GPU: tests/gpu/test_mixed_steps.py.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from aioinfer.ipc.plan import StepPlan
from aioinfer.worker.step_graphs import (
    CudaGraphs,
    SharedPrefixes,
    decode_sizes,
    mixed_sizes,
    timed_sizes,
)
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


class Graph:
    """Stands in for a CUDA graph, which records what is launched while it is captured."""

    launched: ClassVar[list[int]] = []
    capture_stream = object()

    def capture_begin(self, *, pool: Any, capture_error_mode: str) -> None:
        assert (pool, capture_error_mode) == ("pool", "thread_local")
        self.first = len(self.launched)

    def capture_end(self) -> None:
        self.captured = self.launched[self.first :]

    def replay(self) -> None:
        self.launched.append(-self.captured[0])


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes that are launched; negative where a graph of that size is replayed."""
    Graph.launched = []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: graph)
    for name in ("stream", "synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: nullcontext())
    return Graph.launched


def test_graphs_are_captured_at_once(launched: list[int]) -> None:
    graphs = CudaGraphs()
    graphs.capture([1, 2, 4], launched.append, "pool")
    assert launched == [4, 4, 2, 1], "the largest is launched once before"
    assert not graphs.capture_next()
    graphs.replay(graphs.fit(3))
    assert launched[4:] == [-4]


def test_graphs_that_are_left_come_when_they_are_needed_or_one_by_one(launched: list[int]) -> None:
    graphs = CudaGraphs()
    graphs.capture([1, 2, 4, 8, 16], launched.append, "pool", first=[1, 16])
    assert launched == [16, 16, 1]
    assert graphs.fit(3) == 4
    for _ in range(2):
        graphs.replay(4)
    assert launched[3:] == [4, -4, -4]
    while graphs.capture_next():
        pass
    assert launched[6:] == [2, 8]


def test_decode_steps_of_many_rows_replay_larger_graphs_until_a_capture_pays(
    launched: list[int],
) -> None:
    graphs = CudaGraphs()
    graphs.capture([8, 16, 32, 256, 512], launched.append, "pool", first=[512])
    assert [graphs.fit_rows(rows) for rows in (3, 9)] == [8, 16], "few rows: always their own size"
    assert [graphs.fit_rows(200) for _ in range(9)] == [512] * 8 + [256], "8 * 256 rows of padding"
    assert [graphs.fit_rows(20) for _ in range(5)] == [512] * 4 + [32], "each size for itself"
    graphs.replay(32)
    assert graphs.fit_rows(20) == 32
    graphs.replay(256)
    assert graphs.fit_rows(200) == 256
    assert launched == [512, 512, 32, -32, 256, -256]


def test_steps_that_are_timed_reach_the_largest() -> None:
    assert timed_sizes(decode_sizes(96)) == [1, 16, 48, 96]
    assert timed_sizes([7]) == [7]


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
