"""A step plan while it is being built: the budget that is left, and the rows as plain lists.

The scheduler makes one for every step. Nothing of a plan grows without being counted: tokens by the
budget, the bytes of admissions by `admitted_bytes`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from aioinfer.ipc.masks import ConstrainedRows, ForcedTokens
from aioinfer.ipc.plan import GROWTH_BYTES, I32, StepPlan
from aioinfer.ipc.prompt_rows import (
    MAX_STATE_BYTES,
    PooledRows,
    PromptLogprobRows,
    TokenStateRows,
)
from aioinfer.ipc.request_record import RECORD, Admission, AdmissionPacker, FreedSlots
from aioinfer.ipc.requested_logprobs import RequestedLogprobRows
from aioinfer.ipc.sections import Section
from aioinfer.scheduler.prefill_pacing import PrefillAllowance
from aioinfer.scheduler.prompt_rows import (
    PromptPool,
    PromptProgress,
    PromptScores,
    PromptStates,
)
from aioinfer.scheduler.request import NULL_BLOCK, ForkGroup, Request
from aioinfer.scheduler.step_time import StepWork

#: A request is sent whole when it is admitted. A plan takes admissions up to so many bytes (one
#: admission at least), and the next request waits for the next plan: encoding and copying a plan is
#: not to delay the step.
MAX_ADMITTED_BYTES = 4 * 2**20


class PlanBuilder:
    """Collects the rows of one step for the scheduler.

    Decode rows and longer ones are kept apart, as the plan wants them.

    Attributes:
        step_id: the plan's.
        budget_left: tokens that the step may still compute.
        admitted_bytes: bytes that admissions take so far, the growth of their block tables
            included.
        has_beams: whether there are rows of beams.
        scored: of each row in `PromptLogprobRows`, its request, its first token, and how many
            tokens are scored.
        pooled: the requests that the step brings pooled states for, in the order of its result.
        stated: of each row in `TokenStateRows`, as `scored`.
        advanced: the requests that progress is reported for, each with the end of its row.
    """

    def __init__(self, step_id: int, budget: int, prefill: PrefillAllowance, max_num_seqs: int):
        self.step_id = step_id
        self._max_num_seqs = max_num_seqs
        self.budget_left = budget
        self.admitted_bytes = 0
        self.has_beams = False
        self._prefill = prefill
        self._decodes: list[Request] = []
        self._decode_starts: list[int] = []
        self._prefills: list[Request] = []
        self._prefill_rows: list[tuple[int, int, int]] = []  # (start, length, samples)
        self._growth: list[tuple[int, int, int]] = []
        self._copies: list[tuple[int, int, int]] = []
        self._forced: list[tuple[int, int, int, int]] = []
        self._packer = AdmissionPacker()
        self.scored: list[tuple[PromptScores, int, int]] = []
        self.pooled: list[PromptPool] = []
        self.stated: list[tuple[PromptStates, int, int]] = []
        self.advanced: list[tuple[PromptProgress, int]] = []
        self._state_bytes_left = MAX_STATE_BYTES
        self._scored_rows: list[tuple[int, int, int]] = []
        self._stated_rows: list[tuple[int, int]] = []
        self._pooled_rows: list[tuple[int, int, int]] = []
        self._tokens_of_group: dict[ForkGroup, I32] = {}

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute."""
        return not self._decodes and not self._prefills

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

    def bounded(self, request: Request, wanted: int) -> int:
        """Returns how many of `wanted` tokens of a request the step may compute: hidden states of
        its tokens must fit into the result."""
        rows = request.prompt_rows
        if not isinstance(rows, PromptStates):
            return wanted
        return min(wanted, self._state_bytes_left // rows.token_bytes)

    def add_row(self, request: Request, start: int, length: int, samples: bool) -> None:
        """Adds the row of a request: `length` tokens from position `start`."""
        if length == 1 and samples:
            self._decodes.append(request)
            self._decode_starts.append(start)
        else:
            self._prefills.append(request)
            self._prefill_rows.append((start, length, int(samples)))

    def add_prompt_row(self, request: Request, start: int, end: int) -> None:
        """Notes that a row which was added has outputs of its own: see `Request.prompt_rows`."""
        rows = request.prompt_rows
        if isinstance(rows, PromptScores):
            if (count := rows.count(start, end)) > 0:
                self.scored.append((rows, start, count))
                self._scored_rows.append((request.slot, count, rows.num_top))
        elif isinstance(rows, PromptStates):
            if (count := rows.count(start, end)) > 0:
                self.stated.append((rows, start, count))
                self._stated_rows.append((request.slot, count))
                self._state_bytes_left -= count * rows.token_bytes
        elif isinstance(rows, PromptProgress):
            self.advanced.append((rows, end))
        elif rows is not None and rows.wants(end):
            ends = end >= rows.prompt_len
            self._pooled_rows.append((request.slot, rows.number, int(ends)))
            if ends:
                self.pooled.append(rows)

    def work(self) -> StepWork:
        """Returns the work of the step: counts of its tokens and keys."""
        tokens, pairs = 0, 0.0
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
        candidates = 0 if request.beams is None else request.beams.num_candidates
        self._packer.add(
            Admission(
                request.slot, tokens, request.prompt_len, request.params, request.seed,
                _banned_tokens(request), candidates,
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

    def force(self, request: Request, first: int, count: int, num_sampled: int) -> None:
        """Sends `count` known tokens of a running request from position `first` on; the first
        `num_sampled` of them have been sampled as well."""
        tokens = request.tokens[first : first + count]
        for place, token in enumerate(tokens):
            counted = int(place >= num_sampled)
            self._forced.append((request.slot, first + place, token, counted))

    def copy_block(self, group: int, source: int, target: int) -> None:
        """Adds the copy of a KV block of a group, made before the step computes anything."""
        self._copies.append((group, source, target))

    def to_plan(
        self,
        freed_slots: Sequence[int] = (),
        constrained: Sequence[int] = (),
        requested: RequestedLogprobRows | None = None,
    ) -> StepPlan:
        """Returns the plan as flat arrays. `freed_slots`, `constrained`: see `FreedSlots` and
        `ConstrainedRows`."""
        decodes, prefills = len(self._decodes), len(self._prefills)
        rows = np.ones((4, decodes + prefills), np.int32)
        rows[0] = [r.slot for r in self._decodes] + [r.slot for r in self._prefills]
        rows[1, :decodes] = self._decode_starts
        if prefills:
            rows[1:, decodes:] = np.array(self._prefill_rows, np.int32).T
        table_rows, table_indices, table_blocks = _columns(self._growth, 3)
        copy_groups, copy_sources, copy_targets = _columns(self._copies, 3)
        return StepPlan(
            self.step_id, rows[0], rows[1], rows[2], rows[3], table_rows, table_indices,
            table_blocks, copy_sources, copy_targets,
            self._sections(freed_slots, constrained, requested), copy_groups,
        )  # fmt: skip

    def _sections(
        self,
        freed_slots: Sequence[int],
        constrained: Sequence[int],
        requested: RequestedLogprobRows | None,
    ) -> Sequence[Section]:
        sections: list[Section] = []
        if freed_slots:
            sections.append(FreedSlots(np.array(freed_slots, np.int32)))
        if self._packer:
            sections.append(self._packer.pack())
        if self._forced:
            sections.append(ForcedTokens(*_columns(self._forced, 4)))
        if constrained:
            sections.append(ConstrainedRows(np.array(constrained, np.int32)))
        if self._scored_rows:
            sections.append(PromptLogprobRows(*_columns(self._scored_rows, 3)))
        if self._pooled_rows:
            sections.append(PooledRows(*_columns(self._pooled_rows, 3)))
        if self._stated_rows:
            sections.append(TokenStateRows(*_columns(self._stated_rows, 2)))
        if requested is not None:
            sections.append(requested)
        return sections


def _banned_tokens(request: Request) -> frozenset[int]:
    """Returns the tokens that a request may not sample before its `min_tokens`."""
    return request.end_tokens if request.params.min_tokens else frozenset()


def _columns(rows: Sequence[tuple[int, ...]], width: int) -> I32:
    """Returns `rows` as contiguous int32 columns [width, len(rows)]."""
    return np.ascontiguousarray(np.array(rows, np.int32).reshape(-1, width).T)
