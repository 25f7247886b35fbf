"""Products of few rows with 4-bit weights in groups, compiled for Hopper without a GPU: weights and
x go from memory to the tensor cores' registers by 16 bytes, and registers suffice.

Gluon has no interpreter; what it computes is tested in `tests/gpu/test_few_rows_grouped.py`.
"""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton")

import torch
from aioinfer.kernels.few_rows_grouped import (
    FewRowsGroupedConfig,
    GroupedSpec,
    _kernel,
    few_rows_grouped,
    few_rows_grouped_config,
    supports,
)
from aioinfer.kernels.grouped_weight import PackedGroups
from triton.compiler import CompiledKernel

from tests.compiled.hopper import check_fits, compile_gluon, weight_of

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def compile_kernel(
    weight: PackedGroups,
    config: FewRowsGroupedConfig,
    dtype: str = "bf16",
    *,
    normed: bool = False,
    gated: bool = False,
) -> CompiledKernel:
    """Compiles what `few_rows_grouped` launches."""
    constants = {
        "HAS_NORM": normed, "HAS_RESIDUAL": not gated, "GATED": gated, "PDL": True,
        "S": GroupedSpec.of(weight, config, DTYPES[dtype]),
    }  # fmt: skip
    types = {"packed": "*i16", "scales": "*i32", "eps": "fp32"}
    types |= dict.fromkeys(("x", "norm", "residual", "out"), f"*{dtype}")
    return compile_gluon(
        _kernel, types, constants, registers=config.registers, num_warps=config.warps
    )


def count_loads(ptx: str) -> dict[str, int]:
    """Returns how many loads from global memory have each width, by its name."""
    widths = re.findall(r"ld\.global\.(\S+)", ptx)
    return {width: widths.count(width) for width in set(widths)}


@pytest.mark.parametrize(
    ("shape", "dtype", "has_zeros", "gated"),
    [
        ((24576, 4096), "bf16", False, True),
        ((4096, 12288), "bf16", True, False),
        ((6144, 4096), "fp16", True, False),
    ],
)
def test_words_and_x_are_loaded_by_sixteen_bytes_without_spilling(
    shape: tuple[int, int], dtype: str, has_zeros: bool, gated: bool
) -> None:
    weight = weight_of(*shape, has_zeros=has_zeros)
    config = few_rows_grouped_config(weight)
    kernel = compile_kernel(weight, config, dtype, gated=gated)
    check_fits(kernel, spilled=64)
    ptx, shares = kernel.asm["ptx"], weight.units // config.warps
    # words: four loads a unit, those before the loop and those in it; x: eight a unit
    loads, in_loop = count_loads(ptx), config.depth if shares == 1 else shares
    assert loads["v4.b32"] == 4 * (config.depth + in_loop) + 8 * shares
    # scales: two groups of a unit for two output features; residuals
    assert loads["b32"] == 4 * (config.depth + in_loop)
    # products: a unit is 16 of inputs; the sums of x as many
    assert ptx.count("mma.sync.aligned.m16n8k16.row.col.f32.") == 16 * (in_loop + shares)
    before = ptx[: ptx.index("griddepcontrol.wait")]
    assert before.count("ld.global.v4.b32") == 4 * config.depth
    assert kernel.metadata.shared <= 16 * 1024


@pytest.mark.parametrize("config", [FewRowsGroupedConfig(16, 2), FewRowsGroupedConfig(8, 2, 2)])
def test_the_norm_of_one_row_is_part_of_the_kernel(config: FewRowsGroupedConfig) -> None:
    """Its weights are loaded before the wait for the preceding kernel; of x only what the norm
    takes is loaded from memory."""
    weight = weight_of(24576, 4096)
    kernel = compile_kernel(weight, config, normed=True, gated=True)
    check_fits(kernel, spilled=64)
    ptx = kernel.asm["ptx"]
    before, after = ptx.split("griddepcontrol.wait")
    numbers = weight.inputs // (32 * config.warps)  # of a thread, two a load
    assert before.count("ld.global.b32") == 4 * config.depth + numbers // 2
    assert after.count("ld.global.v4.b32") == 4 * 2  # words of the items that come next
    assert kernel.metadata.shared <= 2 * weight.inputs + 16 * 1024


@pytest.mark.parametrize(("group", "inputs"), [(32, 4096), (64, 320), (384, 768), (None, 1000)])
def test_other_groups_and_edges_compile(group: int | None, inputs: int) -> None:
    weight = weight_of(40, inputs, group=group, has_zeros=True)
    kernel = compile_kernel(weight, few_rows_grouped_config(weight))
    check_fits(kernel, spilled=48)  # groups of 64 need twice the sums of x
    width = "v2.b32" if weight.run == 32 else "v4.b32"
    # rows of x, whose stride is a multiple of eight elements, are read by as much as words are
    assert count_loads(kernel.asm["ptx"])[width] >= 8


def test_tensors_on_a_cpu_are_rejected() -> None:
    weight, x = weight_of(16, 256), torch.zeros(1, 256, dtype=torch.bfloat16)
    assert not supports(x, weight)
    with pytest.raises(ValueError, match="supports"):
        few_rows_grouped(x, weight)
    with pytest.raises(ValueError, match="x must be"):
        few_rows_grouped(torch.zeros(9, 256), weight)
