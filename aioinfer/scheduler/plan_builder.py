"""A step plan while it is being built: the budget that is left, and the rows as plain lists.

The scheduler makes one for every step. Nothing of a plan grows without being counted: tokens by the
budget, the bytes of admissions by `admitted_bytes`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter

import numpy as np

from aioinfer.ipc.kv_spec import NULL_BLOCK
from aioinfer.ipc.lookahead import LookaheadRows
from aioinfer.ipc.plan import GROWTH_BYTES, I32, StepPlan
from aioinfer.ipc.request_record import (
    RECORD,
    Admission,
    AdmissionPacker,
    AppendedTokens,
    FreedSlots,
)
from aioinfer.ipc.sections import Section
from aioinfer.scheduler.prefill_pacing import PrefillAllowance
from aioinfer.scheduler.request import ForkGroup, Request
from aioinfer.scheduler.step_time import StepWork
from aioinfer.scheduler.steps import Row

_place = attrgetter("place")

#: A request is sent whole when it is admitted. A plan takes admissions up to so many bytes (one
#: admission at least), and the next request waits for the next plan: encoding and copying a plan is
#: not to delay the step.
MAX_ADMITTED_BYTES = 4 * 2**20
#: The place of a row that samples no token, while a plan is built.
UNSAMPLED = -(2**31)


class PlanBuilder:
    """Collects the rows of one step for the scheduler.

    Decode rows and longer ones are kept apart, as the plan wants them.

    Attributes:
        step_id: the plan's.
        budget_left: tokens that the step may still compute.
        lookahead_left: lookahead rows that the step may still take.
        looks_ahead: whether the step drafts tokens for the next one, even if it has no lookahead
            rows itself.
        admitted_bytes: bytes that admissions take so far, the growth of their block tables
            included.
        rows: the rows that concern features, by the feature's name; complete by
            `feature_rows`.
    """

    def __init__(
        self,
        step_id: int,
        budget: int,
        prefill: PrefillAllowance,
        max_num_seqs: int,
        lookahead: int = 0,
        block_size: int = 1,
    ):
        self.step_id = step_id
        self.lookahead_left = lookahead
        self.looks_ahead = False
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs
        self.budget_left = budget
        self.admitted_bytes = 0
        self.rows: dict[str, list[Row]] = {}
        self._prefill = prefill
        self._decodes: list[Request] = []
        self._decode_starts: list[int] = []
        self._lookahead: dict[int, tuple[int, int]] = {}  # (offset, settled) of some decodes
        self._prefills: list[Request] = []
        self._prefill_rows: list[tuple[int, int, int]] = []  # (start, length, samples)
        self._num_sampled = 0  # of the prefills
        self._extra = 0  # tokens that would take as long as what features compute
        self._growth: list[tuple[int, int, int]] = []
        self._copies: list[tuple[int, int, int]] = []
        self._appended: list[tuple[int, int, int, int]] = []
        self._packer: AdmissionPacker | None = None
        self._tokens_of_group: dict[ForkGroup, I32] = {}

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute."""
        return not self._decodes and not self._prefills

    @property
    def has_lookahead(self) -> bool:
        """Whether the plan describes lookahead: a request has several rows, or a row whose position
        only the workers know, or the step drafts tokens."""
        return self.looks_ahead or bool(self._lookahead)

    @property
    def num_decodes(self) -> int:
        """The rows of the step, if all are decodes; else 0."""
        return 0 if self._prefills else len(self._decodes)

    @property
    def prefill_left(self) -> int:
        """Prefill tokens that the step may still take."""
        return min(self._prefill.tokens_left, self.budget_left)

    @property
    def sampled_requests(self) -> list[Request]:
        """The requests that the step samples a token for, in the order of the result's rows."""
        sampled = [r for r, row in zip(self._prefills, self._prefill_rows, strict=True) if row[2]]
        return self._decodes + sampled

    def grant(self, wanted: int, start: int, *, prefill: bool = False) -> int:
        """Takes up to `wanted` tokens of a request from position `start` on off the budget and
        returns how many; more than one counts as prefill."""
        if wanted == 1 and not prefill:
            granted = 1 if self.budget_left > 0 else 0
        else:
            granted = self._prefill.take(min(wanted, self.budget_left), start)
        self.budget_left -= granted
        return granted

    def correct(self, granted: int, tokens: int, extra: int, start: int) -> None:
        """Makes a grant from position `start` on one of `tokens` tokens, and takes off the prefill
        allowance what features compute beside them, which takes as long as `extra` tokens."""
        self.budget_left -= tokens - granted
        self._prefill.correct(tokens - granted, extra, start)
        self._extra += extra

    def grant_lookahead(self, wanted: int) -> int:
        """Takes up to `wanted` lookahead rows off the budget and returns how many."""
        granted = min(wanted, self.lookahead_left, self.budget_left)
        self.lookahead_left -= granted
        self.budget_left -= granted
        return granted

    def add_decode(self, request: Request, start: int, offset: int, *, settled: bool) -> None:
        """Adds a row of one token that is sampled.

        Args:
            start: its position, or the lowest that it can have.
            offset: its number among the lookahead rows of the request; 0 for the first.
            settled: whether `start` is its position.
        """
        if offset or not settled:
            self._lookahead[len(self._decodes)] = offset, int(settled)
        self._decodes.append(request)
        self._decode_starts.append(start)

    def add_row(self, request: Request, start: int, length: int, samples: bool) -> None:
        """Adds the row of a request: `length` tokens from position `start`."""
        if length == 1 and samples:
            self.add_decode(request, start, 0, settled=True)
        else:
            self._prefills.append(request)
            self._prefill_rows.append((start, length, int(samples)))
            self._num_sampled += samples

    def add_uses(self, request: Request, start: int, end: int, samples: bool) -> None:
        """Notes the features that the row which was added last concerns."""
        if end - start == 1 and samples:
            place = len(self._decodes) - 1
        else:  # sampled rows come behind all decodes, and are counted from -1 downwards
            place = -self._num_sampled if samples else UNSAMPLED
        for use in request.uses:
            if use.covers(start, end, samples):
                row = Row(request, use, start, end, place)
                self.rows.setdefault(use.feature, []).append(row)

    def feature_rows(self) -> Mapping[str, Sequence[Row]]:
        """Returns the rows that concern features by the feature's name, each feature's in the
        order of their places. Called once all rows are planned."""
        if not self._prefills:
            return self.rows
        first = len(self._decodes) - 1
        for rows in self.rows.values():
            for index, row in enumerate(rows):
                if row.place < 0:
                    place = -1 if row.place == UNSAMPLED else first - row.place
                    rows[index] = row._replace(place=place)
            rows.sort(key=_place)
        return self.rows

    def work(self) -> StepWork:
        """Returns the work of the step: counts of its tokens and keys. What features compute
        counts in tokens."""
        tokens, pairs = self._extra, 0.0
        for start, length, _ in self._prefill_rows:
            tokens += length
            pairs += length * (start + length / 2)
        decodes = len(self._decodes)
        return StepWork(decodes, sum(self._decode_starts) + decodes, tokens, pairs)

    def has_bytes(self, size: int) -> bool:
        """Whether the plan has room for admissions of `size` bytes; the first always fits."""
        return not self.admitted_bytes or self.admitted_bytes + size <= MAX_ADMITTED_BYTES

    def admission_bytes(self, request: Request, table_entries: int) -> int:
        """Returns the bytes that the admission of a request adds to the plan, if its block tables
        have `table_entries` entries in all."""
        if self._packer is None:
            self._packer = AdmissionPacker()
        size = RECORD.itemsize + GROWTH_BYTES * table_entries
        size += self._packer.bytes_of_lists(request.params, _banned_tokens(request))
        shared = request.group in self._tokens_of_group and not request.num_output
        return size if shared else size + 4 * len(request.tokens)

    def admit(self, request: Request, size: int) -> None:
        """Describes a request that takes its slot in this step; `size` from `admission_bytes`.

        Siblings share the prompt in the plan, too.
        """
        self.admitted_bytes += size
        if request.group is None or request.num_output:
            tokens = np.array(memoryview(request.tokens), np.int32)
        elif request.group in self._tokens_of_group:
            tokens = self._tokens_of_group[request.group]
        else:
            tokens = np.array(memoryview(request.tokens), np.int32)
            self._tokens_of_group[request.group] = tokens
        assert self._packer is not None, "`admission_bytes` comes first"
        self._packer.add(
            Admission(
                request.slot, tokens, request.prompt_len, request.params, request.seed,
                _banned_tokens(request), request.num_computed, request.rotary_offset,
            )
        )  # fmt: skip

    def grow_tables(self, request: Request, first: int) -> None:
        """Sends the entries of a request's block tables from index `first` on.

        Entries without a block are left out: no row attends to them (see also `set_entry`).
        """
        row = request.slot
        for table in request.blocks:
            for index in range(first, len(table)):
                if table[index] != NULL_BLOCK:
                    self._growth.append((row, index, table[index]))
            row += self._max_num_seqs

    def set_entry(self, request: Request, group: int, index: int, block: int) -> None:
        """Sends one entry of a request's block table in a group."""
        self._growth.append((group * self._max_num_seqs + request.slot, index, block))

    def append(self, request: Request, first: int, count: int, num_sampled: int) -> None:
        """Sends `count` known tokens of a running request from position `first` on; the first
        `num_sampled` of them have been sampled as well."""
        tokens = request.tokens[first : first + count]
        for place, token in enumerate(tokens):
            counted = int(place >= num_sampled)
            self._appended.append((request.slot, first + place, token, counted))

    def copy_block(self, group: int, source: int, target: int) -> None:
        """Adds the copy of a KV block of a group, made before the step computes anything."""
        self._copies.append((group, source, target))

    def to_plan(
        self, freed_slots: Sequence[int] = (), sections: Sequence[Section] = ()
    ) -> StepPlan:
        """Returns the plan as flat arrays. `freed_slots`: see `FreedSlots`; `sections`: of
        features."""
        decodes, prefills = len(self._decodes), len(self._prefills)
        rows = np.ones((4, decodes + prefills), np.int32)
        rows[0] = [r.slot for r in self._decodes] + [r.slot for r in self._prefills]
        rows[1, :decodes] = self._decode_starts
        if prefills:
            rows[1:, decodes:] = np.array(self._prefill_rows, np.int32).T
        table_rows, table_indices, table_blocks = _columns(self._growth, 3)
        copy_groups, copy_sources, copy_targets = _columns(self._copies, 3)
        core: list[Section] = []
        if freed_slots:
            core.append(FreedSlots(np.array(freed_slots, np.int32)))
        if self._packer is not None and len(self._packer):
            core.append(self._packer.pack())
        if self._appended:
            core.append(AppendedTokens(*_columns(self._appended, 4)))
        if self.has_lookahead:
            core.append(self._lookahead_rows())
        return StepPlan(
            self.step_id, rows[0], rows[1], rows[2], rows[3], table_rows, table_indices,
            table_blocks, copy_sources, copy_targets, [*core, *sections], copy_groups,
        )  # fmt: skip

    def _lookahead_rows(self) -> LookaheadRows:
        """Returns the section that describes the lookahead of all rows."""
        requests = self._decodes + self._prefills
        columns = np.zeros((3, len(requests)), np.int32)
        columns[1] = 1
        columns[2] = [request.num_blocks * self._block_size for request in requests]
        for row, pair in self._lookahead.items():
            columns[:2, row] = pair
        return LookaheadRows(*columns)


def _banned_tokens(request: Request) -> frozenset[int]:
    """Returns the tokens that a request may not sample before its `min_tokens`."""
    return request.end_tokens if request.params.min_tokens else frozenset()


def _columns(rows: Sequence[tuple[int, ...]], width: int) -> I32:
    """Returns `rows` as contiguous int32 columns [width, len(rows)]."""
    return np.ascontiguousarray(np.array(rows, np.int32).reshape(-1, width).T)
