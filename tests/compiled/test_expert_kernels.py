"""The kernels of mixtures of experts as compiled for Hopper, without a GPU: every configuration
keeps to the registers and the shared memory, multiplies on the tensor cores it is meant for, and
loads 16 bytes at a time."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("triton")

from aioinfer.kernels import expert_linear, expert_routing
from aioinfer.kernels.expert_linear import (
    CONFIGS,
    SCANNED_CONFIGS,
    ExpertConfig,
    scanned_pairs,
    vector_config,
)
from aioinfer.kernels.expert_routing import routing_config
from triton.compiler import CompiledKernel

from tests.compiled.hopper import SHARED_MEMORY, compile_kernel, spilled

#: Qwen3-30B-A3B.
HIDDEN, CHANNELS, EXPERTS, TOP_K = 2048, 768, 128, 8


def product(
    config: ExpertConfig, *, gated: bool, scanned: bool, partial: bool = False
) -> CompiledKernel:
    """Compiles what `expert_product` launches with a configuration."""
    rows_by_tma = config.tma and not gated and not scanned
    types = {
        "x": "*bf16",
        "row_tiles": f"tensordesc<bf16[{config.rows}, {config.step}]>" if rows_by_tma else "*bf16",
        "weight": f"tensordesc<bf16[{config.lines}, {config.step}]>" if config.tma else "*bf16",
        "factors": "*fp32", "experts": "*i32", "counts": "*i32", "buckets": "*i32", "out": "*bf16",
    }  # fmt: skip
    constants = {
        "FEATURES": 2 * CHANNELS if gated else HIDDEN, "INPUTS": HIDDEN if gated else CHANNELS,
        "LINES": config.lines, "ROWS": config.rows, "STEP": config.step, "TOP_K": TOP_K,
        "EXPERTS": EXPERTS, "EXPERTS_PAD": EXPERTS,
        "PAIRS_PAD": scanned_pairs(config, TOP_K) if scanned else 0, "GATED": gated, "RUN": 8,
        "TMA": config.tma, "TMA_ROWS": rows_by_tma, "TAIL": config.tail, "PARTIAL": partial,
        "PDL": True,
    }  # fmt: skip
    return compile_kernel(expert_linear._expert_kernel, types, constants, config)


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(
    ("config", "scanned"),
    [(config, False) for _, config in CONFIGS] + [(config, True) for _, config in SCANNED_CONFIGS],
)
def test_products(
    config: ExpertConfig, scanned: bool, gated: bool, partial: bool, tmp_path: Path
) -> None:
    kernel = product(config, gated=gated, scanned=scanned, partial=partial)
    ptx = kernel.asm["ptx"]
    assert spilled(kernel, tmp_path) == 0
    assert kernel.metadata.shared <= SHARED_MEMORY
    by_warps = r"mma\.sync\S*m16n8k16\S*f32\.bf16\.bf16"
    by_groups = rf"wgmma\.mma_async\S*m64n{config.rows}k16\.f32\.bf16\.bf16"
    assert re.search(by_warps if config.rows == 8 else by_groups, ptx)
    assert "cp.async.ca" not in ptx  # less than 16 bytes at a time
    assert ("cp.async.bulk.tensor" in ptx) == config.tma


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("gated", [True, False])
def test_products_of_one_token(gated: bool, partial: bool, tmp_path: Path) -> None:
    config = vector_config(gated=gated)
    types = {
        "x": "*bf16", "weight": "*bf16", "factors": "*fp32", "experts": "*i32", "out": "*bf16"
    }  # fmt: skip
    constants = {
        "FEATURES": 2 * CHANNELS if gated else HIDDEN, "INPUTS": HIDDEN if gated else CHANNELS,
        "OUTPUTS": config.features, "STEP": config.step, "EXPERTS": EXPERTS, "GATED": gated,
        "RUN": 8, "PARTIAL": partial, "PDL": True,
    }  # fmt: skip
    kernel = compile_kernel(expert_linear._vector_kernel, types, constants, config)
    assert spilled(kernel, tmp_path) == 0
    wide = (1 + gated) * config.features * config.step // (config.num_warps * 32 * 8)
    assert kernel.asm["ptx"].count("ld.global.v4.b32") >= wide


@pytest.mark.parametrize("tokens", [1, 100, 5000])
@pytest.mark.parametrize(
    ("experts", "groups", "sigmoid", "copies"),
    [(EXPERTS, 1, False, 0), (256, 8, True, 0), (60, 1, False, 0), (EXPERTS, 1, False, 4)],
)
def test_routing(
    tokens: int, experts: int, groups: int, sigmoid: bool, copies: int, tmp_path: Path
) -> None:
    config, padded = routing_config(tokens, experts), expert_routing.padded_experts(experts)
    types = {
        "x": "*bf16", "weight": "*bf16", "bias": "*fp32", "logits": "*fp32", "weights": "*fp32",
        "experts": "*i32", "counts": "*i32", "rows": "*i32", "tickets": "*i32", "scale": "fp32",
        "copy_places": "*i32", "copy_counts": "*i32", "place_totals": "*i32",
        "slot_mapping": "*i64",
    }  # fmt: skip
    constants = {
        "HIDDEN": HIDDEN, "EXPERTS": experts, "EXPERTS_PAD": padded, "TOKENS": config.tokens,
        "PART": config.experts, "STEP": config.step, "TOP_K": TOP_K, "K_PAD": TOP_K,
        "SIGMOID": sigmoid, "NORMALIZED": True, "HAS_BIAS": sigmoid, "GROUPS": groups,
        "TOP_GROUPS": max(1, groups // 2), "GROUP_BEST": 2, "BUCKETS": tokens > 16,
        "COPIES": copies, "COUNTED": True, "SMALLEST": 1e-20, "LOWEST": -1e38, "PDL": True,
    }  # fmt: skip
    kernel = compile_kernel(expert_routing._routing_kernel, types, constants, config)
    assert spilled(kernel, tmp_path) == 0
    assert kernel.metadata.shared <= SHARED_MEMORY
    assert "cp.async.ca" not in kernel.asm["ptx"]
