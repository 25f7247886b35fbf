"""Planning half of soft prompts: which rows of a step compute virtual tokens.

Virtual tokens are the first of a prompt; the prefix cache has their keys like those of other
tokens, for all requests of the adapter. `features.adapters` sees to it that the soft prompt is in a
slot of the workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from aioinfer.errors import RequestError
from aioinfer.features.adapters.planning import AdapterUse
from aioinfer.features.adapters.soft_prompts.sections import SoftPromptRows
from aioinfer.ipc.sections import Section
from aioinfer.scheduler.features import StepFeature, SubmittedRequest
from aioinfer.scheduler.request import Use
from aioinfer.scheduler.steps import Row


@dataclass(slots=True)
class SoftPromptUse(Use):
    """The soft prompt of a request, of so many virtual tokens."""

    feature: ClassVar[str] = "adapters.soft_prompts"

    tokens: int

    def covers(self, start: int, end: int, samples: bool) -> bool:
        """See `Use.covers`."""
        return start < self.tokens


class Planning(StepFeature):
    """See `StepFeature`."""

    name = "adapters.soft_prompts"

    @classmethod
    def use_of(cls, submitted: SubmittedRequest, index: int) -> Use | None:
        """See `StepFeature.use_of`: what is returned for each token of a prompt would be returned
        for virtual ones, too."""
        tokens = 0 if submitted.variant is None else submitted.variant.virtual_tokens
        if not tokens:
            return None
        params = submitted.params
        if params.prompt_logprobs is not None or params.pooling is not None:
            raise RequestError(
                "a soft prompt as the adapter has neither logprobs of the prompt nor embeddings",
                param="model",
            )
        return SoftPromptUse(tokens)

    def plan(self, rows: Sequence[Row]) -> Section:
        """See `StepFeature.plan`."""
        columns = [
            (row.request.slot, use.place, row.start, min(row.end, row.use.tokens) - row.start)
            for row in rows
            if (use := row.request.use(AdapterUse)) is not None
        ]
        return SoftPromptRows(*np.array(columns, np.int32).T.copy())
