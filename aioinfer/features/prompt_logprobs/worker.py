"""Worker half of log-probabilities of the prompt's tokens.

Logits are computed for `CHUNK_ROWS` tokens at a time, so that the logits of a whole prompt never
exist at once. Of several tensor-parallel ranks each has the logits of its shard of the vocabulary;
all of them call this alike, and merge their parts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from aioinfer.features.prompt_logprobs.sections import PromptLogprobRows, PromptLogprobs
from aioinfer.ipc.plan import StepPlan
from aioinfer.sampling_params import MAX_LOGPROBS
from aioinfer.worker.features import (
    PendingSection,
    Rank,
    WorkerFeature,
    first_tokens,
    rows_of,
    spread,
)
from aioinfer.worker.logprobs import ShardPart, find_in_shard, merge_logprobs

#: Tokens whose logits exist at a time.
CHUNK_ROWS = 256
#: The same, where more of the likeliest tokens are wanted than the kernels find: torch takes more
#: memory for them.
_SORTED_ROWS = 16
#: As many of the likeliest tokens as the kernels always find: one compiled variant.
_KERNEL_TOP = MAX_LOGPROBS


class Work(WorkerFeature):
    """See `WorkerFeature`."""

    section = PromptLogprobRows
    suits_graphs = False

    def __init__(self, rank: Rank):
        super().__init__(rank)
        self.is_needed = rank.model.scores_tokens

    def needs_all_tokens(self, plan: StepPlan, section: PromptLogprobRows) -> bool:
        """See `WorkerFeature.needs_all_tokens`."""
        return True

    def read_hidden(
        self,
        plan: StepPlan,
        section: PromptLogprobRows,
        hidden: torch.Tensor,
        *,
        has_all_tokens: bool,
    ) -> PendingSection:
        """See `WorkerFeature.read_hidden`."""
        rank, slots = self.rank, section.slots
        firsts, starts = first_tokens(plan, slots), plan.starts[rows_of(plan, slots)]
        token_of, slot_of, position_of = (
            spread(values, section.counts, step)
            for values, step in ((firsts, 1), (slots, 0), (starts + 1, 1))
        )
        there = rank.upload(np.stack([token_of, slot_of, position_of]))
        targets = rank.slots.tokens[there[1], there[2]]
        top = min(int(section.num_top.max()), rank.model.vocabulary.vocab_size)
        size = CHUNK_ROWS if top <= _KERNEL_TOP else _SORTED_ROWS
        chunks = [
            self._score_chunk(hidden.index_select(0, tokens), tokens, of_tokens, top)
            for tokens, of_tokens in zip(there[0].split(size), targets.split(size), strict=True)
        ]
        parts = tuple(torch.cat(parts) for parts in zip(*chunks, strict=True))
        return PendingSection(PromptLogprobs, parts)

    def dummy_section(self, slots: Sequence[int], lengths: Sequence[int]) -> PromptLogprobRows:
        """See `WorkerFeature.dummy_section`. Of a long step one chunk is scored: further ones take
        no more memory."""
        ends = np.minimum(np.cumsum(lengths), CHUNK_ROWS)
        counts = np.diff(ends, prepend=0).astype(np.int32)
        scored = np.flatnonzero(counts)
        return PromptLogprobRows(
            np.array(slots, np.int32)[scored],
            counts[scored],
            np.full(len(scored), MAX_LOGPROBS, np.int32),
        )

    def _score_chunk(
        self, hidden: torch.Tensor, tokens: torch.Tensor, targets: torch.Tensor, top: int
    ) -> tuple[torch.Tensor, ...]:
        """Returns log-probabilities float32 [c], ranks int32 [c], and the `top` likeliest tokens
        and their log-probabilities, int32 and float32 [c, top], of the tokens `targets` (int32
        [c]) behind the step's `tokens` (integers [c])."""
        model, vocabulary = self.rank.model, self.rank.model.vocabulary
        logits = model.logits_of(hidden, tokens)
        found = self._find_in_shard(logits, targets, top)
        own = vocabulary.group.all_gather_last(found[1][:, None]).amax(dim=1, keepdim=True)
        likelier = (logits > own).sum(dim=1)
        ranks = vocabulary.group.all_reduce(likelier).add_(1).int()
        logprobs, top_tokens, top_logprobs = merge_logprobs(vocabulary, found, top)
        return logprobs, ranks, top_tokens.int(), top_logprobs

    def _find_in_shard(self, logits: torch.Tensor, targets: torch.Tensor, top: int) -> ShardPart:
        """Returns the `found` of `merge_logprobs`, from the logits [c, local_size] of a rank's
        shard."""
        vocabulary = self.rank.model.vocabulary
        if self.rank.uses_kernels and top <= _KERNEL_TOP:
            from aioinfer.kernels.logprobs import shard_logprobs

            requested = torch.ones_like(targets)
            count = min(_KERNEL_TOP, vocabulary.vocab_size)
            return shard_logprobs(logits, targets, requested, count, vocabulary.start)
        return find_in_shard(logits.float(), targets, top, vocabulary)
