"""Mamba-2's recurrence at tiny sizes, against the float64 recurrence."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from aioinfer.kernels.mamba import MambaInputs, MambaWeights, mamba_decode, mamba_prefill
from aioinfer.kernels.states import ChunkPlan, plan_chunks
from cases import normal, poisoned
from delta_cases import Row, StateProblem
from references import mamba_reference


@dataclass(slots=True)
class MambaCase:
    """The shapes of a layer, and what it is computed with."""

    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    groups: int = 2
    heads: int = 4
    head_size: int = 16
    state_size: int = 16
    block_size: int = 16
    state_dtype: torch.dtype = torch.float32
    a_log: tuple[float, float] = (-4.0, 2.8)  # uniform between them
    limits: tuple[float, float] = (0.0, float("inf"))


class MambaProblem(StateProblem):
    """A layer of Mamba-2; its output is float32."""

    def __init__(self, case: MambaCase, rows: list[Row]):
        super().__init__(rows, case.block_size, case.device)
        values, states = case.heads * case.head_size, case.groups * case.state_size
        options = {"dtype": case.dtype, "device": case.device}
        wide = normal(self.tokens, values + 2 * states + case.heads + 3, **options)
        self.inputs = MambaInputs(wide[:, : values + 2 * states], wide[:, -case.heads :])
        a_log = torch.empty(case.heads, device=case.device).uniform_(*case.a_log)
        bias, skip = torch.randn(2, case.heads, device=case.device)
        self.weights = MambaWeights(a_log, bias, skip, *case.limits)
        shape = case.heads, case.state_size, case.head_size
        self.pools = (self.pool(*shape, dtype=case.state_dtype),)
        self.out = poisoned(self.tokens, values, dtype=torch.float32, device=case.device)

    def reference(self, tokens: slice, *states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """See `StateProblem.reference`."""
        inputs = MambaInputs(*(x[tokens] for x in self.inputs))
        return mamba_reference(inputs, self.weights, *states)


def run(case: MambaCase, rows: list[Row], *, prefill: bool) -> tuple[float, ...]:
    """Runs one of the kernels; returns the errors of output and matrices."""
    torch.manual_seed(0)
    problem = MambaProblem(case, rows)
    (pool,), starts, lens = problem.pools, problem.query_starts, problem.seq_lens
    arguments = problem.inputs, problem.weights, pool.states
    if prefill:
        expected = problem.expect(lambda row: row.tokens > 1)
        chunks = ChunkPlan.empty(
            len(rows), problem.tokens, min(64, case.block_size), torch.device(case.device),
            min_tokens=2, is_aligned=True,
        )  # fmt: skip
        plan_chunks(chunks, starts, lens, problem.tokens)
        mamba_prefill(*arguments, starts, lens, chunks, problem.out, block_size=case.block_size)
    else:
        expected = problem.expect(lambda row: row.tokens == 1)
        mamba_decode(*arguments, lens, problem.out, block_size=case.block_size, query_starts=starts)
    return problem.errors(expected)


MIXED = [
    Row(1, 1), Row(1, 17), Row(20, 25, (0,)), Row(1, 16), Row(2, 2), Row(1, 0), Row(3, 0),
    Row(17, 33), Row(1, 300),
]  # fmt: skip
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
