"""Norm, activation, RoPE with KV write, and products of few rows at tiny sizes."""

from __future__ import annotations

import pytest
import torch
from aioinfer.kernels.activation import KINDS, gated_activation
from aioinfer.kernels.few_rows_dense import FewRowsConfig, few_rows_dense
from aioinfer.kernels.norm import add_parts, rms_norm
from aioinfer.kernels.projection import Projection, Rotation
from aioinfer.kernels.qk_norm_rope_cache import qk_norm_rope_cache
from cases import (
    ROTATIONS,
    RotationCase,
    activation,
    dense_rows,
    error,
    norm,
    norm_of_parts,
    qk_norm_rope,
)
from references import gated_activation_reference

from aioinfer.layers.backend import Backend
from aioinfer.layers.norm import RMSNorm
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.layers.residual import ResidualStream
from tests.pairs import pairwise


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_norms(dtype: torch.dtype) -> None:
    for pair in norm(5, 96, dtype, "cpu"):
        assert error(pair) < (1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("count", [1, 3])
def test_norms_of_parts(count: int, dtype: torch.dtype) -> None:
    for pair in norm_of_parts(count, 5, 96, dtype, "cpu"):
        assert error(pair) < (1e-5 if dtype == torch.float32 else 1e-2)


def test_parts_must_have_the_shape_of_the_residual() -> None:
    with pytest.raises(ValueError, match="parts must be"):
        add_parts(torch.zeros(2, 3, 32), torch.zeros(3, 64))
    with pytest.raises(ValueError, match="parts must be"):
        add_parts(torch.zeros(2, 3, 64).half(), torch.zeros(3, 64).half())


@pytest.mark.parametrize("unit_offset", [False, True])
def test_the_stream_sums_parts_when_it_is_read(unit_offset: bool) -> None:
    """With the norm, whose weight may be wider than the stream, or without one."""
    cpu = torch.device("cpu")
    backend = Backend(cpu, torch.float16, ParallelGroup.single(), has_kernels=True)
    rms = RMSNorm("n", 96, 1e-5, backend, unit_offset=unit_offset)
    hidden, parts = torch.randn(5, 96).half(), torch.randn(3, 5, 96)
    total = (hidden.float() + parts.sum(0)).half()
    streams = [ResidualStream(hidden.clone(), backend) for _ in range(3)]
    for stream in streams:
        assert stream.is_reduced
        stream.add_parts(parts)
        assert not stream.is_reduced
    normed, plain, chosen = streams
    torch.testing.assert_close(normed.normed(rms), rms(total), rtol=2**-9, atol=2**-9)
    chosen.select(torch.tensor([4, 1], dtype=torch.int32))
    expected = {normed: total, plain: total, chosen: total[[4, 1]]}
    for stream, content in expected.items():
        torch.testing.assert_close(stream.hidden, content, rtol=2**-10, atol=2**-10)
        assert stream.is_reduced


def test_norm_weights_wider_than_what_is_normed() -> None:
    """Those of Gemma are float32, whatever the model's dtype, and are not rounded to it."""
    torch.manual_seed(0)  # one row in some 300 is on the border of two numbers of float16
    x, weight = torch.randn(3, 96).half(), 0.5 + torch.rand(96)
    expected = rms_norm(x.float(), weight, 1e-6).half()
    assert not torch.equal(rms_norm(x.float(), weight.half(), 1e-6).half(), expected)
    assert torch.equal(rms_norm(x, weight, 1e-6), expected)
    identity = torch.eye(96).half()
    for rows in (1, 3):
        normed = few_rows_dense(x[:rows], identity, norm_weight=weight)
        torch.testing.assert_close(normed, expected[:rows], rtol=2**-11, atol=1e-7)


def test_head_norm_weights_wider_than_the_heads() -> None:
    qkv, slots, angles = torch.randn(3, 4 * 64).half(), torch.arange(3), torch.rand(3, 64)
    weights = 0.5 + torch.rand(2, 64)

    def queries(dtype: torch.dtype, weights: torch.Tensor) -> torch.Tensor:
        caches = torch.zeros(2, 2, 16, 1, 64, dtype=dtype)
        projection = Projection(qkv.to(dtype), Rotation(angles, *weights), slots)
        return qk_norm_rope_cache(projection, slots, *caches, num_q_heads=2)

    expected = queries(torch.float32, weights).half()
    assert not torch.equal(queries(torch.float32, weights.half()).half(), expected)
    assert torch.equal(queries(torch.float16, weights), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_gated_activation(kind: str) -> None:
    assert error(activation(3, 1104, torch.float32, "cpu", kind)) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_gated_activation_far_from_zero(kind: str) -> None:
    gate = torch.tensor([-1e4, -90.0, -12.0, -0.0, 0.0, 12.0, 90.0, 1e4])
    gated = gated_activation(torch.cat((gate, torch.ones(8)))[None], kind=kind)[0]
    expected = gated_activation_reference(torch.cat((gate, torch.ones(8))).double(), kind)
    torch.testing.assert_close(gated.double(), expected, rtol=1e-5, atol=1e-6)


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(ValueError, match="kind must be in"):
        gated_activation(torch.zeros(1, 16), kind="relu")


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(
    ("heads", "head_size", "rotary"), [((6, 3), 64, 64), ((4, 1), 96, 96), ((5, 5), 64, 16)]
)
def test_qk_norm_rope_and_kv_write(
    heads: tuple[int, int], head_size: int, rotary: int, normed: bool
) -> None:
    for pair in qk_norm_rope(
        5, *heads, head_size, RotationCase(rotary, normed), torch.float32, "cpu"
    ):
        assert error(pair) < 1e-5


@pytest.mark.parametrize("rotation", ROTATIONS, ids=str)
def test_rotations_before_the_kv_write(rotation: RotationCase) -> None:
    for pair in qk_norm_rope(5, 6, 3, 64, rotation, torch.float32, "cpu"):
        assert error(pair) < 1e-5


def test_kv_write_in_float8() -> None:
    """Each head by its own scale; numbers beyond the range saturate."""
    q, *caches = qk_norm_rope(
        5, 6, 3, 64, RotationCase(32, normed=True), torch.float32, "cpu", torch.float8_e4m3fn
    )
    assert error(q) < 1e-5
    # what lies between two numbers of float8 may round to the other one
    assert max(map(error, caches)) < 2e-3


@pairwise(normed=[True, False], gated=[True, False], rows=[1, 2, 7, 16], inputs=[90, 192])
def test_few_rows_dense(inputs: int, rows: int, gated: bool, normed: bool) -> None:
    """With a last step that is whole, and one that is not."""
    config = FewRowsConfig(4, 64, 4) if rows == 1 else FewRowsConfig(16, 32, 2, 2)
    shape = rows, 24 if gated else 21, inputs
    pair = dense_rows(*shape, torch.float32, "cpu", normed=normed, gated=gated, config=config)
    assert error(pair) < 1e-5


def test_few_rows_dense_rejects_more_than_16_rows() -> None:
    with pytest.raises(ValueError, match="x must be"):
        few_rows_dense(torch.zeros(17, 8), torch.zeros(4, 8))


def test_half_a_run_of_gate_rows_is_rejected() -> None:
    with pytest.raises(ValueError, match="multiple of 8"):
        few_rows_dense(torch.zeros(1, 8), torch.zeros(24, 8), gated=True)
    with pytest.raises(ValueError, match="multiple of 8"):
        gated_activation(torch.zeros(1, 24))
