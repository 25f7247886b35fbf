"""The streamed products in Gluon as compiled for Hopper, without a GPU: every configuration fits
into registers and shared memory. What they compute is tested in
`tests/gpu/test_streamed_product.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import triton
from aioinfer.kernels.streamed_product import (
    StreamWorkspace,
    _streamed_kernel,
    constants,
    streamed_product,
    supports,
)
from aioinfer.kernels.streamed_tiles import ALL_SHARED_MEMORY, TOKENS, StreamConfig, configs
from triton.compiler import CompiledKernel
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from tests.compiled.hopper import HOPPER, SHARED_MEMORY, spilled

KINDS = {"bf16": gl.bfloat16, "fp16": gl.float16, "fp8e4nv": gl.float8e4nv}
#: Programs of a multiprocessor are no constant of the kernel.
CONFIGS = [config for tokens in TOKENS for config in configs(tokens) if config.programs == 1]
POINTERS = {"bias": "*bf16", "x_scales": "*fp32", "w_scales": "*fp32", "partials": "*fp32",
            "counters": "*i32"}  # fmt: skip


def compile_product(
    config: StreamConfig, *, gated: bool = False, biased: bool = False, added: bool = False,
    scaled: bool = False, pdl: bool = True,
) -> CompiledKernel:  # fmt: skip
    """Compiles what `streamed_product` launches; `scaled`: of operands in float8."""

    def descriptor(name: str, *block: int) -> str:
        layout = gl.NVMMASharedLayout.get_default_for(list(block), KINDS[name])
        return f"tensordesc<{name}{list(block)},{layout!r}>"

    operand, step = ("fp8e4nv", 128) if scaled else ("bf16", 64)
    outputs = config.consumer_rows // 2 if gated else config.consumer_rows
    types = POINTERS | {
        "x": descriptor(operand, config.tokens, step),
        "weight": descriptor(operand, config.consumer_rows, step),
        "out": descriptor("bf16", config.tokens, outputs),
        "residual": descriptor("bf16", config.tokens, outputs),
    }
    fixed = constants(config, gated=gated, biased=biased, added=added, scaled=scaled, pdl=pdl)
    names = _streamed_kernel.arg_names
    signature = {name: "constexpr" if name in fixed else types.get(name, "i32") for name in names}
    source = GluonASTSource(
        _streamed_kernel,
        signature,
        constexprs={(names.index(name),): value for name, value in fixed.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in POINTERS},
    )
    options = {"num_warps": 4, "launch_pdl": pdl, "maxnreg": config.max_registers}
    return triton.compile(source, target=HOPPER, options=options)


def check(kernel: CompiledKernel, config: StreamConfig, folder: Path) -> None:
    """Asserts that nothing is spilled, that as many blocks fit as the configuration says, and that
    sums are exchanged 16 bytes at a time."""
    ptx = kernel.asm["ptx"]
    assert spilled(kernel, folder) == 0
    assert kernel.metadata.shared <= SHARED_MEMORY
    assert (kernel.metadata.shared + 1024) * config.blocks <= ALL_SHARED_MEMORY
    sums = config.consumer_rows * config.tokens // 128  # of a thread
    assert ptx.count("st.global.v4.b32") == config.consumers * sums // 4
    loads = ptx.count("ld.global.cg.v4.b32")
    assert loads >= config.consumers * sums // 2  # the first part and the others
    assert f"m64n{config.tokens}k" in ptx
    assert ptx.index("cp.async.bulk.tensor") < ptx.index("griddepcontrol.wait")
    assert ptx.count("griddepcontrol.launch_dependents") == 1


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_configuration(config: StreamConfig, tmp_path: Path) -> None:
    check(compile_product(config, added=True), config, tmp_path)
    check(compile_product(config, gated=True, biased=True), config, tmp_path)


@pytest.mark.parametrize("config", configs(16) + configs(128), ids=str)
def test_float8(config: StreamConfig, tmp_path: Path) -> None:
    kernel = compile_product(config, scaled=True, added=True)
    check(kernel, config, tmp_path)
    assert "f32.e4m3.e4m3" in kernel.asm["ptx"]


def test_one_configuration(tmp_path: Path) -> None:
    """And launched without dependents."""
    config = configs(32)[0]
    check(compile_product(config), config, tmp_path)
    assert "griddepcontrol" not in compile_product(config, pdl=False).asm["ptx"]


def test_tensors_on_a_cpu_are_rejected() -> None:
    x, weight = torch.zeros(4, 64, dtype=torch.bfloat16), torch.zeros(32, 64, dtype=torch.bfloat16)
    workspace = StreamWorkspace(torch.zeros(1), torch.zeros(1, dtype=torch.int32))
    assert not supports(x, weight)
    with pytest.raises(ValueError, match="no kernel"):
        streamed_product(x, weight, workspace)
    with pytest.raises(ValueError, match="x must be"):
        streamed_product(x.expand(33, 4, 64).reshape(132, 64), weight, workspace)
