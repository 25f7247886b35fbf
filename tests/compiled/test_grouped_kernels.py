"""Products with weights in groups as compiled for Hopper, without a GPU: every configuration of the
table fits, and weights go from shared memory to the tensor cores without a detour."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("triton")

import torch
import triton
from aioinfer.kernels.grouped_product import GroupedConfig, _kernel, grouped_config
from aioinfer.kernels.grouped_weight import TILE, PackedGroups, pack_groups
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

SHARED_MEMORY = 227 * 1024  # of a thread block
POINTERS = {"packed": "*i16", "scales": "*i32", "partials": "*fp32", "counters": "*i32"}
ACTIVATIONS = ("x", "residual", "out")


def compile_kernel(
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
    names = _kernel.arg_names
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32") for name in names
    }
    aligned = [
        name
        for name, kind in signature.items()
        if kind.startswith("*") or name.endswith("stride") or name in ("features", "width")
    ]
    source = ASTSource(
        _kernel, signature,
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )  # fmt: skip
    options = {"num_warps": config.num_warps}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def weight_of(
    features: int, inputs: int, *, bits: int = 4, group: int = 128, has_zeros: bool = False
) -> PackedGroups:
    shape = features, inputs // group
    zeros = torch.zeros(shape) if has_zeros else None
    integers = torch.zeros(features, inputs, dtype=torch.uint8)
    return pack_groups(integers, torch.ones(shape), zeros, bits, group)


def bytes_of_stack(kernel: CompiledKernel, folder: Path) -> int:
    """Returns the bytes of local memory, where registers are spilled to."""
    file = folder / "kernel.cubin"
    file.write_bytes(kernel.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    listed = subprocess.run([tool, "-res-usage", file], capture_output=True, text=True, check=True)
    found = re.search(r"STACK:(\d+).* LOCAL:(\d+)", listed.stdout)
    assert found is not None
    return int(found[1]) + int(found[2])


@pytest.mark.parametrize(
    ("rows", "gated", "bits", "group", "has_zeros", "dtype"),
    [
        (1, True, 4, 128, False, "bf16"),
        (8, False, 4, 128, True, "fp16"),
        (64, True, 4, 128, True, "bf16"),
    ],
)
def test_configurations_fit(
    rows: int, gated: bool, bits: int, group: int, has_zeros: bool, dtype: str, tmp_path: Path
) -> None:
    shape = (24576, 4096) if gated else (4096, 12288)
    weight = weight_of(*shape, bits=bits, group=group, has_zeros=has_zeros)
    config = grouped_config(rows, weight)
    kernel = compile_kernel(weight, config, dtype, gated=gated)
    assert kernel.metadata.shared <= SHARED_MEMORY
    assert bytes_of_stack(kernel, tmp_path) == 0
    code = kernel.asm["ttgir"]
    words = rf"tensor<{config.features}x{weight.run}xi16, #ttg.dot_op<{{opIdx = 0"
    assert len(re.findall(rf"ttg.local_load .*{re.escape(words)}", code)) == 1
    converted = rf"ttg.convert_layout .*tensor<{config.features}x{weight.run}x(i16|bf16|f16)"
    assert not re.search(converted, code), "weights change their layout on the way"
    # words, scales and the activations of each run are copied ahead
    assert code.count("ttg.async_copy_global_to_local") >= 2 * (1 + 16 // bits)
