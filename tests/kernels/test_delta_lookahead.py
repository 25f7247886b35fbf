"""The gated delta rule for lookahead rows at tiny sizes, against the float64 recurrence."""

from __future__ import annotations

import pytest
import torch
from delta_cases import DeltaCase
from lookahead_cases import MOST, Ahead, lookahead


def small(**fields: object) -> DeltaCase:
    torch.manual_seed(0)
    return DeltaCase(**{"dtype": torch.float32, "device": "cpu", **fields})


@pytest.mark.parametrize("group", [pytest.param(1, marks=pytest.mark.extended), 2])
@pytest.mark.parametrize("pending", range(MOST + 1))
def test_every_number_of_kept_rows(pending: int, group: int) -> None:
    """From the start of a sequence, in a block, up to its end and over it."""
    slots = [
        Ahead(start, pending, count)
        for start, count in ((0, 1), (1, 3), (11, MOST + 1), (15, 2), (31, 1))
    ]
    assert max(lookahead(small(group=group), slots)) < 1e-6


@pytest.mark.parametrize(("key", "value"), [(16, 16), (8, 24), (24, 8)])
def test_decays_by_channel(key: int, value: int) -> None:
    """Kimi delta attention, whose gates are sigmoids."""
    case = small(key=key, value=value, group=1, by_channel=True)
    slots = [Ahead(5, 0, 1), Ahead(14, 3, 2), Ahead(0, 0, 6), Ahead(16, 5, 1), Ahead(33, 2, 4)]
    assert max(lookahead(case, slots)) < 1e-6


@pytest.mark.parametrize("has_starts", [False, True])
def test_padding_rows_touch_nothing(has_starts: bool) -> None:
    padding = Ahead(0, 0, 1, is_padding=True)
    slots = [padding, Ahead(14, 3, 2), padding, Ahead(4, 0, 3), Ahead(18, 1, 1), padding]
    assert max(lookahead(small(), slots, has_starts=has_starts)) < 1e-6


def test_rows_of_several_tokens_are_left_alone() -> None:
    slots = [Ahead(14, 3, 2), Ahead(9, 0, 1), Ahead(17, 0, 1, 3), Ahead(0, 0, 1, 18)]
    assert max(lookahead(small(), slots)) < 1e-6


def test_ends_of_blocks_without_a_block_of_their_own() -> None:
    """The end is not kept, or its block has been moved on to the next entry."""
    slots = [
        Ahead(14, 4, 2, lacks_end=True),
        Ahead(15, 2, 1, is_moved=True),
        Ahead(16, 0, 3, is_moved=True),
        Ahead(12, 5, 3, is_moved=True),
    ]
    assert max(lookahead(small(), slots)) < 1e-6


def test_states_in_bfloat16() -> None:
    """The state is rounded after each token, as in steps of one row."""
    slots = [Ahead(14, 3, 3), Ahead(5, 0, 2), Ahead(16, 4, 1)]
    output, windows, matrices = lookahead(small(state_dtype=torch.bfloat16), slots)
    assert output < 1e-2
    assert windows < 1e-6
    assert 1e-6 < matrices < 1.6e-2  # the interpreter cuts bits off instead of rounding
