"""The spans of streamed products, in plain Python: what each program multiplies, exchanges and
adds. The kernel repeats this arithmetic; its results are tested in
`tests/gpu/test_streamed_product.py`."""

from __future__ import annotations

import random

import numpy as np
import pytest
from aioinfer.kernels.streamed_tiles import (
    MIN_WEIGHT,
    TOKENS,
    USED_ROWS,
    Tiling,
    configs,
    max_used_rows,
    padded_rows,
    stream_config,
    tiling,
    use_streamed,
    warm_up_rows,
    workspace_size,
)

TILINGS = [
    Tiling(tiles, steps, programs)
    for tiles, steps, programs in (
        (1, 1, 1),
        (1, 7, 3),
        (2, 5, 10),
        (3, 4, 6),  # half a tile each
        (6, 4, 3),  # whole tiles alone
        (5, 3, 4),
        (32, 64, 132),
        (48, 64, 132),
        (33, 14, 131),
        (192, 64, 132),
    )
]


@pytest.mark.parametrize("spans", TILINGS, ids=str)
def test_every_unit_is_in_one_span(spans: Tiling) -> None:
    taken = [
        tile * spans.steps + step
        for program in range(spans.programs)
        for tile, first, count in spans.pieces(program)
        for step in range(first, first + count)
    ]
    assert taken == list(range(spans.units))
    begins = [spans.begin(program) for program in range(spans.programs + 1)]
    assert begins[-1] == spans.units
    for program in range(spans.programs):
        assert begins[program + 1] - begins[program] in (spans.span, spans.span + 1)
        for unit in range(begins[program], begins[program + 1]):
            assert spans.program_of(unit) == program
    parts = [
        spans.program_of((tile + 1) * spans.steps - 1) - spans.program_of(tile * spans.steps) + 1
        for tile in range(spans.tiles)
    ]
    assert max(parts) <= spans.max_parts <= max(parts) + 1


@pytest.mark.parametrize("spans", TILINGS, ids=str)
def test_sums_that_are_exchanged(spans: Tiling) -> None:
    """As the kernel does it, twice, with programs in any order: a program has one place for a tile
    that it begins and one for a tile that another began, and the last one adds all."""
    numbers = np.random.default_rng(0).integers(-9, 9, (spans.tiles, spans.steps))
    counters = [0] * spans.tiles
    for seed in range(2):
        places: dict[tuple[int, bool], int] = {}
        results: dict[int, int] = {}
        programs = list(range(spans.programs))
        random.Random(seed).shuffle(programs)
        for program in programs:
            for tile, first, count in spans.pieces(program):
                total = int(numbers[tile, first : first + count].sum())
                if count < spans.steps:
                    assert (program, first == 0) not in places
                    places[program, first == 0] = total
                    begin = spans.program_of(tile * spans.steps)
                    end = spans.program_of((tile + 1) * spans.steps - 1)
                    counters[tile] += 1
                    if counters[tile] <= end - begin:
                        continue
                    counters[tile] = 0
                    total = places[begin, True]
                    total += sum(places[other, False] for other in range(begin + 1, end + 1))
                assert tile not in results
                results[tile] = total
        assert [results[tile] for tile in range(spans.tiles)] == numbers.sum(1).tolist()
        assert not any(counters)


@pytest.mark.parametrize("rows", [1, 8, 9, 33, 64, 100, 128])
def test_spans_of_real_weights(rows: int) -> None:
    for lines, inputs in ((6144, 4096), (4096, 12288), (24576, 4096), (151936, 4096), (200, 896)):
        steps = inputs // 64
        chosen = stream_config(rows, lines, steps, 132)
        assert chosen in configs(padded_rows(rows))
        for config in configs(padded_rows(rows)):
            spans = tiling(config, lines, steps, 132)
            assert 0 < spans.programs <= min(spans.units, 132 * config.programs)
            assert spans.exchanged_numbers(config) <= workspace_size(132, rows)
            # nobody reads more than a unit above the mean
            assert spans.begin(1) <= spans.units / spans.programs + 1


def test_configurations() -> None:
    for tokens in TOKENS:
        for config in configs(tokens):
            assert config.tokens == tokens
            assert config.max_registers * 32 * config.num_warps * config.blocks <= 65536
            given = 24 + config.consumers * config.consumer_registers
            assert given <= config.max_registers * (config.consumers + 1)
    assert padded_rows(1) == 8
    assert [padded_rows(rows) for rows in (8, 9, 128)] == [8, 16, 128]


def test_where_it_is_used() -> None:
    rows = warm_up_rows()
    for gated, (first, last) in USED_ROWS.items():
        for n in range(first, last + 1):
            assert use_streamed(n, MIN_WEIGHT, gated=gated)
            assert any(padded_rows(n) == padded_rows(warmed) for warmed in rows)
        assert not use_streamed(last + 1, MIN_WEIGHT, gated=gated)
        assert not use_streamed(first - 1, MIN_WEIGHT, gated=gated)
        assert not use_streamed(first, MIN_WEIGHT - 1, gated=gated)
    assert max(rows) <= max_used_rows()
