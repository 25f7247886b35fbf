"""Random inputs for the kernels of Mamba-2, and their results beside those of the float64
recurrence: for the interpreter's tests and the tests on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from aioinfer.kernels.mamba import MambaInputs, MambaWeights, mamba_decode, mamba_prefill
from aioinfer.kernels.states import ChunkPlan, plan_chunks
from cases import normal, poisoned
from delta_cases import Row, StateProblem
from references import mamba_reference

MIXED = [
    Row(1, 1), Row(1, 17), Row(20, 25, (0,)), Row(1, 16), Row(2, 2), Row(1, 0), Row(3, 0),
    Row(17, 33), Row(1, 300),
]  # fmt: skip


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
