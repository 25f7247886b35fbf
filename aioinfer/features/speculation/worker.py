"""Worker half of speculation: the drafts of lookahead rows. n-grams are found before a step, and a
drafter drafts behind the step before; where the text has a long match, the tokens behind it take
the place of the drafter's."""

from __future__ import annotations

import numpy as np
import torch

from aioinfer.features.speculation.drafting import Drafting
from aioinfer.features.speculation.ngram import (
    MAX_PREDICTED,
    MAX_SUFFIX,
    find_drafts,
    min_suffix_of,
)
from aioinfer.features.speculation.sections import PredictedTexts
from aioinfer.ipc.plan import I32, Admissions, StepPlan
from aioinfer.worker.features import ProposalRows, Rank, SampledStep, WorkerFeature
from aioinfer.worker.slots import upload


class PredictedMemory:
    """The predicted texts of the running requests.

    Attributes:
        tokens: int32 [slots, max_predicted] on the device.
        counts: int32 [slots] on the device, how many of them there are; 0 without a text.
    """

    def __init__(self, rank: Rank):
        slots = rank.slots
        shape = len(slots.tokens), min(MAX_PREDICTED + MAX_SUFFIX, slots.tokens.shape[1])
        self.tokens = torch.zeros(shape, dtype=torch.int32, device=slots.device)
        self.counts = torch.zeros(shape[0], dtype=torch.int32, device=slots.device)
        self._counts = np.zeros(shape[0], np.int32)  # the same on the host

    def of(self, slot: int) -> I32 | None:
        """Returns the text of a slot, without kernels; None without one."""
        count = int(self._counts[slot])
        return self.tokens[slot, :count].numpy() if count else None

    def update(self, plan: StepPlan) -> None:
        """Forgets the texts of slots that the plan gives to other requests, and takes in those
        that it brings."""
        admitted = plan.section(Admissions)
        if admitted is not None:
            slots = admitted.records["slot"]
            slots = slots[self._counts[slots] > 0]
            if len(slots):
                self._enter(slots, np.zeros((len(slots), 0), np.int32), np.zeros_like(slots))
        texts = plan.section(PredictedTexts)
        if texts is None:
            return
        width = self.tokens.shape[1]
        ends = np.cumsum(texts.counts)
        rows = np.zeros((len(ends), min(width, int(texts.counts.max()))), np.int32)
        for row, end, count in zip(rows, ends, texts.counts, strict=True):
            row[:count] = texts.tokens[end - count :][: min(count, width)]
        self._enter(texts.slots, rows, np.minimum(texts.counts, width))

    def _enter(self, slots: I32, rows: I32, counts: I32) -> None:
        self._counts[slots] = counts
        device = self.tokens.device
        at = upload(slots.astype(np.int64), device)
        self.tokens[at, : rows.shape[1]] = upload(rows, device)
        self.counts[at] = upload(counts, device)


class Work(WorkerFeature):
    """See `WorkerFeature`. All ranks propose the same, each from its own slots."""

    proposes = True

    def __init__(self, rank: Rank):
        super().__init__(rank)
        config = rank.config
        self.is_needed = config.speculation.method != "none"
        self._drafting: Drafting | None = None
        self._min_suffix = min_suffix_of(config.speculation)
        # of a pipeline the first stage has the drafts of the last one's drafter
        self._keeps_drafts = config.speculation.has_drafter
        self._texts = PredictedMemory(rank) if self.is_needed else None
        if rank.drafter is not None and config.max_lookahead:
            max_rows = len(rank.slots.tokens) + config.max_lookahead
            most = config.speculation.max_draft_tokens
            self._drafting = Drafting(rank.drafter, rank.slots, most, max_rows)
            self.follows, self.reads_hidden = True, rank.drafter.reads_hidden

    def begin(self, plan: StepPlan) -> None:
        """See `WorkerFeature.begin`."""
        if self._texts is not None:
            self._texts.update(plan)

    def follow(self, step: SampledStep) -> None:
        """See `WorkerFeature.follow`."""
        assert self._drafting is not None
        self._drafting.follow(step)

    def propose(self, rows: ProposalRows) -> None:
        """See `WorkerFeature.propose`. Where a slot's last tokens do not occur earlier, its drafts
        are those that a drafter has left in the slot; without a drafter token 0, and not what an
        earlier request has left there: how fast a request is should not depend on that."""
        texts = self._texts
        if texts is None:
            return
        if self.rank.uses_kernels:
            from aioinfer.kernels.ngram import propose_ngrams

            propose_ngrams(
                *rows, self.rank.slots.tokens, texts.tokens, texts.counts,
                min_suffix=self._min_suffix, max_suffix=MAX_SUFFIX,
                keeps_drafts=self._keeps_drafts,
            )  # fmt: skip
            return
        tokens = self.rank.slots.tokens.numpy()
        slots, bases, offsets = (each.numpy() for each in rows)
        ends = np.append(offsets[1:] == 0, True)
        for row in np.flatnonzero(ends & (offsets > 0)).tolist():
            of_slot, base, count = tokens[slots[row]], int(bases[row]), int(offsets[row])
            text = texts.of(int(slots[row]))
            drafts = find_drafts(of_slot[: base + 1], count, text, self._min_suffix)
            if drafts is not None or not self._keeps_drafts:
                of_slot[base + 1 : base + 1 + count] = 0 if drafts is None else drafts
