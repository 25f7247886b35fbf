"""Every kernel that may be chosen for a dense weight computes the same product."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from aioinfer.kernels import activation
from aioinfer.kernels.few_rows_dense import few_rows_dense
from aioinfer.kernels.gated_product import interleave

from aioinfer.layers.backend import Backend
from aioinfer.layers.formats import kernel_dense
from aioinfer.layers.formats.base import ACTIVATIONS, Epilogue, epilogue_of
from aioinfer.layers.formats.kernel_dense import (
    CUBLAS,
    FEW_ROWS,
    GATED,
    NORM_FEW_ROWS,
    SPLIT,
    KernelDenseWeight,
    KernelHeadWeight,
)
from aioinfer.layers.kernel_choices import Operation
from aioinfer.layers.norm import LayerNorm, RMSNorm
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.layers.shards import Shard, Source
from tests.kernels.references import gated_activation_reference

OUT, INPUTS = 48, 96


def make_weight(backend: Backend) -> KernelDenseWeight:
    weight = interleave(torch.randn(OUT, INPUTS))
    source = Source("weight", Shard.whole(OUT))
    made = KernelDenseWeight([source], Shard.whole(INPUTS), backend, weight)
    made.gate = "interleaved"
    return made


def large_weight(outputs: int, inputs: int) -> KernelDenseWeight:
    """Returns a weight without memory, as if on a Hopper card of 132 multiprocessors."""
    backend = Backend(torch.device("meta"), torch.bfloat16, ParallelGroup.single(), True)
    source = Source("weight", Shard.whole(outputs))
    made = KernelDenseWeight([source], Shard.whole(inputs), backend)
    made._has_split = made._has_gated = True
    made._programs = 132
    return made


@pytest.fixture
def backend() -> Backend:
    cpu = torch.device("cpu")
    return Backend(cpu, torch.float32, ParallelGroup.single(), has_kernels=True)


OPERATIONS: list[Operation] = [
    "plain", "partial", "biased", "residual", "gated", "normed", "normed gated"
]  # fmt: skip


@pytest.mark.parametrize("rows", [1, 3, 17])
def test_candidates_compute_the_same(rows: int, backend: Backend) -> None:
    torch.manual_seed(rows)
    weight, norm = make_weight(backend), RMSNorm("norm", INPUTS, 1e-6, backend)
    norm.weight.normal_()
    x, added = torch.randn(rows, INPUTS), torch.randn(rows, OUT)
    compared = 0
    for operation in OPERATIONS:

        def compute(operation: Operation = operation) -> torch.Tensor:
            return weight.multiply(x, epilogue_of(operation, norm, added.clone()))

        default = compute()
        candidates = weight.candidates(operation, rows)
        assert len({str(candidate) for candidate in candidates}) == len(candidates)
        choices = {each.product.operation: each for each in backend.choices.products.values()}
        for candidate in candidates:
            choices[operation].forced = candidate
            torch.testing.assert_close(compute(), default, rtol=1e-4, atol=1e-4)
            choices[operation].forced = None
            compared += 1
    assert compared >= 5
    is_one = rows == 1
    assert (NORM_FEW_ROWS in {each.kernel for each in weight.candidates("normed", rows)}) == is_one


@pytest.mark.parametrize("rows", [pytest.param(1, marks=pytest.mark.extended), 3])
def test_what_kernels_do_not_fuse_is_composed(rows: int, backend: Backend) -> None:
    """Norms other than RMSNorm, activations other than SiLU, and combinations."""
    torch.manual_seed(rows)
    weight, x = make_weight(backend), torch.randn(rows, INPUTS)
    numbers, bias = weight.loaded, torch.randn(OUT)
    norm = LayerNorm("norm", INPUTS, 1e-5, backend)
    norm.weight.normal_()
    assert norm.bias is not None
    norm.bias.normal_()
    product = norm(x) @ numbers.T + bias
    found = weight.multiply(x, Epilogue(norm, bias))
    torch.testing.assert_close(found, product, rtol=1e-4, atol=1e-4)
    total = torch.randn(rows, OUT)
    found = weight.multiply(x, Epilogue(norm, bias, add_to=total.clone()))
    torch.testing.assert_close(found, product + total, rtol=1e-4, atol=1e-4)
    for kind in ("silu", "gelu"):  # after a bias, by a launch of its own
        expected = gated_activation_reference(product, kind)
        found = weight.multiply(x, Epilogue(norm, bias, kind))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 3, 9])
def test_the_head_is_not_timed(rows: int, backend: Backend) -> None:
    torch.manual_seed(rows)
    weight, x = torch.randn(OUT, INPUTS), torch.randn(rows, INPUTS)
    source, norm = Source("head", Shard.whole(OUT)), RMSNorm("norm", INPUTS, 1e-6, backend)
    head = KernelHeadWeight([source], Shard.whole(INPUTS), backend, weight)
    out = torch.empty(rows, OUT)
    for epilogue in (Epilogue(norm), Epilogue(norm, out=out)):
        found = head.multiply(x, epilogue)
        torch.testing.assert_close(found, norm(x) @ weight.T, rtol=1e-4, atol=1e-4)
    assert found is out
    assert not backend.choices.products


@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "relu"])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
def test_activations(activation: str, dtype: torch.dtype, limit: float) -> None:
    """Of 16 bits GELU is computed along with the product, by its tanh form."""
    cpu = torch.device("cpu")
    backend = Backend(cpu, dtype, ParallelGroup.single(), has_kernels=True)
    weight = torch.randn(OUT, INPUTS).to(dtype) / 8
    source = Source("weight", Shard.whole(OUT))
    made = KernelDenseWeight([source], Shard.whole(INPUTS), backend, weight)
    x, bias = torch.randn(20, INPUTS).to(dtype), torch.randn(OUT).to(dtype)
    expected = ACTIVATIONS[activation](x.float() @ weight.float().T + bias.float())
    found = made.multiply(x, Epilogue(None, bias, activation=activation))
    torch.testing.assert_close(found.float(), expected, rtol=limit, atol=limit)
    assert backend.choices.products


def split_configs(
    weight: KernelDenseWeight, operation: Operation, rows: int
) -> list[tuple[int, int]]:
    """Returns the candidates that divide a product."""
    return [
        (each.config.consumers, each.config.parts)
        for each in weight.candidates(operation, rows)
        if each.kernel == SPLIT
    ]


def test_products_are_divided_where_a_norm_sums_their_parts() -> None:
    down = large_weight(4096, 12288)
    assert split_configs(down, "residual", 1) == []
    assert split_configs(down, "residual", 8) == [(1, 2), (2, 4)]
    assert split_configs(down, "residual", 128) == [(1, 2)]
    assert split_configs(down, "residual", 129) == []
    assert split_configs(down, "plain", 64) == [(1, 1)]
    assert split_configs(down, "normed", 1) == [(1, 1)]
    assert split_configs(down, "biased", 65) == []
    assert split_configs(down, "gated", 8) == []
    # 80 tiles of 64 rows leave 52 multiprocessors idle; 40 of 128 rows in three parts leave 12
    down = large_weight(5120, 25600)
    assert split_configs(down, "residual", 64) == [(1, 1), (2, 3)]


def test_defaults_of_gated_products_are_compiled_at_the_start() -> None:
    """Qwen3-32B's gate and up: what is taken where nothing was timed."""
    weight = large_weight(51200, 5120)
    weight.gate = "interleaved"
    compiled = [candidate.config for _, candidate in weight.warm_up_cases("gated") if candidate]
    for rows in (2, 16, 32, 33, 64, 65, 100, 128, 250, 256, 400, 512, 4096):
        default = weight.default("gated", rows)
        assert default.kernel == GATED
        assert default.config in compiled
        assert default.gain_s == (1.5e-6 if rows <= 128 else 0)
    assert weight.default("gated", 200) == CUBLAS


def test_what_is_chosen_computes(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
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

    monkeypatch.setattr(kernel_dense, "few_rows_dense", note)
    for weight, expected in zip(weights, exact, strict=True):
        torch.testing.assert_close(weight.multiply(x), expected, rtol=1e-4, atol=1e-4)
        weight.multiply(torch.randn(5, INPUTS))
    assert configs == [few_rows.config] * 2


def test_the_warm_up_has_the_activation_of_a_gate(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever kernels compute the product, cuBLAS among them, which needs no warm-up itself."""
    activate, found = activation.gated_activation, []

    def note(product: torch.Tensor, **options: Any) -> torch.Tensor:
        found.append((product.shape, options["kind"]))
        return activate(product, **options)

    monkeypatch.setattr(activation, "gated_activation", note)
    make_weight(backend).warm_up("gated")
    assert found == [((1, OUT), "silu")]
