"""The prefill kernel for Hopper: every supported shape compiles and fits into shared memory, over a
cache in float8, too.

Gluon has no interpreter; what the kernel computes is tested in `tests/gpu/test_kernels.py`.
"""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from aioinfer.kernels.prefill_hopper import (
    ROWS,
    _prefill_kernel,
    pipeline_stages,
    raw_stages,
    tile_tokens,
)
from triton.compiler import CompiledKernel
from triton.experimental.gluon import language as gl

from tests.compiled.hopper import SHARED_MEMORY, box, check_fits, compile_gluon

POINTERS = {
    "q": "*bf16", "out": "*bf16", "block_tables": "*i32", "query_starts": "*i32",
    "seq_lens": "*i32", "plan": "*i32", "scales": "*fp32", "sinks": "*fp32",
}  # fmt: skip
NUMBERS = dict.fromkeys(("scale", "soft_cap"), "fp32")
NAMES = ("head_size", "block_size", "window", "soft_cap", "has_sinks")


def compiled(
    head_size: int, block_size: int, window: int, soft_cap: bool, has_sinks: bool,
    *, is_float8: bool = False, table_stride: int | None = None,
) -> CompiledKernel:  # fmt: skip
    """Returns the kernel that `launch_prefill_hopper` launches for queries in bf16; `table_stride`
    is a constant where it is given."""
    element = gl.float8e4nv if is_float8 else gl.bfloat16
    tile = tile_tokens(head_size, block_size)
    descriptor = box(element, tile, head_size)
    constants = {
        "KV_HEADS": 8, "GROUP": 4, "HEAD_SIZE": head_size, "WINDOW": window, "SOFT_CAP": soft_cap,
        "HAS_SINKS": has_sinks, "HAS_SCALES": is_float8, "TILE": tile, "TILES": block_size // tile,
        "ROWS": ROWS, "STAGES": pipeline_stages(head_size, tile, is_float8=is_float8),
        "RAW_STAGES": raw_stages(head_size, tile) if is_float8 else 0,
    }  # fmt: skip
    if table_stride is not None:
        constants["table_stride"] = table_stride
    types = POINTERS | NUMBERS | {"keys": descriptor, "values": descriptor}
    return compile_gluon(_prefill_kernel, types, constants, pdl=False)


def check(kernel: CompiledKernel) -> None:
    assert kernel.metadata.shared <= SHARED_MEMORY
    assert "wgmma.mma_async" in kernel.asm["ptx"]
    assert "cp.async.bulk.tensor" in kernel.asm["ptx"]


@pytest.mark.parametrize(
    NAMES,
    [
        (64, 128, 128, False, True),
        *(
            pytest.param(*parameters, marks=pytest.mark.extended)
            for parameters in (
                (64, 64, 0, False, False), (128, 64, 0, False, False), (128, 128, 0, False, False),
                (128, 128, 100, True, True), (256, 64, 0, False, False),
                (256, 128, 0, False, False),
            )
        ),
    ],
)  # fmt: skip
def test_every_supported_shape_compiles(
    head_size: int, block_size: int, window: int, soft_cap: bool, has_sinks: bool
) -> None:
    check(compiled(head_size, block_size, window, soft_cap, has_sinks))


@pytest.mark.extended
@pytest.mark.parametrize("is_float8", [False, True])
def test_block_tables_of_one_column(is_float8: bool) -> None:
    """Triton makes an argument of 1 a constant, as the stride of such tables is."""
    check(compiled(64, 64, 0, False, False, is_float8=is_float8, table_stride=1))


@pytest.mark.extended
@pytest.mark.parametrize(
    NAMES,
    [
        (64, 64, 100, True, True),
        (64, 128, 0, False, False),
        (128, 64, 0, False, False),
        (128, 128, 0, False, False),
    ],
)
def test_a_float8_cache(
    head_size: int, block_size: int, window: int, soft_cap: bool, has_sinks: bool
) -> None:
    """Two numbers are converted in one instruction, each of a block of keys and one of values once;
    what is spilled is spilled outside of the loops over blocks."""
    kernel = compiled(head_size, block_size, window, soft_cap, has_sinks, is_float8=True)
    check(kernel)
    conversions = kernel.asm["ptx"].count("cvt.rn.f16x2.e4m3x2")
    assert conversions == 2 * block_size * head_size // 128 // 2
    check_fits(kernel, spilled=128)
