"""Rotation of queries and keys in place, against the towers' in plain torch."""

from __future__ import annotations

import pytest
import torch
from aioinfer.kernels.rotation import rotate_heads

from aioinfer.models.vision.tower import rotated, rotation


@pytest.mark.parametrize(
    ("tokens", "heads", "most", "size"), [(5, 4, 6, 16), (3, 5, 5, 24), (0, 2, 3, 8)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_first_heads_are_rotated(
    tokens: int, heads: int, most: int, size: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    padded = torch.randn(tokens, most * size + 8).to(dtype)
    x = padded[:, : most * size].unflatten(1, (most, size))
    factors = rotation(torch.randn(tokens, size // 2) * 9)
    expected = torch.cat((rotated(x[:, :heads], *factors), x[:, heads:]), dim=1)
    behind = padded[:, most * size :].clone()
    rotate_heads(x, heads, *factors)
    assert torch.allclose(x.float(), expected.float(), atol=1e-6, rtol=1e-3 * (x.itemsize == 2))
    assert torch.equal(padded[:, most * size :], behind)


def test_shapes_that_do_not_go_together() -> None:
    factors = rotation(torch.zeros(2, 4))
    for x, heads in (
        (torch.zeros(2, 3, 8), 4),
        (torch.zeros(2, 3, 6), 2),
        (torch.zeros(1, 3, 8), 2),
    ):
        with pytest.raises(ValueError, match="heads"):
            rotate_heads(x, heads, *factors)
