"""Which kernel computes a product: the table by numbers of rows, and what registers there."""

from __future__ import annotations

import gc
from dataclasses import dataclass

import pytest

from aioinfer.layers.kernel_choices import Candidate, KernelChoices, Product, ProductChoices

CUBLAS, FEW_ROWS = Candidate("cublas"), "few_rows_dense"
PRODUCT = Product("residual", "dense", 64, 32, "bfloat16")


@dataclass(frozen=True)
class Tiles:
    features: int
    step: int


class Weight:
    """Stands for a weight: nothing is asked of it here."""


@pytest.fixture
def choices() -> ProductChoices:
    return ProductChoices(PRODUCT)


def test_texts_tell_candidates_and_products_apart() -> None:
    assert str(CUBLAS) == "cublas"
    assert str(Candidate(FEW_ROWS, Tiles(4, 256))) == "few_rows_dense features=4 step=256"
    assert str(PRODUCT) == "dense residual 64x32 bfloat16"


def test_nothing_is_chosen_before_anything_was_measured(choices: ProductChoices) -> None:
    assert choices.find(1) is None
    assert choices.find(10_000) is None


def test_the_next_larger_measured_number_of_rows_serves(choices: ProductChoices) -> None:
    few, many = Candidate(FEW_ROWS, Tiles(4, 256)), CUBLAS
    choices.choose({8: few, 2: few, 16: many})
    assert [choices.find(rows) for rows in (2, 3, 8)] == [few] * 3
    assert [choices.find(rows) for rows in (9, 16)] == [many] * 2


def test_defaults_beyond_what_was_measured(choices: ProductChoices) -> None:
    """One row may be computed by other kernels than two, which were compiled for no less."""
    choices.choose({2: CUBLAS, 16: CUBLAS})
    assert choices.find(1) is None
    assert choices.find(17) is None


def test_a_forced_candidate_goes_before_what_was_chosen(choices: ProductChoices) -> None:
    other = Candidate(FEW_ROWS, Tiles(1, 32))
    choices.choose({2: CUBLAS})
    choices.forced = other
    assert choices.find(2) == choices.find(500) == other
    choices.forced = None
    assert choices.find(2) == CUBLAS


def test_whether_one_row_was_computed(choices: ProductChoices) -> None:
    choices.find(2)
    assert not choices.has_single_row
    choices.find(1)
    assert choices.has_single_row


def test_equal_products_of_several_weights_are_one() -> None:
    table, first, second = KernelChoices(), Weight(), Weight()
    same = table.register(PRODUCT, first)
    assert table.register(Product(*_fields(PRODUCT)), second) is same  # type: ignore[arg-type]
    assert same.weights == [first, second]
    other = Product("plain", *_fields(PRODUCT)[1:])  # type: ignore[arg-type]
    assert table.register(other, first) is not same


def test_a_weight_that_was_dropped_is_not_kept() -> None:
    table, weight = KernelChoices(), Weight()
    choices = table.register(PRODUCT, weight)
    del weight
    gc.collect()
    assert choices.weights == []


def _fields(product: Product) -> tuple[object, ...]:
    return product.operation, product.format, product.outputs, product.inputs, product.dtype
