"""The kernels for weights of one byte as compiled for Hopper, without a GPU: every configuration
keeps to the registers, multiplies on the tensor cores it is meant for, and reads weights 16 bytes
at a time."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

pytest.importorskip("triton")

import triton.language as tl
from aioinfer.kernels import few_rows_dense, quantize, scaled_product
from aioinfer.kernels.few_rows_scaled import few_rows_scaled_config
from aioinfer.kernels.scaled_product import BLOCK_CONFIGS, CONFIGS, PLAIN_CONFIG, ProductConfig
from triton.compiler import CompiledKernel

from tests.compiled.hopper import check_fits, compile_kernel

pytestmark = pytest.mark.extended

FP8, BF16, INT8 = "fp8e4nv", "bf16", "i8"
GROUP = 128


def product(
    config: ProductConfig, inputs: str, weight: str, scaling: int, run: int, *, gated: bool
) -> CompiledKernel:
    """Compiles what `scaled_product` launches with a configuration."""
    types = {
        "x": f"tensordesc<{inputs}[{config.tokens}, {config.step}]>",
        "weight": f"tensordesc<{weight}[{config.features}, {config.step}]>",
        "x_scales": "*fp32", "w_scales": "*fp32", "residual": "*bf16", "out": "*bf16",
        "partials": "*fp32", "counters": "*i32",
    }  # fmt: skip
    constants = {
        "INPUTS": 4096, "FEATURES": config.features, "TOKENS": config.tokens, "STEP": config.step,
        "GROUP_SIZE": config.group, "X_SCALES": scaling, "GROUPED": scaling == 2,
        "ROWS_PER_SCALE": run, "HAS_RESIDUAL": not gated, "GATED": gated,
        "SUM": tl.int32 if inputs == INT8 else tl.float32, "EXACT_SUMS": config.exact_sums,
        "SPLITS": config.splits, "PDL": True,
    }  # fmt: skip
    return compile_kernel(scaled_product._product_kernel, types, constants, config)


WGMMA = {FP8: "f32.e4m3.e4m3", INT8: "s32.s8.s8", BF16: "f32.bf16.bf16"}


@pytest.mark.parametrize(
    ("config", "kind", "scaling", "run", "gated"),
    [(config, FP8, 1, 1, False) for _, configs in CONFIGS for config in configs]
    + [(config, FP8, 2, 128, False) for _, configs in BLOCK_CONFIGS for config in configs]
    + [(BLOCK_CONFIGS[-1][1][0], FP8, 2, 8, True)]
    + [(replace(CONFIGS[2][1][0], exact_sums=True), FP8, 1, 1, False)]
    + [(CONFIGS[-1][1][0], INT8, 1, 1, True), (PLAIN_CONFIG, BF16, 0, 1, False)],
)
def test_products_of_many_rows(
    config: ProductConfig, kind: str, scaling: int, run: int, gated: bool
) -> None:
    weight = FP8 if kind == BF16 else kind
    kernel = product(config, kind, weight, scaling, run, gated=gated)
    # the widest tiles have as many sums as warps have registers for, and spill a few addresses
    is_widest = config.tokens * config.features >= 32768
    check_fits(kernel, spilled=64 if is_widest else 0)
    products = set(re.findall(r"wgmma\.mma_async\S*", kernel.asm["ptx"]))
    assert {name.partition("k")[2].partition(".")[2] for name in products} == {WGMMA[kind]}


@pytest.mark.parametrize("rows", [1, 8, 16])
@pytest.mark.parametrize(
    ("kind", "run", "gated", "features", "inputs"),
    [
        (FP8, 1, True, 12288, 4096), (FP8, 1, False, 4096, 12288), (FP8, 8, True, 12288, 4096),
        (FP8, 128, False, 4096, 12288), (INT8, 1, False, 6144, 4096),
    ],
)  # fmt: skip
def test_products_of_few_rows(
    rows: int, kind: str, run: int, gated: bool, features: int, inputs: int
) -> None:
    grouped, normed = run > 1, rows == 1 and inputs == 4096
    config = few_rows_scaled_config(
        rows, features, inputs, normed=normed, gated=gated, grouped=grouped
    )
    spec = few_rows_dense.FewRowsSpec(
        inputs, config.features, config.step, gated, not gated, True, grouped, run
    )
    constants = {"PDL": True, "ADAPTED": False, "S": spec}
    if rows == 1:
        constants |= {"HAS_NORM": normed, "EARLY_TRIGGER": False, "WIDTH": 1, "MISSING": -1}
    else:
        constants |= {"ROWS_PAD": rows, "BLOCK": 64}
    types = {
        "x": "*bf16", "weight": f"*{kind}", "scales": "*fp32", "norm": "*bf16",
        "residual": "*bf16", "out": "*bf16", "eps": "fp32",
    } | dict.fromkeys(
        ("shrunk", "up", "blocks", "A", "B", "slots", "ranks", "words", "others"), "*bf16"
    )  # fmt: skip
    source = few_rows_dense._vector_kernel if rows == 1 else few_rows_dense._tensor_kernel
    kernel = compile_kernel(source, types, constants, config)
    ptx = kernel.asm["ptx"]
    check_fits(kernel)
    assert "wgmma" not in ptx
    if rows == 1:
        wide = (1 + gated) * config.features * config.step // (config.num_warps * 32 * 16)
        assert ptx.count("ld.global.v4.b32") >= wide * -(-inputs // config.step)
    else:
        assert "mma.sync" in ptx
        assert "cp.async.ca" not in ptx  # less than 16 bytes at a time


@pytest.mark.sample
@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize(("kind", "before"), [(FP8, "norm"), (FP8, ""), (INT8, "")])
def test_activations_are_quantized_in_registers(kind: str, before: str, grouped: bool) -> None:
    block = 4096 if before else 16384
    constants = {
        "BLOCK": block, "SCALED": GROUP if grouped else block,
        "HAS_NORM": before == "norm", "IS_STATIC": False, "MAXIMUM": 448.0, "TINY": 1e-12,
        "PDL": True,
    }  # fmt: skip
    types = {
        "x": "*bf16", "norm": "*bf16", "static_scale": "*fp32", "values": f"*{kind}",
        "scales": "*fp32", "eps": "fp32",
    }  # fmt: skip
    warps = quantize.num_warps(block, is_grouped=grouped)
    config = ProductConfig(0, 0, 0, warps, 1)
    ptx = compile_kernel(quantize._quantize_kernel, types, constants, config).asm["ptx"]
    assert set(re.findall(r"ld\.global\S*", ptx)) == {"ld.global.v4.b32"}
    assert "st.global.v4.b32" in ptx
    assert ("cvt.rn.satfinite.e4m3x2" in ptx) == (kind == FP8)
