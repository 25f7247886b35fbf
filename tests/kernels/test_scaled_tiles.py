"""Which kernel multiplies many rows of float8 on Hopper."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from aioinfer.kernels.scaled_tiles import CONFIGS, HOPPER_TIMES, hopper_config, hopper_rows

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


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_every_selected_configuration_is_warmed_up(name: str, grouped: bool) -> None:
    """For any number of rows."""
    lines, inputs, gated = SHAPES[name]

    def selected(rows: int) -> object:
        return hopper_config(rows, lines, inputs, PROGRAMS, gated=gated, grouped=grouped)

    warm = {selected(rows) for rows in hopper_rows(lines, inputs, PROGRAMS, 4096, grouped=grouped)}
    assert {selected(rows) for rows in range(1, 10000)} - warm <= {None}
    assert warm - {None}


def test_tests_and_benchmarks_go_through_every_configuration_of_the_layers() -> None:
    """Those of `CONFIGS`."""
    for kind, times in HOPPER_TIMES.items():
        assert set(times) <= set(CONFIGS[kind])
