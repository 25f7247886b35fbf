"""Random steps of lookahead rows over layers with a state, and their results beside those of
float64 recurrences: for the interpreter's tests and the tests on a GPU. Outputs, blocks that no row
may read, and inputs that are not kept are NaN."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from aioinfer.kernels.convolution_lookahead import convolution_lookahead
from aioinfer.kernels.delta_arguments import DeltaInputs
from aioinfer.kernels.delta_decode import make_tickets
from aioinfer.kernels.delta_lookahead import delta_lookahead
from aioinfer.kernels.mamba import MambaInputs, mamba_lookahead
from aioinfer.kernels.states import StateTables
from cases import normal, poisoned
from delta_cases import WIDTH, DeltaCase, DeltaProblem, Row, StateProblem
from mamba_cases import MambaCase, MambaProblem

#: Lookahead rows of a slot, at most.
MOST = 5


@dataclass(frozen=True, slots=True)
class Ahead:
    """The adjacent rows of a slot.

    Attributes:
        start: tokens behind which the state is.
        pending: tokens whose inputs are replayed.
        count: rows.
        length: of each row; rows of several tokens are left alone.
        is_padding: whether the row is padding.
        is_moved: whether the entry of the row names the block of the entry before it.
        lacks_end: whether the end of a block among the replayed tokens has no block.
    """

    start: int
    pending: int
    count: int
    length: int = 1
    is_padding: bool = False
    is_moved: bool = False
    lacks_end: bool = False

    @property
    def tokens(self) -> int:
        """Tokens that are replayed or computed."""
        return self.pending + self.count * self.length


def _row(one: Ahead, size: int) -> Row:
    """Returns a row of all tokens, with the entries that have a block."""
    if one.is_padding:
        return Row(1, 0)
    first = one.start + one.pending  # the position of the first row
    ends = range(one.start // size + 1, first // size + 1)
    wanted = [first // size, *(end - 1 for end in ends if not one.lacks_end)]
    return Row(one.tokens, one.start + one.tokens, tuple(sorted(set(wanted))))


class LookaheadStep:
    """A step of lookahead rows over a layer.

    Args:
        slots: its rows.
        problem: the layer, with the tokens of `rows_of(slots)`, the replayed ones among them.
        inputs: [T, size] each, which the layer keeps for further rows.

    Attributes:
        own: the tokens of the step.
        saved: the kept inputs, before the step; kept: after it.
        seq_lens, replays, starts, tables: the arguments of kernels.
    """

    def __init__(
        self, slots: Sequence[Ahead], problem: StateProblem, inputs: Sequence[torch.Tensor]
    ):
        self.slots, self.problem = slots, problem
        device = problem.device
        own: list[int] = []
        rows: list[tuple[int, int, int, int, int]] = []  # slot, seq_len, pending, count, index
        numbers = torch.randperm(len(slots) + 2).tolist()
        self.saved = [
            poisoned(len(numbers), MOST, x.shape[1], dtype=x.dtype, device=device) for x in inputs
        ]
        self.kept = [x.clone() for x in self.saved]
        for index, one in enumerate(slots):
            first = int(problem.query_starts[index])
            mine = range(first + one.pending, first + one.tokens)
            own += mine
            self._share_moved(index, one)
            for number in range(one.count):
                length = one.start + one.pending + (number + 1) * one.length
                rows.append(
                    (
                        numbers[index],
                        0 if one.is_padding else length,
                        0 if number else one.pending,
                        0 if number or one.is_padding else one.count,
                        index,
                    )
                )
            for saved, kept, x in zip(self.saved, self.kept, inputs, strict=True):
                saved[numbers[index], : one.pending] = x[first : first + one.pending]
                kept[numbers[index]] = saved[numbers[index]]
                if one.length == 1 and not one.is_padding:
                    kept[numbers[index], : one.count - 1] = x[list(mine)[1:]]
        self.own = torch.tensor(own, device=device)
        columns = torch.tensor(rows, dtype=torch.int32, device=device).T.contiguous()
        self.seq_lens, self.replays = columns[1], (columns[0], columns[2], columns[3])
        lengths = [one.length for one in slots for _ in range(one.count)]
        self.starts = torch.tensor([0, *lengths], device=device).cumsum(0).int()
        index = columns[4].long()
        self.tables = [
            StateTables(pool.states.states, pool.states.tables[index]) for pool in problem.pools
        ]
        self._expected = self._expect()
        problem.out = problem.out[self.own]

    def _share_moved(self, index: int, one: Ahead) -> None:
        """Makes the entries of a moved block one block: the block that is read."""
        if one.is_moved:
            size = self.problem.block_size
            for pool in self.problem.pools:
                table = pool.states.tables[index]
                table[(one.start + one.pending) // size] = table[(one.start - 1) // size]

    def _expect(self) -> torch.Tensor:
        """Returns the expected output of the step's tokens, and updates the expected states."""
        problem, size = self.problem, self.problem.block_size
        expected = torch.full(problem.out.shape, float("nan"), device=problem.device).double()
        for index, one in enumerate(self.slots):
            if one.is_padding or one.length > 1:
                continue
            begin, first = int(problem.query_starts[index]), one.start + one.pending
            states = []
            for pool in problem.pools:
                entry = pool.states.tables[index, max(one.start - 1, 0) // size]
                known = pool.expected[entry]
                states.append(known.clone() if one.start else torch.zeros_like(known))
            out, *after = problem.reference(slice(begin, begin + one.tokens), *states)
            expected[begin : begin + one.tokens] = out
            for pool, of_token in zip(problem.pools, after, strict=True):
                for end in (*range((one.start // size + 1) * size, first + 1, size), first + 1):
                    block = int(pool.states.tables[index, (end - 1) // size])
                    if block >= 0:
                        pool.expected[block] = of_token[end - one.start - 1]
                        pool.written.append(block)
        return expected[self.own]

    def errors(self) -> tuple[float, ...]:
        """Returns the errors of output and states; NaN where anything was written that should not
        be, or where kept inputs are not what they should be."""
        for saved, kept in zip(self.saved, self.kept, strict=True):
            if not torch.equal(saved.nan_to_num(7), kept.nan_to_num(7)):
                return (float("nan"),)
        return self.problem.errors(self._expected)


def rows_of(slots: Sequence[Ahead], block_size: int) -> list[Row]:
    """Returns rows of all tokens of the slots, those that are replayed included."""
    return [_row(one, block_size) for one in slots]


def lookahead(
    case: DeltaCase, slots: Sequence[Ahead], *, has_starts: bool = True
) -> tuple[float, ...]:
    """Runs `delta_lookahead` and returns the errors of output, windows and matrices."""
    problem = DeltaProblem(case, rows_of(slots, case.block_size))
    given = problem.inputs
    step = LookaheadStep(slots, problem, (given.mixed, given.b, given.a))
    tickets = make_tickets(len(step.seq_lens), case.key_heads, torch.device(case.device))
    delta_lookahead(
        DeltaInputs(*(x[step.own] for x in given)), problem.weights, *step.tables, step.seq_lens,
        step.replays, step.saved, tickets, problem.out, block_size=case.block_size,
        query_starts=step.starts if has_starts else None,
    )  # fmt: skip
    assert not tickets.any()
    return step.errors()


class ConvolutionProblem(StateProblem):
    """A short convolution; shapes of `MambaCase`."""

    def __init__(self, case: MambaCase, rows: Sequence[Row], channels: int, *, has_silu: bool):
        super().__init__(rows, case.block_size, case.device)
        options = {"dtype": case.dtype, "device": case.device}
        self.x = normal(self.tokens, channels + 3, **options)[:, :-3]
        self.weight, self.bias = normal(channels, WIDTH, **options), normal(channels, **options)
        self.has_silu = has_silu
        self.pools = (self.pool(channels, WIDTH - 1, dtype=case.dtype),)
        self.out = poisoned(self.tokens, channels, **options)

    def reference(self, tokens: slice, *states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """See `StateProblem.reference`."""
        inputs = torch.cat((states[0].T, self.x[tokens])).double().unfold(0, WIDTH, 1)
        out = (inputs * self.weight.double()).sum(-1) + self.bias.double()
        return torch.nn.functional.silu(out) if self.has_silu else out, inputs[..., 1:]


def convolve(
    case: MambaCase, slots: Sequence[Ahead], channels: int, *, has_starts: bool = True,
    has_replayed: bool = True,
) -> tuple[float, ...]:  # fmt: skip
    """Runs `convolution_lookahead` as Mamba-2 does, or as LFM2, without SiLU and without outputs of
    replayed tokens. Returns the errors of output and windows. Raises AssertionError if outputs of
    replayed tokens are wrong."""
    rows = rows_of(slots, case.block_size)
    problem = ConvolutionProblem(case, rows, channels, has_silu=has_replayed)
    step = LookaheadStep(slots, problem, [problem.x])
    replayed = torch.full_like(step.saved[0], float("nan"))
    expected = replayed.double()
    for index, one in enumerate(slots):
        slot = int(step.replays[0][sum(each.count for each in slots[:index])])
        begin = int(problem.query_starts[index])
        tokens = slice(begin, begin + one.pending)
        if one.pending and has_replayed:
            pool = problem.pools[0]
            entry = pool.states.tables[index, max(one.start - 1, 0) // case.block_size]
            before = pool.states.states[entry]
            before = before if one.start else torch.zeros_like(before)
            expected[slot, : one.pending] = problem.reference(tokens, before)[0]
    convolution_lookahead(
        problem.x[step.own], problem.weight, step.tables[0], step.seq_lens, step.replays,
        step.saved[0], problem.out, bias=problem.bias, has_silu=has_replayed,
        block_size=case.block_size, query_starts=step.starts if has_starts else None,
        replayed=replayed if has_replayed else None,
    )  # fmt: skip
    tolerance = 1e-5 if case.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(
        replayed.double(), expected, equal_nan=True, rtol=tolerance, atol=tolerance
    )
    return step.errors()


def mamba(case: MambaCase, slots: Sequence[Ahead], *, has_starts: bool = True) -> tuple[float, ...]:
    """Runs `mamba_lookahead` and returns the errors of output and matrices."""
    problem = MambaProblem(case, rows_of(slots, case.block_size))
    step = LookaheadStep(slots, problem, problem.inputs)
    step.kept[0] = step.saved[0].clone()  # the convolution keeps other inputs
    mamba_lookahead(
        MambaInputs(*(x[step.own] for x in problem.inputs)), problem.weights, step.tables[0],
        step.seq_lens, step.replays, *step.saved, problem.out, block_size=case.block_size,
        query_starts=step.starts if has_starts else None,
    )  # fmt: skip
    return step.errors()
