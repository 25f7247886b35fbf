"""Log-probabilities of the prompt's tokens: which rows bring them, and those that have come."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from aioinfer.errors import RequestError
from aioinfer.features.prompt_logprobs.sections import (
    MAX_LOGPROB_BYTES,
    PromptLogprobRows,
    PromptLogprobs,
    logprob_bytes,
)
from aioinfer.ipc.plan import StepResult
from aioinfer.ipc.sections import Section
from aioinfer.scheduler.features import StepFeature, SubmittedRequest
from aioinfer.scheduler.request import Use
from aioinfer.scheduler.steps import Row, StepOutput


class PromptScores(Use):
    """The requested log-probabilities of the prompt's tokens, each given the tokens before it.

    Entry i of the arrays belongs to token i + 1 of the prompt.

    Attributes:
        tokens: int32, the prompt.
        logprobs, ranks: float32 and int32 [P - 1], of the tokens.
        top_tokens, top_logprobs: int32 and float32 [P - 1, K], the likeliest tokens in their place.
        num_scored: how many entries, from the first one on, have come.
    """

    __slots__ = ("logprobs", "num_scored", "ranks", "tokens", "top_logprobs", "top_tokens")
    feature: ClassVar[str] = "prompt_logprobs"

    def __init__(self, prompt: array[int], num_top: int):
        """Makes empty arrays for a prompt, with `num_top` of the likeliest tokens."""
        count = len(prompt) - 1
        self.tokens = prompt
        self.logprobs = np.full(count, np.nan, np.float32)
        self.ranks = np.zeros(count, np.int32)
        self.top_tokens = np.full((count, num_top), -1, np.int32)
        self.top_logprobs = np.full((count, num_top), np.nan, np.float32)
        self.num_scored = 0

    @property
    def num_top(self) -> int:
        """How many of the likeliest tokens are wanted."""
        return self.top_tokens.shape[1]

    @property
    def is_done(self) -> bool:
        """Whether all log-probabilities have come."""
        return self.num_scored >= len(self.logprobs)

    @property
    def max_cached(self) -> int:
        """See `Use.max_cached`."""
        return self.num_scored

    def covers(self, start: int, end: int, samples: bool) -> bool:
        """See `Use.covers`."""
        return end > self.num_scored and self.count(start, end) > 0

    def count(self, start: int, end: int) -> int:
        """Returns how many tokens of a row from `start` to `end` have log-probabilities, from its
        first one on."""
        return min(end, len(self.logprobs)) - start

    def take(self, start: int, found: PromptLogprobs, first: int, count: int) -> None:
        """Enters the results of a row that began at token `start`: entries `first` to `first +
        count` of a result."""
        rows, there = slice(start, start + count), slice(first, first + count)
        self.logprobs[rows] = found.logprobs[there]
        self.ranks[rows] = found.ranks[there]
        self.top_tokens[rows] = found.top_tokens[there, : self.num_top]
        self.top_logprobs[rows] = found.top_logprobs[there, : self.num_top]
        if start <= self.num_scored:
            self.num_scored = max(self.num_scored, start + count)


class Planning(StepFeature):
    """Lists the rows of prompts that are scored."""

    name = "prompt_logprobs"

    @classmethod
    def use_of(cls, submitted: SubmittedRequest, index: int) -> Use | None:
        """See `StepFeature.use_of`; the first sequence asks for all."""
        wanted = submitted.params.prompt_logprobs
        if wanted is None or index:
            return None
        count = submitted.vocab_size if wanted < 0 else min(wanted, submitted.vocab_size)
        if submitted.token_budget * logprob_bytes(count) > MAX_LOGPROB_BYTES:
            raise RequestError(
                f"prompt_logprobs is {wanted}: too many for steps of "
                f"{submitted.token_budget} tokens (scheduler.max_num_batched_tokens)",
                param="prompt_logprobs",
            )
        return PromptScores(submitted.tokens, count)

    def plan(self, rows: Sequence[Row]) -> Section:
        """See `StepFeature.plan`."""
        columns = [
            (row.request.slot, row.use.count(row.start, row.end), row.use.num_top) for row in rows
        ]
        return PromptLogprobRows(*np.ascontiguousarray(np.array(columns, np.int32).T))

    def take(self, rows: Sequence[Row], result: StepResult, output: StepOutput) -> StepOutput:
        """See `StepFeature.take`."""
        found, first = result.section(PromptLogprobs), 0
        for row in rows if found is not None else ():
            count = row.use.count(row.start, row.end)
            row.use.take(row.start, found, first, count)
            first += count
        return output
