"""Worker half of speculation: the drafts of lookahead rows by the configured method: n-grams are
found before a step, and a drafter drafts behind the step before."""

from __future__ import annotations

import numpy as np

from aioinfer.features.speculation.drafting import Drafting
from aioinfer.features.speculation.ngram import MAX_SUFFIX, MIN_SUFFIX, find_drafts
from aioinfer.worker.features import ProposalRows, Rank, SampledStep, WorkerFeature


class Work(WorkerFeature):
    """See `WorkerFeature`. All ranks propose the same, each from its own slots."""

    proposes = True

    def __init__(self, rank: Rank):
        super().__init__(rank)
        config = rank.config
        self.is_needed = config.speculation.method != "none"
        self._drafting: Drafting | None = None
        if rank.drafter is not None and config.max_lookahead:
            max_rows = len(rank.slots.tokens) + config.max_lookahead
            most = config.speculation.max_draft_tokens
            self._drafting = Drafting(rank.drafter, rank.slots, most, max_rows)
            self.follows, self.reads_hidden = True, rank.drafter.reads_hidden

    def follow(self, step: SampledStep) -> None:
        """See `WorkerFeature.follow`."""
        assert self._drafting is not None
        self._drafting.follow(step)

    def propose(self, rows: ProposalRows) -> None:
        """See `WorkerFeature.propose`. Where a slot's last tokens do not occur earlier its drafts
        are token 0, and not what an earlier request has left in the slot: how fast a request is
        should not depend on that. A drafter has left its drafts there."""
        if self._drafting is not None:
            return
        if self.rank.uses_kernels:
            from aioinfer.kernels.ngram import propose_ngrams

            suffix = {"min_suffix": MIN_SUFFIX, "max_suffix": MAX_SUFFIX}
            propose_ngrams(*rows, self.rank.slots.tokens, **suffix)
            return
        tokens = self.rank.slots.tokens.numpy()
        slots, bases, offsets = (each.numpy() for each in rows)
        ends = np.append(offsets[1:] == 0, True)
        for row in np.flatnonzero(ends & (offsets > 0)).tolist():
            of_slot, base, count = tokens[slots[row]], int(bases[row]), int(offsets[row])
            drafts = find_drafts(of_slot[: base + 1], count)
            of_slot[base + 1 : base + 1 + count] = 0 if drafts is None else drafts
