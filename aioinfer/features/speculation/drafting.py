"""Drafts of a drafter (`models.drafters`), behind each step that looks ahead: its passes, and a
token sampled from the logits of each.

A draft is sampled by temperature, filters and noise of its request at its position, as the target
samples: the more alike both distributions are, the more often both take the same token (a coupling
by common random numbers; of all ways to draft, the kept tokens are the target's anyway).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from aioinfer.layers.step import SampledRows
from aioinfer.models.drafters.drafter import Drafter
from aioinfer.worker.features import SampledStep, StepRows
from aioinfer.worker.sampler import RowSampler
from aioinfer.worker.slots import Slots


class DraftRows(NamedTuple):
    """The rows of a drafter's passes, integers [D] each: one for each slot of which the step has
    sampled the last token. Padding is behind all others.

    Attributes:
        slots: the slot of each row.
        starts: the position that the pass has computed.
        lengths: 1, or 0 for padding.
        limits: see `StepRows`.
        positions: the position of the draft that the pass gives.
        numbers: the number of the row in the step.
        last: the row's last token in the step.
    """

    slots: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    limits: torch.Tensor
    positions: torch.Tensor
    numbers: torch.Tensor
    last: torch.Tensor

    @property
    def of_step(self) -> StepRows:
        """The rows as a step of their own."""
        return StepRows(*self[:4])


class Drafting:
    """Drafts tokens for one rank; all ranks of a target call it alike.

    Args:
        drafter: the rank's part of it.
        slots: the running requests.
        num_drafts: of each request, behind each step.
        max_rows: of a step: sampled ones.
    """

    def __init__(self, drafter: Drafter, slots: Slots, num_drafts: int, max_rows: int):
        self._drafter, self._slots, self._num_drafts = drafter, slots, num_drafts
        self._sampler = RowSampler(slots, drafter.vocabulary, max_rows)
        columns = len(DraftRows._fields)
        self._memory = torch.zeros(columns, max_rows, dtype=torch.int32, device=slots.device)

    def follow(self, sampled: SampledStep) -> None:
        """Writes the drafts of each request behind its last token in `Slots.tokens`, where the next
        step takes them for its lookahead rows. See `WorkerFeature.follow`."""
        drafter, rows, hidden = self._drafter, self._select(sampled), None
        given = sampled.step
        num_tokens = len(given.inputs.input_ids)
        assert given.num_decodes is not None
        step = sampled.prepare(
            sampled.rows, num_tokens, given.num_decodes, sampled.longest,
            keeps_first=drafter.keeps_first,
        )  # fmt: skip
        step.host = step.host or given.host
        # layers take as many sampled rows as tokens for all tokens in order
        is_part = len(rows.slots) < num_tokens
        if is_part:
            step.sampled = SampledRows.of(step.inputs, rows.numbers, rows.last)
        drafter.plan(step)
        if drafter.tapped_layers:
            assert given.taps is not None
            hidden = drafter.combine(given.taps)
        elif drafter.reads_hidden:
            hidden = drafter.combine(sampled.hidden)
        hidden = drafter.forward(hidden, step)
        if not is_part:
            hidden = hidden.index_select(0, rows.last)
        for number in range(self._num_drafts):
            count = len(rows.slots)
            if not count:
                return  # no prompt ends with this step, or no row has room
            if number:
                step = sampled.prepare(
                    rows.of_step, count, count, 1, keeps_first=drafter.keeps_first
                )
                drafter.plan(step)
                hidden = drafter.forward(hidden, step)
            self._append(drafter.logits(hidden), rows)
            if not self._slots.uses_kernels:
                rows, hidden = _with_room(rows, hidden)

    def _select(self, sampled: SampledStep) -> DraftRows:
        """Returns the rows behind the first pass."""
        there, next_start, limits = sampled.sampled, self._slots.next_start, sampled.rows.limits
        if self._slots.uses_kernels:
            from aioinfer.kernels.drafts import select_rows

            rows = there.slots, there.positions, there.is_real, sampled.places, limits
            return DraftRows(*select_rows(*rows, next_start, self._memory))
        assert sampled.places is not None
        is_last = (next_start[there.slots] == there.positions) & (there.is_real > 0)
        slots, positions, numbers, last = (
            each[is_last] for each in (there.slots, there.positions, *sampled.places)
        )
        for number in range(1, self._num_drafts + 1):
            at = (positions + number).clamp(max=self._slots.tokens.shape[1] - 1)
            self._slots.tokens[slots.long(), at.long()] = 0  # of an earlier request
        ones = torch.ones_like(slots)
        return DraftRows(slots, positions - 1, ones, limits[numbers], positions + 1, numbers, last)

    def _append(self, logits: torch.Tensor, rows: DraftRows) -> None:
        """Samples the drafts of a pass, writes them to the slots, and moves the rows on."""
        tokens = self._slots.tokens
        if self._slots.uses_kernels:
            from aioinfer.kernels.drafts import append_drafts

            drafts = self._sampler.launch(logits, rows.slots, rows.positions)
            append_drafts(drafts, rows.slots, rows.starts, rows.lengths, rows.positions, tokens)
            return
        slot_ids, positions = rows.slots.int().numpy(), rows.positions.int().numpy()
        flags = self._slots.sampling_flags[slot_ids]
        drafts = self._sampler.sample_on_host(logits, slot_ids, positions, flags)
        fits = rows.positions < tokens.shape[1]
        where = rows.slots[fits].long(), rows.positions[fits].long()
        tokens[where] = drafts[fits].clamp(min=0)
        rows.starts.add_(1).clamp_(max=tokens.shape[1] - 2)
        rows.positions.add_(1)


def _with_room(rows: DraftRows, hidden: torch.Tensor) -> tuple[DraftRows, torch.Tensor]:
    """Returns the rows, with their hidden states, that may cache their next token; kernels leave
    the others out when they write to the cache."""
    has_room = rows.starts < rows.limits
    if has_room.all():
        return rows, hidden
    return DraftRows(*(column[has_room] for column in rows)), hidden[has_room]
