"""The products of many rows with 4-bit weights in Gluon: every configuration compiles for Hopper,
keeps to the registers, and expands words while the tensor cores multiply. What they compute is
tested in `tests/gpu/test_grouped_hopper.py`."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from aioinfer.kernels.grouped_hopper import SCALE_BOX, _kernel, scales_of_unit, word_layout
from aioinfer.kernels.grouped_hopper_configs import (
    REGISTERS,
    GroupedHopperConfig,
    configs,
    grouped_hopper_config,
)
from aioinfer.kernels.grouped_weight import MAX_RUN, TILE, PackedGroups
from aioinfer.kernels.hopper_pipeline import WEIGHT_ROWS, scale_layout
from triton.compiler import CompiledKernel
from triton.experimental.gluon import language as gl

from tests.compiled.hopper import box, check_fits, compile_gluon, machine_code, weight_of
from tests.pairs import pairwise

pytestmark = pytest.mark.extended

#: Output features (of gate and up together) and inputs of Qwen3-8B's layers.
SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}


def compile_product(
    weight: PackedGroups, config: GroupedHopperConfig, *, gated: bool, dtype: str = "bf16"
) -> CompiledKernel:
    """Compiles what `grouped_hopper` launches: with a residual where it is not gated."""
    kind = {"bf16": gl.bfloat16, "fp16": gl.float16}[dtype]
    outputs = WEIGHT_ROWS // 2 if gated else WEIGHT_ROWS
    words = [WEIGHT_ROWS // TILE, 1, TILE, MAX_RUN]
    types = {
        "x": box(kind, config.tokens, MAX_RUN),
        "packed": f"tensordesc<i16{words},{word_layout()!r}>",
        "scales": f"tensordesc<i32{[1, SCALE_BOX]},{scale_layout()!r}>",
        "out": box(kind, config.tokens, outputs),
        "residual": box(kind, config.tokens, outputs),
        "partials": "*fp32", "counters": "*i32",
    }  # fmt: skip
    constants = {
        "STAGES": config.stages, "WORD_STAGES": config.word_stages,
        "SCALES": scales_of_unit(weight.group), "SIZE": weight.group, "SHARED": config.splits > 1,
        "GROUP": config.group, "HAS_ZEROS": weight.has_zeros, "GATED": gated,
        "HAS_RESIDUAL": not gated, "REGISTERS": REGISTERS, "PDL": True,
    }  # fmt: skip
    return compile_gluon(_kernel, types, constants, aligned=("partials", "counters"))


def check(kernel: CompiledKernel) -> None:
    """Checks what every configuration has in common."""
    # Programs that share a tile displace a few numbers over the loop.
    check_fits(kernel, spilled=48)
    code = machine_code(kernel)
    # Each of three consumers multiplies 4 runs of 4 steps, and waits for all of its products only
    # after the last run: ptxas waits after each where registers do not suffice.
    assert code.count("HGMMA.64x") == 3 * 16
    assert code.count("WARPGROUP.DEPBAR.LE gsb0, 0x1") == 3 * 3
    assert code.count("WARPGROUP.DEPBAR.LE gsb0, 0x0") == 3
    # words are read as the tensor cores' operand lies in registers
    assert code.count("LDSM.16.M88.4") == 3 * 2 * 4  # before the loop and in it


@pairwise(
    tokens=[64, 128],
    gated=[False, True],
    group__has_zeros__dtype=[
        (64, True, "bf16"), (64, False, "fp16"), (128, True, "bf16"), (128, False, "fp16"),
        (4096, True, "fp16"),
    ],
)  # fmt: skip
def test_groups(tokens: int, group: int, has_zeros: bool, dtype: str, gated: bool) -> None:
    weight = weight_of(4096, 4096, group=group, has_zeros=has_zeros)
    config = next(c for c in configs(256, weight, gated) if c.tokens == tokens)
    check(compile_product(weight, config, gated=gated, dtype=dtype))


def every_configuration() -> list[tuple[GroupedHopperConfig, bool]]:
    """Returns the configurations of all shapes, each once, and whether the product is gated."""
    shapes = [(weight_of(*shape), name == "gate_up") for name, shape in SHAPES.items()]
    found = {(c, gated) for weight, gated in shapes for c in configs(128, weight, gated)}
    return sorted(found, key=str)


@pytest.mark.parametrize(("config", "gated"), every_configuration())
def test_every_configuration(config: GroupedHopperConfig, gated: bool) -> None:
    check(compile_product(weight_of(*SHAPES["qkv"]), config, gated=gated))


@pytest.mark.sample
def test_one_configuration() -> None:
    weight = weight_of(512, 4096)
    config = GroupedHopperConfig(64, 4, 8, splits=2)
    check(compile_product(weight, config, gated=False))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_table_has_a_configuration_for_every_number_of_rows(shape: str) -> None:
    """All programs of a split product have inputs, and its tiles counters."""
    weight, is_gated = weight_of(*SHAPES[shape]), shape == "gate_up"
    for rows in (*range(1, 520, 7), 8192):
        config = grouped_hopper_config(rows, weight, 132, gated=is_gated)
        share = -(-weight.units // config.splits)
        assert share * (config.splits - 1) < weight.units
        tiles = -(-rows // config.tokens) * -(-weight.features // (3 * WEIGHT_ROWS))
        assert config.splits == 1 or 3 * tiles <= len(weight.counters)
