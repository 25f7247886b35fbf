"""The decode attention kernel as compiled for Hopper, without a GPU: how many barriers it takes,
and how it converts a KV cache in float8."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton")

from aioinfer.kernels.decode_attention import _decode_kernel, merged_splits
from aioinfer.kernels.decode_plan import PLAN_FIELDS, decode_config

from tests.compiled.hopper import compile_kernel, names_to_types

HEAD_SIZE, KV_HEADS = 128, 8
TYPES = {
    "*bf16": ("q", "out", "q_weight", "k_weight"),
    "*i32": ("block_tables", "seq_lens", "plan", "counters", "shared_rows"),
    "*fp32": (
        "partials",
        "maxima",
        "sums",
        "cos_sin",
        "scales",
        "key_shifts",
        "sinks",
        "prefix_states",
    ),
    "fp32": ("scale", "soft_cap", "eps"),
}


def compiled(
    group: int,
    *,
    projected: bool,
    is_float8: bool = False,
    fp16_operands: bool = False,
    has_sinks: bool = False,
    paired: bool = False,
) -> str:
    """Returns the PTX of the kernel that `launch_decode` launches for Qwen3's heads and queries in
    bf16."""
    config = decode_config(HEAD_SIZE, 1 if is_float8 else 2)
    constants = {
        "KV_HEADS": KV_HEADS, "GROUP": group, "GROUP_PAD": group, "ROWS": 16,
        "HEAD_SIZE": HEAD_SIZE, "HEAD_PAD": HEAD_SIZE,
        "BLOCK_SIZE": 128, "TILE": config.tile, "WINDOW": 0, "SOFT_CAP": False,
        "FIELDS": PLAN_FIELDS,
        "SPLITS": merged_splits(group, HEAD_SIZE), "PDL": True,
        "PROJECTED": projected, "ROTARY": HEAD_SIZE if projected else 0, "HAS_NORM": projected,
        "HAS_SCALES": is_float8, "HAS_SHIFTS": is_float8 and projected,
        "FP16_OPERANDS": fp16_operands, "HAS_SINKS": has_sinks,
        "CASCADE": False, "PREFIX_ROWS": 0, "MAX_ROWS": 0, "PREFIX_LINES": 0,
        "PAIRED": paired, "BY_ASSEMBLY": paired,
    }  # fmt: skip
    types = names_to_types(TYPES)
    types |= dict.fromkeys(("k_cache", "v_cache"), "*fp8e4nv" if is_float8 else "*bf16")
    kernel = compile_kernel(_decode_kernel, types, constants, config, divisible="stride")
    ptx: str = kernel.asm["ptx"]
    return ptx


def barriers(group: int, *, projected: bool, has_sinks: bool = False) -> int:
    """Returns the number of barriers in the kernel over a cache in bf16, those of the merge
    included."""
    return compiled(group, projected=projected, has_sinks=has_sinks).count("bar.sync")


@pytest.mark.parametrize("group", [2, 4])
def test_norm_and_rope_in_the_kernel_take_few_barriers(group: int) -> None:
    """Barriers are needed only where layouts are converted: there were 49 when every tensor had a
    layout of its own."""
    extra = barriers(group, projected=True) - barriers(group, projected=False)
    assert 0 < extra <= 12


def test_sinks_take_few_barriers() -> None:
    """They are loaded in the layout of the sums that they join."""
    with_sinks = barriers(4, projected=True, has_sinks=True)
    assert with_sinks - barriers(4, projected=True) <= 4


@pytest.mark.parametrize("projected", [True, False])
def test_float8_is_converted_by_instructions_for_two_numbers(projected: bool) -> None:
    """To float16 by one instruction, to bf16 by two more. What is written saturates."""
    to_bf16, to_fp16 = (
        compiled(4, projected=projected, is_float8=True, fp16_operands=fp16)
        for fp16 in (False, True)
    )
    for ptx in (to_bf16, to_fp16):
        assert "cvt.rn.f16x2.e4m3x2" in ptx
        assert ("cvt.rn.satfinite.e4m3x2" in ptx) == projected
    assert to_bf16.count("cvt.bf16.f16") > 1.8 * to_bf16.count("cvt.rn.f16x2.e4m3x2")
    assert to_fp16.count("cvt.bf16.f16") < 0.1 * to_bf16.count("cvt.bf16.f16")


def test_pairs_of_channels_are_read_as_words() -> None:
    """Not byte by byte: keys and values of a tile come from shared memory by `ldmatrix`, and four
    numbers take one permutation of bytes and two conversions. With eight query heads a KV head,
    where the assembler of Triton 3.6 crashes on the kernel that reads bytes."""
    ptx = compiled(8, projected=True, is_float8=True, fp16_operands=True, paired=True)
    config = decode_config(HEAD_SIZE, 1)
    numbers = 2 * config.tile * HEAD_SIZE // (32 * config.num_warps)  # of a thread
    assert not re.findall(r"ld\.shared\.[bu]8", ptx)
    assert ptx.count("prmt.b32") == numbers // 4
    # and those of the newest key
    assert 0 <= ptx.count("cvt.rn.f16x2.e4m3x2") - numbers // 2 <= 16
    assert ptx.count("ldmatrix") >= 16
