"""Norms of whole rows, and of groups with a gate."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from aioinfer.kernels.gated_norm import MAX_GROUP, gated_norm
from aioinfer.kernels.norm import MAX_HIDDEN, add_layer_norm
from cases import error, poisoned


@pytest.mark.parametrize(("tokens", "hidden"), [(3, 64), (5, 96), (1, 1000), (0, 64)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_the_norm_of_a_sum_takes_the_streams_place(
    tokens: int, hidden: int, has_bias: bool
) -> None:
    torch.manual_seed(0)
    stream, addend = torch.randn(tokens, hidden) + 7, torch.randn(tokens, hidden) * 3
    weight, bias = torch.randn(hidden), torch.randn(hidden) if has_bias else None
    expected = F.layer_norm(stream + addend, (hidden,), weight, bias, 1e-5)
    given = addend.clone()
    add_layer_norm(stream, addend, weight, bias, 1e-5)
    assert torch.allclose(stream, expected, atol=1e-5)
    assert torch.equal(addend, given)


def test_the_sum_and_its_norm() -> None:
    torch.manual_seed(1)
    stream, addend = (torch.randn(5, 96).half() for _ in range(2))
    weight, bias = (torch.randn(96).half() for _ in range(2))
    total, out = stream + addend, torch.empty_like(stream)
    add_layer_norm(stream, addend, weight, bias, 1e-5, out)
    assert torch.equal(stream, total)
    expected = F.layer_norm(total.float(), (96,), weight.float(), bias.float(), 1e-5)
    assert torch.allclose(out.float(), expected, atol=1e-4, rtol=1e-3)


def test_shapes_that_do_not_go_together() -> None:
    weight = torch.ones(8)
    with pytest.raises(ValueError, match="addend"):
        add_layer_norm(torch.zeros(2, 8), torch.zeros(3, 8), weight, None, 1e-5)
    long = torch.zeros(1, MAX_HIDDEN + 1)
    with pytest.raises(ValueError, match="addend"):
        add_layer_norm(long, long, weight, None, 1e-5)


EPS = 1e-5
normal = torch.randn


@pytest.mark.parametrize(("channels", "groups"), [(48, 1), (48, 4), (1200, 1), (1200, 3), (8, 8)])
@pytest.mark.parametrize("order", ["gates first", "norm first", "no norm"])
def test_orders_and_groups(order: str, channels: int, groups: int) -> None:
    torch.manual_seed(0)
    x, gates, weight = normal(5, channels) * 3, normal(5, channels + 7)[:, 3:-4], normal(channels)
    wide = poisoned(5, channels + 4, dtype=torch.float32, device="cpu")
    out = wide[:, :channels]
    has_norm = order != "no norm"
    found = gated_norm(
        x, gates, out, weight=weight if has_norm else None, groups=groups, eps=EPS,
        gates_first=order == "gates first",
    )  # fmt: skip
    factors = F.silu(gates.double())
    expected = x.double() if order == "norm first" else x.double() * factors
    if has_norm:
        by_group = expected.unflatten(1, (groups, -1))
        squares = by_group.square().mean(-1, keepdim=True)
        expected = (by_group / (squares + EPS).sqrt()).flatten(1) * weight
    if order == "norm first":
        expected = expected * factors
    assert found.data_ptr() == out.data_ptr()
    assert error((found, expected)) < 1e-6
    assert wide[:, channels:].isnan().all()


def test_outputs_in_another_dtype() -> None:
    x, gates = normal(3, 40), normal(3, 40).half()
    out = torch.empty(3, 40, dtype=torch.float16)
    gated_norm(x, gates, out, weight=None, groups=1, eps=0.0, gates_first=True)
    assert error((out, x.double() * F.silu(gates.double()))) < 1e-3


def test_no_tokens() -> None:
    empty = torch.empty(0, 8)
    gated_norm(empty, empty, empty, weight=torch.ones(8), groups=2, eps=EPS, gates_first=True)


def test_wrong_shapes_are_rejected() -> None:
    x, weight = torch.zeros(2, 12), torch.zeros(12)
    options = {"eps": EPS, "gates_first": True}
    with pytest.raises(ValueError, match="gates are"):
        gated_norm(x, x[:, :6], x, weight=weight, groups=1, **options)
    with pytest.raises(ValueError, match="5 groups of 12"):
        gated_norm(x, x, x, weight=weight, groups=5, **options)
    wide = torch.zeros(1, 2 * MAX_GROUP)
    with pytest.raises(ValueError, match="do not fit"):
        gated_norm(wide, wide, wide, weight=wide[0], groups=1, **options)
