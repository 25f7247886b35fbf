"""The float8 products of many rows in Gluon: every configuration compiles for Hopper and keeps to
the registers. What they compute is tested in `tests/gpu/test_scaled_hopper.py`."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from aioinfer.kernels.hopper_pipeline import WEIGHT_ROWS, scale_layout
from aioinfer.kernels.scaled_hopper import _product_kernel
from aioinfer.kernels.scaled_tiles import CONFIGS, STEP, HopperConfig
from triton.compiler import CompiledKernel
from triton.experimental.gluon import language as gl

from tests.compiled.hopper import box, check_fits, compile_gluon, machine_code

pytestmark = pytest.mark.extended


def compile_product(
    config: HopperConfig, *, gated: bool, grouped: bool, residual: bool, rows_per_scale: int
) -> CompiledKernel:
    """Compiles what `hopper_product` launches."""
    outputs = WEIGHT_ROWS // 2 if gated else WEIGHT_ROWS
    fp8, bf16 = gl.float8e4nv, gl.bfloat16
    types = {
        "x": box(fp8, config.tokens, STEP),
        "weight": box(fp8, WEIGHT_ROWS, STEP),
        "out": box(bf16, config.tokens, outputs),
        "residual": box(bf16, config.tokens, outputs),
        "scales": f"tensordesc<fp32{[1, config.tokens]},{scale_layout()!r}>",
        "x_scales": "*fp32", "w_scales": "*fp32",
    }  # fmt: skip
    constants = {
        "STAGES": config.stages, "GROUP": config.group, "GATED": gated, "HAS_RESIDUAL": residual,
        "GROUPED": grouped, "ROWS_PER_SCALE": rows_per_scale, "REGISTERS": config.registers,
        "CONSUMERS": config.consumers, "PDL": True,
    }  # fmt: skip
    return compile_gluon(_product_kernel, types, constants)


@pytest.mark.parametrize(
    ("config", "gated", "grouped"),
    [(config, *kind) for kind, configs in CONFIGS.items() for config in configs],
)
def test_every_configuration(config: HopperConfig, gated: bool, grouped: bool) -> None:
    run = (8 if gated else 128) if grouped else 1
    kernel = compile_product(
        config, gated=gated, grouped=grouped, residual=not gated, rows_per_scale=run
    )
    # With scales of blocks, three times the sums of 128 tokens displace a few addresses.
    check_fits(kernel, spilled=48 if grouped and config.tokens == 128 else 0)
    assert "wgmma.mma_async.sync.aligned.m64n" in kernel.asm["ptx"]
    assert "f32.e4m3.e4m3" in kernel.asm["ptx"]


@pytest.mark.parametrize(
    ("config", "gated"),
    [(config, gated) for (gated, grouped), configs in CONFIGS.items() if grouped
     for config in configs],
)  # fmt: skip
def test_a_stage_is_multiplied_while_another_is_scaled(config: HopperConfig, gated: bool) -> None:
    """In the machine's instructions: the assembler waits for every single product where it cannot
    keep two sets of sums apart."""
    kernel = compile_product(
        config, gated=gated, grouped=True, residual=not gated, rows_per_scale=8 if gated else 128
    )
    lines = machine_code(kernel).splitlines()
    products = sum("QGMMA" in line for line in lines)
    waits = sum("WARPGROUP.DEPBAR" in line for line in lines)
    assert products == config.consumers * 4 * (1 + 2 + 1)  # before, in and after the loop
    assert waits == config.consumers * (4 + 3)
