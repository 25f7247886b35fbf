"""The float8 products of few rows in Gluon as compiled for Hopper, without a GPU: no configuration
spills, weights are read 16 bytes at a time and converted in pairs, and the tensor cores multiply
float16. What they compute is tested in `tests/gpu/test_few_rows_float8.py`."""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("triton")

from aioinfer.kernels.few_rows_float8 import (
    FewRowsFloat8Config,
    _few_rows_kernel,
    constants,
    few_rows_float8,
    few_rows_float8_config,
    supports,
)
from aioinfer.kernels.few_rows_scaled import ScaledMatrix
from triton.compiler import CompiledKernel

from tests.compiled.hopper import SHARED_MEMORY, compile_gluon, machine_code, resources

pytestmark = pytest.mark.extended

TYPES = {
    "x": "*bf16", "weight": "*fp8e4nv", "scales": "*fp32", "norm": "*bf16", "residual": "*bf16",
    "out": "*bf16", "eps": "fp32",
}  # fmt: skip
#: Machine instructions a weight in the loop over tiles, at most; with scales of blocks.
INSTRUCTIONS = {False: 1.6, True: 1.7}


def compile_product(
    config: FewRowsFloat8Config, rows: int, inputs: int, *, normed: bool, gated: bool, run: int
) -> CompiledKernel:
    """Compiles what `few_rows_float8` launches; `run`: rows that share scales of blocks, or 0."""
    fixed = constants(config, rows, inputs) | {
        "HAS_NORM": normed, "HAS_RESIDUAL": not gated, "GATED": gated, "GROUPED": run > 0,
        "ROWS_PER_SCALE": max(run, 1), "PDL": True, "EARLY_TRIGGER": False,
    }  # fmt: skip
    return compile_gluon(
        _few_rows_kernel, TYPES, fixed, aligned=("x_stride",), num_warps=config.num_warps
    )


def instructions(kernel: CompiledKernel) -> list[str]:
    """Returns the names of the machine instructions of the loop over output tiles."""
    text = machine_code(kernel)
    names = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)", text)
    return names[names.index("EXIT") + 1 :]  # a program without a tile ends before the loop


@pytest.mark.parametrize("rows", [1, 2, 8])
@pytest.mark.parametrize(
    ("lines", "inputs", "run", "normed", "gated"),
    [
        (6144, 4096, 0, True, False), (24576, 4096, 0, True, True), (4096, 12288, 0, False, False),
        (24576, 4096, 8, True, True), (4096, 12288, 128, False, False),
        (576, 1536, 1, False, False),
    ],
)  # fmt: skip
def test_the_tables_configurations(
    rows: int, lines: int, inputs: int, run: int, normed: bool, gated: bool
) -> None:
    config = few_rows_float8_config(rows, lines, inputs, grouped=run > 0)
    kernel = compile_product(config, rows, inputs, normed=normed, gated=gated, run=run)
    ptx = kernel.asm["ptx"]
    used = resources(kernel)
    assert used["STACK"] == 0
    assert used["REG"] * 32 * config.num_warps * config.programs <= 65536
    assert kernel.metadata.shared * config.programs <= SHARED_MEMORY
    assert set(re.findall(r"mma\.sync\S*", ptx)) == {
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
    }
    steps = -(-inputs // (config.num_warps * 128))
    vectors = steps * config.features // 4  # of a thread in a tile
    assert ptx.count("ld.global.v4.b32") >= vectors
    assert ptx.index("ld.global.v4.b32") < ptx.index("griddepcontrol.wait")
    assert ptx.count("griddepcontrol.wait") == ptx.count("griddepcontrol.launch_dependents") == 1
    loop = instructions(kernel)
    weights = steps * config.features * 4  # of a thread in a tile
    assert loop.count("F2FP.F16.E4M3.UNPACK_B") <= weights / 2  # less where K is no whole step
    assert loop.count("HMMA.16816.F32") <= weights / 8
    if inputs >= 4096:
        assert len(loop) / weights < INSTRUCTIONS[run > 0]


@pytest.mark.sample
def test_other_weights_and_machines_are_rejected() -> None:
    x, values = torch.zeros(1, 64, dtype=torch.bfloat16), torch.zeros(32, 64)
    weight = ScaledMatrix(values.to(torch.float8_e4m3fn), torch.ones(32, 1))
    assert not supports(x, weight)  # on a CPU
    with pytest.raises(ValueError, match="no kernel"):
        few_rows_float8(x, weight)
    with pytest.raises(ValueError, match="x must be"):
        few_rows_float8(x.expand(9, -1), weight)
