"""Decode attention of rows that share a prefix, with its keys read once for all of them and once
for each: cases of `bench_kernels.py`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial

import torch
from aioinfer.kernels.attention_tiles import ScoreArguments
from aioinfer.kernels.cascade_attention import CascadeConfig, cascade_config
from aioinfer.kernels.decode_attention import launch_decode
from aioinfer.kernels.decode_plan import DecodeWorkspace, plan_decode

from benchlib.kernel_cases import LOG2_E, Case, attention_check, ints, paged, random_tensor

Q_HEADS, KV_HEADS, SIZE, BLOCK = 32, 8, 128, 128
SCALE = SIZE**-0.5 * LOG2_E
#: Rows, keys that all share, keys of each row behind them.
SHAPES = {
    "128x8k+128": (128, 8064, 128),
    "32x8k+128": (32, 8064, 128),
    "8x8k+128": (8, 8064, 128),
    "256x1k+300": (256, 1024, 300),
    "64x2k+2k": (64, 2048, 2048),
    "128x0+1k": (128, 0, 1024),
    "16x0+300": (16, 0, 300),
}


def cascade_cases(tune: bool) -> Iterator[Case]:
    """Qwen3-8B's heads over blocks of 128 tokens. The bytes count each block once; without the
    cascade, shared blocks are read for each row. The last shapes share nothing, and show what the
    search costs."""
    configs: list[CascadeConfig | None] = [None, cascade_config(SIZE, Q_HEADS // KV_HEADS, 2)]
    if tune:
        choices = itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3, 4), (1, 2))
        configs += [CascadeConfig(*choice) for choice in choices]
    for name, (rows, shared, own) in SHAPES.items():
        keys = [shared + own] * rows
        k, v, tables = paged([shared] + [own] * rows, KV_HEADS, SIZE, BLOCK)
        blocks = shared // BLOCK
        tables = torch.cat([tables[:1, :blocks].expand(rows, -1), tables[1:]], dim=1).contiguous()
        q, lens = random_tensor(rows, Q_HEADS, SIZE), ints(keys)
        for config in configs:
            workspace = DecodeWorkspace.create(
                Q_HEADS, k, cascade_rows=0 if config is None else rows, cascade_config=config
            )
            plan_decode(workspace, lens, tables)
            out = torch.full_like(q, float("nan"))
            run = partial(
                launch_decode, q, k, v, tables, lens, out, workspace, scores=ScoreArguments(SCALE)
            )
            check = partial(attention_check, q, out, k, v, tables, [1] * rows, keys)
            variant = "each row reads all"
            if config is not None:
                variant = (
                    f"cascade {config.rows}x{config.tile} w{config.num_warps} "
                    f"s{config.num_stages} p{config.programs_per_sm}"
                )
            size = (shared + rows * own) * KV_HEADS * SIZE * 4
            flops = 4 * SIZE * Q_HEADS * sum(keys)
            yield Case("cascade", name, variant, [run], size, flops, check)
            if config is not None:
                plan = partial(plan_decode, workspace, lens, tables)
                yield Case("cascade", name, f"the plan of {variant}", [plan], 0)
