"""LayerNorm of a sum, against torch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from aioinfer.kernels.layer_norm import MAX_HIDDEN, add_layer_norm


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
