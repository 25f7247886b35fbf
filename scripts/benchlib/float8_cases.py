"""The cases of `bench_kernels.py --cases float8`: attention over a KV cache in float8, beside the
same over one in bf16, which reads twice the bytes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from aioinfer.kernels.attention_tiles import ScoreArguments
from aioinfer.kernels.decode_attention import launch_decode
from aioinfer.kernels.decode_plan import DecodeConfig, DecodeWorkspace, decode_config, plan_decode
from aioinfer.kernels.prefill_attention import PrefillConfig, launch_prefill, prefill_config
from aioinfer.kernels.prefill_hopper import ROWS, launch_prefill_hopper
from aioinfer.kernels.prefill_plan import PrefillPlan, plan_prefill
from aioinfer.kernels.projection import Projection, Rotation
from aioinfer.kernels.qk_norm_rope_cache import qk_norm_rope_cache

from benchlib.kernel_cases import (
    BF16,
    DEVICE,
    LOG2_E,
    Case,
    attention_check,
    ints,
    paged,
    random_tensor,
)

FLOAT8 = torch.float8_e4m3fn
HEADS, KV_HEADS, SIZE, BLOCK = 32, 8, 128, 128
SCALE = SIZE**-0.5 * LOG2_E
Caches = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def float8_cases(tune: bool) -> Iterator[Case]:
    """Qwen3-8B's heads over blocks of 128 tokens: decodes and prefill as in `decode` and `prefill`,
    and the write of keys and values."""
    for dtype in (BF16, FLOAT8):
        yield from _decodes(dtype, tune)
        yield from _prefills(dtype, tune)
        yield from _writes(dtype)


def _caches(keys: list[int], dtype: torch.dtype) -> Caches:
    k, v, tables = paged(keys, KV_HEADS, SIZE, BLOCK)
    return k.to(dtype), v.to(dtype), tables


def _scales(dtype: torch.dtype) -> torch.Tensor | None:
    return torch.ones(4, KV_HEADS, device=DEVICE) if dtype == FLOAT8 else None


def _label(dtype: torch.dtype) -> str:
    return "float8" if dtype == FLOAT8 else "bf16"


def _check(
    q: torch.Tensor, out: torch.Tensor, caches: Caches, tokens: list[int], keys: list[int]
) -> float:
    k, v, tables = caches
    return attention_check(q, out, k.to(BF16), v.to(BF16), tables, tokens, keys)


def _decodes(dtype: torch.dtype, tune: bool) -> Iterator[Case]:
    usual = decode_config(SIZE, dtype.itemsize)
    choices = [(64, 2, 6, 3), (64, 2, 6, 5), (64, 2, 8, 4), (64, 4, 6, 3), (128, 4, 6, 2)]
    if tune:
        product = itertools.product((32, 64, 128), (2, 4), (3, 4, 5, 6, 8), (1, 2, 3, 4, 5))
        choices = list(product)
    configs = [usual]
    if dtype == FLOAT8:
        fp16 = replace(usual, fp16_operands=True, paired_channels=False)
        paired = replace(fp16, paired_channels=True)
        configs = [replace(fp16, fp16_operands=False), fp16, paired]
        configs += [DecodeConfig(*choice, 1, True, True) for choice in choices]
    elif tune:
        configs = [DecodeConfig(*choice, 1) for choice in choices]
    shapes = {
        "64x2k": [2048] * 64,
        "8x8k": [8192] * 8,
        "256x256": [256] * 256,
        "256x1k": [1024] * 256,
        "1x32k": [32768],
    }
    for name, keys in shapes.items():
        caches, scales = _caches(keys, dtype), _scales(dtype)
        k, v, tables = caches
        q, lens = random_tensor(len(keys), HEADS, SIZE), ints(keys)
        for config in configs:
            workspace = DecodeWorkspace.create(HEADS, k, config=config)
            plan_decode(workspace, lens)
            out = torch.full_like(q, float("nan"))
            run = partial(
                launch_decode, q, k, v, tables, lens, out, workspace,
                scores=ScoreArguments(SCALE), scales=scales,
            )  # fmt: skip
            variant = (
                f"{_label(dtype)} tile {config.tile} w{config.num_warps} s{config.num_stages} "
                f"p{config.programs_per_sm}{' fp16' if config.fp16_operands else ''}"
                f"{' paired' if config.paired_channels else ''}"
            )
            size = sum(keys) * KV_HEADS * SIZE * 2 * dtype.itemsize
            check = partial(_check, q, out, caches, [1] * len(keys), keys)
            flops = 4 * SIZE * HEADS * sum(keys)
            yield Case("float8", f"decode {name}", variant, [run], size, flops, check)


def _prefills(dtype: torch.dtype, tune: bool) -> Iterator[Case]:
    configs: list[PrefillConfig | None] = [None, prefill_config(SIZE, 2)]  # None: for Hopper
    if tune:
        choices = (
            (128, 64, 8, 3),
            (128, 64, 4, 3),
            (64, 64, 4, 3),
            (128, 128, 8, 2),
            (128, 32, 4, 4),
        )
        configs += [PrefillConfig(*choice) for choice in choices]
    shapes = {"4x2000": [(2000, 2000)] * 4, "1x7900": [(7900, 7900)], "512@16k": [(512, 16384)]}
    for name, rows in shapes.items():
        tokens, keys = [row[0] for row in rows], [row[1] for row in rows]
        caches, scales = _caches(keys, dtype), _scales(dtype)
        q, lens = random_tensor(sum(tokens), HEADS, SIZE), ints(keys)
        starts = ints([0, *tokens]).cumsum(0).int()
        visible = sum(t * (n - t) + t * (t + 1) / 2 for t, n in rows)
        for config in configs:
            out = torch.full_like(q, float("nan"))
            plan = PrefillPlan.empty(
                len(rows), len(q), HEADS // KV_HEADS, ROWS if config is None else config.rows,
                q.device, hopper=config is None,
            )  # fmt: skip
            plan_prefill(plan, starts, lens, 0, len(q))
            launch, variant = launch_prefill_hopper, f"{_label(dtype)} hopper"
            if config is not None:
                launch = partial(launch_prefill, config=config)
                variant = (
                    f"{_label(dtype)} plain {config.rows} {config.tile} w{config.num_warps} "
                    f"s{config.num_stages}"
                )
            run = partial(
                launch, q, *caches, starts, lens, out, plan, window=0, scores=ScoreArguments(SCALE),
                scales=scales,
            )  # fmt: skip
            size = 2 * q.nbytes + sum(keys) * KV_HEADS * SIZE * 2 * dtype.itemsize
            check = partial(_check, q, out, caches, tokens, keys)
            flops = 4 * SIZE * HEADS * visible
            yield Case("float8", f"prefill {name}", variant, [run], size, flops, check, 5)


def _writes(dtype: torch.dtype) -> Iterator[Case]:
    for tokens in (256, 8192):
        k, v, _ = _caches([tokens], dtype)
        qkv = random_tensor(tokens, (HEADS + 2 * KV_HEADS) * SIZE)
        positions, slots = ints(range(tokens)), torch.arange(tokens, device=DEVICE)
        cos_sin, weight = torch.rand(tokens, SIZE, device=DEVICE), random_tensor(SIZE)
        run = partial(
            qk_norm_rope_cache, Projection(qkv, Rotation(cos_sin, weight, weight), positions),
            slots, k, v, num_q_heads=HEADS, scales=_scales(dtype),
        )  # fmt: skip
        size = qkv.nbytes + tokens * SIZE * (HEADS * 2 + KV_HEADS * 2 * dtype.itemsize)
        yield Case("float8", f"qk_norm_rope_cache {tokens}", _label(dtype), [run], size)
