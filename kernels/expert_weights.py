"""The weights of all experts of a layer, as `expert_product` reads them: as they are,
in float8 with scales, or in four bits with scales of groups.

Made by `layers.expert_stacks` when a model is loaded. A weight in four bits is cut into runs of
neighbouring inputs, four of which lie in the same 16-bit words, as in `grouped_weight`. Of MXFP4
(OCP Microscaling Formats 1.0) a run is a block of 32 inputs, and the bits of a word are ordered for
the conversion to bfloat16 (`expert_tiles`): sign and magnitude of a number have the distance there
that they have in bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F
from aioinfer.kernels.expert_configs import NARROW_INPUTS
from aioinfer.kernels.grouped_weight import TILE

#: Inputs that share a scale in MXFP4, and numbers in a word.
BLOCK, PARTS = 32, 4
#: By the place of a number in a word: where its sign and the bits of its magnitude are, the highest
#: first.
PLACES = ((15, 8, 7, 6), (12, 5, 4, 3), (9, 2, 1, 0), (14, 13, 11, 10))
#: The largest code of a scale that the kernels multiply by: 2.0.
MAX_SCALE = 128
#: The number added to the codes of scales: the exponent, in bfloat16, of the scale times 2 ** 126.
SCALE_OFFSET = 126


@dataclass(frozen=True, slots=True)
class ScaledExperts:
    """Weights in float8 (e4m3), or in int8 for activations that are not quantized: value * scale.

    Attributes:
        values: float8_e4m3fn or int8 [E, N, K], contiguous.
        scales: float32 [E, N / rows_per_scale, groups], contiguous. One group holds all inputs;
            several hold `quantize.GROUP` inputs each.
        rows_per_scale: neighbouring rows that share scales.
    """

    values: torch.Tensor
    scales: torch.Tensor
    rows_per_scale: int = 1

    @property
    def shape(self) -> tuple[int, int, int]:
        """E, N and K."""
        experts, features, inputs = self.values.shape
        return experts, features, inputs

    @property
    def is_grouped(self) -> bool:
        """Whether scales belong to `GROUP` inputs, instead of to a row."""
        return self.scales.shape[2] > 1

    @property
    def nbytes(self) -> int:
        """Bytes of all experts."""
        return self.values.nbytes + self.scales.nbytes


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """Weights in four bits.

    Attributes:
        words: int16 [E, N / 16, K / (R * 4), 16, R] of runs of R inputs; N and K are padded.
        scales: int32. Of integers [E, K / group, N] as in `PackedGroups`; of MXFP4 [E, K / 128, N],
            the scales of four blocks, the first in the lowest bits, each its code plus
            `SCALE_OFFSET` less `shift`.
        features, inputs: N and K without padding.
        group: inputs that share a scale.
        has_zeros: whether integers have zero points; otherwise each is 8.
        is_float: whether these are numbers of MXFP4, and not integers.
        shift: 0 where the largest scale of MXFP4 is not above 2; else results are multiplied by
            2 ** shift.
    """

    words: torch.Tensor
    scales: torch.Tensor
    features: int
    inputs: int
    group: int
    has_zeros: bool = False
    is_float: bool = False
    shift: int = 0

    @property
    def shape(self) -> tuple[int, int, int]:
        """E, N and K."""
        return len(self.words), self.features, self.inputs

    @property
    def run(self) -> int:
        """R: inputs of a run."""
        return self.words.shape[4]

    @property
    def units(self) -> int:
        """Units of a row: four runs that lie in the same words."""
        return self.words.shape[2]

    @property
    def width(self) -> int:
        """N with padding."""
        return self.words.shape[1] * TILE

    @property
    def nbytes(self) -> int:
        """Bytes of all experts."""
        return self.words.nbytes + self.scales.nbytes


ExpertWeights: TypeAlias = torch.Tensor | ScaledExperts | PackedExperts


def packed_shape(features: int, inputs: int, run: int) -> tuple[int, int, int, int]:
    """Returns the shape of one expert's words."""
    return -(-features // TILE), -(-inputs // (PARTS * run)), TILE, run


def pack_floats(blocks: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the words int16 [N / 16, K / 128, 16, 32] of a weight in MXFP4, and its scales int32
    [K / 128, N], for a shift of 0.

    Args:
        blocks: uint8 [N, K / 32, 16], two numbers to a byte, that of the lower input in its low
            bits.
        scales: uint8 [N, K / 32], of e8m0, `MAX_SCALE` at most.
    """
    features, count = scales.shape
    missing = (0, -count % PARTS, 0, -features % TILE)
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(2).int()
    codes = F.pad(codes, (0, 0, *missing)).unflatten(1, (-1, PARTS))  # [N, units, part, 32]
    words = torch.zeros_like(codes[:, :, 0])
    for part, (sign, *bits) in enumerate(PLACES):
        code = codes[:, :, part]
        words |= (code >> 3) << sign
        for number, place in enumerate(bits):
            words |= (code >> 2 - number & 1) << place
    tiles = words.to(torch.int16).unflatten(0, (-1, TILE)).transpose(1, 2).contiguous()
    stored = F.pad(scales.int() + SCALE_OFFSET, missing).unflatten(1, (-1, PARTS))
    shifts = torch.arange(0, 32, 8, device=scales.device)
    return tiles, (stored << shifts).sum(-1).to(torch.int32).t().contiguous()


def values_and_scales(weight: ExpertWeights) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the values to multiply and their scales; without scales the second is arbitrary."""
    if isinstance(weight, torch.Tensor):
        return weight, weight
    values = weight.values if isinstance(weight, ScaledExperts) else weight.words
    return values, weight.scales


def format_name(weight: ExpertWeights, *, quantized: bool = True) -> str:
    """Returns the format by which a configuration is selected, a key of `expert_configs.TABLES`;
    `quantized` says whether activations are, where weights have one byte."""
    if isinstance(weight, torch.Tensor):
        return "narrow" if weight.shape[2] in NARROW_INPUTS else "plain"
    if isinstance(weight, ScaledExperts):
        if not quantized:
            return "weights alone"
        return "blocks" if weight.is_grouped else "scaled"
    return "mxfp4" if weight.is_float else "integers"
