"""The float8 products with tokens as rows: every configuration compiles for Hopper and keeps to the
registers. What they compute is tested in `tests/gpu/test_block_hopper.py`."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from aioinfer.kernels.block_hopper import _product_kernel
from aioinfer.kernels.scaled_tiles import BLOCK_CONFIGS, HALF, STEP, BlockConfig
from triton.compiler import CompiledKernel
from triton.experimental.gluon import language as gl

from tests.compiled.hopper import box, check_fits, compile_gluon, machine_code

pytestmark = pytest.mark.extended


def compile_product(config: BlockConfig, *, gated: bool, residual: bool) -> CompiledKernel:
    """Compiles what `block_product` launches."""
    outputs = config.part_lines // 2 if gated else config.part_lines
    fp8, bf16 = gl.float8e4nv, gl.bfloat16
    types = {
        "x": box(fp8, HALF, STEP),
        "weight": box(fp8, config.part_lines, STEP),
        "out": box(bf16, HALF, outputs),
        "residual": box(bf16, HALF, outputs),
        "x_scales": "*fp32", "w_scales": "*fp32",
    }  # fmt: skip
    constants = {
        "STAGES": config.stages(gated=gated), "GROUP": config.group, "GATED": gated,
        "PAIRED": gated, "HAS_RESIDUAL": residual, "HALVES": config.halves,
        "SPLITS_LINES": config.splits_lines, "OVERLAPPED": config.overlapped,
        "ROWS_PER_SCALE": 8 if gated else 128, "CONSUMERS": config.consumers,
        "REGISTERS": config.registers, "PDL": True,
    }  # fmt: skip
    return compile_gluon(_product_kernel, types, constants)


@pytest.mark.parametrize(
    ("config", "gated"),
    [(config, gated) for gated in (False, True) for config in BLOCK_CONFIGS
     if config.allows(gated=gated)],
)  # fmt: skip
def test_every_configuration(config: BlockConfig, gated: bool) -> None:
    """Nothing is spilled, no layouts are converted, and products are not waited for one by one,
    as the assembler does where it cannot keep sets of sums apart."""
    kernel = compile_product(config, gated=gated, residual=not gated)
    check_fits(kernel)
    assert "convert_layout" not in kernel.asm["ttgir"]
    lines = machine_code(kernel).splitlines()
    products = sum("QGMMA" in line for line in lines)
    waits = sum("WARPGROUP.DEPBAR" in line for line in lines)
    # sets of four products: before, in and after the loop
    sets = 1 + 2 + 1 if config.overlapped or config.halves == 2 else 2
    assert products == config.consumers * 4 * sets
    assert waits == config.consumers * {2: 3, 4: 7}[sets]


def test_one_instruction_for_each_sum() -> None:
    """Beside a few that multiply the scales of tokens and weight rows."""
    kernel = compile_product(BlockConfig(128, 128), gated=True, residual=False)
    lines = machine_code(kernel).splitlines()
    scaled = 64 * (2 + 2)  # for each thread: in the loop of two stages, and after it
    assert sum(" FFMA " in line for line in lines) == 2 * scaled
