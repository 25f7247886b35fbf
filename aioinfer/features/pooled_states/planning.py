"""Pooled hidden states of prompts: which rows take part, and the states that have come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from aioinfer.features.pooled_states.sections import LAST, PooledRows, PooledStates
from aioinfer.ipc.plan import StepResult
from aioinfer.ipc.sections import F32, Section
from aioinfer.sampling_params import ALL_TOKENS, POOLINGS
from aioinfer.scheduler.features import StepFeature, SubmittedRequest
from aioinfer.scheduler.request import Use
from aioinfer.scheduler.steps import Row, StepOutput


class PromptPool(Use):
    """The requested pooled hidden state of the prompt.

    Attributes:
        number: how to pool: the place among `POOLINGS`.
        prompt_len: tokens of the prompt.
        hidden_size: of the state.
        state: float32 [hidden_size], once it has come.
    """

    __slots__ = ("hidden_size", "number", "prompt_len", "state")
    feature: ClassVar[str] = "pooled_states"

    def __init__(self, pooling: str, prompt_len: int, hidden_size: int):
        """`pooling`: one of `POOLINGS`."""
        self.number = POOLINGS.index(pooling)
        self.prompt_len = prompt_len
        self.hidden_size = hidden_size
        self.state: F32 | None = None

    @property
    def result_bytes(self) -> int:
        """See `Use.result_bytes`: any step may be the prompt's last."""
        return 4 * self.hidden_size

    @property
    def is_done(self) -> bool:
        """Whether the state has come."""
        return self.state is not None

    @property
    def max_cached(self) -> int | None:
        """See `Use.max_cached`."""
        return None if self.number == LAST else 0

    def covers(self, start: int, end: int, samples: bool) -> bool:
        """See `Use.covers`."""
        return start < self.prompt_len and (self.number != LAST or end >= self.prompt_len)


class Planning(StepFeature):
    """Lists the rows whose hidden states are pooled."""

    name = "pooled_states"

    @classmethod
    def use_of(cls, submitted: SubmittedRequest, index: int) -> Use | None:
        """See `StepFeature.use_of`; the first sequence asks for the state."""
        pooling = submitted.params.pooling
        if pooling is None or pooling == ALL_TOKENS or index:
            return None
        return PromptPool(pooling, len(submitted.tokens), submitted.hidden_size)

    def plan(self, rows: Sequence[Row]) -> Section:
        """See `StepFeature.plan`."""
        columns = [
            (row.request.slot, row.use.number, int(row.end >= row.use.prompt_len)) for row in rows
        ]
        return PooledRows(*np.ascontiguousarray(np.array(columns, np.int32).T))

    def take(self, rows: Sequence[Row], result: StepResult, output: StepOutput) -> StepOutput:
        """See `StepFeature.take`."""
        if (found := result.section(PooledStates)) is not None:
            ended = [row.use for row in rows if row.end >= row.use.prompt_len]
            for use, state in zip(ended, found.states, strict=True):
                use.state = state
        return output
