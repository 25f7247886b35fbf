"""The kernels of a shared prefix as compiled for Hopper, without a GPU: that they fit, and multiply
by warp groups."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

from aioinfer.kernels.cascade_attention import _find_kernel, _prefix_kernel, cascade_config
from aioinfer.kernels.decode_attention import _decode_kernel, merged_splits
from aioinfer.kernels.decode_plan import PLAN_FIELDS, _plan_kernel, decode_config
from hopper import SHARED_MEMORY, compile_kernel, spilled

TYPES = {
    "q": "*bf16", "out": "*bf16", "q_weight": "*bf16", "k_weight": "*bf16", "k_cache": "*bf16",
    "v_cache": "*bf16", "block_tables": "*i32", "seq_lens": "*i32", "plan": "*i32",
    "counters": "*i32", "shared_rows": "*i32", "partials": "*fp32", "maxima": "*fp32",
    "sums": "*fp32", "cos_sin": "*fp32", "scales": "*fp32", "key_shifts": "*fp32",
    "sinks": "*fp32", "states": "*fp32", "prefix_states": "*fp32", "scale": "fp32",
    "soft_cap": "fp32", "eps": "fp32",
}  # fmt: skip
KV_HEADS, MAX_ROWS, PROGRAMS = 8, 256, 264


def shape(group: int, head_size: int, *, projected: bool) -> dict[str, Any]:
    return {
        "KV_HEADS": KV_HEADS, "GROUP": group, "GROUP_PAD": group, "HEAD_SIZE": head_size,
        "HEAD_PAD": head_size, "BLOCK_SIZE": 128, "SOFT_CAP": False, "PDL": True,
        "PROJECTED": projected, "ROTARY": head_size if projected else 0, "HAS_NORM": projected,
        "HAS_SCALES": False, "FP16_OPERANDS": False, "MAX_ROWS": MAX_ROWS,
    }  # fmt: skip


@pytest.mark.parametrize("head_size", [64, 128, 256])
@pytest.mark.parametrize("projected", [True, False])
def test_the_prefix_kernel(head_size: int, projected: bool, tmp_path: Path) -> None:
    group = 4
    config = cascade_config(head_size, group, 2)
    constants = shape(group, head_size, projected=projected) | {
        "TILE": config.tile, "ROWS": config.rows, "LINES": PROGRAMS * config.rows,
        "PROGRAMS": PROGRAMS,
    }  # fmt: skip
    kernel = compile_kernel(_prefix_kernel, TYPES, constants, config)
    assert "wgmma.mma_async" in kernel.asm["ptx"]
    assert kernel.metadata.shared * config.programs_per_sm <= SHARED_MEMORY
    assert spilled(kernel, tmp_path) <= (0 if head_size <= 128 else 64)


@pytest.mark.parametrize("rows", [64, 256])
def test_the_search_for_a_prefix(rows: int) -> None:
    config = cascade_config(128, 4, 2)
    types = {"block_tables": "*i32", "seq_lens": "*i32", "out": "*i32"}
    constants = {
        "KV_HEADS": KV_HEADS, "TILE_ROWS": 16, "TILE": config.tile, "STEP": 128,
        "BLOCK_SIZE": 128, "PROGRAMS": PROGRAMS, "MAX_SPLITS": config.max_splits,
        "MIN_SPLIT": config.min_split, "MIN_ROWS": config.min_rows,
        "MIN_SAVED": config.min_saved, "MAX_ROWS": MAX_ROWS, "ROWS_PAD": rows, "CHUNK": 32,
    }  # fmt: skip
    compile_kernel(_find_kernel, types, constants, SimpleNamespace(num_warps=8))


def test_the_decode_kernel_behind_a_prefix(tmp_path: Path) -> None:
    config, cascade = decode_config(128, 2), cascade_config(128, 4, 2)
    constants = shape(4, 128, projected=True) | {
        "ROWS": 16, "TILE": config.tile, "WINDOW": 0, "FIELDS": PLAN_FIELDS,
        "SPLITS": merged_splits(4, 128), "HAS_SHIFTS": False, "HAS_SINKS": False,
        "CASCADE": True, "PREFIX_ROWS": cascade.rows, "PREFIX_LINES": PROGRAMS * cascade.rows,
        "PAIRED": False, "BY_ASSEMBLY": False,
    }  # fmt: skip
    kernel = compile_kernel(_decode_kernel, TYPES, constants, config)
    assert kernel.metadata.shared * config.programs_per_sm <= SHARED_MEMORY
    assert spilled(kernel, tmp_path) == 0
    plan = {
        "KV_HEADS": KV_HEADS, "WINDOW": 0, "TILE": config.tile, "MIN_TILES": 1, "WHOLE_TILES": 8,
        "PROGRAMS": 528, "ROWS_PAD": 256, "FIELDS": PLAN_FIELDS, "CASCADE": True,
    }  # fmt: skip
    compile_kernel(_plan_kernel, TYPES, plan, SimpleNamespace(num_warps=4))
