"""Reports how many tokens the experts were given: a section of a result every few seconds."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch.nn.utils.rnn import pad_sequence

from aioinfer.ipc.expert_tokens import ExpertTokens
from aioinfer.layers.experts import ExpertCounter
from aioinfer.models.decoder import CausalLM
from aioinfer.worker.prompt_rows import PendingSection

#: Seconds from one report to the next; int32 counters last longer at any speed.
INTERVAL_S = 1.0


class ExpertReport:
    """The counters of one rank's model. The runner asks it after each step.

    Args:
        counters: of the layers; of ranks that report nothing, none.
    """

    def __init__(self, counters: Sequence[ExpertCounter]):
        self._tokens = [counter.tokens for counter in counters]
        self._due = 0.0
        if not counters:
            return
        self._about = (
            torch.tensor([counter.layer for counter in counters], dtype=torch.int32),
            _padded([counter.experts for counter in counters]),
            _padded([counter.ranks for counter in counters]),
        )

    @classmethod
    def of(cls, model: CausalLM) -> ExpertReport:
        """Returns the report of a model's first rank, whose results reach the engine; of others
        one without counters."""
        return cls(() if model.backend.group.rank else model.expert_counters)

    def take(self) -> list[PendingSection]:
        """Returns the section for the result of a step that was just launched, and begins to count
        anew, if a report is due; else nothing."""
        if not self._tokens or (now := time.monotonic()) < self._due:
            return []
        self._due = now + INTERVAL_S
        rows = pad_sequence(self._tokens, batch_first=True)
        torch._foreach_zero_(self._tokens)
        return [PendingSection(ExpertTokens, (*self._about, rows.to("cpu", non_blocking=True)))]

    def begin(self) -> None:
        """Forgets what was counted while the rank warmed up; the next step brings a report."""
        self._due = 0.0
        self.take()
        self._due = 0.0


def _padded(rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """Returns rows of numbers as int32 [rows, longest], with -1 behind the shorter ones."""
    tensors = [torch.tensor(row, dtype=torch.int32) for row in rows]
    return pad_sequence(tensors, batch_first=True, padding_value=-1)
