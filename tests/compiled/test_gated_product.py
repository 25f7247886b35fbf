"""The gated product's kernel: every configuration compiles for Hopper without spilling registers,
and the order of its weight.

Gluon has no interpreter; what the kernel computes is tested in `tests/gpu/test_kernels.py`.
"""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("triton")

import triton
from aioinfer.kernels.activation import BLOCK, GATE_RUN, KINDS, _gated_activation_kernel
from aioinfer.kernels.gated_product import (
    CONFIGS,
    TILE_TIMES,
    GatedConfig,
    _gated_kernel,
    candidates,
    gated_config,
    gated_product,
    interleave,
    supports,
)
from aioinfer.kernels.hopper_pipeline import STEP, WEIGHT_ROWS, consumer_registers
from triton.compiler import ASTSource, CompiledKernel
from triton.experimental.gluon import language as gl

from tests.compiled.hopper import (
    HOPPER,
    SHARED_MEMORY,
    adapter_types,
    box,
    compile_gluon,
    resources,
)
from tests.kernels.references import product_reference

# the accumulators of the widest tile fill the registers
FULLEST = [(config, "fp16", False) for config in CONFIGS if config.tokens == 256]


def compile_kernel(
    config: GatedConfig, dtype: str, pdl: bool, *, adapted: bool = False
) -> CompiledKernel:
    """Compiles what `gated_product` launches with `config`, for Hopper, without a GPU."""
    kind = {"bf16": gl.bfloat16, "fp16": gl.float16}[dtype]
    types = {
        "x": box(kind, config.tokens, STEP),
        "weight": box(kind, WEIGHT_ROWS, STEP),
        "out": box(kind, config.tokens, WEIGHT_ROWS // 2),
        **adapter_types(kind, config.tokens, adapted=adapted),
    }
    constants = {
        "CONSUMERS": config.consumers, "STAGES": config.stages - adapted, "GROUP": config.group,
        "REGISTERS": consumer_registers(config.registers, config.consumers), "PDL": pdl,
        "ADAPTED": adapted,
    }  # fmt: skip
    return compile_gluon(_gated_kernel, types, constants, pdl=pdl, registers=config.registers)


@pytest.mark.parametrize(
    ("config", "dtype", "pdl"), [(config, "bf16", True) for config in CONFIGS] + FULLEST
)
def test_every_configuration_compiles_without_spilling_registers(
    config: GatedConfig, dtype: str, pdl: bool
) -> None:
    kernel = compile_kernel(config, dtype, pdl)
    used = resources(kernel)
    assert used["STACK"] == used["LOCAL"] == 0
    assert used["REG"] * 32 * (4 * config.consumers + 4) <= 65536
    assert kernel.metadata.shared <= SHARED_MEMORY
    assert "wgmma.mma_async" in kernel.asm["ptx"]
    assert [
        kernel.asm["ptx"].count(f"griddepcontrol.{what};") for what in ("wait", "launch_dependents")
    ] == [pdl, pdl]


@pytest.mark.parametrize("config", TILE_TIMES)
def test_products_with_adapters_compile_without_spilling_registers(config: GatedConfig) -> None:
    used = resources(compile_kernel(config, "bf16", True, adapted=True))
    assert used["STACK"] == used["LOCAL"] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_gated_activation_reads_and_writes_sixteen_bytes_at_a_time(kind: str) -> None:
    """A run of gate columns is 16 bytes long: the compiler has to see that it is contiguous."""
    names = _gated_activation_kernel.arg_names
    constants = {"BLOCK": BLOCK, "RUN": GATE_RUN, "KIND": kind, "PDL": False}
    signature = {
        name: "constexpr" if name in constants else "*bf16" if name in ("gate_up", "out") else "i32"
        for name in names
    }
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if name not in constants
    }
    source = ASTSource(
        _gated_activation_kernel,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        aligned,
    )
    ptx = triton.compile(source, target=HOPPER, options={"num_warps": 4}).asm["ptx"]
    assert re.findall(r"(?:ld|st)\.global\S*", ptx) == ["ld.global.v4.b32"] * 2 + [
        "st.global.v4.b32"
    ]


def test_interleaving_alternates_runs_of_gate_and_up() -> None:
    weight = torch.arange(48 * 3).view(48, 3)
    interleaved = interleave(weight)
    for n in range(24):
        assert torch.equal(interleaved[16 * (n // 8) + n % 8], weight[n])
        assert torch.equal(interleaved[16 * (n // 8) + n % 8 + 8], weight[24 + n])
    bias = torch.arange(32)
    assert torch.equal(interleave(bias), interleave(bias[:, None])[:, 0])
    with pytest.raises(ValueError, match="multiple of 8"):
        interleave(torch.zeros(24, 3))


def test_the_reference_is_silu_of_gate_times_up() -> None:
    x, weight = torch.randn(5, 20, dtype=torch.float64), torch.randn(48, 20, dtype=torch.float64)
    gate, up = (x @ weight.T).chunk(2, dim=-1)
    torch.testing.assert_close(
        product_reference(x, interleave(weight), gated=True), torch.nn.functional.silu(gate) * up
    )


def test_configurations_by_number_of_rows_and_width_of_the_weight() -> None:
    """As measured: the largest tile for 256 rows of Qwen3-8B and for large steps; a narrow weight
    takes smaller tiles, which occupy more multiprocessors."""
    wide = {64: 64, 128: 128, 192: 64, 256: 256, 512: 256, 8192: 256}
    narrow = {64: 64, 128: 64, 256: 64, 512: 128, 8192: 256}
    for width, tokens in ((12288, wide), (3072, narrow)):
        assert {rows: gated_config(rows, width, 132).tokens for rows in tokens} == tokens


def test_few_rows_take_the_tiles_whose_last_wave_is_full() -> None:
    """The fastest that were measured with the weights of Qwen3-8B, Llama-3.1-8B, Qwen2.5-7B and
    Qwen3-32B, or within 2 % of it."""
    measured = {12288: (3, 3, 3), 14336: (2, 2, 2), 18944: (1, 1, 3), 25600: (1, 1, 2)}
    for features, consumers in measured.items():
        for rows, expected in zip((32, 64, 128), consumers, strict=True):
            assert gated_config(rows, features, 132) == GatedConfig(rows, expected)


def test_candidates_differ_in_weight_rows_where_reading_the_weight_is_the_bound() -> None:
    assert [(config.tokens, config.consumers) for config in candidates(32)] == [
        (32, 3), (32, 2), (32, 1)
    ]  # fmt: skip
    assert {config.tokens for config in candidates(33)} == {64}
    assert candidates(128)[0] in TILE_TIMES
    assert candidates(129) == list(TILE_TIMES)


def test_tensors_on_a_cpu_are_rejected() -> None:
    x, weight = torch.zeros(4, 64, dtype=torch.bfloat16), torch.zeros(32, 64, dtype=torch.bfloat16)
    assert not supports(x, weight)
    with pytest.raises(ValueError, match="supports"):
        gated_product(x, weight)
