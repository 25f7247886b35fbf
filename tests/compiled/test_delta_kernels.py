"""The kernels of the gated delta rule as compiled for Hopper, without a GPU, at Qwen3.5's sizes:
registers, shared memory, and which tensor-core instructions they take."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from aioinfer.kernels.delta_arguments import DeltaShape
from aioinfer.kernels.delta_decode import _delta_decode_kernel, decode_config

from tests.compiled.hopper import compile_call, spilled

BF16, FLOATS, INTS = (torch.empty(8, dtype=d) for d in (torch.bfloat16, torch.float32, torch.int32))
HEADS, CHANNELS, BLOCK = 32, 8192, 64
SHAPE = DeltaShape(16, 2, 128, 128, 128, 128, 4, BLOCK)


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_decodes(state_dtype: torch.dtype, tmp_path: Path) -> None:
    """A matrix stays in registers and is moved in vectors of 16 bytes; two programs fit a
    multiprocessor."""
    config = decode_config(SHAPE)
    assert 2 * config.num_warps * 32 * config.max_registers <= 65536
    kernel = compile_call(
        _delta_decode_kernel, SimpleNamespace(**config._asdict(), num_stages=3), mixed=BF16,
        z=BF16, b=BF16, a=BF16, out=BF16, conv=BF16, a_log=FLOATS, dt_bias=FLOATS, norm=BF16,
        norm_eps=1e-6, windows=BF16, matrices=torch.empty(8, dtype=state_dtype),
        window_tables=INTS, matrix_tables=INTS, seq_lens=INTS, query_starts=INTS, tickets=INTS,
        mixed_stride=CHANNELS + 4096, z_stride=CHANNELS + 4096, b_stride=64, a_stride=64,
        out_stride=4096, window_stride=CHANNELS * 3, matrix_stride=HEADS * 128 * 128,
        window_table_stride=320, matrix_table_stride=320, SHAPE=SHAPE, HAS_STARTS=True, TAPS=4,
        PDL=True,
    )  # fmt: skip
    assert spilled(kernel, tmp_path) <= (0 if state_dtype == torch.float32 else 32)
    assert "ld.global.v4.b32" in kernel.asm["ptx"]
    assert "st.global.v4.b32" in kernel.asm["ptx"]
