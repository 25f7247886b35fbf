"""Random inputs for the kernels of the gated delta rule, and their results beside those of the
float64 recurrence: for the interpreter's tests and the tests on a GPU. Outputs, and blocks that no
row may read, are NaN."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from aioinfer.kernels.delta_arguments import DeltaInputs, DeltaWeights
from aioinfer.kernels.delta_decode import DeltaDecodeConfig, delta_decode, make_tickets
from aioinfer.kernels.delta_prefill import (
    DeltaPrefillConfig,
    DeltaWorkspace,
    delta_prefill,
    plans_of,
)
from aioinfer.kernels.states import StateTables, plan_chunks
from cases import error, normal, poisoned
from references import delta_reference

WIDTH = 4


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a step: its tokens in this step, its length with them, and the entries of its tables
    that hold a snapshot besides the first that is read and the last that is written."""

    tokens: int
    length: int
    wanted: tuple[int, ...] = ()


@dataclass(slots=True)
class DeltaCase:
    """The shapes of a layer, and what it is computed with."""

    dtype: torch.dtype
    device: str
    key_heads: int = 2
    group: int = 2
    key: int = 16
    value: int = 16
    block_size: int = 16
    state_dtype: torch.dtype = torch.float32
    a_log: tuple[float, float] = (-4.0, 2.8)  # uniform between them
    shift: float = 0.0  # of the logarithm's input, a
    same_keys: bool = False  # all tokens alike, and replacing what the key had before
    by_channel: bool = False  # decays of each key channel

    @property
    def heads(self) -> int:
        """Value heads."""
        return self.key_heads * self.group

    @property
    def decays(self) -> int:
        """Decays of all heads."""
        return self.heads * self.key if self.by_channel else self.heads

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return 2 * self.key_heads * self.key + self.heads * self.value

    def normal(self, *shape: int) -> torch.Tensor:
        """Returns standard normal numbers."""
        return normal(*shape, dtype=self.dtype, device=self.device)


@dataclass(slots=True)
class Pool:
    """The states of one kind: random where a row starts, else NaN; and what is expected of them."""

    states: StateTables
    expected: torch.Tensor
    written: list[int] = field(default_factory=list)

    def error(self) -> float:
        """Returns the error of the written blocks; NaN if any other block has changed."""
        states, expected = self.states.states, self.expected
        others = torch.ones(len(states), dtype=torch.bool, device=states.device)
        others[self.written] = False
        same = torch.equal(states[others].nan_to_num(7), expected[others].nan_to_num(7))
        return error((states[self.written], expected[self.written])) if same else float("nan")


class StateProblem:
    """The rows of a step, in this order, and their states; a row of length 0 is padding.

    Attributes:
        pools: the states of each kind.
    """

    def __init__(self, rows: Sequence[Row], block_size: int, device: str):
        self.rows, self.block_size, self.device = rows, block_size, device
        starts = [0]
        for row in rows:
            starts.append(starts[-1] + row.tokens)
        self.tokens = starts[-1]
        self.query_starts = torch.tensor(starts, dtype=torch.int32, device=device)
        lengths = [row.length for row in rows]
        self.seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
        self.pools: tuple[Pool, ...] = ()
        self.out = torch.empty(0)

    def _entries(self, row: Row) -> list[int]:
        """Returns the entries of a row that have a block."""
        if row.length == 0:
            return []
        size = self.block_size
        start = row.length - row.tokens
        kept = {(row.length - 1) // size, *row.wanted}
        return sorted(kept | ({(start - 1) // size} if start else set()))

    def pool(self, *shape: int, dtype: torch.dtype) -> Pool:
        """Returns random states of a shape for the rows, with the blocks that they need."""
        device, size = self.device, self.block_size
        entries = [self._entries(row) for row in self.rows]
        blocks = torch.randperm(sum(map(len, entries)) + 3).tolist()
        states = poisoned(2, len(blocks), *shape, dtype=dtype, device=device)[1]
        longest = max(row.length for row in self.rows)
        tables = torch.full((len(self.rows), longest // size + 2), -1, dtype=torch.int32)
        for index, row in enumerate(self.rows):
            for entry in entries[index]:
                tables[index, entry] = blocks.pop()
            if row.length > row.tokens:
                start = int(tables[index, (row.length - row.tokens - 1) // size])
                states[start] = normal(*shape, dtype=dtype, device=device) * 0.5
        return Pool(StateTables(states, tables.to(device)), states.clone())

    def reference(self, tokens: slice, *states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns the output of a row's tokens, and of each pool the states after each token."""
        raise NotImplementedError

    def expect(self, takes: Callable[[Row], bool]) -> torch.Tensor:
        """Computes the rows that `takes` says; returns the expected output, NaN elsewhere, and
        updates the expected states of all pools."""
        size = self.block_size
        expected = torch.full(self.out.shape, float("nan"), device=self.device).double()
        for index, row in enumerate(self.rows):
            if row.length == 0 or not takes(row):
                continue
            start, begin = row.length - row.tokens, int(self.query_starts[index])
            states = []
            for pool in self.pools:
                tables, kept = pool.states.tables, pool.expected
                entry = tables[index, (start - 1) // size] if start else 0
                states.append(kept[entry] if start else torch.zeros_like(kept[0]))
            out, *after = self.reference(slice(begin, begin + row.tokens), *states)
            expected[begin : begin + row.tokens] = out
            for pool, of_token in zip(self.pools, after, strict=True):
                for entry in range(start // size, (row.length - 1) // size + 1):
                    block = int(pool.states.tables[index, entry])
                    if block >= 0:
                        end = min((entry + 1) * size, row.length)
                        pool.expected[block] = of_token[end - start - 1].to(pool.expected.dtype)
                        pool.written.append(block)
        return expected

    def errors(self, expected: torch.Tensor) -> tuple[float, ...]:
        """Returns the errors of the output and of each pool; NaN where something was written that
        should not be."""
        valid = ~expected.isnan().any(1)
        kept = self.out[~valid].isnan().all()
        of_output = error((self.out[valid], expected[valid])) if kept else float("nan")
        return of_output, *(pool.error() for pool in self.pools)


class DeltaProblem(StateProblem):
    """A layer of the gated delta rule."""

    def __init__(self, case: DeltaCase, rows: Sequence[Row]):
        super().__init__(rows, case.block_size, case.device)
        tokens = self.tokens
        wide = case.normal(tokens, case.channels + case.heads * case.value + 16)
        if case.same_keys:
            wide[:] = wide[:1].clone()
        mixed, z = wide[:, : case.channels], wide[:, case.channels : -16]
        self.inputs = DeltaInputs(
            mixed, z.unflatten(1, (case.heads, case.value)),
            case.normal(tokens, case.heads) + 8 * case.same_keys,
            case.normal(tokens, case.decays) + case.shift,
        )  # fmt: skip
        a_log = torch.empty(case.heads, device=case.device).uniform_(*case.a_log)
        self.weights = DeltaWeights(
            case.normal(case.channels, WIDTH) * 0.5, a_log,
            torch.ones(case.decays, device=case.device), case.normal(case.value), 1e-6,
        )  # fmt: skip
        windows = self.pool(case.channels, WIDTH - 1, dtype=case.dtype)
        matrices = self.pool(case.heads, case.key, case.value, dtype=case.state_dtype)
        self.windows, self.matrices = self.pools = windows, matrices
        self.out = poisoned(
            tokens, case.heads * case.value + 5, dtype=case.dtype, device=case.device
        )[:, :-5]

    def reference(self, tokens: slice, *states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """See `StateProblem.reference`."""
        inputs = DeltaInputs(*(x[tokens] for x in self.inputs))
        return delta_reference(inputs, self.weights, *states)


def decode(
    case: DeltaCase,
    rows: Sequence[Row],
    *,
    has_starts: bool = True,
    config: DeltaDecodeConfig | None = None,
) -> tuple[float, ...]:
    """Runs `delta_decode` and returns the errors of output, windows and matrices."""
    problem = DeltaProblem(case, rows)
    expected = problem.expect(lambda row: row.tokens == 1)
    tickets = make_tickets(len(rows), case.key_heads, torch.device(case.device))
    delta_decode(
        problem.inputs, problem.weights, problem.windows.states, problem.matrices.states,
        problem.seq_lens, tickets, problem.out, block_size=case.block_size,
        query_starts=problem.query_starts if has_starts else None, config=config,
    )  # fmt: skip
    assert not tickets.any()
    return problem.errors(expected)


def prefill(
    case: DeltaCase,
    rows: Sequence[Row],
    *,
    first_row: int = 0,
    config: DeltaPrefillConfig | None = None,
) -> tuple[float, ...]:
    """Runs `delta_prefill` and returns the errors of output, windows and matrices."""
    problem = DeltaProblem(case, rows)
    expected = problem.expect(lambda row: row.tokens > 1)
    tokens, device = len(problem.out), torch.device(case.device)
    workspace = DeltaWorkspace.empty(
        tokens, len(rows), case.channels, case.heads, case.key, case.block_size, case.dtype, device,
        by_channel=case.by_channel,
    )  # fmt: skip
    for name in ("mixed", "keys", "scores", "decays", "sums"):
        getattr(workspace, name).fill_(float("nan"))
    plans = plans_of(len(rows), tokens, case.block_size, device)
    for plan in plans:
        plan.chunks.fill_(-1)
        plan_chunks(plan, problem.query_starts, problem.seq_lens, tokens)
    delta_prefill(
        problem.inputs, problem.weights, problem.windows.states, problem.matrices.states,
        problem.query_starts, problem.seq_lens, *plans, workspace, problem.out,
        block_size=case.block_size, first_row=first_row, config=config,
    )  # fmt: skip
    return problem.errors(expected)
