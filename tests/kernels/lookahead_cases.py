"""Random steps of lookahead rows over the gated delta rule, and their results beside those of the
float64 recurrence: for the interpreter's tests and the tests on a GPU. Outputs, blocks that no row
may read, and inputs that are not kept are NaN."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from aioinfer.kernels.delta_arguments import DeltaInputs
from aioinfer.kernels.delta_decode import make_tickets
from aioinfer.kernels.delta_lookahead import delta_lookahead
from aioinfer.kernels.states import StateTables
from cases import error, poisoned
from delta_cases import DeltaCase, DeltaProblem, Row

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


class LookaheadProblem(DeltaProblem):
    """A step over a layer; `rows` and `inputs` have the replayed tokens, too."""

    def __init__(self, case: DeltaCase, slots: Sequence[Ahead]):
        super().__init__(case, [_row(one, case.block_size) for one in slots])
        self.slots = slots
        if case.same_keys:
            raise ValueError("not here")
        own: list[int] = []
        rows: list[tuple[int, int, int, int, int]] = []  # slot, seq_len, pending, count, index
        self.case, device = case, case.device
        numbers = torch.randperm(len(slots) + 2).tolist()
        sizes = case.channels, case.heads, case.decays
        self.saved = [
            poisoned(len(numbers), MOST, size, dtype=case.dtype, device=device) for size in sizes
        ]
        self.kept = [x.clone() for x in self.saved]
        for index, one in enumerate(slots):
            first = int(self.query_starts[index])
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
            for saved, kept, x in zip(self.saved, self.kept, self._kept_inputs, strict=True):
                saved[numbers[index], : one.pending] = x[first : first + one.pending]
                kept[numbers[index]] = saved[numbers[index]]
                if one.length == 1 and not one.is_padding:
                    kept[numbers[index], : one.count - 1] = x[list(mine)[1:]]
        self.own = torch.tensor(own, device=device)
        columns = torch.tensor(rows, dtype=torch.int32, device=device).T.contiguous()
        self.step_rows = columns[1], (columns[0], columns[2], columns[3])
        self.index = columns[4].long()
        self.lengths = [one.length for one in slots for _ in range(one.count)]

    @property
    def _kept_inputs(self) -> tuple[torch.Tensor, ...]:
        return self.inputs.mixed, self.inputs.b, self.inputs.a

    def _share_moved(self, index: int, one: Ahead) -> None:
        """Makes the entries of a moved block one block: the block that is read."""
        if one.is_moved:
            size = self.block_size
            for pool in self.pools:
                table = pool.states.tables[index]
                table[(one.start + one.pending) // size] = table[(one.start - 1) // size]

    def expect_rows(self) -> torch.Tensor:
        """Returns the expected output of the step's tokens, and updates the expected states."""
        size = self.block_size
        expected = torch.full(self.out.shape, float("nan"), device=self.device).double()
        for index, one in enumerate(self.slots):
            if one.is_padding or one.length > 1:
                continue
            begin, first = int(self.query_starts[index]), one.start + one.pending
            states = []
            for pool in self.pools:
                entry = pool.states.tables[index, max(one.start - 1, 0) // size]
                known = pool.expected[entry]
                states.append(known.clone() if one.start else torch.zeros_like(known))
            out, *after = self.reference(slice(begin, begin + one.tokens), *states)
            expected[begin : begin + one.tokens] = out
            for pool, of_token in zip(self.pools, after, strict=True):
                for end in (*range((one.start // size + 1) * size, first + 1, size), first + 1):
                    block = int(pool.states.tables[index, (end - 1) // size])
                    if block >= 0:
                        pool.expected[block] = of_token[end - one.start - 1]
                        pool.written.append(block)
        return expected[self.own]


def lookahead(
    case: DeltaCase, slots: Sequence[Ahead], *, has_starts: bool = True
) -> tuple[float, ...]:
    """Runs `delta_lookahead` and returns the errors of output, windows and matrices; NaN where
    anything was written that should not be, or where kept inputs are not what they should be."""
    problem = LookaheadProblem(case, slots)
    expected = problem.expect_rows()
    inputs = DeltaInputs(*(x[problem.own] for x in problem.inputs))
    problem.out = problem.out[problem.own]
    seq_lens, replays = problem.step_rows
    tables = [
        StateTables(pool.states.states, pool.states.tables[problem.index]) for pool in problem.pools
    ]
    tickets = make_tickets(len(seq_lens), case.key_heads, torch.device(case.device))
    starts = torch.tensor([0, *problem.lengths], device=case.device).cumsum(0).int()
    delta_lookahead(
        inputs, problem.weights, *tables, seq_lens, replays, problem.saved, tickets, problem.out,
        block_size=case.block_size, query_starts=starts if has_starts else None,
    )  # fmt: skip
    assert not tickets.any()
    for saved, kept in zip(problem.saved, problem.kept, strict=True):
        if not torch.equal(saved.nan_to_num(7), kept.nan_to_num(7)):
            return (float("nan"),)
    return problem.errors(expected)


__all__ = ["MOST", "Ahead", "error", "lookahead"]
