"""The kernels of mixtures of experts as compiled for Hopper, without a GPU: every configuration
keeps to the registers and the shared memory, multiplies on the tensor cores it is meant for, and
loads 16 bytes at a time."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import product as product_of
from typing import Any

import pytest

pytest.importorskip("triton")

from aioinfer.kernels import (
    expert_hopper,
    expert_matrix,
    expert_routing,
    expert_sum,
    expert_vector,
)
from aioinfer.kernels.expert_arguments import FLOATS, INTEGERS, PLAIN, SCALED, ExpertSpec
from aioinfer.kernels.expert_configs import (
    CONFIGS,
    SCANNED_CONFIGS,
    TABLES,
    ExpertConfig,
    PipelinedConfig,
    vector_config,
)
from aioinfer.kernels.expert_matrix import scanned_pairs
from aioinfer.kernels.expert_routing import RoutingConfig, RoutingSpec, tile_config
from aioinfer.kernels.expert_selection import FewTokensConfig
from aioinfer.kernels.hopper_pipeline import (
    STEP,
    WEIGHT_ROWS,
    all_registers,
    consumer_registers,
)
from triton.compiler import CompiledKernel
from triton.experimental.gluon import language as gl

from tests.compiled.hopper import box, check_fits, compile_gluon, compile_kernel
from tests.pairs import pairwise

pytestmark = pytest.mark.extended

#: Qwen3-30B-A3B.
HIDDEN, CHANNELS, EXPERTS, TOP_K = 2048, 768, 128, 8


#: What the products are compiled for beside their shapes, by the name of a format in
#: `expert_configs.TABLES`.
QUANTIZED: dict[str, dict[str, Any]] = {
    "scaled": {"format": SCALED, "x_scales": 1},
    "blocks": {"format": SCALED, "x_scales": 2, "grouped": True, "rows_per_scale": 8},
    "weights alone": {"format": SCALED},
    "blocks, weights alone": {"format": SCALED, "grouped": True, "rows_per_scale": 8},
    "int8, weights alone": {"format": SCALED},
    "integers": {"format": INTEGERS, "words": 64},
    "integers with zeros": {"format": INTEGERS, "words": 64, "has_zeros": True},
    "integers in short runs": {"format": INTEGERS, "words": 32},
    "integers in groups of 32": {"format": INTEGERS, "words": 32, "group": 32},
    "mxfp4": {"format": FLOATS, "words": 32, "group": 32, "has_bias": True, "alpha": 1.702,
              "limit": 7.0},
}  # fmt: skip
#: Hidden size, channels, experts and experts of a token.
QWEN = (HIDDEN, CHANNELS, EXPERTS, TOP_K)
GPT_OSS = (2880, 2880, 32, 4)


def product(
    config: ExpertConfig, *, gated: bool, scanned: bool, partial: bool = False, format: str = "",
) -> CompiledKernel:  # fmt: skip
    """Compiles what `expert_product` launches with a configuration."""
    rows_by_tma = config.tma and not gated and not scanned
    hidden, channels, experts, top_k = GPT_OSS if format == "mxfp4" else QWEN
    values = dict(QUANTIZED.get(format, {}))
    if values.get("grouped") and not gated:
        values["rows_per_scale"] = 128
    spec = ExpertSpec(
        2 * channels if gated else hidden, hidden if gated else channels, experts, top_k,
        config.lines, 128 if values.get("grouped") else config.step, gated, partial,
        tma=config.tma, **values,
    )  # fmt: skip
    one_byte = "i8" if "int8" in format else "fp8e4nv"
    kind = {PLAIN: "bf16", SCALED: one_byte}.get(spec.format, "i16")
    x_kind = "fp8e4nv" if spec.x_scales else "bf16"
    types = {
        "x": f"*{x_kind}",
        "row_tiles": f"tensordesc<{x_kind}[{config.rows}, {spec.step}]>" if rows_by_tma
        else f"*{x_kind}",
        "weight": f"tensordesc<{kind}[{config.lines}, {spec.step}]>" if config.tma else f"*{kind}",
        "w_scales": "*i32" if spec.format > SCALED else "*fp32", "x_scales": "*fp32",
        "bias": "*bf16", "factors": "*fp32", "experts": "*i32", "counts": "*i32",
        "buckets": "*i32", "out": "*bf16", "factor": "fp32",
    }  # fmt: skip
    constants = {
        "ROWS": config.rows, "TMA_ROWS": rows_by_tma, "TAIL": config.tail, "EXPERTS_PAD": experts,
        "PAIRS_PAD": scanned_pairs(config, top_k) if scanned else 0, "PDL": True, "S": spec,
    }  # fmt: skip
    return compile_kernel(expert_matrix._expert_kernel, types, constants, config)


@pairwise(
    partial=[False, True],
    gated=[True, False],
    config__scanned=[(config, False) for _, config in CONFIGS]
    + [(config, True) for _, config in SCANNED_CONFIGS],
)
def test_products(config: ExpertConfig, scanned: bool, gated: bool, partial: bool) -> None:
    kernel = product(config, gated=gated, scanned=scanned, partial=partial)
    ptx = kernel.asm["ptx"]
    check_fits(kernel)
    by_warps = r"mma\.sync\S*m16n8k16\S*f32\.bf16\.bf16"
    by_groups = rf"wgmma\.mma_async\S*m64n{config.rows}k16\.f32\.bf16\.bf16"
    assert re.search(by_warps if config.rows == 8 else by_groups, ptx)
    assert "cp.async.ca" not in ptx  # less than 16 bytes at a time
    assert ("cp.async.bulk.tensor" in ptx) == config.tma


@pairwise(
    kind=[gl.bfloat16, gl.float16], experts=[8, EXPERTS, 257], inputs=[512, CHANNELS, 3584],
    outputs=[HIDDEN, 2880],
)  # fmt: skip
def test_the_pipelined_product(experts: int, inputs: int, outputs: int, kind: gl.dtype) -> None:
    """Results are written 16 bytes at a time."""
    loader, launched = expert_hopper.LOADER_REGISTERS, all_registers(expert_hopper.CONSUMERS)
    types = {
        "x": box(kind, expert_hopper.TOKENS, STEP), "weight": box(kind, WEIGHT_ROWS, STEP),
        "factors": "*fp32", "counts": "*i32", "buckets": "*i32", "out": f"*{kind.name}",
    }  # fmt: skip
    constants = {
        "STEPS": inputs // STEP, "WIDTH": outputs, "LINE_TILES": -(-outputs // expert_hopper.LINES),
        "EXPERTS": experts, "PAD": expert_hopper.padded(experts),
        "STAGES": PipelinedConfig().stages,
        "CONSUMER_REGISTERS": consumer_registers(launched, expert_hopper.CONSUMERS, loader),
        "LOADER_REGISTERS": loader, "PDL": True,
    }  # fmt: skip
    kernel = compile_gluon(
        expert_hopper._expert_hopper_kernel, types, constants, registers=launched
    )
    check_fits(kernel)
    ptx = kernel.asm["ptx"]
    for tokens in (64, 128):
        assert re.search(rf"wgmma\.mma_async\S*m64n{tokens}k16\.f32", ptx)
    assert set(re.findall(r"st\.global\.\S+", ptx)) == {"st.global.v4.b32"}


def quantized_products() -> Iterator[tuple[str, ExpertConfig, bool, bool]]:
    """Yields formats, configurations, whether there are no buckets, and whether the product is
    gated; in pairs, where several formats have the configurations of one table."""
    by_table: dict[str, list[str]] = {}
    for format in QUANTIZED:
        name = format if format in TABLES else "weights alone" if "alone" in format else "integers"
        by_table.setdefault(name, []).append(format)
    for name, formats in by_table.items():
        few, many = TABLES[name]
        configs = [(config, True) for _, config in few] + [(config, False) for _, config in many]
        for (i, format), (j, each) in product_of(enumerate(formats), enumerate(configs)):
            for gated in (True, False) if len(formats) == 1 else ((i + j) % 2 == 0,):
                yield format, *each, gated


@pytest.mark.parametrize(("format", "config", "scanned", "gated"), list(quantized_products()))
def test_quantized_products(format: str, config: ExpertConfig, scanned: bool, gated: bool) -> None:
    """In four bits, two numbers at a time are converted, in the registers of the left operand."""
    kernel = product(config, gated=gated, scanned=scanned, format=format)
    ptx = kernel.asm["ptx"]
    check_fits(kernel)
    if "alone" in format:
        shape = rf"wgmma\.mma_async\S*m64n{config.rows}k16\.f32\.bf16\.bf16"
    elif config.tma:
        shape = rf"wgmma\.mma_async\S*m64n{config.rows}k32\.f32\.e4m3\.e4m3"
        assert "cp.async.bulk.tensor" in ptx
    elif config.rows == 8 or config.lines < 64:
        shape = r"mma\.sync\S*m16n8k16\S*f32\.bf16\.bf16"
    else:
        shape = rf"wgmma\.mma_async\S*m64n{config.rows}k16\.f32\.bf16\.bf16"
    assert re.search(shape, ptx)
    if format == "mxfp4":
        assert "mul.rn.bf16x2" in ptx


@pairwise(
    format=["", "scaled", "blocks"],
    partial=[False, True],
    gated__normed=[(True, True), (True, False), (False, False)],
)
def test_products_of_one_token(gated: bool, normed: bool, partial: bool, format: str) -> None:
    config = vector_config(gated=gated, itemsize=1 if format else 2)
    types = {
        "x": "*bf16", "weight": "*fp8e4nv" if format else "*bf16", "w_scales": "*fp32",
        "bias": "*bf16", "factors": "*fp32", "experts": "*i32", "out": "*bf16", "norm": "*bf16",
        "norm_factors": "*fp32",
    }  # fmt: skip
    spec = ExpertSpec(
        2 * CHANNELS if gated else HIDDEN, HIDDEN if gated else CHANNELS, EXPERTS, TOP_K,
        config.features, config.step, gated, partial, format=SCALED if format else PLAIN,
        grouped=format == "blocks", rows_per_scale=8 if format == "blocks" else 1,
    )  # fmt: skip
    constants = {"HAS_NORM": normed, "PDL": True, "S": spec}
    kernel = compile_kernel(expert_vector._vector_kernel, types, constants, config)
    check_fits(kernel)
    bytes_of = config.features * config.step * (1 if format else 2)
    wide = (1 + gated) * bytes_of // (config.num_warps * 32 * 16)
    assert kernel.asm["ptx"].count("ld.global.v4.b32") >= wide


@pairwise(scaled=[False, True], partial=[False, True], inputs=[CHANNELS, 1024])
def test_the_summed_product(inputs: int, partial: bool, scaled: bool) -> None:
    config = expert_sum.CONFIG
    types = {
        "x": "*bf16", "weight": "*fp8e4nv" if scaled else "*bf16", "scales": "*fp32",
        "bias": "*bf16", "factors": "*fp32", "experts": "*i32", "residual": "*bf16",
        "added": "*bf16", "out": "*bf16",
    }  # fmt: skip
    constants = {
        "FEATURES": HIDDEN, "INPUTS": inputs, "OUTPUTS": config.features, "STEP": config.step,
        "TOP_K": TOP_K, "EXPERTS": EXPERTS, "SCALED": scaled, "ROWS_PER_SCALE": 1,
        "HAS_BIAS": False, "HAS_RESIDUAL": True, "HAS_ADDED": False, "PARTIAL": partial,
        "PDL": True,
    }  # fmt: skip
    kernel = compile_kernel(expert_sum._sum_vector_kernel, types, constants, config)
    check_fits(kernel)
    per_thread = config.features * config.step * (1 if scaled else 2) // (config.num_warps * 32)
    wide = r"ld\.global\.v4\.b32" if per_thread % 16 == 0 else r"ld\.global\.v2\.b32"
    assert len(re.findall(wide, kernel.asm["ptx"])) >= TOP_K * per_thread // 16


ROUTED = [(EXPERTS, 1, False, 0), (256, 8, True, 0), (60, 1, False, 0), (EXPERTS, 1, False, 4)]


def routing(
    config: RoutingConfig | FewTokensConfig,
    experts: int,
    groups: int,
    sigmoid: bool,
    buckets: bool,
    copies: int = 0,
    normed: bool = False,
) -> CompiledKernel:
    """Compiles what `route` launches with a configuration."""
    types = {
        "x": "*bf16", "weight": "*bf16", "bias": "*fp32", "logit_bias": "*fp32", "logits": "*fp32",
        "scales": "*fp32", "weights": "*fp32",
        "experts": "*i32", "counts": "*i32", "rows": "*i32", "tickets": "*i32", "scale": "fp32",
        "copy_places": "*i32", "copy_counts": "*i32", "place_totals": "*i32",
        "slot_mapping": "*i64", "norm": "*bf16", "norm_factors": "*fp32", "eps": "fp32",
    }  # fmt: skip
    spec = RoutingSpec(
        experts, expert_routing.padded_experts(experts), TOP_K, TOP_K, sigmoid, True, sigmoid,
        not sigmoid, groups, max(1, groups // 2), 2, buckets, copies, counted=True,
        has_scales=not sigmoid,
    )  # fmt: skip
    constants = {
        "HIDDEN": HIDDEN, "PART": config.experts, "STEP": config.step, "PDL": True, "S": spec,
    }  # fmt: skip
    if isinstance(config, FewTokensConfig):
        kernel, own = expert_routing._few_tokens_kernel, {"EARLY": config.early_weights}
        own["HAS_NORM"] = normed
    else:
        kernel = expert_routing._routing_kernel
        own = {"TOKENS": config.tokens, "BY_KEYS": config.by_keys}
    return compile_kernel(kernel, types, constants | own, config)


def routings() -> Iterator[tuple[int, bool, int, int, bool, int]]:
    """Yields numbers of tokens, each with all of `ROUTED`, and every other time by keys; larger
    tiles would take a minute by keys."""
    for (i, tokens), (j, routed) in product_of(enumerate((1, 100, 5000)), enumerate(ROUTED)):
        yield tokens, tokens < 5000 and (i + j) % 2 == 1, *routed


@pytest.mark.parametrize(
    ("tokens", "by_keys", "experts", "groups", "sigmoid", "copies"), list(routings())
)
def test_routing(
    tokens: int, by_keys: bool, experts: int, groups: int, sigmoid: bool, copies: int
) -> None:
    config = replace(tile_config(tokens, experts), by_keys=by_keys)
    kernel = routing(config, experts, groups, sigmoid, tokens > 16, copies)
    check_fits(kernel)
    assert "cp.async.ca" not in kernel.asm["ptx"]


@pairwise(normed=[False, True], part=[1, 2], experts__groups__sigmoid__copies=ROUTED)
def test_routing_of_few_tokens(
    experts: int, groups: int, sigmoid: bool, copies: int, part: int, normed: bool
) -> None:
    """The best expert is found by an instruction of the warp, for each of a token's experts, where
    each thread has experts of its own; 16 bytes are loaded at a time."""
    kernel = routing(FewTokensConfig(part), experts, groups, sigmoid, True, copies, normed)
    ptx = kernel.asm["ptx"]
    check_fits(kernel)
    if experts >= 128:
        assert ptx.count("redux.sync") >= 2 * TOP_K
    assert ptx.count("ld.global.v4.b32") >= (1 + part) * HIDDEN // (32 * 8)
