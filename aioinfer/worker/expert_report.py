"""Report of how many tokens each expert was given: a section of a result every few seconds.

Results come from a pipeline's last stage alone. So each stage sends its own counts, and the counts
that it has received, on to the next stage every `STEPS_BETWEEN` steps, point to point behind the
hidden states of a step: both sides know the plan's number, so neither has to ask whether there is a
message.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch.nn.utils.rnn import pad_sequence

from aioinfer.ipc.expert_tokens import ExpertTokens
from aioinfer.layers.placed_experts import ExpertCounter
from aioinfer.models.decoder import CausalLM
from aioinfer.worker.prompt_rows import PendingSection
from aioinfer.worker.stage_links import StageLinks

#: Seconds from one report to the next; int32 counters last longer at any speed.
INTERVAL_S = 1.0
#: Steps from one message between stages to the next. A message is four bytes for each layer and
#: expert, 24 KB at most for Qwen3-30B-A3B, and two small launches: less than a thousandth of what
#: hidden states and launches take of so many steps.
STEPS_BETWEEN = 16


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
        """Returns the report of a model's first rank, whose results reach the engine; of other
        ranks, a report without counters."""
        return cls(() if model.backend.group.rank else model.expert_counters)

    def take(self) -> list[PendingSection]:
        """Returns the section for the result of a step that was just launched, and resets the
        counters, if a report is due; else nothing."""
        if not self._tokens or (now := time.monotonic()) < self._due:
            return []
        self._due = now + INTERVAL_S
        rows = pad_sequence(self._tokens, batch_first=True)
        torch._foreach_zero_(self._tokens)
        return [PendingSection(ExpertTokens, (*self._about, rows.to("cpu", non_blocking=True)))]

    def begin(self) -> None:
        """Resets the counters after the rank's warm-up; the next step brings a report."""
        self._due = 0.0
        self.take()
        self._due = 0.0


class StageExpertReport(ExpertReport):
    """The counters of one rank of a pipeline stage, and of the stages before. The last stage
    reports; the other stages send their counts on.

    Args:
        counters: of the layers of the stages before, then of the stage's own layers.
        num_before: how many of them are of the stages before.
        links: to the other stages.
    """

    def __init__(self, counters: Sequence[ExpertCounter], num_before: int, links: StageLinks):
        super().__init__(counters)
        self._links = links
        self._before = self._tokens[:num_before]
        self._has_begun = False

    @classmethod
    def of_stage(cls, model: CausalLM, links: StageLinks) -> StageExpertReport:
        """Returns the report of a stage's rank, as `ExpertReport.of` does."""
        counters = () if model.backend.group.rank else model.expert_counters
        first = model.layer_numbers.start
        return cls(counters, sum(counter.layer < first for counter in counters), links)

    def take(self) -> list[PendingSection]:
        """See `ExpertReport.take`; nothing of stages that are not the last."""
        return super().take() if self._links.is_last else []

    def begin(self) -> None:
        """See `ExpertReport.begin`; the stages begin to send their counts."""
        if self._tokens:
            torch._foreach_zero_(self._tokens)
        self._due, self._has_begun = 0.0, True

    def pass_on(self, step_id: int) -> None:
        """Receives and sends counts, if that is due after a step: behind its hidden states, by all
        stages in the same step."""
        if not self._has_begun or step_id % STEPS_BETWEEN:
            return
        if self._before:
            sizes = [len(tokens) for tokens in self._before]
            parts = self._links.receive_counts(sum(sizes)).split(sizes)
            torch._foreach_add_(self._before, list(parts))
        if self._tokens and not self._links.is_last:
            self._links.send_counts(torch.cat(self._tokens))
            torch._foreach_zero_(self._tokens)


def _padded(rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """Returns rows of numbers as int32 [rows, longest], with -1 behind the shorter ones."""
    tensors = [torch.tensor(row, dtype=torch.int32) for row in rows]
    return pad_sequence(tensors, batch_first=True, padding_value=-1)
