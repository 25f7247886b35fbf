"""Worker half of log-probabilities of sampled tokens, of the likeliest tokens, and of named tokens.

On a GPU kernels find up to 20 of the likeliest tokens. More, and named tokens, are rare, so they
are plain torch, a few rows at a time, since it takes memory: for named tokens each of several
tensor-parallel ranks gathers the whole logits of these rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from aioinfer.features.logprobs.sections import ALL, LogprobRows, Logprobs
from aioinfer.ipc.plan import StepPlan
from aioinfer.layers.embedding import Vocabulary
from aioinfer.sampling_params import MAX_LOGPROBS
from aioinfer.worker.features import PendingSection, WorkerFeature
from aioinfer.worker.logprobs import merge_logprobs, token_logprobs

#: Rows that torch computes at a time where their logits are copied.
_ROWS = 16

#: Log-probabilities of R rows: float32 [R] of given tokens, and int32 and float32 [R, K] of the
#: likeliest.
_Found = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Work(WorkerFeature):
    """See `WorkerFeature`. All ranks find the same."""

    section = LogprobRows

    def read_tokens(
        self, plan: StepPlan, section: LogprobRows, logits: torch.Tensor, tokens: torch.Tensor
    ) -> PendingSection:
        """See `WorkerFeature.read_tokens`."""
        top = min(int(section.num_top.max()), self.rank.model.vocabulary.vocab_size)
        find = self._find
        if self.rank.uses_kernels and top <= MAX_LOGPROBS:
            find = self._find_with_kernels
        likeliest = find(section, logits, tokens, top)
        counts = np.where(
            section.counts == ALL, self.rank.model.vocabulary.vocab_size, section.counts
        )
        named = self._find_named(section, logits)
        of_rows = torch.tensor(section.rows), torch.from_numpy(counts.astype(np.int32))
        return PendingSection(Logprobs, (of_rows[0], *likeliest, of_rows[1], named))

    def dummy_section(self, slots: Sequence[int], lengths: Sequence[int]) -> LogprobRows:
        """See `WorkerFeature.dummy_section`."""
        rows, none = np.arange(len(slots), dtype=np.int32), np.empty(0, np.int32)
        return LogprobRows(rows, np.full_like(rows, MAX_LOGPROBS), np.zeros_like(rows), none)

    def _find_with_kernels(
        self, section: LogprobRows, logits: torch.Tensor, tokens: torch.Tensor, top: int
    ) -> _Found:
        """Returns the log-probabilities of the sampled tokens and of the `top` likeliest. The
        kernels skip other rows, and always find `MAX_LOGPROBS` tokens: one compiled variant."""
        from aioinfer.kernels.logprobs import shard_logprobs
        from aioinfer.kernels.logprobs import token_logprobs as launch

        rank, vocabulary = self.rank, self.rank.model.vocabulary
        count, is_whole = min(MAX_LOGPROBS, vocabulary.vocab_size), vocabulary.group.size == 1
        if len(section.rows) == len(logits):
            rows, requested = None, torch.ones_like(tokens)
        else:
            listed = np.zeros(len(logits), np.int32)
            listed[section.rows] = 1
            rows, requested = rank.upload(section.rows), rank.upload(listed)
        found: Sequence[torch.Tensor]
        if is_whole:
            found = launch(logits, tokens, requested, count)
        else:
            found = shard_logprobs(logits, tokens, requested, count, vocabulary.start)
        if rows is not None:
            found = [part.index_select(0, rows) for part in found]
        if not is_whole:
            totals, own, values, ids = found
            found = merge_logprobs(vocabulary, (totals, own, values, ids), count)
        logprobs, top_tokens, top_logprobs = found
        return logprobs, top_tokens[:, :top].contiguous(), top_logprobs[:, :top].contiguous()

    def _find(
        self, section: LogprobRows, logits: torch.Tensor, tokens: torch.Tensor, top: int
    ) -> _Found:
        """Returns the same as `_find_with_kernels`, for any `top`."""
        vocabulary = self.rank.model.vocabulary
        # a CPU has the memory for all rows at once
        size = _ROWS if self.rank.uses_kernels else len(section.rows)
        pieces: Iterable[tuple[torch.Tensor, torch.Tensor]]
        if len(section.rows) == len(logits):
            pieces = zip(logits.split(size), tokens.split(size), strict=True)
        else:
            rows = self.rank.upload(section.rows)
            pieces = (
                (logits.index_select(0, at), tokens.index_select(0, at)) for at in rows.split(size)
            )
        found = [token_logprobs(some.float(), of_some, top, vocabulary) for some, of_some in pieces]
        logprobs, top_tokens, top_logprobs = map(torch.cat, zip(*found, strict=True))
        return logprobs, top_tokens, top_logprobs

    def _find_named(self, section: LogprobRows, logits: torch.Tensor) -> torch.Tensor:
        """Returns the log-probabilities of the named tokens of the rows one after the other,
        float32 [N]."""
        naming = np.flatnonzero(section.counts)
        if not len(naming):
            return torch.empty(0)
        lengths = np.where(section.counts == ALL, 0, section.counts)
        ends = np.cumsum(lengths)
        rows, tokens = self.rank.upload(section.rows[naming]), self.rank.upload(section.tokens)
        found: list[torch.Tensor] = []
        for first in range(0, len(naming), _ROWS):
            some = logits.index_select(0, rows[first : first + _ROWS])
            whole = _gather_vocabulary(some, self.rank.model.vocabulary)
            for number, values in zip(
                naming[first : first + _ROWS], whole.float().log_softmax(dim=-1), strict=True
            ):
                if section.counts[number] != ALL:
                    of_row = tokens[ends[number] - lengths[number] : ends[number]]
                    values = values.index_select(0, of_row)
                found.append(values)
        return torch.cat(found)


def _gather_vocabulary(logits: torch.Tensor, vocabulary: Vocabulary) -> torch.Tensor:
    """Returns logits [n, vocab_size] of all shards, from the logits [n, local_size] of the rank."""
    if vocabulary.group.size == 1:
        return logits
    padded = torch.nn.functional.pad(logits, (0, vocabulary.shard_size - vocabulary.local_size))
    return vocabulary.group.all_gather_last(padded)[:, : vocabulary.vocab_size]
