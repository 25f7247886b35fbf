"""Weights of 4-bit or 8-bit integers of which groups of inputs share a scale, in the order that
`grouped_product` reads, and their dequantization.

`pack_groups` makes the order once, when a weight is loaded. The inputs of an output feature are cut
into runs of 64 (or of a group, if that is shorter). Four runs of 4 bits, or two of 8 bits, lie in
the same 16-bit words: the first in their lowest bits, and so on. Neighbouring words hold
neighbouring inputs of each run, so two words in a register give, by a shift and a mask, the two
neighbouring 16-bit values that a tensor-core operand has in one, without a shuffle; and tiles of
16-bit words are read from shared memory like tiles of 16-bit weights (`ldmatrix`). The words of
such a unit of runs for 16 neighbouring output features are contiguous, 2 KiB for runs of 64.

Called by the weight format for groups (`aioinfer.layers.formats.kernel_grouped`).
"""
# ruff: noqa: N803  (compile-time constants are written in capitals)

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from aioinfer.kernels.launch import wait_for_kernel

#: Output features whose bytes of a unit are contiguous.
TILE = 16
#: Inputs of the longest run.
MAX_RUN = 64


@dataclass(frozen=True, slots=True)
class PackedGroups:
    """A weight [N, K] of integers, as `pack_groups` orders it: (integer - zero point) * scale.

    Attributes:
        integers: int16 [N / 16, K / (R * 16 / bits), 16, R] of runs of R inputs; N and K are padded
            to multiples.
        scales: int32 [K / group, N], padded likewise: the bits of float32 scales. With zero points
            their lowest eight bits are the zero point, so that one load of four bytes, the least
            that is copied asynchronously, has both. Scales that are 16-bit numbers lose nothing by
            it, others less than 2 ** -15.
        has_zeros: whether there are zero points; otherwise each is 2 ** (bits - 1).
        counters: int32 [N / 16] of zeros, in which split products count the programs that are done.
        features, inputs: N and K without padding.
        group: inputs that share a scale.
        bits: 4 or 8.
    """

    integers: torch.Tensor
    scales: torch.Tensor
    has_zeros: bool
    counters: torch.Tensor
    features: int
    inputs: int
    group: int
    bits: int

    @property
    def run(self) -> int:
        """R: inputs of a run."""
        return self.integers.shape[3]

    @property
    def units(self) -> int:
        """Units of a row: runs that lie in the same bytes count as one."""
        return self.integers.shape[1]

    @property
    def width(self) -> int:
        """N with padding."""
        return self.scales.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes that a product has to read."""
        return self.integers.nbytes + self.scales.nbytes


def supports_group(group: int | None) -> bool:
    """Whether runs can be cut out of groups of so many inputs; None stands for whole rows."""
    return group is None or group in (32, 64) or group % (2 * MAX_RUN) == 0


def pack_groups(
    integers: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bits: int,
    group: int | None,
    run: int | None = None,
) -> PackedGroups:
    """Returns a weight in the kernels' order.

    Args:
        integers: [N, K] of any integer dtype, from 0 to 2 ** bits - 1.
        scales: [N, groups], of any floating-point dtype.
        zeros: [N, groups], integers from 0 to 2 ** bits - 1, or None for 2 ** (bits - 1).
        bits: 4 or 8.
        group: inputs that share a scale, the first group beginning with the first input; None for
            all of a row.
        run: inputs of a run, which divides `MAX_RUN` and the group; by default the most.

    Raises:
        ValueError: `supports_group` is false, or there are other numbers of groups.
    """
    features, inputs = integers.shape
    if bits not in (4, 8) or not supports_group(group):
        raise ValueError(f"{bits} bits in groups of {group} are not supported")
    if scales.shape != (features, 1 if group is None else -(-inputs // group)):
        raise ValueError(f"scales are {tuple(scales.shape)} for {features} x {inputs} integers")
    run = run or (MAX_RUN if group is None else min(group, MAX_RUN))
    parts = 16 // bits
    unit = run * parts
    padded = F.pad(integers.to(torch.int16), (0, -inputs % unit, 0, -features % TILE))
    units = padded.shape[1] // unit
    runs = padded.view(-1, TILE, units, parts, run)
    packed = runs[..., 0, :].clone()
    for part in range(1, parts):
        packed |= runs[..., part, :] << part * bits
    group = units * unit if group is None else group
    groups = -(-units * unit // group)

    kept = scales.float().view(torch.int32)
    if zeros is not None:
        kept = (kept & ~255) | zeros.int()
    missing = (0, groups - kept.shape[1], 0, -features % TILE)
    return PackedGroups(
        packed.transpose(1, 2).contiguous(),
        F.pad(kept, missing).t().contiguous(),
        zeros is not None,
        torch.zeros(len(padded) // TILE, dtype=torch.int32, device=integers.device),
        features, inputs, group, bits,
    )  # fmt: skip


@triton.jit
def split_zero(kept, BITS: tl.constexpr, HAS_ZEROS: tl.constexpr):
    """Returns the scales, float32, and the zero points, int32, of elements of
    `PackedGroups.scales`."""
    if HAS_ZEROS:
        zero = kept & 255
        scale = (kept & -256).to(tl.float32, bitcast=True)
    else:
        zero = tl.zeros_like(kept) + 2 ** (BITS - 1)
        scale = kept.to(tl.float32, bitcast=True)
    return scale, zero


@triton.jit
def _dequantize_kernel(
    packed, scales, out, features, width, units, out_stride,
    INPUTS: tl.constexpr, RUN: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr,
    TILE: tl.constexpr, HAS_ZEROS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Dequantizes the unit `program_id(1)` of a tile of output features."""
    tile, unit = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, word = tl.arange(0, TILE), tl.arange(0, RUN)
    n = tile * TILE + row
    words = tl.load(packed + ((tile * units + unit) * TILE + row[:, None]) * RUN + word[None, :])
    wait_for_kernel(PDL)  # a product with the weight that was here before may still be running
    for part in tl.static_range(16 // BITS):
        begin = (unit * (16 // BITS) + part) * RUN
        kept = tl.load(scales + begin // GROUP * width + n)
        scale, zero = split_zero(kept, BITS, HAS_ZEROS)
        integers = (words.to(tl.int32) >> (part * BITS)) & (2**BITS - 1)
        values = (integers - zero[:, None]).to(tl.float32) * scale[:, None]
        place = out + n[:, None] * out_stride + (begin + word)[None, :]
        inside = (n < features)[:, None] & (begin + word < INPUTS)[None, :]
        tl.store(place, values.to(out.dtype.element_ty), inside)


def dequantize(weight: PackedGroups, out: torch.Tensor, *, pdl: bool = False) -> torch.Tensor:
    """Writes the dequantized weight to `out` [N, K], rounded to its dtype, and returns it.

    Args:
        weight: of integers.
        out: [N, K], contiguous rows. A kernel that reads it must not be launched as a programmatic
            dependent that reads weights before this kernel has ended.
        pdl: launch as a programmatic dependent of the kernel before (Hopper and later).
    """
    if out.shape != (weight.features, weight.inputs) or out.stride(1) != 1:
        raise ValueError(f"out must be {weight.features} x {weight.inputs}, not {out.shape}")
    _dequantize_kernel[(weight.width // TILE, weight.units)](
        weight.integers, weight.scales, out, weight.features, weight.width, weight.units,
        out.stride(0), INPUTS=weight.inputs, RUN=weight.run, GROUP=weight.group, BITS=weight.bits,
        TILE=TILE, HAS_ZEROS=weight.has_zeros, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return out
