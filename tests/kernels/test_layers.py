"""Norm, activation, RoPE with KV write, and skinny linear layers at tiny sizes."""

from __future__ import annotations

import pytest
import torch
from aioinfer.kernels.activation import silu_mul
from aioinfer.kernels.linear import LinearConfig, skinny_linear
from cases import activation, error, linear, norm, qk_norm_rope


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_norms(dtype: torch.dtype) -> None:
    for pair in norm(5, 96, dtype, "cpu"):
        assert error(pair) < (1e-5 if dtype == torch.float32 else 1e-2)


def test_silu_mul() -> None:
    assert error(activation(3, 1104, torch.float32, "cpu")) < 1e-5


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(
    ("heads", "head_size", "rotary"), [((6, 3), 64, 64), ((4, 1), 96, 96), ((5, 5), 64, 16)]
)
def test_qk_norm_rope_and_kv_write(
    heads: tuple[int, int], head_size: int, rotary: int, normed: bool
) -> None:
    for pair in qk_norm_rope(5, *heads, head_size, rotary, normed, torch.float32, "cpu"):
        assert error(pair) < 1e-5


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 7, 16])
def test_skinny_linear(rows: int, gated: bool, normed: bool) -> None:
    config = LinearConfig(4, 64, 4) if rows == 1 else LinearConfig(16, 32, 2, 2)
    features = 24 if gated else 21
    assert (
        error(
            linear(
                rows, features, 90, torch.float32, "cpu", normed=normed, gated=gated, config=config
            )
        )
        < 1e-5
    )


def test_skinny_linear_rejects_more_than_16_rows() -> None:
    with pytest.raises(ValueError, match="x must be"):
        skinny_linear(torch.zeros(17, 8), torch.zeros(4, 8))


def test_half_a_run_of_gate_rows_is_rejected() -> None:
    with pytest.raises(ValueError, match="multiple of 8"):
        skinny_linear(torch.zeros(1, 8), torch.zeros(24, 8), gated=True)
    with pytest.raises(ValueError, match="multiple of 8"):
        silu_mul(torch.zeros(1, 24))
