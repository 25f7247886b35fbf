"""Products with weights in groups as compiled for Hopper, without a GPU: every configuration of the
table fits, and weights go from shared memory to the tensor cores without a detour."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton")

from aioinfer.kernels.grouped_product import GroupedConfig, _kernel, grouped_config
from aioinfer.kernels.grouped_weight import TILE, PackedGroups
from triton.compiler import CompiledKernel

from tests.compiled.hopper import SHARED_MEMORY, compile_kernel, resources, weight_of

POINTERS = {"packed": "*i16", "scales": "*i32", "partials": "*fp32", "counters": "*i32"}
ACTIVATIONS = ("x", "residual", "out")


def compile_product(
    weight: PackedGroups, config: GroupedConfig, dtype: str = "bf16", *, gated: bool = False
) -> CompiledKernel:
    """Compiles what `grouped_product` launches."""
    offset = 0 if weight.bits == 8 else {"bf16": 128, "fp16": 1024}[dtype]
    constants = {
        "INPUTS": weight.inputs, "UNITS": weight.units, "RUN": weight.run, "GROUP": weight.group,
        "BITS": weight.bits, "TILE": TILE, "FEATURES": config.features, "ROWS": config.rows,
        "SPLITS": config.splits, "STAGES": config.num_stages, "OFFSET": offset,
        "HAS_ZEROS": weight.has_zeros, "HAS_RESIDUAL": not gated, "GATED": gated,
        "GATE": 8, "PDL": True,
    }  # fmt: skip
    types = {**POINTERS, **dict.fromkeys(ACTIVATIONS, f"*{dtype}")}
    divisible = ("stride", "features", "width")
    return compile_kernel(_kernel, types, constants, config, divisible=divisible)


@pytest.mark.parametrize(
    ("rows", "gated", "bits", "group", "has_zeros", "dtype"),
    [
        (1, True, 4, 128, False, "bf16"),
        (8, False, 4, 128, True, "fp16"),
        (64, True, 4, 128, True, "bf16"),
    ],
)
def test_configurations_fit(
    rows: int, gated: bool, bits: int, group: int, has_zeros: bool, dtype: str
) -> None:
    shape = (24576, 4096) if gated else (4096, 12288)
    weight = weight_of(*shape, bits=bits, group=group, has_zeros=has_zeros)
    config = grouped_config(rows, weight)
    kernel = compile_product(weight, config, dtype, gated=gated)
    assert kernel.metadata.shared <= SHARED_MEMORY
    used = resources(kernel)
    assert used["STACK"] == used["LOCAL"] == 0
    code = kernel.asm["ttgir"]
    words = rf"tensor<{config.features}x{weight.run}xi16, #ttg.dot_op<{{opIdx = 0"
    assert len(re.findall(rf"ttg.local_load .*{re.escape(words)}", code)) == 1
    converted = rf"ttg.convert_layout .*tensor<{config.features}x{weight.run}x(i16|bf16|f16)"
    assert not re.search(converted, code), "weights change their layout on the way"
    # words, scales and the activations of each run are copied ahead
    assert code.count("ttg.async_copy_global_to_local") >= 2 * (1 + 16 // bits)
