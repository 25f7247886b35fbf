"""Worker half of pooled hidden states of prompts.

Pooling the last token needs the sampled rows alone. The mean is summed up over the steps of a
prompt in float32, on the device, in a row for each slot; the first token's state is kept in the
same way. Hidden states are the same on every tensor-parallel rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from aioinfer.features.pooled_states.sections import CLS, LAST, MEAN, PooledRows, PooledStates
from aioinfer.ipc.plan import StepPlan
from aioinfer.worker.features import (
    PendingSection,
    Rank,
    WorkerFeature,
    first_tokens,
    rows_of,
    spread,
)


class Work(WorkerFeature):
    """See `WorkerFeature`."""

    section = PooledRows
    suits_graphs = False

    def __init__(self, rank: Rank):
        super().__init__(rank)
        self._kept: torch.Tensor | None = None  # [S, hidden_size]; see the module's docstring

    def needs_all_tokens(self, plan: StepPlan, section: PooledRows) -> bool:
        """See `WorkerFeature.needs_all_tokens`."""
        if not self.rank.model.finishes_with_hidden_states:
            return True
        return bool((section.poolings != LAST).any())

    def read_hidden(
        self, plan: StepPlan, section: PooledRows, hidden: torch.Tensor, *, has_all_tokens: bool
    ) -> PendingSection | None:
        """See `WorkerFeature.read_hidden`."""
        if (section.poolings == LAST).all():
            states = self._last(plan, section, hidden, has_all_tokens=has_all_tokens)
        else:
            states = self._pool(plan, section, hidden)
        return PendingSection(PooledStates, (states,)) if len(states) else None

    def dummy_section(self, slots: Sequence[int], lengths: Sequence[int]) -> PooledRows:
        """See `WorkerFeature.dummy_section`."""
        ones = np.ones(len(slots), np.int32)
        return PooledRows(np.array(slots, np.int32), MEAN * ones, ones)

    def _last(
        self, plan: StepPlan, rows: PooledRows, hidden: torch.Tensor, *, has_all_tokens: bool
    ) -> torch.Tensor:
        """Returns the last tokens' states, float32 [P, hidden_size]."""
        at = rows_of(plan, rows.slots)
        if has_all_tokens:
            index = np.cumsum(plan.lengths)[at] - 1
        else:
            index = np.cumsum(plan.samples)[at] - 1
        selected = hidden.index_select(0, self.rank.upload(index.astype(np.int64)))
        return self.rank.model.normed(selected).float()

    def _pool(self, plan: StepPlan, rows: PooledRows, hidden: torch.Tensor) -> torch.Tensor:
        """Adds the rows of a step to the pooling state of their slots. Returns the pooled states of
        the prompts that end, float32 [ends, hidden_size]."""
        model, upload = self.rank.model, self.rank.upload
        at, kept = rows_of(plan, rows.slots), self._kept_states()
        firsts, lengths, starts = first_tokens(plan, rows.slots), plan.lengths[at], plan.starts[at]
        slots = rows.slots.astype(np.int64)
        means = np.flatnonzero(rows.poolings == MEAN)
        if len(means):
            there = upload(np.stack([slots, starts, lengths])[:, means].astype(np.int64))
            of_means = upload(spread(firsts[means], lengths[means], 1))
            states = model.normed(hidden.index_select(0, of_means)).float()
            totals = torch.segment_reduce(states, "sum", lengths=there[2], unsafe=True)
            before = kept.index_select(0, there[0])
            is_first = (there[1] == 0)[:, None]
            kept.index_copy_(0, there[0], torch.where(is_first, totals, before + totals))
        lasts = (rows.poolings == LAST) & (rows.ends == 1)
        single = np.flatnonzero(lasts | ((rows.poolings == CLS) & (starts == 0)))
        if len(single):
            tokens = np.where(lasts, firsts + lengths - 1, firsts)[single]
            there = upload(np.stack([slots[single], tokens]))
            states = model.normed(hidden.index_select(0, there[1])).float()
            kept.index_copy_(0, there[0], states)
        ends = np.flatnonzero(rows.ends)
        divisors = np.where(rows.poolings == MEAN, starts + lengths, 1).astype(np.int64)
        there = upload(np.stack([slots, divisors])[:, ends])
        return kept.index_select(0, there[0]) / there[1][:, None]

    def _kept_states(self) -> torch.Tensor:
        if self._kept is None:
            shape = len(self.rank.slots.tokens), self.rank.model.hidden_size
            self._kept = torch.zeros(shape, dtype=torch.float32, device=self.rank.device)
        return self._kept
