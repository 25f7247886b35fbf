"""Hidden states of all tokens of a prompt: which rows bring them, and those that have come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from aioinfer.errors import RequestError
from aioinfer.features.token_states.sections import MAX_STATE_BYTES, TokenStateRows, TokenStates
from aioinfer.ipc.plan import StepResult
from aioinfer.ipc.sections import F32, Section
from aioinfer.sampling_params import ALL_TOKENS
from aioinfer.scheduler.features import StepFeature, SubmittedRequest
from aioinfer.scheduler.request import Use
from aioinfer.scheduler.steps import Row, StepOutput

#: Bytes of hidden states that a request may ask for: they are held until all have come.
MAX_REQUEST_STATE_BYTES = 32 * 2**20


class PromptStates(Use):
    """The requested hidden states of all tokens of the prompt.

    Attributes:
        states: float32 [P, hidden_size].
        num_known: how many of them, from the first one on, have come.
    """

    __slots__ = ("num_known", "states")
    feature: ClassVar[str] = "token_states"

    def __init__(self, prompt_len: int, hidden_size: int):
        """Makes an array for a prompt; it takes memory as it is filled."""
        self.states: F32 = np.empty((prompt_len, hidden_size), np.float32)
        self.num_known = 0

    @property
    def token_bytes(self) -> int:
        """Bytes of a result that a token takes."""
        return 4 * self.states.shape[1]

    @property
    def is_done(self) -> bool:
        """Whether all hidden states have come."""
        return self.num_known >= len(self.states)

    @property
    def max_cached(self) -> int:
        """See `Use.max_cached`."""
        return self.num_known

    def covers(self, start: int, end: int, samples: bool) -> bool:
        """See `Use.covers`."""
        return end > self.num_known and self.count(start, end) > 0

    def count(self, start: int, end: int) -> int:
        """Returns how many tokens of a row from `start` to `end`, from its first one on, have their
        states requested."""
        return min(end, len(self.states)) - start

    def take(self, start: int, found: TokenStates, first: int, count: int) -> None:
        """Enters the results of a row that began at token `start`: entries `first` to `first +
        count` of a result."""
        self.states[start : start + count] = found.states[first : first + count]
        if start <= self.num_known:
            self.num_known = max(self.num_known, start + count)


class Planning(StepFeature):
    """Lists the rows whose hidden states come back, as many as a result has room for."""

    name = "token_states"

    @classmethod
    def use_of(cls, submitted: SubmittedRequest, index: int) -> Use | None:
        """See `StepFeature.use_of`; the first sequence asks for the states."""
        if submitted.params.pooling != ALL_TOKENS or index:
            return None
        num_tokens, size = len(submitted.tokens), submitted.hidden_size
        check_states(num_tokens, size)
        most = MAX_STATE_BYTES // (4 * size)
        if submitted.is_whole and num_tokens > most:
            raise RequestError(
                f"the prompt has {num_tokens} tokens, and one step computes it: at most {most} "
                "hidden states of this model come back together",
                param="pooling",
            )
        return PromptStates(len(submitted.tokens), submitted.hidden_size)

    def limit(self, use: PromptStates, wanted: int, rows: Sequence[Row], start: int) -> int:
        """See `StepFeature.limit`."""
        taken = sum(row.use.count(row.start, row.end) for row in rows)
        return max(0, min(wanted, MAX_STATE_BYTES // use.token_bytes - taken))

    def plan(self, rows: Sequence[Row]) -> Section:
        """See `StepFeature.plan`."""
        columns = [(row.request.slot, row.use.count(row.start, row.end)) for row in rows]
        return TokenStateRows(*np.ascontiguousarray(np.array(columns, np.int32).T))

    def take(self, rows: Sequence[Row], result: StepResult, output: StepOutput) -> StepOutput:
        """See `StepFeature.take`."""
        found, first = result.section(TokenStates), 0
        for row in rows if found is not None else ():
            count = row.use.count(row.start, row.end)
            row.use.take(row.start, found, first, count)
            first += count
        return output


def check_states(num_tokens: int, hidden_size: int) -> None:
    """Raises `RequestError` if the hidden states of so many tokens are too many for one request."""
    most = MAX_REQUEST_STATE_BYTES // (4 * hidden_size)
    if num_tokens > most:
        raise RequestError(
            f"the hidden states of {num_tokens} tokens are too many for one request, which may "
            f"have those of {most}",
            param="prompt",
        )
