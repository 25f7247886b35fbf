"""The kernels of a shared prefix as compiled for Hopper, without a GPU: that they fit, and multiply
by warp groups."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from aioinfer.kernels.cascade_attention import (
    PrefixArguments,
    PrefixShape,
    _find_kernel,
    _prefix_kernel,
    cascade_config,
)
from aioinfer.kernels.decode_attention import _decode_kernel
from aioinfer.kernels.decode_plan import PLAN_FIELDS, _plan_kernel, decode_config
from hopper import SHARED_MEMORY, check_fits, compile_call, compile_kernel
from test_decode_attention import KV_HEADS, decode_arguments

pytestmark = pytest.mark.extended

MAX_ROWS, PROGRAMS = 256, 264


def prefix_arguments(group: int, head_size: int) -> dict[str, Any]:
    config = cascade_config(head_size, group, 2)
    buffers = torch.empty(8, dtype=torch.int32), torch.empty(8)
    lines = PROGRAMS * config.rows
    shape = PrefixShape(config.rows, config.tile, MAX_ROWS, lines, PROGRAMS)
    return {"prefix": PrefixArguments(*buffers), "PREFIX": shape}


@pytest.mark.parametrize("head_size", [64, 128, 256])
@pytest.mark.parametrize("projected", [True, False])
def test_the_prefix_kernel(head_size: int, projected: bool) -> None:
    group = 4
    config = cascade_config(head_size, group, 2)
    arguments = decode_arguments(group, head_size, projected=projected)
    arguments |= prefix_arguments(group, head_size) | {"FP16_OPERANDS": False}
    wanted = {name: arguments[name] for name in _prefix_kernel.arg_names}
    kernel = compile_call(_prefix_kernel, config, **wanted)
    assert "wgmma.mma_async" in kernel.asm["ptx"]
    of_a_program = SHARED_MEMORY // config.programs_per_sm
    check_fits(kernel, spilled=0 if head_size <= 128 else 64, shared=of_a_program)


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


def test_the_decode_kernel_behind_a_prefix() -> None:
    config = decode_config(128, 2)
    arguments = decode_arguments(4, projected=True) | prefix_arguments(4, 128)
    kernel = compile_call(_decode_kernel, config, **arguments)
    check_fits(kernel, shared=SHARED_MEMORY // config.programs_per_sm)
    plan = {
        "KV_HEADS": KV_HEADS, "WINDOW": 0, "TILE": config.tile, "SPLITS": 16,
        "PART_TILES": 1, "WHOLE_TILES": 8, "PROGRAMS": 528, "ROWS_PAD": 256,
        "FIELDS": PLAN_FIELDS,
    }  # fmt: skip
    types = dict.fromkeys(("seq_lens", "plan", "shared_rows", "offsets", "joined"), "*i32")
    for kind in ({"CASCADE": True, "JOINED": 1}, {"CASCADE": False, "JOINED": 4}):
        compile_kernel(_plan_kernel, types, plan | kind, SimpleNamespace(num_warps=4))
