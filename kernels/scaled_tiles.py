"""Tile configurations for float8 products of many rows on Hopper: for the Gluon kernels
(`scaled_hopper.py` and `block_hopper.py`), and where these are faster than the Triton kernel
(`scaled_product.py`).

Products of many rows take as long as their waves: tiles are computed one for each multiprocessor at
a time, and a last wave that occupies few of them takes as long as a full one. So a time for each
kind of tile explains the measurements (notes/quantized-products.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from aioinfer.kernels.hopper_pipeline import all_registers, consumer_registers
from aioinfer.kernels.scaled_product import ProductConfig, product_config

CONSUMER_ROWS = 64  # weight rows of a consumer warpgroup: the rows of one wgmma
STEP = 128  # inputs of a stage: 128 bytes, the widest swizzle of TMA and wgmma, and one block
HALF = 64  # tokens of a wgmma where tokens are its rows
SHARED_MEMORY = 227 * 1024  # bytes of a thread block
MAX_STAGES = 12
#: Whether products with scales of blocks are computed by `block_hopper`, where it is the faster
#: one: False to compare with the kernels used before.
USE_BLOCK_HOPPER = True


@dataclass(frozen=True, slots=True)
class HopperConfig:
    """The compile-time configuration of the Gluon kernel of `scaled_hopper`.

    Attributes:
        tokens: columns of a tile: 64 or 128. With scales of blocks, the registers of three
            consumers hold 64.
        stages: stages of the ring.
        consumers: warpgroups that multiply, 2 or 3, each 64 weight rows.
        group: token tiles that are computed with a weight tile before the next weight tile.
    """

    tokens: int
    stages: int
    consumers: int = 3
    group: int = 8

    @property
    def lines(self) -> int:
        """Weight rows of a tile."""
        return self.consumers * CONSUMER_ROWS

    @property
    def registers(self) -> int:
        """Registers of a consumer's thread, if the kernel takes all."""
        return consumer_registers(all_registers(self.consumers), self.consumers)


@dataclass(frozen=True, slots=True)
class BlockConfig:
    """The compile-time configuration of `block_hopper`, the Gluon kernel for scales of blocks; its
    tiles have tokens as rows.

    Attributes:
        tokens: rows of a tile: 64 or 128 for each consumer that has its own.
        lines: weight rows of a tile; of each consumer up to 128, all in one block.
        consumers: warpgroups that multiply, 2 or 3.
        splits_lines: consumers divide a tile's weight rows instead of its tokens.
        group: token tiles that are computed with a weight tile before the next weight tile.
    """

    tokens: int
    lines: int
    consumers: int = 2
    splits_lines: bool = False
    group: int = 8

    @property
    def halves(self) -> int:
        """Sets of 64 tokens of a consumer: 1 or 2."""
        return self.tokens // HALF // (1 if self.splits_lines else self.consumers)

    @property
    def part_lines(self) -> int:
        """Weight rows of a consumer."""
        return self.lines // self.consumers if self.splits_lines else self.lines

    @property
    def registers(self) -> int:
        """Registers of a consumer's thread, as `HopperConfig.registers`."""
        return consumer_registers(all_registers(self.consumers), self.consumers)

    @property
    def overlapped(self) -> bool:
        """Whether a consumer scales the sums of one wgmma while another is computed: with one half,
        where the registers hold both beside the total and some 32 for the rest."""
        return self.halves == 1 and 3 * self.part_lines // 2 <= self.registers - 32

    def allows(self, *, gated: bool) -> bool:
        """Whether a consumer's results are rows of 32 bytes or more, which TMA writes swizzled."""
        return not gated or self.part_lines >= 32

    def stages(self, *, gated: bool) -> int:
        """Stages of the ring: as many as shared memory holds beside the results, in 16 bits."""
        results = self.tokens * self.lines * (1 if gated else 2)
        space = SHARED_MEMORY - results - 1024  # for barriers and alignment
        return min(MAX_STAGES, space // ((self.tokens + self.lines) * STEP))


#: By (gated, scales of blocks): the configurations that tests and benchmarks run.
CONFIGS = {
    (True, False): (HopperConfig(128, 4), HopperConfig(64, 6)),
    (False, False): (HopperConfig(128, 4), HopperConfig(64, 6)),
    (True, True): (
        HopperConfig(128, 6, consumers=2),
        HopperConfig(64, 6),
        HopperConfig(128, 4, consumers=2),
        HopperConfig(64, 8, consumers=2),
    ),
    (False, True): (
        HopperConfig(128, 5, consumers=2),
        HopperConfig(64, 6),
        HopperConfig(128, 4, consumers=2),
        HopperConfig(64, 8, consumers=2),
    ),
}
#: Microseconds that `STEP` inputs of a wave of tiles take, by (gated, scales of blocks), as
#: `CONFIGS`: measured on an H200 with the weights of Qwen3-8B.
HOPPER_TIMES = {
    (True, False): {HopperConfig(128, 4): 0.63, HopperConfig(64, 6): 0.34},
    (False, False): {HopperConfig(128, 4): 0.63, HopperConfig(64, 6): 0.34},
    (True, True): {HopperConfig(128, 6, consumers=2): 0.71, HopperConfig(64, 6): 0.62},
    (False, True): {
        HopperConfig(128, 5, consumers=2): 0.66,
        HopperConfig(64, 6): 0.53,
        HopperConfig(64, 8, consumers=2): 0.39,
    },
}
#: The same of `block_hopper`, measured with 8192 rows, without a gate; tiles of 64 x 32 predicted.
BLOCK_TIMES = {
    BlockConfig(128, 128): 0.47,
    BlockConfig(128, 64): 0.37,
    BlockConfig(64, 64, splits_lines=True): 0.26,
    BlockConfig(64, 32, splits_lines=True): 0.18,
    BlockConfig(64, 192, 3, splits_lines=True): 0.43,
    BlockConfig(128, 192, 3, splits_lines=True): 0.87,
}
#: The configurations that its tests and benchmarks run.
BLOCK_CONFIGS = (*BLOCK_TIMES, BlockConfig(256, 128), BlockConfig(192, 128, 3))
GATED_BLOCK_CONFIGS = tuple(config for config in BLOCK_CONFIGS if config.allows(gated=True))
#: The same of the Triton kernel, by weight rows and tokens; with scales of blocks a multiprocessor
#: has two programs at a time.
PRODUCT_TIMES = {
    False: {(64, 128): 0.31, (128, 128): 0.48, (256, 128): 0.95, (128, 256): 0.855},
    True: {(64, 64): 0.74, (64, 128): 0.74},
}
#: Steps that a program of the Triton kernel takes to begin and end a tile, which the Gluon kernel
#: does while it loads the next one.
_ENDS = 0.5
#: Microseconds a token of a tile by which programs that share its inputs (split-K) end later: what
#: o with scales of blocks and 64 or 128 rows takes beyond its steps and a launch.
_SUM_OF_PARTS = 0.05
#: Up to so many rows a narrow weight's inputs are shared by several programs of the Triton kernel,
#: or its smaller tiles occupy more multiprocessors.
_NARROW_ROWS = 128
#: Up to so many rows reading the weight is the bound, by whether scales are of blocks.
_FEW_ROWS = {False: 64, True: 32}


@lru_cache(maxsize=8192)
def hopper_config(
    rows: int,
    lines: int,
    inputs: int,
    programs: int,
    *,
    gated: bool,
    grouped: bool,
    blocks: bool = False,
) -> BlockConfig | HopperConfig | None:
    """Returns the configuration of the Gluon kernel that is the fastest for activations
    [rows, inputs] and a weight of `lines` rows, or None where the Triton kernel is faster.

    Args:
        programs: multiprocessors.
        gated: whether the weight's rows are gate and up rows.
        grouped: whether scales are of blocks.
        blocks: whether they are such that `block_hopper` takes them.
    """
    if rows <= _FEW_ROWS[grouped]:
        return None
    is_narrow = 2 * lines <= programs * 3 * CONSUMER_ROWS
    times = _hopper_times(rows, lines, inputs, programs, gated, grouped, blocks)
    if rows <= _NARROW_ROWS and is_narrow:
        times = {one: time for one, time in times.items() if isinstance(one, BlockConfig)}
    best = min(times, key=times.__getitem__, default=None)
    other = product_config(rows, lines, inputs, grouped=grouped)
    other_time = _product_time(other, rows, lines, inputs, programs, grouped)
    return best if best is not None and times[best] < other_time else None


def close_configs(
    rows: int,
    lines: int,
    inputs: int,
    programs: int,
    *,
    gated: bool,
    grouped: bool,
    blocks: bool = False,
) -> list[BlockConfig | HopperConfig]:
    """Returns the configurations of the Gluon kernels whose predicted times are at most a quarter
    longer than the shortest, that first; arguments as for `hopper_config`. They are worth timing:
    each takes a compilation of a second or two."""
    times = _hopper_times(rows, lines, inputs, programs, gated, grouped, blocks)
    ordered = sorted(times, key=times.__getitem__)
    return [config for config in ordered if times[config] <= 1.25 * times[ordered[0]]]


def _hopper_times(
    rows: int, lines: int, inputs: int, programs: int, gated: bool, grouped: bool, blocks: bool
) -> dict[BlockConfig | HopperConfig, float]:
    """Returns the predicted microseconds of each configuration of the Gluon kernels."""
    steps: dict[BlockConfig | HopperConfig, float] = dict(HOPPER_TIMES[gated, grouped])
    if blocks and USE_BLOCK_HOPPER:
        steps |= {one: time for one, time in BLOCK_TIMES.items() if one.allows(gated=gated)}

    def waves(config: BlockConfig | HopperConfig) -> int:
        tiles = -(-lines // config.lines) * -(-rows // config.tokens)
        return -(-tiles // programs)

    return {config: waves(config) * inputs / STEP * time for config, time in steps.items()}


def _product_time(
    config: ProductConfig, rows: int, lines: int, inputs: int, programs: int, grouped: bool
) -> float:
    """Returns the microseconds of the Triton kernel."""
    tiles = -(-lines // config.features) * -(-rows // config.tokens)
    waves = -(-tiles * config.splits // (programs * (1 + grouped)))
    steps = waves * (inputs / STEP / config.splits + _ENDS)
    time = steps * PRODUCT_TIMES[grouped][config.features, config.tokens]
    return time + (_SUM_OF_PARTS * config.tokens if config.splits > 1 else 0)


def hopper_rows(
    lines: int, inputs: int, programs: int, max_rows: int, *, grouped: bool, blocks: bool = False
) -> list[int]:
    """Returns the fewest rows, in steps of 32, that select each configuration, be the weight gated
    or not."""
    first: dict[tuple[bool, BlockConfig | HopperConfig | None], int] = {}
    for gated in (False, True):
        for rows in range(1, max_rows, 32):
            config = hopper_config(
                rows, lines, inputs, programs, gated=gated, grouped=grouped, blocks=blocks
            )
            first.setdefault((gated, config), rows)
    return sorted({rows for (_, config), rows in first.items() if config is not None})
