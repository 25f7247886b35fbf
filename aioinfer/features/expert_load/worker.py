"""Worker half of the load of experts: how many tokens each was given, a section of a result every
second at most.

The first rank of a model reports; the other ranks route the same tokens. Results come from a
pipeline's last stage alone. So each stage sends its own counts, and the counts that it has
received, on to the next stage every `STEPS_BETWEEN` steps, point to point behind the hidden states
of a step: both sides know the plan's number, so neither has to ask whether there is a message.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch.nn.utils.rnn import pad_sequence

from aioinfer.features.expert_load.sections import ExpertTokens
from aioinfer.worker.features import PendingSection, Rank, WorkerFeature

#: Seconds from one report to the next; int32 counters last longer at any speed.
INTERVAL_S = 1.0
#: Steps from one message between stages to the next. A message is four bytes for each layer and
#: expert, 24 KB at most for Qwen3-30B-A3B, and two small launches: less than a thousandth of what
#: hidden states and launches take of so many steps.
STEPS_BETWEEN = 16


class Work(WorkerFeature):
    """See `WorkerFeature`: the counters of one rank's model, in a pipeline of its stage and the
    stages before."""

    def __init__(self, rank: Rank):
        super().__init__(rank)
        counters = () if rank.model.backend.group.rank else rank.model.expert_counters
        self._tokens = [counter.tokens for counter in counters]
        first = rank.model.layer_numbers.start
        #: of the stages before
        self._before = [each.tokens for each in counters if each.layer < first]
        self.is_needed = bool(counters)
        self._due = 0.0
        self._serves = False
        if counters:
            self._about = (
                torch.tensor([counter.layer for counter in counters], dtype=torch.int32),
                _padded([counter.experts for counter in counters]),
                _padded([counter.ranks for counter in counters]),
            )

    def read_step(self, step_id: int) -> PendingSection | None:
        """Returns the section for the result of a step that was just launched, and resets the
        counters, if a report is due."""
        if not self._tokens or (now := time.monotonic()) < self._due:
            return None
        self._due = now + INTERVAL_S
        rows = pad_sequence(self._tokens, batch_first=True)
        torch._foreach_zero_(self._tokens)
        return PendingSection(ExpertTokens, (*self._about, rows))

    def begin_service(self) -> None:
        """Resets the counters; the next step brings a report, and stages begin to send their
        counts."""
        if self._tokens:
            torch._foreach_zero_(self._tokens)
        self._due, self._serves = 0.0, True

    def pass_on(self, step_id: int) -> None:
        """Receives and sends counts, if that is due after a step: behind its hidden states, by all
        stages in the same step."""
        links = self.rank.links
        if links is None or not self._serves or step_id % STEPS_BETWEEN:
            return
        if self._before:
            sizes = [len(tokens) for tokens in self._before]
            parts = links.receive_counts(sum(sizes)).split(sizes)
            torch._foreach_add_(self._before, list(parts))
        if self._tokens and not links.is_last:
            links.send_counts(torch.cat(self._tokens))
            torch._foreach_zero_(self._tokens)


def _padded(rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """Returns rows of numbers as int32 [rows, longest], with -1 behind the shorter ones."""
    tensors = [torch.tensor(row, dtype=torch.int32) for row in rows]
    return pad_sequence(tensors, batch_first=True, padding_value=-1)
