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
#: Columns of a tile.
TOKENS = (8, 16, 32, 64, 128)
MAX_ROWS = TOKENS[-1]
#: Rows of x for which the streamed product is used, by whether it has a gate; (0, 0) for none. More
#: rows are left to cuBLASLt and `gated_product` until they have been measured.
USED_ROWS = {False: (2, 64), True: (2, 47)}
#: Smaller weights are read faster than programs exchange their sums.
MIN_WEIGHT = 4 * 2**20
#: Bytes of shared memory: of a thread block, and of a multiprocessor, which keeps 1 KiB a block.
SHARED_MEMORY, ALL_SHARED_MEMORY = 227 * 1024, 228 * 1024
#: Bytes of weights in a ring, at least: 32 a nanosecond for 1 us, and as many being multiplied.
_MIN_LOADS = 64 * 1024
#: Registers of a consumer's thread that hold sums, at most, by the consumers of a multiprocessor.
_MAX_SUMS = {2: 128, 4: 32}
#: For barriers and alignment.
_RESERVED = 1024
#: Bytes of a ring: more is never under way (32 bytes a nanosecond, and less than 2 us).
_RING = 192 * 1024
#: Tiles of which a program may have a part: one that it begins, one that another began.
_PLACES = 2
#: Programs that share a tile, at most: the last one adds the sums of all.
_MAX_PARTS = 12
#: Units of a program, at least.
_MIN_SPAN = 4
#: Bytes a microsecond of an H200's memory and of its L2 cache, and of each for one multiprocessor:
#: as `gated_product` reads the weight of Qwen3-8B on 128 multiprocessors, in 49 us with 64 rows,
#: and with 128 rows 335 MB in 52 us. Whether fewer multiprocessors suffice has not been measured.
_MEMORY_RATE, _READING_RATE = 4.2e6, 3.35e4
_CACHE_RATE, _LOADING_RATE = 6.5e6, 5e4
#: Bytes a microsecond of sums that one multiprocessor adds: a guess.
_ADDING_RATE = 8e4
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

    def exchanged_numbers(self, config: StreamConfig) -> int:
        """Returns the float32 numbers in which programs exchange their sums."""
        return _PLACES * self.programs * config.tile_rows * config.tokens

    @property
    def max_parts(self) -> int:
        """Programs that share a tile: as many as that at most."""
        if self.longer == 0 and self.span % self.steps == 0:
            return 1
        if self.longer == 0 and self.steps % self.span == 0:
            return self.steps // self.span
        return 1 + (self.steps + self.span - 2) // self.span


@lru_cache(maxsize=8192)
def tiling(config: StreamConfig, lines: int, steps: int, processors: int) -> Tiling:
    """Returns the spans for a weight of `lines` rows and `steps` steps of inputs: those with the
    shortest estimated time.

    A few programs less than there could be often have no longer spans, but spans that divide a
    tile, so that fewer sums are exchanged. Few units are divided among few programs: each takes
    part in few sums, and a program that has less to read than a ring holds would wait for memory
    once anyway.
    """
    tiles = -(-lines // config.tile_rows)
    most = min(processors * config.programs, tiles * _MAX_PARTS, max(1, tiles * steps // _MIN_SPAN))
    return min(
        (Tiling(tiles, steps, programs) for programs in range(most, most // 2, -1)),
        key=lambda spans: _time(config, spans, processors),
    )


def stages_of(tokens: int, consumers: int, consumer_rows: int, blocks: int) -> int:
    """Returns how many stages shared memory holds beside the outputs of a tile, at most 12."""
    memory = min(SHARED_MEMORY, ALL_SHARED_MEMORY // blocks - 1024) - _RESERVED
    outputs = consumers * consumer_rows * tokens * 2
    stage = (consumers * consumer_rows + tokens) * STEP_BYTES
    return min(12, _RING // stage, (memory - outputs) // stage)


@lru_cache
def configs(tokens: int) -> tuple[StreamConfig, ...]:
    """Returns the configurations to choose from for tiles of so many columns: those whose ring has
    at least three stages and 64 KiB of weights, and whose sums fit into registers."""
    found = []
    for consumers, consumer_rows, blocks in ((2, 64, 2), (1, 64, 2), (2, 64, 1), (2, 128, 1)):
        stages = stages_of(tokens, consumers, consumer_rows, blocks)
        loads = stages * consumers * consumer_rows * STEP_BYTES
        sums = consumer_rows * tokens // 128  # registers of a thread
        if stages >= 3 and loads >= _MIN_LOADS and sums <= _MAX_SUMS[consumers * blocks]:
            for programs in range(1, blocks + 1):
                found.append(
                    StreamConfig(tokens, consumers, consumer_rows, stages, blocks, programs)
                )
    return tuple(found)


def padded_rows(rows: int) -> int:
    """Returns the columns of a tile for so many tokens."""
    return max(8, 1 << (rows - 1).bit_length())


def estimated_time(config: StreamConfig, lines: int, steps: int, processors: int) -> float:
    """Returns the microseconds of a product with full tiles, launch not counted."""
    return _time(config, tiling(config, lines, steps, processors), processors)


def _time(config: StreamConfig, spans: Tiling, processors: int) -> float:
    unit = config.tile_rows * STEP_BYTES
    weight, tokens = spans.units * unit, config.tokens / config.tile_rows
    # what the programs of one multiprocessor read, and what all read if each had the longest span
    longest = -(-spans.units // spans.programs)
    own = -(-spans.programs // processors) * longest * unit
    unevenness = longest * spans.programs / spans.units
    reading = max(
        weight * unevenness / _MEMORY_RATE,
        weight * unevenness * (1 + tokens) / _CACHE_RATE,
        own / _READING_RATE,
        own * (1 + tokens) / _LOADING_RATE,
    )
    if spans.max_parts == 1:
        return reading
    part = config.tile_rows * config.tokens * 4
    return reading + _EXCHANGE + (1 + spans.max_parts) * part / _ADDING_RATE


@lru_cache(maxsize=8192)
def stream_config(rows: int, lines: int, steps: int, processors: int) -> StreamConfig:
    """Returns the configuration with the shortest estimated time: the first of those alike.

    Args:
        rows: tokens, 1 .. MAX_ROWS.
        lines: rows of the weight.
        steps: of its inputs, `STEP_BYTES` each.
        processors: multiprocessors.
    """
    return min(
        configs(padded_rows(rows)),
        key=lambda config: estimated_time(config, lines, steps, processors),
    )


def use_streamed(rows: int, weight_bytes: int, *, gated: bool) -> bool:
    """Whether the streamed product is the one to use, where it is supported, for so many rows."""
    first, last = USED_ROWS[gated]
    return first <= rows <= last and weight_bytes >= MIN_WEIGHT


def max_used_rows() -> int:
    """Returns the most rows that `use_streamed` allows, at least 1."""
    return max(1, *(last for _, last in USED_ROWS.values()))


def warm_up_rows() -> list[int]:
    """Returns numbers of rows for which `use_streamed` selects all its configurations."""
    first = min(first for first, _ in USED_ROWS.values())
    sizes = {max(first, columns // 2 + 1) for columns in TOKENS}
    return sorted(rows for rows in sizes if rows <= max_used_rows())


def workspace_size(processors: int, max_rows: int) -> int:
    """Returns the float32 numbers that the parts of any product of up to `max_rows` tokens take."""
    return max(
        _PLACES * processors * config.programs * config.tile_rows * config.tokens
        for tokens in TOKENS
        if tokens <= padded_rows(max_rows)
        for config in configs(tokens)
    )
