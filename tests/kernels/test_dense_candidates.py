"""Every kernel that may be chosen for a dense weight computes the same product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from aioinfer.kernels.few_rows_dense import few_rows_dense
from aioinfer.kernels.gated_product import interleave

from aioinfer.layers.backend import Backend
from aioinfer.layers.formats.dense import KernelDenseWeight
from aioinfer.layers.formats.dense_candidates import DenseCandidates
from aioinfer.layers.kernel_choices import CUBLAS, FEW_ROWS, GATED, SPLIT, Operation
from aioinfer.layers.norm import RMSNorm
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.layers.shards import Shard, Source

OUT, INPUTS = 48, 96


def make_weight(backend: Backend) -> KernelDenseWeight:
    weight = interleave(torch.randn(OUT, INPUTS))
    source = Source("weight", Shard.whole(OUT))
    return KernelDenseWeight([source], Shard.whole(INPUTS), backend, weight)


@pytest.fixture
def backend() -> Backend:
    cpu = torch.device("cpu")
    return Backend(cpu, torch.float32, ParallelGroup.single(), has_kernels=True)


@pytest.mark.parametrize("rows", [1, 3, 17])
def test_candidates_compute_the_same(rows: int, backend: Backend) -> None:
    torch.manual_seed(rows)
    weight, norm = make_weight(backend), RMSNorm("norm", INPUTS, 1e-6, backend)
    x, added = torch.randn(rows, INPUTS), torch.randn(rows, OUT)

    def add() -> torch.Tensor:
        total = added.clone()
        weight.add_product(x, total)
        return total

    products: dict[Operation, Callable[[], torch.Tensor]] = {
        "plain": lambda: weight.multiply(x),
        "partial": lambda: weight.multiply(x, out=torch.empty_like(added)),
        "biased": lambda: weight.multiply(x, added[0]),
        "residual": add,
        "gated": lambda: weight.multiply_gated(x),
        "normed": lambda: weight.multiply_normed(x, norm),
        "normed gated": lambda: weight.multiply_gated(x, norm),
    }
    for operation, compute in products.items():
        default = compute()
        candidates = weight.candidates(operation, rows)
        assert len({str(candidate) for candidate in candidates}) == len(candidates)
        choices = {each.product.operation: each for each in backend.choices.products.values()}
        for candidate in candidates:
            choices[operation].forced = candidate
            torch.testing.assert_close(compute(), default, rtol=1e-4, atol=1e-4)
            choices[operation].forced = None


def split_configs(weight: torch.Tensor, operation: Operation, rows: int) -> list[tuple[int, int]]:
    """Returns the candidates that divide a product, on a Hopper card of 132 multiprocessors."""
    candidates = DenseCandidates(weight, 8)
    candidates._has_split, candidates._programs = True, 132
    return [
        (each.config.consumers, each.config.parts)
        for each in candidates.of(operation, rows)
        if each.kernel == SPLIT
    ]


def test_products_are_divided_where_a_norm_sums_their_parts() -> None:
    down = torch.empty(4096, 12288, dtype=torch.bfloat16, device="meta")
    assert split_configs(down, "residual", 1) == []
    assert split_configs(down, "residual", 8) == [(1, 2), (2, 4)]
    assert split_configs(down, "residual", 128) == [(1, 2)]
    assert split_configs(down, "residual", 129) == []
    assert split_configs(down, "plain", 64) == [(1, 1)]
    assert split_configs(down, "biased", 65) == []
    assert split_configs(down, "gated", 8) == []
    # 80 tiles of 64 rows leave 52 multiprocessors idle; 40 of 128 rows in three parts leave 12
    down = torch.empty(5120, 25600, dtype=torch.bfloat16, device="meta")
    assert split_configs(down, "residual", 64) == [(1, 1), (2, 3)]


def test_defaults_of_gated_products_are_compiled_at_the_start() -> None:
    """Qwen3-32B's gate and up: what is taken where nothing was timed."""
    weight = torch.empty(51200, 5120, dtype=torch.bfloat16, device="meta")
    candidates = DenseCandidates(weight, 8)
    candidates._has_gated, candidates._programs = True, 132
    compiled = candidates.default_gated()
    for rows in (2, 16, 32, 33, 64, 65, 100, 128, 250, 256, 400, 512, 4096):
        default = candidates.default("gated", rows)
        assert default.kernel == GATED
        assert default.config in compiled
        assert default.gain_s == (1.5e-6 if rows <= 128 else 0)
    assert candidates.default("gated", 200) == CUBLAS


def test_what_is_chosen_computes(backend: Backend) -> None:
    """A choice holds for both weights of a shape, and for the rows that it was made for."""
    weights = make_weight(backend), make_weight(backend)
    x = torch.randn(3, INPUTS)
    exact = [weight.multiply(x) for weight in weights]
    (choices,) = backend.choices.products.values()
    assert choices.weights == list(weights)
    assert weights[0].candidates("plain", 3)[0] == CUBLAS
    few_rows = next(each for each in weights[0].candidates("plain", 3) if each.kernel == FEW_ROWS)
    choices.choose({2: CUBLAS, 4: few_rows})
    configs = []

    def note(*operands: torch.Tensor, **options: Any) -> torch.Tensor:
        configs.append(options["config"])
        return few_rows_dense(*operands, **options)

    for weight, expected in zip(weights, exact, strict=True):
        weight._few_rows_dense = note
        torch.testing.assert_close(weight.multiply(x), expected, rtol=1e-4, atol=1e-4)
        weight.multiply(torch.randn(5, INPUTS))
    assert configs == [few_rows.config] * 2
