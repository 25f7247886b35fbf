"""The kernels of adapters, as compiled for Hopper without a GPU: none spills."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

pytest.importorskip("triton")

from aioinfer.kernels import adapter_tiles, adapters

from tests.compiled.hopper import SHARED_MEMORY, check_fits, compile_call


class Launch(NamedTuple):
    """Of a kernel."""

    num_warps: int
    num_stages: int = 3


BF16, INT = torch.empty(16, dtype=torch.bfloat16), torch.empty(16, dtype=torch.int32)
FLOAT, WORD = torch.empty(16), torch.empty(16, dtype=torch.int16)


@pytest.mark.parametrize("tokens", [64, 256, 1000, 5000])
def test_shrink(tokens: int) -> None:
    """The matrices of few tokens leave room beside a ring of 208 KiB."""
    plan = adapters._ShrinkPlan.of(tokens, 48, 4096, 2, 8)
    kernel = compile_call(
        adapters._shrink_kernel, Launch(4, plan.stages), x=BF16, A=BF16, parts=FLOAT,
        shrunk=BF16, tickets=INT, order=INT, slots=INT, widths=INT, inputs=4096, modules=3,
        x_stride=4096, a_stride=4096, slot_stride=4096 * 48, shrunk_stride=768, spread=48,
        SPLITS=plan.splits, INPUTS=plan.inputs, RANKS=plan.ranks, TILE=plan.tile, PDL=True,
    )  # fmt: skip
    check_fits(kernel, shared=19 * 1024 if tokens <= 128 else SHARED_MEMORY)


@pytest.mark.parametrize("inputs", [4096, 12288])
def test_shrink_of_one_row(inputs: int) -> None:
    kernel = compile_call(
        adapters._shrink_row_kernel, Launch(4), x=BF16, A=BF16, shrunk=BF16, slots=INT,
        widths=INT, modules=3, a_stride=inputs, slot_stride=inputs * 48, spread=48,
        INPUTS=inputs, STEP=4096, PDL=True,
    )  # fmt: skip
    check_fits(kernel)
    assert kernel.asm["ptx"].count("ld.global.v4.b32") >= inputs // 4096 * 8


@pytest.mark.parametrize("tile", [16, 32, 64])
def test_expand(tile: int) -> None:
    kernel = compile_call(
        adapters._expand_kernel, Launch(4), shrunk=BF16, B=BF16, y=BF16, order=INT, slots=INT,
        widths=INT, channels=4096, modules=3, y_stride=4096, b_stride=384, shrunk_stride=768,
        width=48, spread=48, CHANNELS=128, RANKS=64, TILE=tile, PDL=True,
    )  # fmt: skip
    check_fits(kernel)


def test_sorting() -> None:
    kernel = compile_call(
        adapter_tiles._sort_kernel, Launch(8), adapters=INT, order=INT, slots=INT, ranks=INT,
        modules=INT, blocks=INT, words=WORD, tokens=256, tiles=24, max_tiles=24, num_slots=8,
        max_rank=16, num_words=96, stride=7, MISSING=-1, KINDS=3, NUM=8, BLOCKS=8, BLOCK=64,
        SORTED=256, TILE=32,
    )  # fmt: skip
    check_fits(kernel)
