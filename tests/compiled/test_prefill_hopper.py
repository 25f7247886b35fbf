"""The prefill kernel for Hopper: every supported shape compiles and fits into shared memory.

Gluon has no interpreter; what the kernel computes is tested in `tests/gpu/test_kernels.py`.
"""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import triton
from aioinfer.kernels.prefill_hopper import ROWS, _prefill_kernel, pipeline_stages
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

HOPPER = GPUTarget("cuda", 90, 32)
SHARED_MEMORY = 227 * 1024  # of a thread block
POINTERS = {
    "q": "*bf16",
    "out": "*bf16",
    "block_tables": "*i32",
    "query_starts": "*i32",
    "seq_lens": "*i32",
    "plan": "*i32",
    "sinks": "*fp32",
}
NUMBERS = dict.fromkeys(("scale", "soft_cap", "v_scale"), "fp32")
NAMES = ("head_size", "block_size", "window", "soft_cap", "has_sinks")


@pytest.mark.parametrize(
    NAMES,
    [
        (64, 64, 0, False, False),
        (64, 128, 128, False, True),
        (128, 64, 0, False, False),
        (128, 128, 0, False, False),
        (128, 128, 100, True, True),
        (256, 64, 0, False, False),
    ],
)
def test_every_supported_shape_compiles(
    head_size: int, block_size: int, window: int, soft_cap: bool, has_sinks: bool
) -> None:
    block = [block_size, head_size]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
    descriptor = f"tensordesc<bf16{block},{layout!r}>"
    constants = {
        "KV_HEADS": 8, "GROUP": 4, "HEAD_SIZE": head_size, "WINDOW": window, "SOFT_CAP": soft_cap,
        "HAS_SINKS": has_sinks,
        "TILE": block_size, "ROWS": ROWS, "STAGES": pipeline_stages(head_size, block_size),
    }  # fmt: skip
    types = POINTERS | NUMBERS | {"keys": descriptor, "values": descriptor}
    names = _prefill_kernel.arg_names
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32") for name in names
    }
    source = GluonASTSource(
        _prefill_kernel,
        signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
    )
    kernel = triton.compile(source, target=HOPPER, options={"num_warps": 4})
    assert kernel.metadata.shared <= SHARED_MEMORY
    assert "wgmma.mma_async" in kernel.asm["ptx"]
    assert "cp.async.bulk.tensor" in kernel.asm["ptx"]
