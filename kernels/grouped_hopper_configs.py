"""The configurations of `grouped_hopper` for a number of rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from aioinfer.kernels.grouped_weight import PackedGroups
from aioinfer.kernels.hopper_pipeline import WEIGHT_ROWS, all_registers, consumer_registers
from triton.experimental.gluon import language as gl

#: Warpgroups that multiply, and the registers of each of their threads.
CONSUMERS = gl.constexpr(3)
REGISTERS = consumer_registers(all_registers(CONSUMERS.value), CONSUMERS.value)


@dataclass(frozen=True, slots=True)
class GroupedHopperConfig:
    """The compile-time configuration of the kernel.

    Attributes:
        tokens: columns of a tile: 64 or 128.
        word_stages: stages of the ring of words; each holds 256 inputs of the tile's weight rows.
        stages: stages of the ring of x; each holds 64 inputs of the tile's tokens.
        splits: programs that share the inputs of a tile.
        group: token tiles that are computed with a weight tile before the next weight tile.
    """

    tokens: int
    word_stages: int
    stages: int
    splits: int = 1
    group: int = 8


#: Microseconds that a program needs for a unit of 256 inputs of a tile, by the tile's tokens, and
#: for the end of a tile, measured on an H200.
UNIT_TIMES, TILE_TIME = {128: 2.15, 64: 1.6}, 2.0
#: Microseconds that summing costs for each program that shares a tile of 128 tokens: the reads of
#: one multiprocessor. Guessed.
SPLIT_TIME = 0.9
MAX_SPLITS = 6


def _stages(tokens: int, gated: bool) -> tuple[int, int]:
    """Returns the stages of words and of x that fit beside the results of a tile."""
    if tokens == 64:
        return 4, 8
    return (3, 6) if gated else (3, 5)


def configs(rows: int, weight: PackedGroups, gated: bool) -> Iterator[GroupedHopperConfig]:
    """Yields the configurations for a number of rows: for each tile by the number of programs that
    share its inputs, one program first."""
    for tokens in (128, 64) if rows > 64 else (64,):
        tiles = -(-rows // tokens) * weight_tiles_of(weight)
        for splits in range(1, min(MAX_SPLITS, weight.units) + 1):
            if shares(weight, tiles, splits):
                yield GroupedHopperConfig(tokens, *_stages(tokens, gated), splits)


def shares(weight: PackedGroups, tiles: int, splits: int) -> bool:
    """Whether `splits` programs can share each of `tiles` tiles: all have inputs, and there is a
    counter for each consumer of a tile."""
    share = -(-weight.units // splits)
    has_counters = tiles * CONSUMERS.value <= len(weight.counters)
    return splits == 1 or (share * (splits - 1) < weight.units and has_counters)


def weight_tiles_of(weight: PackedGroups) -> int:
    """Returns the tiles of 192 rows, the last of which may reach beyond the weight."""
    return -(-weight.features // (WEIGHT_ROWS * CONSUMERS.value))


def grouped_hopper_config(
    rows: int, weight: PackedGroups, programs: int, *, gated: bool
) -> GroupedHopperConfig:
    """Returns the configuration with the shortest time, if every tile takes what `UNIT_TIMES`,
    `TILE_TIME` and `SPLIT_TIME` say: tiles are computed in waves of one for each program.

    Args:
        rows: of x.
        weight: of the product.
        programs: multiprocessors.
        gated: whether pairs of rows are multiplied.
    """

    def time(config: GroupedHopperConfig) -> float:
        items = -(-rows // config.tokens) * weight_tiles_of(weight) * config.splits
        waves = -(-items // programs)
        units = -(-weight.units // config.splits)
        summed = SPLIT_TIME * config.splits * config.tokens / 128 if config.splits > 1 else 0.0
        return waves * (units * UNIT_TIMES[config.tokens] + TILE_TIME) + summed

    return min(configs(rows, weight, gated), key=time)
