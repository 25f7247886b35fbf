"""The kernels of the gated delta rule, of short convolutions and of Mamba-2 as compiled for Hopper,
without a GPU, at the sizes of models: registers, shared memory, and which tensor-core instructions
they take."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from aioinfer.kernels.convolution_lookahead import _convolution_lookahead_kernel
from aioinfer.kernels.delta_arguments import DeltaInputs, DeltaShape, DeltaWeights
from aioinfer.kernels.delta_chunks import MAX_PART, _channel_chunk_kernel, _chunk_kernel
from aioinfer.kernels.delta_decode import _delta_decode_kernel, delta_decode_config
from aioinfer.kernels.delta_inputs import REGISTERS, RESIDENT, _inputs_kernel
from aioinfer.kernels.delta_lookahead import (
    Saved,
    SavedShape,
    Strides,
    _delta_lookahead_kernel,
)
from aioinfer.kernels.delta_prefill import _norm_kernel, _scan_kernel, delta_prefill_config
from aioinfer.kernels.gated_norm import _gated_norm_kernel
from aioinfer.kernels.mamba import (
    MambaShape,
    _decode_warps,
    _mamba_lookahead_kernel,
    prefill_values,
)
from aioinfer.kernels.mamba import _decode_kernel as _mamba_decode
from aioinfer.kernels.mamba import _prefill_kernel as _mamba_prefill
from aioinfer.kernels.short_convolution import _short_convolution_kernel

from tests.compiled.hopper import SHARED_MEMORY, check_fits, compile_call, resources
from tests.pairs import pairwise

BF16, FLOATS, INTS = (torch.empty(8, dtype=d) for d in (torch.bfloat16, torch.float32, torch.int32))
HEADS, CHANNELS, BLOCK = 32, 8192, 64
SHAPE = DeltaShape(16, 2, 128, 128, 128, 128, 4, BLOCK)
#: Kimi-Linear's.
KIMI = DeltaShape(32, 1, 128, 128, 128, 128, 4, BLOCK, by_channel=True)


@pytest.mark.parametrize("shape", [SHAPE, KIMI])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_decodes(state_dtype: torch.dtype, shape: DeltaShape) -> None:
    """A matrix stays in registers and is moved in vectors of 16 bytes."""
    config = delta_decode_config(shape)
    kernel = compile_call(
        _delta_decode_kernel, SimpleNamespace(num_warps=config.num_warps, num_stages=3), mixed=BF16,
        z=BF16, b=BF16, a=BF16, out=BF16, conv=BF16, a_log=FLOATS, dt_bias=FLOATS, norm=BF16,
        norm_eps=1e-6, windows=BF16, matrices=torch.empty(8, dtype=state_dtype),
        window_tables=INTS, matrix_tables=INTS, seq_lens=INTS, query_starts=INTS, tickets=INTS,
        mixed_stride=CHANNELS + 4096, z_stride=CHANNELS + 4096, b_stride=64, a_stride=64,
        out_stride=4096, window_stride=CHANNELS * 3, matrix_stride=HEADS * 128 * 128,
        window_table_stride=320, matrix_table_stride=320, SHAPE=shape, HAS_STARTS=True, TAPS=4,
        PDL=True,
    )  # fmt: skip
    check_fits(kernel, spilled=0 if state_dtype == torch.float32 else 32)
    assert "ld.global.v4.b32" in kernel.asm["ptx"]
    assert "st.global.v4.b32" in kernel.asm["ptx"]


@pairwise(
    state_dtype=[torch.float32, torch.bfloat16], shape=[SHAPE, KIMI], has_starts=[False, True]
)
def test_lookahead(state_dtype: torch.dtype, shape: DeltaShape, has_starts: bool) -> None:
    """A matrix stays in registers from the first token to the last."""
    config = delta_decode_config(shape)
    decays = HEADS * 128 if shape.by_channel else HEADS
    kernel = compile_call(
        _delta_lookahead_kernel, SimpleNamespace(num_warps=config.num_warps, num_stages=3),
        inputs=DeltaInputs(BF16, BF16, BF16, BF16), out=BF16,
        weights=DeltaWeights(BF16, FLOATS, FLOATS, BF16, 1e-6), windows=BF16,
        matrices=torch.empty(8, dtype=state_dtype), window_tables=INTS, matrix_tables=INTS,
        seq_lens=INTS, query_starts=INTS, slots=INTS, pending=INTS, counts=INTS,
        saved=Saved(BF16, BF16, BF16), tickets=INTS,
        strides=Strides(CHANNELS + 4096, CHANNELS + 4096, 64, 64), out_stride=4096,
        window_stride=CHANNELS * 3, matrix_stride=HEADS * 128 * 128, window_table_stride=320,
        matrix_table_stride=320, SHAPE=shape,
        SAVED=SavedShape(5, (2 * shape.key_heads + HEADS) * 128, HEADS, decays),
        HAS_STARTS=has_starts, PDL=True,
    )  # fmt: skip
    check_fits(kernel, spilled=0 if state_dtype == torch.float32 else 32)
    assert "ld.global.v4.b32" in kernel.asm["ptx"]
    assert "st.global.v4.b32" in kernel.asm["ptx"]


def test_convolution_of_prefill() -> None:
    """As many programs fit a multiprocessor as the launch counts on."""
    options = SimpleNamespace(num_warps=4, num_stages=1, max_registers=REGISTERS)
    kernel = compile_call(
        _inputs_kernel, options, mixed=BF16, out=BF16, conv=BF16, windows=BF16,
        tables=INTS, tiles=INTS, query_starts=INTS, mixed_stride=CHANNELS + 4096,
        out_stride=CHANNELS, window_stride=CHANNELS * 3, table_stride=320, SHAPE=SHAPE,
        CHANNELS=128, TOKENS=16, TAPS=4, PDL=True,
    )  # fmt: skip
    assert resources(kernel)["REG"] <= 65536 // (RESIDENT * 128)
    check_fits(kernel)
    assert "ld.global.v4.b32" in kernel.asm["ptx"]


def test_chunks_of_prefill() -> None:
    """Products by warp groups; three programs fit a multiprocessor."""
    config = delta_prefill_config(SHAPE, 2)
    options = SimpleNamespace(
        num_warps=config.chunk_warps, num_stages=1, max_registers=config.chunk_registers
    )
    kernel = compile_call(
        _chunk_kernel, options, mixed=BF16, keys=BF16, scores=BF16, decays=FLOATS, b=BF16, a=BF16,
        a_log=FLOATS, dt_bias=FLOATS, chunks=INTS, mixed_stride=CHANNELS, b_stride=64, a_stride=64,
        decay_stride=8192, SHAPE=SHAPE, LENGTH=64, PRECISION="tf32", PDL=True,
    )  # fmt: skip
    assert "wgmma.mma_async" in kernel.asm["ptx"]
    assert resources(kernel)["REG"] <= 65536 // (3 * 32 * config.chunk_warps)
    check_fits(kernel, spilled=112, shared=SHARED_MEMORY // 3 - 1024)


def test_chunks_with_decays_by_channel() -> None:
    """Products by warp groups; two programs fit a multiprocessor."""
    config = delta_prefill_config(KIMI, 2)
    kernel = compile_call(
        _channel_chunk_kernel, SimpleNamespace(num_warps=config.chunk_warps, num_stages=1),
        mixed=BF16, keys=BF16, scores=BF16, decays=FLOATS, sums=FLOATS, b=BF16, a=BF16,
        a_log=FLOATS, dt_bias=FLOATS, chunks=INTS, query_starts=INTS, mixed_stride=3 * 4096,
        b_stride=64, a_stride=4096, SHAPE=KIMI, LENGTH=64, PART=MAX_PART, PRECISION="tf32",
        PDL=True,
    )  # fmt: skip
    assert "wgmma.mma_async" in kernel.asm["ptx"]
    check_fits(kernel, spilled=64, shared=SHARED_MEMORY // 2 - 1024)


@pytest.mark.parametrize("shape", [SHAPE, KIMI])
@pytest.mark.parametrize("on_hopper", [True, False])
def test_the_scan_of_prefill(on_hopper: bool, shape: DeltaShape) -> None:
    """Products by warp groups, and the next chunk loaded meanwhile; elsewhere it fits the 163 KiB
    of an A100."""
    config = delta_prefill_config(shape, 2, on_hopper=on_hopper)
    options = SimpleNamespace(num_warps=config.scan_warps, num_stages=config.scan_stages)
    kernel = compile_call(
        _scan_kernel, options, mixed=BF16, keys=BF16, scores=BF16, decays=FLOATS, z=BF16, norm=BF16,
        norm_eps=1e-6, out=BF16, matrices=FLOATS, tables=INTS, rows=INTS, query_starts=INTS,
        seq_lens=INTS, mixed_stride=CHANNELS, decay_stride=8192, z_stride=CHANNELS + 4096,
        out_stride=4096, matrix_stride=HEADS * 128 * 128, table_stride=320, SHAPE=shape, LENGTH=64,
        VALUES=config.values, PRECISION="tf32", PDL=True,
    )  # fmt: skip
    assert "wgmma.mma_async" in kernel.asm["ptx"]
    assert "cp.async" in kernel.asm["ptx"]
    check_fits(kernel, spilled=16, shared=SHARED_MEMORY if on_hopper else 163 * 1024)


def test_the_norm_of_prefill() -> None:
    kernel = compile_call(
        _norm_kernel, SimpleNamespace(num_warps=4, num_stages=1), out=BF16, z=BF16, norm=BF16,
        norm_eps=1e-6, chunks=INTS, out_stride=4096, z_stride=CHANNELS + 4096, SHAPE=SHAPE,
        LENGTH=64, PDL=True,
    )  # fmt: skip
    check_fits(kernel)


@pytest.mark.parametrize("tokens", [1, 16])
def test_short_convolution(tokens: int) -> None:
    """For decodes and for prefill."""
    kernel = compile_call(
        _short_convolution_kernel, SimpleNamespace(num_warps=4, num_stages=1), x=BF16, out=BF16,
        weight=BF16, bias=BF16, windows=BF16, tables=INTS, chunks=INTS, query_starts=INTS,
        num_channels=2048, x_stride=6144, out_stride=2048, window_stride=2048 * 3, table_stride=320,
        TOKENS=tokens, WIDTH=4, TAPS=4, CHANNELS=128, BLOCK_SIZE=64, HAS_SILU=True,
        PDL=True,
    )  # fmt: skip
    check_fits(kernel)


#: Nemotron-3's layers, and Falcon-H1's.
MAMBA_SHAPES = [
    MambaShape(64, 8, 64, 128, 64, 128, BLOCK),
    MambaShape(48, 48, 64, 256, 64, 256, BLOCK),
]


@pytest.mark.parametrize("shape", MAMBA_SHAPES)
@pytest.mark.parametrize("is_prefill", [True, False])
def test_mamba(shape: MambaShape, is_prefill: bool) -> None:
    arguments = {
        "mixed": BF16, "steps": BF16, "a_log": FLOATS, "dt_bias": FLOATS, "skip": FLOATS,
        "least": 0.0, "largest": 1e9, "out": FLOATS, "matrices": FLOATS, "tables": INTS,
        "seq_lens": INTS, "query_starts": INTS, "mixed_stride": 8192, "step_stride": 8192,
        "out_stride": 4096, "matrix_stride": 64 * 64 * 128, "table_stride": 320, "SHAPE": shape,
        "PDL": True,
    }  # fmt: skip
    if is_prefill:
        kernel = compile_call(
            _mamba_prefill, SimpleNamespace(num_warps=4, num_stages=2), **arguments, rows=INTS,
            LENGTH=64, VALUES=prefill_values(shape, 2), PRECISION="tf32",
        )  # fmt: skip
        assert "wgmma.mma_async" in kernel.asm["ptx"]
        assert "cp.async" in kernel.asm["ptx"]
        assert kernel.metadata.shared <= SHARED_MEMORY
    else:
        options = SimpleNamespace(num_warps=_decode_warps(shape), num_stages=3)
        kernel = compile_call(_mamba_decode, options, **arguments, HAS_STARTS=True)
        assert "ld.global.v4.b32" in kernel.asm["ptx"]
    check_fits(kernel, spilled=192 if is_prefill else 0)


@pytest.mark.parametrize("has_starts", [False, True])
@pytest.mark.parametrize("shape", MAMBA_SHAPES)
def test_lookahead_of_mamba(shape: MambaShape, has_starts: bool) -> None:
    """A matrix stays in registers from the first token to the last."""
    kernel = compile_call(
        _mamba_lookahead_kernel, SimpleNamespace(num_warps=_decode_warps(shape), num_stages=3),
        mixed=BF16, steps=BF16, a_log=FLOATS, dt_bias=FLOATS, skip=FLOATS, least=0.0, largest=1e9,
        out=FLOATS, matrices=FLOATS, tables=INTS, seq_lens=INTS, query_starts=INTS, slots=INTS,
        pending=INTS, counts=INTS, replayed=BF16, saved=BF16, mixed_stride=8192, step_stride=8192,
        out_stride=4096, matrix_stride=64 * 64 * 128, table_stride=320, SHAPE=shape, SAVED=5,
        HAS_STARTS=has_starts, PDL=True,
    )  # fmt: skip
    check_fits(kernel)
    assert "ld.global.v4.b32" in kernel.asm["ptx"]


@pytest.mark.parametrize("has_replayed", [False, True])
def test_lookahead_of_convolutions(has_replayed: bool) -> None:
    kernel = compile_call(
        _convolution_lookahead_kernel, SimpleNamespace(num_warps=4, num_stages=3), x=BF16,
        out=BF16, replayed=BF16 if has_replayed else None, weight=BF16, bias=BF16, windows=BF16,
        tables=INTS, seq_lens=INTS, query_starts=INTS, slots=INTS, pending=INTS, counts=INTS,
        saved=BF16, x_stride=8192, out_stride=8192, window_stride=CHANNELS * 3, table_stride=320,
        CHANNELS=CHANNELS, PART=128, WIDTH=4, SAVED=5, BLOCK_SIZE=BLOCK, HAS_STARTS=True,
        HAS_SILU=has_replayed, PDL=True,
    )  # fmt: skip
    check_fits(kernel)


@pytest.mark.parametrize(("size", "block"), [(512, 512), (8192, 8192)])
def test_gates_and_norms_of_mamba(size: int, block: int) -> None:
    """Nemotron-3's groups, and Bamba's only one."""
    kernel = compile_call(
        _gated_norm_kernel, SimpleNamespace(num_warps=4 if block <= 2048 else 8, num_stages=1),
        x=FLOATS, gates=BF16, weight=BF16, out=BF16, size=size, channels=8192, x_stride=8192,
        gate_stride=18560, out_stride=8192, eps=1e-5, BLOCK=block, HAS_NORM=True, GATES_FIRST=True,
        PDL=True,
    )  # fmt: skip
    check_fits(kernel)
    assert "ld.global.v4.b32" in kernel.asm["ptx"]
