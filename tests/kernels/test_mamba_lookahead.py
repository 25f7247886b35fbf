"""Mamba-2 and short convolutions for lookahead rows at tiny sizes, against float64."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from address_check import checked_addresses
from aioinfer.kernels.convolution_lookahead import convolution_lookahead
from aioinfer.kernels.states import StateTables
from lookahead_cases import MOST, Ahead, convolve, mamba
from mamba_cases import MambaCase

#: From the start of a sequence, in a block, up to its end and over it; padding and prompts among
#: them, an end that is not kept, and a block that was moved on to the next entry.
PADDING = Ahead(0, 0, 1, is_padding=True)
SLOTS = [
    [Ahead(start, pending, count) for start, count in ((0, 1), (11, MOST + 1), (15, 2), (31, 1))]
    for pending in range(MOST + 1)
]
MIXED = [
    [PADDING, Ahead(14, 3, 2), PADDING, Ahead(17, 0, 1, 3), Ahead(4, 0, 3), Ahead(0, 0, 1, 18)],
    [Ahead(14, 4, 2, lacks_end=True), Ahead(15, 2, 1, is_moved=True), Ahead(16, 0, 3), PADDING],
    [Ahead(12, 5, 3, is_moved=True), Ahead(18, 1, 1), PADDING, Ahead(16, 0, 3, is_moved=True)],
]


@pytest.mark.parametrize("slots", [*SLOTS, *MIXED])
def test_mamba(slots: Sequence[Ahead]) -> None:
    torch.manual_seed(0)
    with checked_addresses():
        assert max(mamba(MambaCase(head_size=24, state_size=8), slots)) < 1e-6


@pytest.mark.parametrize("has_replayed", [True, False])
@pytest.mark.parametrize("slots", [*SLOTS, *MIXED])
def test_convolutions(slots: Sequence[Ahead], has_replayed: bool) -> None:
    torch.manual_seed(0)
    with checked_addresses():
        assert max(convolve(MambaCase(), slots, 140, has_replayed=has_replayed)) < 1e-6


def test_rows_of_one_token_alone() -> None:
    """Without the first tokens of rows, row r is token r."""
    torch.manual_seed(0)
    slots = [PADDING, Ahead(14, 3, 2), PADDING, Ahead(4, 0, 3), Ahead(18, 1, 1)]
    assert max(mamba(MambaCase(groups=1), slots, has_starts=False)) < 1e-6
    assert max(convolve(MambaCase(), slots, 24, has_starts=False)) < 1e-6


def test_states_in_bfloat16() -> None:
    """The state is rounded after each token, as in steps of one row."""
    torch.manual_seed(0)
    slots = [Ahead(14, 3, 3), Ahead(5, 0, 2), Ahead(16, 4, 1)]
    output, matrices = mamba(MambaCase(state_dtype=torch.bfloat16), slots)
    assert output < 1e-2
    assert 1e-6 < matrices < 1.6e-2  # the interpreter cuts bits off instead of rounding


def test_wrong_shapes_are_refused() -> None:
    x, ints = torch.zeros(2, 8), torch.zeros(2, dtype=torch.int32)
    windows = StateTables(torch.zeros(3, 8, 3), ints[:, None])
    for saved, out in ((torch.zeros(2, 5, 7), x), (torch.zeros(2, 5, 8), x[:1])):
        with pytest.raises(ValueError, match="fit"):
            convolution_lookahead(
                x, torch.zeros(8, 4), windows, ints, [ints] * 3, saved, out, block_size=16
            )
