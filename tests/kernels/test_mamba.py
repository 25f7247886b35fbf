"""Mamba-2's recurrence and lookahead rows at tiny sizes, against the float64 recurrence."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from address_check import checked_addresses
from aioinfer.kernels.convolution_lookahead import convolution_lookahead
from aioinfer.kernels.mamba import mamba_decode, mamba_prefill
from aioinfer.kernels.states import ChunkPlan, StateTables
from delta_cases import Row
from lookahead_cases import MOST, Ahead, convolve, mamba
from mamba_cases import MIXED, MambaCase, MambaProblem, run

SHAPES = [{"groups": 1}, {"head_size": 24, "state_size": 8}, {"state_size": 40}, {"groups": 4}]


@pytest.mark.parametrize("prefill", [True, False])
@pytest.mark.parametrize("fields", SHAPES)
def test_shapes(fields: dict[str, int], prefill: bool) -> None:
    """Each kernel leaves the other's rows and padding alone."""
    assert max(run(MambaCase(**fields), MIXED, prefill=prefill)) < 1e-5


@pytest.mark.parametrize("block_size", [32, 64, 128])
def test_block_sizes(block_size: int) -> None:
    """With and without a snapshot at a boundary; 128 tokens are two chunks."""
    rows = [Row(2 * block_size, 2 * block_size + 5, (0,)), Row(70, 70), Row(1, block_size + 1)]
    case = MambaCase(block_size=block_size, groups=1, heads=2)
    assert max(run(case, rows, prefill=True)) < 1e-5
    assert max(run(case, rows, prefill=False)) < 1e-5


@pytest.mark.parametrize("prefill", [True, False])
@pytest.mark.parametrize("a_log", [(-9.0, -8.0), (5.0, 6.0)])
def test_decays_near_one_and_zero(a_log: tuple[float, float], prefill: bool) -> None:
    case = MambaCase(a_log=a_log, block_size=64)
    assert max(run(case, MIXED, prefill=prefill)) < 1e-5


@pytest.mark.parametrize("prefill", [True, False])
def test_limits_of_steps(prefill: bool) -> None:
    assert max(run(MambaCase(limits=(0.3, 0.9)), MIXED, prefill=prefill)) < 1e-5


@pytest.mark.parametrize("prefill", [True, False])
def test_states_in_bfloat16(prefill: bool) -> None:
    output, matrices = run(MambaCase(state_dtype=torch.bfloat16), MIXED, prefill=prefill)
    assert output < 1e-5
    assert 1e-6 < matrices < 8e-3  # the interpreter cuts bits off instead of rounding


def test_wrong_shapes_and_chunks_are_rejected() -> None:
    problem = MambaProblem(MambaCase(), [Row(2, 2)])
    (pool,) = problem.pools
    rest = problem.query_starts, problem.seq_lens
    plans = [
        ChunkPlan.empty(1, 2, length, torch.device("cpu"), min_tokens=tokens, is_aligned=is_aligned)
        for length, tokens, is_aligned in [(32, 2, True), (16, 1, True), (16, 2, False)]
    ]
    arguments = problem.inputs, problem.weights, pool.states
    for plan in plans:
        with pytest.raises(ValueError, match="do not fit blocks"):
            mamba_prefill(*arguments, *rest, plan, problem.out, block_size=16)
    wrong = problem.weights._replace(a_log=torch.zeros(3))
    with pytest.raises(ValueError, match="do not fit together"):
        mamba_decode(problem.inputs, wrong, pool.states, rest[1], problem.out, block_size=16)


#: From the start of a sequence, in a block, up to its end and over it; padding and prompts among
#: them, an end that is not kept, and a block that was moved on to the next entry.
PADDING = Ahead(0, 0, 1, is_padding=True)
SLOTS = [
    [Ahead(start, pending, count) for start, count in ((0, 1), (11, MOST + 1), (15, 2), (31, 1))]
    for pending in range(MOST + 1)
]
BATCHES = [
    [PADDING, Ahead(14, 3, 2), PADDING, Ahead(17, 0, 1, 3), Ahead(4, 0, 3), Ahead(0, 0, 1, 18)],
    [Ahead(14, 4, 2, lacks_end=True), Ahead(15, 2, 1, is_moved=True), Ahead(16, 0, 3), PADDING],
    [Ahead(12, 5, 3, is_moved=True), Ahead(18, 1, 1), PADDING, Ahead(16, 0, 3, is_moved=True)],
]


@pytest.mark.parametrize("slots", [*SLOTS, *BATCHES])
def test_mamba(slots: Sequence[Ahead]) -> None:
    torch.manual_seed(0)
    with checked_addresses():
        assert max(mamba(MambaCase(head_size=24, state_size=8), slots)) < 1e-6


@pytest.mark.parametrize("has_replayed", [True, False])
@pytest.mark.parametrize("slots", [*SLOTS, *BATCHES])
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


def test_lookahead_states_in_bfloat16() -> None:
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
