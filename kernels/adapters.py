"""Products with the adapters of a step's tokens (LoRA, Hu et al. 2021): y += (x A^T) B^T, where a
token has an adapter of its own or none.

Tokens come sorted by adapter (`adapter_tiles`). `shrink` computes x A^T: programs divide the input
channels among them, and the last one of a tile adds up the sums of all. A step of few tokens has it
in the columns of each token's adapter, with zeros in all others, so that the product with the
matrices B of all adapters side by side is a few more steps of a product's loop over its inputs: the
kernels of few rows, the split and the gated product compute it in the launch of the model's own
weight. Elsewhere `expand` adds it afterwards. Of a single token the launch of the weight computes
x A^T, too: its first programs, while the others read the weight (`RowOperand`).
"""
# ruff: noqa: N803  (matrices and compile-time constants are written in capitals)

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from aioinfer.kernels.adapter_tiles import AdapterTiles, RankLayout, max_tiles, tile_size
from aioinfer.kernels.launch import is_last_of, wait_for_kernel
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

#: Output channels of a program of `expand`, and the ranks that it takes at a time at most.
_CHANNELS, _MAX_RANKS = 128, 64
#: Input channels that a program of `_shrink_row_kernel` takes at a time.
_STEP = 4096
#: Up to so many tokens: the ranks that a program of `shrink` takes at most, bytes of a token's
#: input channels at a time, and parts of the input channels at most. The matrices of few tokens
#: leave room beside the ring of a product that is launched while the program runs.
_SHRINKS = ((128, 16, 512, 24), (512, 16, 512, 16), (1024, 64, 256, 4), (None, 64, 256, 1))


@dataclass(frozen=True, slots=True)
class Adapters:
    """The matrices of one product in the slots of adapters.

    Attributes:
        down: A [slots, modules * max_rank, in]: the first modules * ranks[s] rows count.
        up: B [out, columns]: slot s has modules * max_rank columns from as many times s on, of
            which the first modules * ranks[s] are not zero.
        ranks: int32 [slots], of each adapter.
        modules: how many modules the product merges.
    """

    down: torch.Tensor
    up: torch.Tensor
    ranks: torch.Tensor
    modules: int

    @property
    def width(self) -> int:
        """Columns of a slot."""
        return self.down.shape[1]


@dataclass(frozen=True, slots=True)
class AdapterOperand:
    """The adapters of a product's tokens, as kernels add them to the product.

    Attributes:
        shrunk: [T, columns], x A^T of each token in the columns of its adapter; zeros elsewhere.
        up: [out, columns], B of all adapters.
        blocks: int32 [1 + max], the number of blocks of `BLOCK` columns that tokens have, and then
            the blocks.
    """

    shrunk: torch.Tensor
    up: torch.Tensor
    blocks: torch.Tensor


@dataclass(frozen=True, slots=True)
class RowOperand:
    """The adapter of a product's only token: the product's launch computes x A^T, too.

    Attributes:
        adapters: of all slots.
        slots: int32, the first is the slot of the token; negative for none.
        words: integers of x's size, modules * max_rank at least, that are all MISSING: the launch
            writes x A^T there, which other programs of the launch wait for.
        others: those of the launch before, which this one sets to MISSING.
    """

    adapters: Adapters
    slots: torch.Tensor
    words: torch.Tensor
    others: torch.Tensor

    @classmethod
    def of(cls, adapters: Adapters, tiles: AdapterTiles, number: int) -> RowOperand:
        """Returns the operand of a step's only token in its launch `number`, counted from 0 in each
        step; `tiles` are of this token."""
        words, others = tiles.words[number % 2], tiles.words[1 - number % 2]
        return cls(adapters, tiles.slots, words, others)


@dataclass(frozen=True, slots=True)
class AdapterWorkspace:
    """Memory of the products of a step.

    Attributes:
        parts: float32, sums over a part of the input channels.
        shrunk: [T, width], x A^T of many tokens.
        tickets: int32, zeros, which count programs.
    """

    parts: torch.Tensor
    shrunk: torch.Tensor
    tickets: torch.Tensor

    @classmethod
    def empty(
        cls, tokens: int, layout: RankLayout, inputs: int, dtype: torch.dtype, device: torch.device
    ) -> AdapterWorkspace:
        """Returns the memory for up to `tokens` tokens, and products of up to `inputs` channels."""
        width = layout.modules[-1] * layout.max_rank
        sizes = {*(size for size, *_ in _SHRINKS if size is not None and size < tokens), tokens}
        parts = tickets = 0
        for size in sizes:
            plan = _ShrinkPlan.of(size, width, inputs, dtype.itemsize, layout.num_slots)
            numbers = plan.tiles * plan.blocks
            tickets = max(tickets, numbers)
            parts = max(parts, numbers * plan.splits * plan.tile * plan.ranks)
        return cls(
            torch.empty(parts, dtype=torch.float32, device=device),
            torch.empty(tokens, width, dtype=dtype, device=device),
            torch.zeros(tickets, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True, slots=True)
class _ShrinkPlan:
    """How the programs of `shrink` divide their work: into tiles of tokens, blocks of ranks, and
    parts of the input channels."""

    tiles: int
    tile: int
    blocks: int
    ranks: int
    inputs: int
    splits: int

    @property
    def stages(self) -> int:
        """Of the loop over the input channels, which takes few turns for few tokens."""
        return 1 if self.ranks == 16 else 3

    @classmethod
    def of(cls, tokens: int, width: int, inputs: int, itemsize: int, slots: int) -> _ShrinkPlan:
        _, most, size, splits = next(
            each for each in _SHRINKS if each[0] is None or tokens <= each[0]
        )
        ranks, channels = min(most, _ranks_at_a_time(width)), size // itemsize
        steps = triton.cdiv(inputs, channels)
        turns = triton.cdiv(steps, splits)  # equally many steps for each program
        tiles, tile = max_tiles(tokens, slots), tile_size(tokens)
        blocks = triton.cdiv(width, ranks)
        return cls(tiles, tile, blocks, ranks, channels, triton.cdiv(steps, turns))


def _ranks_at_a_time(ranks: int) -> int:
    return min(max(16, triton.next_power_of_2(ranks)), _MAX_RANKS)


@triton.jit(do_not_specialize=["modules"], do_not_specialize_on_alignment=["tickets"])
def _shrink_kernel(
    x, A, parts, shrunk, tickets, order, slots, widths, inputs, modules, x_stride, a_stride,
    slot_stride, shrunk_stride, spread,
    SPLITS: tl.constexpr, INPUTS: tl.constexpr, RANKS: tl.constexpr, TILE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    tile, block, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if PDL:
        gdc_launch_dependents()  # the product loads weights meanwhile, and waits for this kernel
    # what the sort has written can be read: the preceding kernel began when the sort had ended
    slot = tl.load(slots + tile)
    ranks = tl.load(widths + tl.maximum(slot, 0)) * modules
    token = tl.load(order + tile * TILE + tl.arange(0, TILE))
    rank = block * RANKS + tl.arange(0, RANKS)
    is_used = (rank < ranks) & (slot >= 0)
    row = x + token.to(tl.int64)[:, None] * x_stride
    weight = A + slot.to(tl.int64) * slot_stride + rank.to(tl.int64)[:, None] * a_stride
    channel = split * INPUTS + tl.arange(0, INPUTS)
    there = channel < inputs
    part = tl.load(weight + channel[None, :], is_used[:, None] & there[None, :], 0.0)
    if PDL:
        gdc_wait()
    if slot < 0:
        return
    if block * RANKS >= ranks:
        return
    given = tl.load(row + channel[None, :], (token >= 0)[:, None] & there[None, :], 0.0)
    total = tl.dot(given, tl.trans(part), input_precision="ieee")
    for first in range((split + SPLITS) * INPUTS, inputs, SPLITS * INPUTS):
        channel = first + tl.arange(0, INPUTS)
        there = channel < inputs
        given = tl.load(row + channel[None, :], (token >= 0)[:, None] & there[None, :], 0.0)
        part = tl.load(weight + channel[None, :], is_used[:, None] & there[None, :], 0.0)
        total = tl.dot(given, tl.trans(part), total, input_precision="ieee")
    if SPLITS > 1:
        part_size: tl.constexpr = TILE * RANKS
        number = tile * tl.num_programs(1) + block
        at = tl.arange(0, TILE)[:, None] * RANKS + tl.arange(0, RANKS)[None, :]
        tl.store(parts + (number * SPLITS + split) * part_size + at, total)
        if not is_last_of(tickets + number, SPLITS):
            return
        total = tl.zeros([TILE, RANKS], tl.float32)
        for other in tl.static_range(SPLITS):
            total += tl.load(
                parts + (number * SPLITS + other) * part_size + at, cache_modifier=".cg"
            )
    place = shrunk + token.to(tl.int64)[:, None] * shrunk_stride + slot * spread + rank[None, :]
    here = (token >= 0)[:, None] & (rank < ranks)[None, :]
    tl.store(place, total.to(shrunk.dtype.element_ty), here)


@triton.jit
def shrink_rank(
    x, A, norm, slot, widths, rank, modules, a_stride, slot_stride, eps,
    INPUTS: tl.constexpr, STEP: tl.constexpr, HAS_NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Returns one rank of x A^T of a single token, whose adapter is in `slot`, not negative; 0 for
    a rank that the adapter does not have."""
    is_used = rank < tl.load(widths + slot) * modules
    weight = A + slot.to(tl.int64) * slot_stride + rank.to(tl.int64) * a_stride
    k = tl.arange(0, STEP)
    part = tl.load(weight + k, is_used & (k < INPUTS), 0.0)
    if HAS_NORM:
        scale = tl.load(norm + k, k < INPUTS, 0.0)
    if PDL:
        gdc_wait()
    total, square = 0.0, 0.0
    for first in tl.static_range(0, INPUTS, STEP):
        there = first + k < INPUTS
        if first > 0:
            part = tl.load(weight + first + k, is_used & there, 0.0)
            if HAS_NORM:
                scale = tl.load(norm + first + k, there, 0.0)
        value = tl.load(x + first + k, there, 0.0).to(tl.float32)
        if HAS_NORM:
            square += tl.sum(value * value)
            value = value * scale.to(tl.float32)
        total += tl.sum(part.to(tl.float32) * value)
    if HAS_NORM:
        total *= tl.rsqrt(square / INPUTS + eps)
    return total


@triton.jit(do_not_specialize=["modules"])
def _shrink_row_kernel(
    x, A, shrunk, slots, widths, modules, a_stride, slot_stride, spread,
    INPUTS: tl.constexpr, STEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()  # see `_shrink_kernel`
    slot, rank = tl.load(slots), tl.program_id(0)
    if slot < 0:
        return
    total = shrink_rank(
        x, A, x, slot, widths, rank, modules, a_stride, slot_stride, 0.0, INPUTS, STEP, False, PDL
    )
    tl.store(shrunk + slot * spread + rank, total.to(shrunk.dtype.element_ty))


@triton.jit
def put_word(words, others, at, value, MISSING: tl.constexpr):
    """Writes a number as a word of its bits, and MISSING to `others`, which the launch before has
    read."""
    word = value.to(words.dtype.element_ty, bitcast=True)
    tl.store(words + at, tl.where(word == MISSING, word ^ 1, word))  # another NaN
    tl.store(others + at, tl.full([], MISSING, others.dtype.element_ty))


@triton.jit
def wait_for_words(words, column, has, word, MISSING: tl.constexpr):
    """Returns the words [columns] that other programs of the launch write (`put_word`), as soon as
    all of them are there; `word`: as they have been read before. There must be a column for each
    thread at least: threads that read the same one may see it at different times, and one of them
    would leave the loop without the others.

    The words carry their own flags, as in NCCL's protocol LL. The programs that write have lower
    numbers than those that wait, so that they run or have ended by then: GPUs start programs in the
    order of their numbers, on which the decoupled look-back of CUB's scans relies, too (Merrill and
    Garland 2016).
    """
    while tl.max((word == MISSING).to(tl.int32)) > 0:
        word = tl.load(words + column, has, 0, volatile=True)
    return word


@triton.jit(do_not_specialize=["modules"])
def _expand_kernel(
    shrunk, B, y, order, slots, widths, channels, modules, y_stride, b_stride, shrunk_stride, width,
    spread, CHANNELS: tl.constexpr, RANKS: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    slot = tl.load(slots + tile)
    ranks = tl.load(widths + tl.maximum(slot, 0)) * modules
    token = tl.load(order + tile * TILE + tl.arange(0, TILE))
    wait_for_kernel(PDL)
    if slot < 0:
        return
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    row = shrunk + token.to(tl.int64)[:, None] * shrunk_stride + slot * spread
    weight = B + channel.to(tl.int64)[:, None] * b_stride + slot * width
    target = y + token.to(tl.int64)[:, None] * y_stride + channel[None, :]
    inside = (token >= 0)[:, None] & (channel < channels)[None, :]
    old = tl.load(target, inside, 0.0)
    total = tl.zeros([TILE, CHANNELS], tl.float32)
    for first in range(0, ranks, RANKS):
        rank = first + tl.arange(0, RANKS)
        here = rank < ranks
        given = tl.load(row + rank[None, :], (token >= 0)[:, None] & here[None, :], 0.0)
        part = tl.load(weight + rank[None, :], (channel < channels)[:, None] & here[None, :], 0.0)
        total = tl.dot(given, tl.trans(part), total, input_precision="ieee")
    tl.store(target, (old.to(tl.float32) + total).to(old.dtype), inside)


def shrink(
    x: torch.Tensor, adapters: Adapters, tiles: AdapterTiles, workspace: AdapterWorkspace,
    *, pdl: bool = False,
) -> AdapterOperand | None:  # fmt: skip
    """Computes x A^T of each token with its adapter, and returns it as an operand of the product;
    None for more tokens than `tiles.shrunk` has rows, of which `workspace.shrunk` has it.

    Args:
        x: [T, in], contiguous channels.
        tiles: of the T tokens.
        workspace: for T tokens at least.
        pdl: launch as a programmatic dependent of the kernel before (Hopper and later).
    """
    rows, inputs = x.shape
    down, width, modules = adapters.down, adapters.width, adapters.modules
    by_adapter = rows <= len(tiles.shrunk)  # in the columns of each token's adapter
    shrunk = tiles.shrunk_of(modules) if by_adapter else workspace.shrunk
    spread = width if by_adapter else 0
    if by_adapter and rows == 1:
        _shrink_row_kernel[(width,)](
            x, down, shrunk, tiles.slots, adapters.ranks, modules, down.stride(1), down.stride(0),
            spread, INPUTS=inputs, STEP=min(_STEP, triton.next_power_of_2(inputs)), PDL=pdl,
            num_warps=4, launch_pdl=pdl,
        )  # fmt: skip
    else:
        slots = tiles.layout.num_slots
        plan = _ShrinkPlan.of(rows, width, inputs, x.element_size(), slots)
        _shrink_kernel[(plan.tiles, plan.blocks, plan.splits)](
            x, down, workspace.parts, shrunk, workspace.tickets, tiles.order, tiles.slots,
            adapters.ranks, inputs, modules, x.stride(0), down.stride(1), down.stride(0),
            shrunk.stride(0), spread,
            SPLITS=plan.splits, INPUTS=plan.inputs, RANKS=plan.ranks, TILE=plan.tile, PDL=pdl,
            num_warps=4, num_stages=plan.stages, launch_pdl=pdl,
        )  # fmt: skip
    if not by_adapter:
        return None
    return AdapterOperand(shrunk[:rows], adapters.up, tiles.blocks_of(modules))


def expand(
    y: torch.Tensor, adapters: Adapters, tiles: AdapterTiles, workspace: AdapterWorkspace,
    *, pdl: bool = False,
) -> None:  # fmt: skip
    """Adds the product of what `shrink` computed with B to y [T, out], in place; arguments as
    there."""
    rows, width, up = len(y), adapters.width, adapters.up
    by_adapter = rows <= len(tiles.shrunk)  # in the columns of each token's adapter
    shrunk = tiles.shrunk_of(adapters.modules) if by_adapter else workspace.shrunk
    _expand_kernel[(len(tiles.slots), triton.cdiv(y.shape[1], _CHANNELS))](
        shrunk, up, y, tiles.order, tiles.slots, adapters.ranks, y.shape[1], adapters.modules,
        y.stride(0), up.stride(0), shrunk.stride(0), width, width if by_adapter else 0,
        CHANNELS=_CHANNELS, RANKS=_ranks_at_a_time(width), TILE=tile_size(rows), PDL=pdl,
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip


def operand_arguments(
    operand: AdapterOperand | None, other: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int]:
    """Returns an operand as kernels take it: shrunk, up, blocks, and the strides of shrunk's and
    up's rows; `other` stands for tensors that there are not."""
    if operand is None:
        return other, other, other, 0, 0
    shrunk, up = operand.shrunk, operand.up
    return shrunk, up, operand.blocks, shrunk.stride(0), up.stride(0)


def row_arguments(
    operand: RowOperand | None, other: torch.Tensor
) -> tuple[torch.Tensor | int, ...]:
    """Returns an operand as the kernel of one row takes it: A, B, words, the other words, slots,
    ranks, the merged modules and columns of a slot, and the strides of B's and of A's rows and of
    A's slots; `other` stands for tensors that there are not."""
    if operand is None:
        return other, other, other, other, other, other, 0, 0, 0, 0, 0
    own = operand.adapters
    down, up = own.down, own.up
    return (
        down, up, operand.words, operand.others, operand.slots, own.ranks, own.modules, own.width,
        up.stride(0), down.stride(1), down.stride(0),
    )  # fmt: skip
