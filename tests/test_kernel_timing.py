"""The choice of kernels at a worker's start, with recorded times in place of a GPU's."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from aioinfer.layers.kernel_choices import (
    Candidate,
    KernelChoices,
    Operation,
    Product,
    ProductChoices,
    StoredChoices,
)
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.worker import kernel_timing
from aioinfer.worker.kernel_timing import Case, KernelTiming, fastest, list_cases, time_cases
from aioinfer.worker.stopwatch import MAX_LAYERS_ROWS, Costs
from tests.test_kernel_choices import CUBLAS, FEW_ROWS, Tiles

SIZES = (1, 2, 8, 16, 24)
SMALL, LARGE = Candidate(FEW_ROWS, Tiles(16, 256)), Candidate(FEW_ROWS, Tiles(64, 256))
MACHINE = {"card": "a card"}


class TwoKernels:
    """A weight with a kernel in two configurations for up to 16 rows, and cuBLAS for any."""

    def candidates(self, operation: Operation, rows: int) -> Sequence[Candidate]:
        return [CUBLAS] if rows > 16 else [SMALL, LARGE, CUBLAS]


class RecordedTimes:
    """A stopwatch: seconds by candidate and rows, which its clock passes with each measurement."""

    device = torch.device("cpu")

    def __init__(self, seconds: dict[Candidate, float], cost_s: float = 0.0):
        self.seconds, self.cost_s, self.now = seconds, cost_s, 0.0
        self.launched: list[tuple[int, Candidate]] = []
        self.measured: list[tuple[str, int, Candidate]] = []
        #: what was entered for a product when it was measured
        self.entered: list[Candidate | None] = []
        self.is_closed = False

    def launch(self, choices: ProductChoices, rows: int, candidate: Candidate) -> None:
        self.launched.append((rows, candidate))

    def measure(self, choices: ProductChoices, rows: int, candidates: Sequence[Candidate]) -> Costs:
        self.entered.append(choices.find(rows))
        for candidate in candidates:
            self.measured.append((choices.product.operation, rows, candidate))
            self.now += self.cost_s
        return Costs.alone({candidate: self.seconds[candidate] for candidate in candidates})

    def close(self) -> None:
        self.is_closed = True

    def clock(self) -> float:
        return self.now


class Setting:
    """A rank with one product, or several, of one weight."""

    def __init__(
        self,
        folder: Path,
        operations: Sequence[Operation] = ("residual",),
        group: ParallelGroup | None = None,
    ):
        self.weight = TwoKernels()
        self.table = KernelChoices()
        for operation in operations:
            product = Product(operation, "dense", 64, 32, "bfloat16")
            self.table.register(product, self.weight).find(1)
        self.stored = StoredChoices(folder, MACHINE)
        self._group = group or ParallelGroup.single()

    def start(self, stopwatch: Any) -> int:
        """Does what a worker does at its start; returns how many choices were measured."""
        timing = KernelTiming(self.table, SIZES, self.stored, self._group, stopwatch)
        timing.prepare()
        return timing.run(stopwatch.clock)

    def found(self, operation: Operation = "residual") -> list[Candidate | None]:
        choices = {each.product.operation: each for each in self.table.products.values()}
        return [choices[operation].find(rows) for rows in SIZES]


@pytest.mark.parametrize(
    ("default", "other", "expected"),
    [(1.0, 0.99, SMALL), (1.0, 0.97, LARGE), (1.0, 2.0, SMALL), (1.02, 1.0, SMALL)],
)
def test_the_default_stays_unless_it_is_clearly_slower(
    default: float, other: float, expected: Candidate
) -> None:
    assert fastest(Costs.alone({SMALL: default, LARGE: other}), SMALL) == expected
    assert fastest(Costs({SMALL: default, LARGE: other}, 1.001), SMALL) == (
        SMALL if default < other else LARGE
    )


def test_what_a_candidate_gains_elsewhere_counts() -> None:
    helpful = replace(LARGE, gain_s=0.5)
    assert fastest(Costs.alone({SMALL: 1.0, helpful: 1.4}), SMALL) == LARGE
    assert fastest(Costs.alone({SMALL: 1.0, helpful: 1.6}), SMALL) == SMALL


def test_a_default_that_cannot_be_launched_is_replaced() -> None:
    assert fastest(Costs.alone({SMALL: float("inf"), CUBLAS: 1.0}), SMALL) == CUBLAS


def test_the_fastest_is_chosen_and_stored(tmp_path: Path) -> None:
    first = Setting(tmp_path)
    watch = RecordedTimes({SMALL: 3.0, LARGE: 1.0, CUBLAS: 2.0})
    assert first.start(watch) == 4
    assert first.found() == [LARGE] * 4 + [CUBLAS]
    assert watch.is_closed
    # with one candidate there is nothing to time; cuBLAS needs no compilation
    assert {rows for _, rows, _ in watch.measured} == {1, 2, 8, 16}
    assert watch.launched == [(rows, each) for rows in SIZES[:4] for each in (SMALL, LARGE)]
    # the neighbours of what is timed are those chosen for fewer rows
    assert watch.entered == [SMALL, LARGE, LARGE, LARGE]


def test_a_second_start_times_nothing_and_compiles_what_was_chosen(tmp_path: Path) -> None:
    Setting(tmp_path).start(RecordedTimes({SMALL: 3.0, LARGE: 1.0, CUBLAS: 2.0}))
    again, watch = Setting(tmp_path), RecordedTimes({})
    assert again.start(watch) == 0
    assert again.found() == [LARGE] * 4 + [CUBLAS]
    assert watch.measured == []
    assert watch.launched == [(rows, LARGE) for rows in SIZES[:4]]


def test_stored_candidates_that_no_longer_exist_are_timed_anew(tmp_path: Path) -> None:
    setting = Setting(tmp_path)
    product = str(next(iter(setting.table.products)))
    setting.stored.add({product: {1: str(LARGE), 2: "gone", 8: str(LARGE), 16: str(LARGE)}})
    watch = RecordedTimes({SMALL: 3.0, LARGE: 2.0, CUBLAS: 1.0})
    assert setting.start(watch) == 1
    assert setting.found() == [LARGE, CUBLAS, LARGE, LARGE, CUBLAS]
    assert setting.stored.read()[product] == {
        1: str(LARGE), 2: str(CUBLAS), 8: str(LARGE), 16: str(LARGE),
    }  # fmt: skip


def test_out_of_time_the_rest_stays_at_the_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernel_timing, "BUDGET_S", 10.0)
    setting = Setting(tmp_path, ["residual", "plain"])
    times = {SMALL: 3.0, LARGE: 1.0, CUBLAS: 2.0}
    with caplog.at_level(logging.INFO):
        # a choice takes 6 s, and after the second one 10 s are over: those of one row are made
        assert setting.start(RecordedTimes(times, cost_s=2.0)) == 2
    assert "2 of 8 timed in 12.00 s" in caplog.text
    for operation in ("residual", "plain"):
        assert setting.found(operation) == [LARGE, SMALL, SMALL, SMALL, CUBLAS]  # type: ignore[arg-type]
    # the next start goes on
    assert Setting(tmp_path, ["residual", "plain"]).start(RecordedTimes(times)) == 6


def test_a_failure_leaves_the_defaults(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    setting, watch = Setting(tmp_path), RecordedTimes({SMALL: 1.0})  # the others' are missing
    assert setting.start(watch) == 0
    assert "all products take their defaults" in caplog.text
    assert setting.found() == [SMALL] * 4 + [CUBLAS]
    assert watch.is_closed


def test_one_row_is_left_out_where_it_was_never_computed(tmp_path: Path) -> None:
    setting = Setting(tmp_path, [])
    product = Product("gated", "dense", 64, 32, "bfloat16")
    setting.table.register(product, setting.weight).find(2)
    watch = RecordedTimes({SMALL: 3.0, LARGE: 1.0, CUBLAS: 2.0})
    assert setting.start(watch) == 3
    assert setting.found("gated") == [None, LARGE, LARGE, LARGE, CUBLAS]


def test_a_product_whose_weights_are_gone_is_left_out(tmp_path: Path) -> None:
    setting = Setting(tmp_path)
    setting.weight = TwoKernels()
    assert setting.start(RecordedTimes({})) == 0
    assert setting.found() == [None] * 5


def test_many_rows_come_first_and_of_few_the_largest_weight(tmp_path: Path) -> None:
    setting = Setting(tmp_path, [])
    sizes = (1, 8, MAX_LAYERS_ROWS, MAX_LAYERS_ROWS + 16, 512)
    for operation, outputs in (("plain", 64), ("gated", 128)):
        product = Product(operation, "dense", outputs, 32, "bfloat16")  # type: ignore[arg-type]
        setting.table.register(product, setting.weight).find(1)
    cases = list_cases(setting.table.products.values(), sizes, {})
    assert [case.rows for case in cases[::2]] == [80, 512, 1, 8, 64]
    assert [case.choices.product.operation for case in cases] == ["gated", "plain"] * 5


def test_what_is_chosen_for_few_rows_is_not_entered_for_fewer(tmp_path: Path) -> None:
    """Where more rows are timed first."""
    setting = Setting(tmp_path)
    (choices,) = setting.table.products.values()
    found = [SMALL, LARGE, CUBLAS]
    choices.choose({8: SMALL, 16: SMALL, 24: SMALL})
    cases = [Case(choices, rows, found, None) for rows in (16, 8, 24)]
    watch = RecordedTimes({SMALL: 3.0, LARGE: 1.0, CUBLAS: 2.0})
    assert time_cases(cases, watch.measure, watch.clock, 10.0) == {0: LARGE, 1: LARGE, 2: LARGE}
    assert watch.entered == [SMALL, SMALL, LARGE]


class SecondOfTwo(ParallelGroup):
    """The second of two ranks, whose sums bring what the first one gave."""

    def __init__(self, given: list[torch.Tensor]):
        super().__init__(1, 2)
        self._given = iter(given)

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        return values + next(self._given)


class FirstOfTwo(ParallelGroup):
    """The first of two ranks; the other one gives zeros."""

    def __init__(self) -> None:
        super().__init__(0, 2)
        self.given: list[torch.Tensor] = []

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        self.given.append(values.clone())
        return values


def test_the_first_rank_decides(tmp_path: Path) -> None:
    group = FirstOfTwo()
    first = Setting(tmp_path / "first", group=group)
    first.start(RecordedTimes({SMALL: 3.0, LARGE: 1.0, CUBLAS: 2.0}))
    second = Setting(tmp_path / "second", group=SecondOfTwo(group.given))
    watch = RecordedTimes({})
    second.start(watch)
    assert watch.measured == []
    assert second.found() == first.found() == [LARGE] * 4 + [CUBLAS]
    assert second.stored.read() == {}
