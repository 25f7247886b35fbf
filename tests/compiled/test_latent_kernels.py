"""The kernels of latent attention as compiled for Hopper, without a GPU, at DeepSeek's sizes:
shared memory, and which tensor-core instructions they take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from aioinfer.kernels.attention_tiles import HeadShape
from aioinfer.kernels.decode_plan import PLAN_FIELDS, QUERY_ROWS, Parts, merged_splits
from aioinfer.kernels.latent_attention import _latent_decode_kernel, head_group, latent_config
from aioinfer.kernels.latent_cache import _latent_cache_kernel
from aioinfer.kernels.latent_prefill import ITEM_FIELDS, _latent_prefill_kernel, tile_config

from tests.compiled.hopper import SHARED_MEMORY, compile_call, compile_kernel, names_to_types

pytestmark = pytest.mark.extended

TYPES = {
    "*bf16": ("cache", "out", "queries", "expanded", "keys", "latents", "weight"),
    "*i64": ("slot_mapping",),
    "*i32": ("items", "positions"),
    "*fp32": ("maxima", "sums", "sums_out", "cos_sin"),
    "fp32": ("scale", "eps"),
}  # fmt: skip


def compiled(kernel: Any, constants: dict[str, Any], num_warps: int, num_stages: int) -> Any:
    """Returns a kernel compiled for bfloat16."""
    config = SimpleNamespace(num_warps=num_warps, num_stages=num_stages)
    return compile_kernel(kernel, names_to_types(TYPES), constants, config, divisible="stride")


@pytest.mark.parametrize(("num_heads", "instruction"), [(16, "mma.sync"), (128, "wgmma.mma_async")])
def test_decodes(num_heads: int, instruction: str) -> None:
    """V2-Lite's heads, which are V3's on 8 ranks, and V3's on one: several tiles are in flight, and
    as many programs fit as are launched."""
    group, config = head_group(num_heads, 2), latent_config(num_heads, 2)
    bf16, ints, floats = (
        torch.empty(8, dtype=dtype) for dtype in (torch.bfloat16, torch.int32, torch.float32)
    )
    kernel = compile_call(
        _latent_decode_kernel, config, absorbed=bf16, rotated=bf16, cache=bf16, out=bf16,
        block_tables=ints, seq_lens=ints, plan=ints, parts=Parts(floats, floats, floats, ints),
        scale=1.0, absorbed_stride=num_heads * 512, rotated_strides=(num_heads * 64, 64),
        out_stride=num_heads * 512, table_stride=320, cache_strides=(128 * 576, 576),
        SHAPE=HeadShape(num_heads // group, group, 512, QUERY_ROWS, 512, 128), ROWS=group,
        ROTARY=64, ROTARY_PAD=64, TILE=config.tile, FIELDS=PLAN_FIELDS,
        SPLITS=merged_splits(config, QUERY_ROWS, 512), PDL=True,
    )  # fmt: skip
    assert instruction in kernel.asm["ptx"]
    tile_bytes = config.tile * 576 * 2
    assert 2 * tile_bytes < kernel.metadata.shared < SHARED_MEMORY // config.programs_per_sm - 1024


def test_prefill() -> None:
    config = tile_config(2)
    constants = {
        "NUM_HEADS": 16, "PLAIN": 128, "PLAIN_PAD": 128, "ROTARY": 64, "ROTARY_PAD": 64,
        "VALUE": 128, "VALUE_PAD": 128, "FIELDS": ITEM_FIELDS, "ROWS": config.rows,
        "TILE": config.tile, "PDL": True,
    }  # fmt: skip
    kernel = compiled(_latent_prefill_kernel, constants, config.num_warps, config.num_stages)
    assert "wgmma.mma_async" in kernel.asm["ptx"]
    assert kernel.metadata.shared < SHARED_MEMORY


def test_cache_write() -> None:
    constants = {
        "NUM_HEADS": 16, "HEADS": 16, "LATENT": 512, "LATENT_PAD": 512, "ROTARY": 64,
        "ROTARY_PAD": 64, "BLOCK_SIZE": 128, "PDL": True,
    }  # fmt: skip
    assert "bar" in compiled(_latent_cache_kernel, constants, 1, 3).asm["ptx"]
