"""The kernel of split products: every configuration compiles for Hopper without spilling registers,
and how products are divided.

Gluon has no interpreter; what the kernel computes is tested in `tests/gpu/test_split_product.py`.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from aioinfer.kernels.hopper_pipeline import (
    STEP,
    WEIGHT_ROWS,
    consumer_registers,
    few_registers,
    supports_product,
)
from aioinfer.kernels.split_product import (
    MAX_ROWS,
    MIN_TOKENS,
    RING_BYTES,
    SplitConfig,
    _split_kernel,
    split_config,
    split_product,
    whole_product,
)
from triton.compiler import CompiledKernel
from triton.experimental.gluon import language as gl

from tests.compiled.hopper import adapter_types, box, check_fits, compile_gluon


def compile_kernel(
    config: SplitConfig, tokens: int, pdl: bool, *, adapted: bool = False
) -> CompiledKernel:
    """Compiles what `split_product` launches for so many rows, for Hopper, without a GPU."""
    bf16 = gl.bfloat16
    types = {
        "x": box(bf16, tokens, STEP), "weight": box(bf16, WEIGHT_ROWS, STEP), "bias": "*bf16",
        "out": "*fp32", **adapter_types(bf16, tokens, adapted=adapted),
    }  # fmt: skip
    stage = (WEIGHT_ROWS * config.consumers + tokens) * STEP * 2
    registers = few_registers(tokens)
    constants = {
        "PARTS": config.parts, "CONSUMERS": config.consumers, "HAS_BIAS": True,
        "STAGES": RING_BYTES // stage, "PDL": pdl, "ADAPTED": adapted,
        "REGISTERS": consumer_registers(registers, config.consumers),
    }  # fmt: skip
    return compile_gluon(_split_kernel, types, constants, pdl=pdl, registers=registers)


@pytest.mark.parametrize("tokens", [MIN_TOKENS, 32, 64, MAX_ROWS])
@pytest.mark.parametrize(("consumers", "adapted"), [(1, False), (2, False), (1, True)])
def test_every_configuration_compiles_without_spilling_registers(
    consumers: int, adapted: bool, tokens: int
) -> None:
    kernel = compile_kernel(SplitConfig(consumers, 2), tokens, pdl=True, adapted=adapted)
    check_fits(kernel)
    for instruction in ("wgmma.mma_async", "griddepcontrol.wait", "griddepcontrol.launch"):
        assert instruction in kernel.asm["ptx"]


def test_parts_fill_the_card() -> None:
    """Qwen3-8B's output projection and down, Qwen2.5-7B's, and a weight with tiles enough."""
    assert split_config(4096, 12288, 132, 1) == SplitConfig(1, 2)
    assert split_config(4096, 4096, 132, 2) == SplitConfig(2, 4)
    assert split_config(3584, 18944, 132, 1) == SplitConfig(1, 2)
    assert split_config(12288, 4096, 132, 1) == SplitConfig(1, 1)
    assert split_config(64, 128, 132, 1) == SplitConfig(1, 2)  # one stage each


def test_tensors_on_a_cpu_are_rejected() -> None:
    x, weight = torch.zeros(4, 64, dtype=torch.bfloat16), torch.zeros(32, 64, dtype=torch.bfloat16)
    assert not supports_product(x, weight)
    with pytest.raises(ValueError, match="x must be"):
        split_product(x, weight, SplitConfig(1, 1))
    with pytest.raises(ValueError, match="one part"):
        whole_product(x, weight, SplitConfig(1, 2))
