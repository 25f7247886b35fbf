"""The decode attention kernel as compiled for Hopper, without a GPU: how many barriers it takes,
and how it converts a KV cache in float8."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from aioinfer.kernels.attention_tiles import CacheArguments, HeadShape, ScoreArguments
from aioinfer.kernels.decode_attention import DecodeTiles, _decode_kernel
from aioinfer.kernels.decode_plan import PLAN_FIELDS, Parts, decode_config, merged_splits
from aioinfer.kernels.prefill_attention import _prefill_kernel, prefill_config
from aioinfer.kernels.projection import Rotation
from aioinfer.kernels.qk_norm_rope_cache import (
    _qk_norm_rope_cache_kernel,
    _rotated_queries_kernel,
    heads_of_program,
)

from tests.compiled.hopper import SHARED_MEMORY, compile_call

HEAD_SIZE, KV_HEADS = 128, 8


def empty(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(8, dtype=dtype)


def decode_arguments(
    group: int,
    head_size: int = HEAD_SIZE,
    *,
    projected: bool,
    is_float8: bool = False,
    fp16_operands: bool = False,
    has_sinks: bool = False,
    paired: bool = False,
    joined: int = 1,
    early: bool = False,
) -> dict[str, Any]:
    """Returns the arguments of the kernel that `launch_decode` launches for Qwen3's heads and
    queries in bf16."""
    narrow = torch.float8_e4m3fn if is_float8 else torch.bfloat16
    strides = 128 * KV_HEADS * head_size, KV_HEADS * head_size, head_size
    weights = empty(torch.bfloat16), empty(torch.bfloat16)
    rotation = Rotation(torch.empty(1, head_size), *weights)
    shape = HeadShape(KV_HEADS, group, head_size, group, head_size, 128)
    config = decode_config(head_size, 1 if is_float8 else 2)
    splits = merged_splits(config, group * joined, head_size)
    return {
        "q": empty(torch.bfloat16), "out": empty(torch.bfloat16), "q_stride": 6144,
        "out_stride": 4096, "positions": None, "axis_stride": 0,
        "block_tables": empty(torch.int32), "table_stride": 320, "seq_lens": empty(torch.int32),
        "plan": empty(torch.int32),
        "parts": Parts(empty(), empty(), empty(), empty(torch.int32)),
        "cache": CacheArguments(
            empty(narrow), empty(narrow), strides, strides, empty() if is_float8 else None,
            empty() if is_float8 and projected else None,
        ),
        "scores": ScoreArguments(1.0, None, empty() if has_sinks else None),
        "rotation": rotation.arguments if projected else None, "prefix": None,
        "joined_rows": empty(torch.int32) if joined > 1 else None,
        "SHAPE": shape, "ROTATION": rotation.config if projected else None,
        "TILES": DecodeTiles(
            16, config.tile, joined, 0, splits, fp16_operands, paired, paired, early
        ),
        "PREFIX": None, "FIELDS": PLAN_FIELDS, "PDL": True,
    }  # fmt: skip


def compiled(group: int, *, is_float8: bool = False, **options: Any) -> str:
    """Returns the PTX of the kernel for `decode_arguments`."""
    config = decode_config(HEAD_SIZE, 1 if is_float8 else 2)
    arguments = decode_arguments(group, is_float8=is_float8, **options)
    ptx: str = compile_call(_decode_kernel, config, **arguments).asm["ptx"]
    return ptx


def barriers(group: int, *, projected: bool, has_sinks: bool = False) -> int:
    """Returns the number of barriers in the kernel over a cache in bf16, those of the merge
    included."""
    return compiled(group, projected=projected, has_sinks=has_sinks).count("bar.sync")


ROTATIONS = {
    "RoPE": Rotation(torch.empty(1, HEAD_SIZE)),
    "half a head": Rotation(torch.empty(1, HEAD_SIZE // 2)),
    "none": Rotation(),
    "norms behind it": Rotation(torch.empty(1, HEAD_SIZE), empty(), empty(), norm_last=True),
    "sections": Rotation(torch.empty(1, HEAD_SIZE), sections=(32, 16, 16, True)),
}


@pytest.mark.parametrize(
    "rotation",
    [
        pytest.param(rotation, id=name, marks=pytest.mark.extended if name == "RoPE" else ())
        for name, rotation in ROTATIONS.items()
    ],
)
def test_rotations_of_all_kinds_compile(rotation: Rotation) -> None:
    """Also with neither norms nor rotation, which the interpreter does not tell apart."""
    arguments = decode_arguments(4, projected=True)
    arguments |= {"rotation": rotation.arguments, "ROTATION": rotation.config}
    arguments |= {"positions": empty(torch.int32)}
    kernel = compile_call(_decode_kernel, decode_config(HEAD_SIZE, 2), **arguments)
    assert "bar.sync" in kernel.asm["ptx"]
    wanted = {name: arguments[name] for name in ("positions", "axis_stride", "cache", "rotation")}
    kernel = compile_call(
        _qk_norm_rope_cache_kernel, SimpleNamespace(num_warps=1, num_stages=3), **wanted,
        qkv=arguments["q"], q_out=arguments["out"], qkv_stride=6144, q_stride=4096,
        slot_mapping=empty(torch.int64), SHAPE=arguments["SHAPE"], ROTATION=rotation.config,
        HEADS=8, PDL=True,
    )  # fmt: skip
    assert "st.global" in kernel.asm["ptx"]


@pytest.mark.extended
def test_heads_of_512_compile() -> None:
    """As Gemma 4 has them: norms of queries, keys and values; queries alone, whose keys another
    layer has written; decodes and prefills."""
    arguments = decode_arguments(4, 512, projected=True)
    rotation = Rotation(torch.empty(1, 512), empty(), empty(), value_norm_eps=1e-6)
    arguments |= {"rotation": rotation.arguments, "ROTATION": rotation.config}
    shape = arguments["SHAPE"]
    kernel = compile_call(_decode_kernel, decode_config(512, 2), **arguments)
    assert kernel.metadata.shared < SHARED_MEMORY
    one_warp = SimpleNamespace(num_warps=1, num_stages=3)
    shared = {
        "positions": empty(torch.int32), "axis_stride": 0, "rotation": rotation.arguments,
        "SHAPE": shape, "ROTATION": rotation.config, "PDL": True,
        "HEADS": heads_of_program(32, shape),
    }  # fmt: skip
    written = compile_call(
        _qk_norm_rope_cache_kernel, one_warp, **shared, qkv=arguments["q"], q_out=arguments["out"],
        qkv_stride=6144, q_stride=4096, slot_mapping=empty(torch.int64), cache=arguments["cache"],
    )  # fmt: skip
    assert "rsqrt" in written.asm["ptx"]
    queries = compile_call(
        _rotated_queries_kernel, one_warp, **shared, q=arguments["q"], q_out=arguments["out"],
        q_stride=4096, out_stride=4096, num_heads=32,
    )  # fmt: skip
    assert "st.global" in queries.asm["ptx"]
    names = ("q", "out", "q_stride", "out_stride", "block_tables", "table_stride", "seq_lens",
             "plan", "cache", "scores", "SHAPE")  # fmt: skip
    for narrow in (2, 4):
        config = prefill_config(512, narrow)
        kernel = compile_call(
            _prefill_kernel, config, **{name: arguments[name] for name in names},
            query_starts=empty(torch.int32), ROWS=config.rows, TILE=config.tile, WINDOW=0, PDL=True,
        )  # fmt: skip
        assert kernel.metadata.shared < SHARED_MEMORY


@pytest.mark.parametrize("is_float8", [False, pytest.param(True, marks=pytest.mark.extended)])
def test_first_tiles_are_loaded_before_the_wait(is_float8: bool) -> None:
    """With few rows; else the kernel waits before it copies anything to shared memory."""
    options = {"is_float8": is_float8, "fp16_operands": is_float8, "paired": is_float8}
    copies = []
    for early in (False, True):
        ptx = compiled(4, projected=True, early=early, **options)
        before, after = ptx.split("griddepcontrol.wait")
        assert "griddepcontrol.launch_dependents" not in before
        assert "cp.async.cg" in before + after
        copies.append(before.count("cp.async.cg"))
    config = decode_config(HEAD_SIZE, 1 if is_float8 else 2)
    tile_bytes = config.tile * HEAD_SIZE * (1 if is_float8 else 2)
    of_a_tile = 2 * tile_bytes // (16 * 32 * config.num_warps)  # of a thread, 16 bytes each
    assert copies[0] == 0
    assert copies[1] >= 2 * of_a_tile


@pytest.mark.parametrize("is_float8", [pytest.param(False, marks=pytest.mark.extended), True])
def test_alibi_compiles(is_float8: bool) -> None:
    arguments = decode_arguments(
        4, projected=False, is_float8=is_float8, fp16_operands=is_float8, paired=is_float8
    )
    arguments["scores"] = ScoreArguments(1.0, 5.0, None, empty())
    config = decode_config(HEAD_SIZE, 1 if is_float8 else 2)
    assert compile_call(_decode_kernel, config, **arguments).metadata.shared < SHARED_MEMORY
    config = prefill_config(HEAD_SIZE, 2)
    names = ("q", "out", "q_stride", "out_stride", "block_tables", "table_stride", "seq_lens",
             "plan", "cache", "scores", "SHAPE")  # fmt: skip
    kernel = compile_call(
        _prefill_kernel, config, **{name: arguments[name] for name in names},
        query_starts=empty(torch.int32), ROWS=config.rows, TILE=config.tile, WINDOW=100, PDL=True,
    )  # fmt: skip
    assert "wgmma.mma_async" in kernel.asm["ptx"]


@pytest.mark.parametrize("group", [pytest.param(2, marks=pytest.mark.extended), 4])
def test_norm_and_rope_in_the_kernel_take_few_barriers(group: int) -> None:
    """Barriers are needed only where layouts are converted: there were 49 when every tensor had a
    layout of its own."""
    extra = barriers(group, projected=True) - barriers(group, projected=False)
    assert 0 < extra <= 12


@pytest.mark.extended
def test_sinks_take_few_barriers() -> None:
    """They are loaded in the layout of the sums that they join."""
    with_sinks = barriers(4, projected=True, has_sinks=True)
    assert with_sinks - barriers(4, projected=True) <= 4


@pytest.mark.parametrize("projected", [True, pytest.param(False, marks=pytest.mark.extended)])
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
