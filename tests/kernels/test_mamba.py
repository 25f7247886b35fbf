"""Mamba-2's recurrence at tiny sizes, against the float64 recurrence."""

from __future__ import annotations

import pytest
import torch
from aioinfer.kernels.mamba import mamba_decode, mamba_prefill
from aioinfer.kernels.states import ChunkPlan
from delta_cases import Row
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
