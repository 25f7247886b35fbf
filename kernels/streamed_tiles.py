"""How the units of a streamed product are divided among programs, and with which tiles
(`streamed_product`). Plain Python: the kernel repeats the arithmetic of `Tiling`.

The time of a configuration is estimated from the bytes that pass through the memory and the L2
cache: the weight is read once from memory, but each tile of it reads all tokens from the L2 cache,
and parts of tiles are written there and read again.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

CONSUMER_ROWS = 64  # weight rows of one wgmma
STEP_BYTES = 128  # of a unit's inputs: the widest swizzle of TMA and wgmma
MAX_ROWS = 128
#: Bytes of shared memory: of a thread block, and of a multiprocessor, which keeps 1 KiB a block.
SHARED_MEMORY, ALL_SHARED_MEMORY = 227 * 1024, 228 * 1024
#: For barriers and alignment.
_RESERVED = 1024
#: Bytes of a ring: more is never under way (32 bytes a nanosecond, and less than 2 us).
_RING = 192 * 1024
#: Programs that share a tile, at most: the last one adds the sums of all.
_MAX_PARTS = 12
#: Units of a program, at least.
_MIN_SPAN = 4
#: Bytes a microsecond of an H200's memory, and of its L2 cache, all multiprocessors together and
#: one alone. Guesses but for the first.
_MEMORY_RATE, _CACHE_RATE, _PROGRAM_RATE = 4.2e6, 5.5e6, 6e4
#: Microseconds that exchanging sums takes however few they are.
_EXCHANGE = 1.5


@dataclass(frozen=True, slots=True)
class StreamConfig:
    """How the kernel is compiled and launched.

    Attributes:
        tokens: columns of a tile: 8, 16, 32, 64 or 128.
        consumers: warpgroups that multiply: 1 or 2.
        consumer_rows: weight rows of each: 64 or 128.
        stages: of the ring.
        blocks: thread blocks for which registers and shared memory of a multiprocessor suffice:
            with 2, the next kernel's can begin while this one's end.
        programs: of a multiprocessor, at most `blocks`.
    """

    tokens: int
    consumers: int
    consumer_rows: int
    stages: int
    blocks: int
    programs: int

    @property
    def tile_rows(self) -> int:
        """Weight rows of a tile."""
        return self.consumers * self.consumer_rows

    @property
    def num_warps(self) -> int:
        """Of a thread block: the producer's is filled up to four."""
        return 4 * self.consumers + 4

    @property
    def max_registers(self) -> int:
        """Of a thread, at the launch, in the granularity of setmaxnreg."""
        return 65536 // (32 * self.num_warps * self.blocks) // 8 * 8

    @property
    def consumer_registers(self) -> int:
        """Of the second consumer's threads; the first gets what the others leave."""
        return min(240, (self.max_registers * 3 - 24) // 2 // 8 * 8)


@dataclass(frozen=True, slots=True)
class Tiling:
    """The spans of a launch: each program has `span` units, the first `longer` programs one more.
    A tile is a run of `steps` units."""

    tiles: int
    steps: int
    programs: int

    @property
    def units(self) -> int:
        """Of all tiles."""
        return self.tiles * self.steps

    @property
    def span(self) -> int:
        """Units of a program, at least."""
        return self.units // self.programs

    @property
    def longer(self) -> int:
        """Programs with one unit more."""
        return self.units % self.programs

    def begin(self, program: int) -> int:
        """Returns the first unit of a program."""
        return program * self.span + min(program, self.longer)

    def program_of(self, unit: int) -> int:
        """Returns the program that has a unit."""
        in_longer = unit // (self.span + 1)
        if in_longer < self.longer:
            return in_longer
        return self.longer + (unit - self.longer * (self.span + 1)) // self.span

    def pieces(self, program: int) -> list[tuple[int, int, int]]:
        """Returns the pieces of a program's span: tile, first step, number of steps."""
        begin, end = self.begin(program), self.begin(program + 1)
        found = []
        for tile in range(begin // self.steps, (end - 1) // self.steps + 1):
            first = max(begin, tile * self.steps)
            last = min(end, (tile + 1) * self.steps)
            found.append((tile, first - tile * self.steps, last - first))
        return found

    @property
    def max_parts(self) -> int:
        """Programs that share a tile, at most."""
        return 1 if self.steps % max(1, self.span) == self.longer == 0 and (
            self.span % self.steps == 0
        ) else 2 + max(0, self.steps - 2) // max(1, self.span)


def tiling(config: StreamConfig, lines: int, steps: int, processors: int) -> Tiling:
    """Returns the spans for a weight of `lines` rows and `steps` steps of inputs.

    Few units are divided among fewer programs: each takes part in few sums, and a program that has
    less to read than a ring holds would wait for memory once anyway.
    """
    tiles = -(-lines // config.tile_rows)
    programs = min(
        processors * config.programs, tiles * _MAX_PARTS, max(1, tiles * steps // _MIN_SPAN)
    )
    return Tiling(tiles, steps, programs)


def stages_of(tokens: int, consumers: int, consumer_rows: int, blocks: int) -> int:
    """Returns how many stages shared memory holds beside the outputs of a tile, at most 12."""
    memory = min(SHARED_MEMORY, ALL_SHARED_MEMORY // blocks - 1024) - _RESERVED
    outputs = consumers * consumer_rows * tokens * 2
    stage = (consumers * consumer_rows + tokens) * STEP_BYTES
    return min(12, _RING // stage, (memory - outputs) // stage)


@lru_cache
def configs(tokens: int) -> tuple[StreamConfig, ...]:
    """Returns the configurations to choose from for tiles of so many columns: those whose ring has
    at least four stages, and whose sums fit into registers."""
    found = []
    for consumers, consumer_rows, blocks in ((1, 64, 2), (2, 64, 2), (2, 64, 1), (2, 128, 1)):
        stages = stages_of(tokens, consumers, consumer_rows, blocks)
        fits = stages >= 4 and consumer_rows * tokens <= (64 if blocks == 2 else 128) * 128
        if fits:
            for programs in range(1, blocks + 1):
                found.append(
                    StreamConfig(tokens, consumers, consumer_rows, stages, blocks, programs)
                )
    return tuple(found)


def padded_rows(rows: int) -> int:
    """Returns the columns of a tile for so many tokens."""
    return max(8, 1 << (rows - 1).bit_length())


def estimated_time(
    config: StreamConfig, rows: int, lines: int, steps: int, processors: int
) -> float:
    """Returns the microseconds of a product, launch not counted."""
    tiles = tiling(config, lines, steps, processors)
    weight = lines * steps * STEP_BYTES
    # the longest span takes as long as if all were as long
    unevenness = -(-tiles.units // tiles.programs) * tiles.programs / tiles.units
    reread = rows / config.tile_rows
    reading = max(weight / _MEMORY_RATE, weight * (1 + reread) / _CACHE_RATE) * unevenness
    reading *= max(1.0, processors / tiles.programs)
    if tiles.max_parts == 1:
        return reading
    part = config.consumer_rows * config.tokens * 4  # each consumer adds its own
    added = (1 + tiles.max_parts) * part * config.consumers * config.programs
    return reading + _EXCHANGE + added / _PROGRAM_RATE


@lru_cache(maxsize=8192)
def stream_config(rows: int, lines: int, steps: int, processors: int) -> StreamConfig:
    """Returns the configuration with the shortest estimated time.

    Args:
        rows: tokens, 1 .. MAX_ROWS.
        lines: rows of the weight.
        steps: of its inputs, `STEP_BYTES` each.
        processors: multiprocessors.
    """
    return min(
        configs(padded_rows(rows)),
        key=lambda config: estimated_time(config, rows, lines, steps, processors),
    )


def workspace_size(processors: int) -> int:
    """Returns the float32 numbers that the parts of any product take: two tiles a program."""
    return max(
        2 * processors * config.programs * config.tile_rows * config.tokens
        for tokens in (8, 16, 32, 64, 128)
        for config in configs(tokens)
    )
