"""Worker half of the hidden states of a prompt's tokens. They are the same on every tensor-parallel
rank."""

from __future__ import annotations

import torch

from aioinfer.features.token_states.sections import TokenStateRows, TokenStates
from aioinfer.ipc.plan import StepPlan
from aioinfer.worker.features import PendingSection, WorkerFeature, first_tokens, spread


class Work(WorkerFeature):
    """See `WorkerFeature`."""

    section = TokenStateRows
    suits_graphs = False

    def needs_all_tokens(self, plan: StepPlan, section: TokenStateRows) -> bool:
        """See `WorkerFeature.needs_all_tokens`."""
        return True

    def read_hidden(
        self,
        plan: StepPlan,
        section: TokenStateRows,
        hidden: torch.Tensor,
        *,
        has_all_tokens: bool,
    ) -> PendingSection:
        """See `WorkerFeature.read_hidden`."""
        tokens = spread(first_tokens(plan, section.slots), section.counts, 1)
        selected = hidden.index_select(0, self.rank.upload(tokens))
        return PendingSection(TokenStates, (self.rank.model.normed(selected).float(),))
