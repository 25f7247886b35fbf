"""Which kernel multiplies many rows of float8 on Hopper."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from aioinfer.kernels import scaled_tiles
from aioinfer.kernels.scaled_tiles import (
    BLOCK_CONFIGS,
    CONFIGS,
    HOPPER_TIMES,
    SHARED_MEMORY,
    STEP,
    hopper_config,
    hopper_rows,
)

#: Weight rows and inputs of Qwen3-8B, and whether the weight is gated.
SHAPES = {
    "qkv": (6144, 4096, False),
    "o": (4096, 4096, False),
    "gate_up": (24576, 4096, True),
    "down": (4096, 12288, False),
}
PROGRAMS = 132


@pytest.mark.parametrize(
    ("grouped", "name", "tokens"),
    [  # None for the Triton kernel, from 64, 128, 256, 512, 1024, 2048 and 8192 rows
        (False, "qkv", (None, None, 64, 128, 128, 128, 128)),
        (False, "o", (None, None, None, 128, None, None, 128)),
        (False, "gate_up", (None, 128, 128, 128, 128, 128, 128)),
        (False, "down", (None, None, None, 128, None, None, None)),
        (True, "qkv", (None, None, 64, 64, 128, 128, 128)),
        (True, "o", (None, None, 64, 128, 128, 128, 128)),
        (True, "gate_up", (64, 64, 128, 128, 128, 128, 128)),
    ],
)
def test_the_kernel_measured_to_be_faster_is_selected(
    grouped: bool, name: str, tokens: tuple[int | None, ...]
) -> None:
    """On an H200; but for gate and up, and o with blocks, at 512 rows, where both are within 2 %,
    and for qkv with blocks at 128."""
    lines, inputs, gated = SHAPES[name]
    selected = []
    for rows in (64, 128, 256, 512, 1024, 2048, 8192):
        config = hopper_config(rows, lines, inputs, PROGRAMS, gated=gated, grouped=grouped)
        selected.append(None if config is None else config.tokens)
    assert tuple(selected) == tokens


@pytest.mark.parametrize(
    ("name", "tiles"),
    [  # weight rows and tokens of a tile, from 64, 128, 256, 512, 2048 and 8192 rows
        ("qkv", ((64, 64), (64, 128), (192, 64), (192, 64), (128, 128), (128, 128))),
        ("o", ((32, 64), (64, 64), (64, 128), (128, 128), (128, 128), (128, 128))),
        ("gate_up", ((192, 64), (192, 64), (128, 128), (128, 128), (128, 128), (128, 128))),
        ("down", ((32, 64), None, (64, 128), (128, 128), (128, 128), (128, 128))),
    ],
)
def test_tiles_of_whole_blocks(name: str, tiles: tuple[tuple[int, int] | None, ...]) -> None:
    """The fastest ones on an H200 from 128 to 256 and with 8192 rows; tiles of 32 weight rows were
    not measured."""
    lines, inputs, gated = SHAPES[name]
    selected = []
    for rows in (64, 128, 256, 512, 2048, 8192):
        config = hopper_config(
            rows, lines, inputs, PROGRAMS, gated=gated, grouped=True, blocks=True
        )
        selected.append(None if config is None else (config.lines, config.tokens))
    assert tuple(selected) == tiles


def test_without_the_kernel_for_whole_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The switch: everything is selected as for other scales of blocks."""
    monkeypatch.setattr(scaled_tiles, "USE_BLOCK_HOPPER", False)
    for lines, inputs, gated in SHAPES.values():
        for rows in (65, 129, 257, 4097):
            select = hopper_config.__wrapped__
            given = {"gated": gated, "grouped": True}
            args = (rows, lines, inputs, PROGRAMS)
            assert select(*args, **given, blocks=True) == select(*args, **given)


@pytest.mark.parametrize("config", BLOCK_CONFIGS)
def test_stages_of_whole_blocks(config: scaled_tiles.BlockConfig) -> None:
    """A ring has at least three, and tile and results fit into shared memory."""
    assert config.tokens % (64 * config.halves) == 0
    assert config.halves in (1, 2)
    for gated in (False, True):
        stages = config.stages(gated=gated)
        results = config.tokens * config.lines * (1 if gated else 2)
        assert stages >= 3
        assert stages * (config.tokens + config.lines) * STEP + results < SHARED_MEMORY


@pytest.mark.parametrize(("grouped", "blocks"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("name", SHAPES)
def test_every_selected_configuration_is_warmed_up(name: str, grouped: bool, blocks: bool) -> None:
    """For any number of rows."""
    lines, inputs, gated = SHAPES[name]

    def selected(rows: int) -> object:
        kind = {"grouped": grouped, "blocks": blocks}
        return hopper_config(rows, lines, inputs, PROGRAMS, gated=gated, **kind)

    kind = {"grouped": grouped, "blocks": blocks}
    warm = {selected(rows) for rows in hopper_rows(lines, inputs, PROGRAMS, 4096, **kind)}
    assert {selected(rows) for rows in range(1, 10000)} - warm <= {None}
    assert warm - {None}


def test_tests_and_benchmarks_go_through_every_configuration_of_the_layers() -> None:
    """Those of `CONFIGS`."""
    for kind, times in HOPPER_TIMES.items():
        assert set(times) <= set(CONFIGS[kind])
