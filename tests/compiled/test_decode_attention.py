"""The decode attention kernel as compiled for Hopper, without a GPU: how many barriers it takes."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import triton
from aioinfer.kernels.decode_attention import (
    PLAN_FIELDS,
    _decode_kernel,
    decode_config,
    merged_splits,
)
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

HEAD_SIZE, KV_HEADS = 128, 8
TYPES = {
    "*bf16": ("q", "k_cache", "v_cache", "out", "q_weight", "k_weight"),
    "*i32": ("block_tables", "seq_lens", "plan", "counters"),
    "*fp32": ("partials", "maxima", "sums", "cos_sin"),
    "fp32": ("scale", "soft_cap", "v_scale", "eps", "k_inverse", "v_inverse"),
}


def barriers(group: int, *, projected: bool) -> int:
    """Returns the number of barriers in the kernel that `launch_decode` launches for Qwen3's heads
    in bf16, those of the merge included."""
    config, names = decode_config(HEAD_SIZE, 2), _decode_kernel.arg_names
    constants = {
        "KV_HEADS": KV_HEADS, "GROUP": group, "GROUP_PAD": group, "ROWS": 16,
        "HEAD_SIZE": HEAD_SIZE, "HEAD_PAD": HEAD_SIZE,
        "BLOCK_SIZE": 128, "TILE": config.tile, "WINDOW": 0, "SOFT_CAP": False,
        "FIELDS": PLAN_FIELDS,
        "SPLITS": merged_splits(group, HEAD_SIZE), "PDL": True,
        "PROJECTED": projected, "ROTARY": HEAD_SIZE if projected else 0, "HAS_NORM": projected,
    }  # fmt: skip
    types = {name: kind for kind, those in TYPES.items() for name in those}
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32") for name in names
    }
    aligned = [
        name for name, kind in signature.items() if kind.startswith("*") or name.endswith("stride")
    ]
    source = ASTSource(
        _decode_kernel, signature,
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )  # fmt: skip
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return (
        triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        .asm["ptx"]
        .count("bar.sync")
    )


@pytest.mark.parametrize("group", [2, 4])
def test_norm_and_rope_in_the_kernel_take_few_barriers(group: int) -> None:
    """Barriers are needed only where layouts are converted: there were 49 when every tensor had a
    layout of its own."""
    extra = barriers(group, projected=True) - barriers(group, projected=False)
    assert 0 < extra <= 12
