"""The gated delta rule for rows of several tokens at tiny sizes, against the float64 recurrence."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from aioinfer.kernels.delta_prefill import DeltaPrefillConfig
from delta_cases import DeltaCase, Row, prefill

Make = Callable[..., DeltaCase]


def small(**fields: object) -> DeltaCase:
    torch.manual_seed(0)
    return DeltaCase(**{"dtype": torch.float32, "device": "cpu", "key_heads": 1, **fields})


@pytest.mark.parametrize("length", [2, 3, 15, 16, 17, 33])
def test_lengths_around_a_chunk(length: int) -> None:
    assert max(prefill(small(), [Row(length, length)])) < 1e-5


@pytest.mark.parametrize("length", [63, 64, 65, 129, 200])
def test_lengths_around_a_chunk_of_64(length: int) -> None:
    case = small(block_size=64, group=1)
    assert max(prefill(case, [Row(length, length)])) < 1e-5


@pytest.mark.parametrize(
    ("tokens", "length"), [(2, 3), (2, 17), (3, 17), (5, 13), (16, 32), (17, 33), (20, 31)]
)
def test_rows_that_continue(tokens: int, length: int) -> None:
    """In a block, whose state is read and written in place, before its last tokens, which are fewer
    than a window has, and at a boundary."""
    assert max(prefill(small(), [Row(tokens, length)])) < 1e-5


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_snapshots_at_wanted_boundaries(block_size: int) -> None:
    """Some blocks of the row's range are there, the others are not; 128 tokens are two chunks."""
    first, last = block_size // 2, 4 * block_size + 3
    case = small(block_size=block_size, group=1)
    assert max(prefill(case, [Row(last - first, last, (0, 2))])) < 1e-5


@pytest.mark.parametrize(("key", "value"), [(8, 24), (24, 8), (16, 64)])
def test_heads_of_other_sizes(key: int, value: int) -> None:
    case = small(key=key, value=value, group=1)
    assert max(prefill(case, [Row(19, 40, (1,))])) < 1e-5


def by_channel(**fields: object) -> DeltaCase:
    """Kimi delta attention: decays by channel, and gates that are sigmoids."""
    return small(by_channel=True, group=1, **fields)


@pytest.mark.parametrize("make", [small, by_channel])
@pytest.mark.parametrize("values", [16, 32])
def test_the_norm_in_the_scan_and_after_it(make: Make, values: int) -> None:
    """A program has half of a head's values, or all of them."""
    config = DeltaPrefillConfig(values, 4, 1, 4)
    assert max(prefill(make(value=32), [Row(19, 40)], config=config)) < 1e-5


@pytest.mark.parametrize(
    ("make", "a_log", "shift", "heads"),
    [
        (small, (-9.0, -8.0), -4.0, 1), (small, (2.0, 2.8), 30.0, 1),
        (by_channel, (-9.0, -8.0), -4.0, 3), (by_channel, (2.0, 2.8), 30.0, 3),
        (by_channel, (-3.0, 3.0), 2.0, 3),
    ],
)  # fmt: skip
def test_decays_near_one_and_zero(
    make: Make, a_log: tuple[float, float], shift: float, heads: int
) -> None:
    """A state that is kept, and one that is forgotten within a token: its decay is exp(-480), whose
    inverse is no float32. In the last case some heads keep it and others forget it."""
    case = make(a_log=a_log, shift=shift, block_size=64, key_heads=heads)
    assert max(prefill(case, [Row(100, 130)])) < 1e-5


@pytest.mark.parametrize("make", [small, by_channel])
def test_equal_keys(make: Make) -> None:
    """Products of equal keys are all 1: sums of powers of their matrix would cancel digits."""
    case = make(same_keys=True, a_log=(-9.0, -8.0), block_size=64)
    assert max(prefill(case, [Row(129, 129)])) < 1e-5


@pytest.mark.parametrize("first_row", [0, 2])
def test_decodes_and_padding_are_left_alone(first_row: int) -> None:
    rows = [Row(1, 9), Row(1, 17), Row(20, 25, (0,)), Row(1, 4), Row(2, 2), Row(3, 0), Row(0, 0)]
    assert max(prefill(small(), rows, first_row=first_row)) < 1e-5


def test_states_in_bfloat16() -> None:
    """Within the row the state is float32."""
    case = small(state_dtype=torch.bfloat16)
    output, windows, matrices = prefill(case, [Row(40, 50, (1,))])
    assert max(output, windows) < 1e-5
    assert 1e-6 < matrices < 8e-3  # the interpreter cuts bits off instead of rounding


@pytest.mark.parametrize("make", [small, by_channel])
def test_inputs_in_float16(make: Make) -> None:
    assert max(prefill(make(dtype=torch.float16), [Row(40, 50)])) < 4e-3


@pytest.mark.parametrize("length", [2, 15, 16, 17, 33])
def test_decays_by_channel(length: int) -> None:
    assert max(prefill(by_channel(), [Row(length, length)])) < 1e-5


@pytest.mark.parametrize("length", [63, 64, 65, 200])
def test_decays_by_channel_in_sub_chunks(length: int) -> None:
    """A chunk of 64 tokens has four sub-chunks, whole and not."""
    assert max(prefill(by_channel(block_size=64), [Row(length, length)])) < 1e-5


def test_decays_by_channel_of_many_channels() -> None:
    """A program computes 64 of them at a time."""
    assert max(prefill(by_channel(key=100, block_size=32), [Row(70, 75, (0,))])) < 1e-5


@pytest.mark.parametrize(("block_size", "key", "value"), [(16, 24, 8), (32, 8, 24), (128, 24, 8)])
def test_decays_by_channel_of_many_rows(block_size: int, key: int, value: int) -> None:
    """Each chunk finds what it leaves: rows of one chunk and of several, beginning anywhere,
    decodes and padding."""
    rows = [
        Row(1, 9), Row(2, 2), Row(2, block_size + 1), Row(3, 0), Row(1, 4), Row(17, 33),
        Row(2 * block_size, 3 * block_size), Row(block_size + 5, 2 * block_size + 7, (0, 1)),
        Row(0, 0),
    ]  # fmt: skip
    case = by_channel(block_size=block_size, key=key, value=value)
    assert max(prefill(case, rows)) < 1e-5
