"""The configurations of the products of experts (`expert_product`), by the format of the weights
and the number of tokens. The configurations for unquantized weights are measured on an H200
(notes/experts.md); the others are derived from the dense products of the same format.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from aioinfer.kernels.launch import first_bound

#: Up to so many tokens programs look for their rows themselves, without buckets.
SCANNED_TOKENS = 16


@dataclass(frozen=True, slots=True)
class ExpertConfig:
    """The compile-time configuration of a product.

    Attributes:
        lines: weight rows of a tile; a multiple of 16.
        rows: tokens of a tile.
        step: inputs of a stage.
        num_warps, num_stages: as Triton has them.
        tma: whether weights are loaded by TMA, and sorted rows too.
        programs: with buckets, programs of a multiprocessor, which take tile after tile; 0 for a
            program for each tile that there may be, of which those without one end at once.
        tail: with buckets, rows of the narrower tile that an expert's last rows get if they fit: of
            512 rows on average, tiles of 128 alone would be 11 % padding. 0 for none.
    """

    lines: int
    rows: int
    step: int
    num_warps: int
    num_stages: int
    tma: bool = True
    programs: int = 0
    tail: int = 0


@dataclass(frozen=True, slots=True)
class VectorConfig:
    """The compile-time configuration of a product of one token: output features of a program,
    inputs of a step."""

    features: int
    step: int
    num_warps: int


@dataclass(frozen=True, slots=True)
class PipelinedConfig:
    """The compile-time configuration of `expert_hopper`, with buckets.

    Attributes:
        stages: of the ring in shared memory.
    """

    stages: int = 4


#: By the average rows of an expert up to which each is used, with buckets. There
#: are as many programs as fit a multiprocessor's shared memory: a third of the tiles that there may
#: be in a decode step are none, and a program that ends at once takes another's place for a while.
CONFIGS: tuple[tuple[float | None, ExpertConfig], ...] = (
    (8, ExpertConfig(64, 16, 128, 4, 5, programs=2)),
    (24, ExpertConfig(64, 32, 128, 4, 4, programs=2)),
    (64, ExpertConfig(128, 64, 64, 4, 4, programs=2)),
    (192, ExpertConfig(128, 128, 64, 8, 4, programs=1, tail=64)),
    (None, ExpertConfig(256, 128, 64, 8, 3, programs=1, tail=64)),
)
#: Unquantized weights of 256 to 512 inputs, of which a tile of 64 rows has few steps: measured with
#: 512 inputs and an expert that all tokens take.
NARROW_CONFIGS: tuple[tuple[float | None, ExpertConfig], ...] = (
    (8, ExpertConfig(128, 16, 64, 4, 6, programs=2)),
    (24, ExpertConfig(128, 32, 64, 4, 5, programs=2)),
    *CONFIGS[2:],
)
NARROW_INPUTS = range(256, 513)
#: By the number of tokens up to which each is used, without.
SCANNED_CONFIGS: tuple[tuple[int, ExpertConfig], ...] = (
    (8, ExpertConfig(64, 8, 256, 4, 4)),
    (SCANNED_TOKENS, ExpertConfig(64, 16, 128, 4, 5)),
)
#: Float8 weights and activations: a stage holds twice the inputs. Tiles have 16 rows or more, the
#: least that warpgroups multiply in Triton.
SCALED_CONFIGS: tuple[tuple[float | None, ExpertConfig], ...] = (
    (8, ExpertConfig(64, 16, 256, 4, 5, programs=2)),
    (24, ExpertConfig(64, 32, 256, 4, 4, programs=2)),
    (64, ExpertConfig(128, 64, 128, 4, 4, programs=2)),
    (192, ExpertConfig(128, 128, 128, 8, 4, programs=1, tail=64)),
    (None, ExpertConfig(256, 128, 128, 8, 3, programs=1, tail=64)),
)
SCANNED_SCALED_CONFIGS = ((SCANNED_TOKENS, ExpertConfig(64, 16, 256, 4, 5)),)
#: With scales of blocks: the sums of a block stand beside the total in the registers.
BLOCK_CONFIGS: tuple[tuple[float | None, ExpertConfig], ...] = (
    (8, ExpertConfig(64, 16, 128, 4, 6, programs=3)),
    (24, ExpertConfig(64, 32, 128, 4, 5, programs=3)),
    (64, ExpertConfig(64, 64, 128, 4, 5, programs=2)),
    (None, ExpertConfig(64, 128, 128, 4, 4, programs=2)),
)
SCANNED_BLOCK_CONFIGS = ((SCANNED_TOKENS, ExpertConfig(64, 16, 128, 4, 6)),)
#: Weights of one byte and activations that are not quantized: a tile of weights goes through
#: registers to be converted.
ALONE_CONFIGS: tuple[tuple[float | None, ExpertConfig], ...] = (
    (8, ExpertConfig(64, 16, 128, 4, 4, programs=3)),
    (24, ExpertConfig(64, 32, 128, 4, 4, programs=2)),
    (None, ExpertConfig(64, 64, 128, 4, 4, programs=2)),
)
SCANNED_ALONE_CONFIGS = ((SCANNED_TOKENS, ExpertConfig(64, 16, 128, 4, 4)),)
#: Weights in four bits; their units are the steps. A wide tile has its weights expanded for more
#: rows at a time.
MXFP4_CONFIGS: tuple[tuple[float | None, ExpertConfig], ...] = (
    (8, ExpertConfig(64, 16, 128, 4, 3, tma=False, programs=4)),
    (24, ExpertConfig(64, 32, 128, 4, 3, tma=False, programs=3)),
    (96, ExpertConfig(64, 64, 128, 4, 3, tma=False, programs=2)),
    (256, ExpertConfig(128, 128, 128, 8, 3, tma=False, programs=1, tail=64)),
    (None, ExpertConfig(128, 256, 128, 8, 3, tma=False, programs=1, tail=64)),
)
#: Integers: the sums of a group stand beside the total in the registers.
INTEGER_CONFIGS: tuple[tuple[float | None, ExpertConfig], ...] = (
    (8, ExpertConfig(64, 16, 256, 4, 3, tma=False, programs=3)),
    (24, ExpertConfig(64, 32, 256, 4, 3, tma=False, programs=2)),
    (96, ExpertConfig(64, 64, 256, 4, 3, tma=False, programs=1)),
    (None, ExpertConfig(128, 64, 256, 8, 3, tma=False, programs=1)),
)
SCANNED_PACKED_CONFIGS = (
    (8, ExpertConfig(32, 8, 128, 2, 4, tma=False)),
    (SCANNED_TOKENS, ExpertConfig(64, 16, 128, 4, 3, tma=False)),
)
Table: TypeAlias = "tuple[tuple[float | None, ExpertConfig], ...]"
#: By the format of weights: the configurations without buckets, and with.
TABLES: dict[str, tuple[Table, Table]] = {
    "plain": (SCANNED_CONFIGS, CONFIGS),
    "narrow": (SCANNED_CONFIGS, NARROW_CONFIGS),
    "scaled": (SCANNED_SCALED_CONFIGS, SCALED_CONFIGS),
    "blocks": (SCANNED_BLOCK_CONFIGS, BLOCK_CONFIGS),
    "weights alone": (SCANNED_ALONE_CONFIGS, ALONE_CONFIGS),
    "integers": (SCANNED_PACKED_CONFIGS, INTEGER_CONFIGS),
    "mxfp4": (SCANNED_PACKED_CONFIGS, MXFP4_CONFIGS),
}
#: For activations of 32 bits, which only tests have.
WIDE_CONFIG = ExpertConfig(32, 16, 32, 4, 2)
#: The least rows of a tensor-core product.
MIN_ROWS = 8


def expert_config(
    tokens: int, top_k: int, num_experts: int, itemsize: int = 2, format: str = "plain"
) -> ExpertConfig:
    """Returns the configuration for a number of tokens; of plain weights above 1.

    Args:
        itemsize: bytes of an activation.
        format: of the weights, a key of `TABLES`.
    """
    if itemsize > 2:
        return WIDE_CONFIG
    scanned, sorted_rows = TABLES[format]
    average = tokens * top_k / num_experts
    table, size = (scanned, tokens) if tokens <= SCANNED_TOKENS else (sorted_rows, average)
    return first_bound(table, size)


def vector_config(*, gated: bool, itemsize: int = 2) -> VectorConfig:
    """Returns the configuration for one token and weights of so many bytes."""
    if itemsize == 1:
        return VectorConfig(4, 2048, 4) if gated else VectorConfig(8, 1024, 4)
    return VectorConfig(2, 2048, 4) if gated else VectorConfig(4, 1024, 4)
