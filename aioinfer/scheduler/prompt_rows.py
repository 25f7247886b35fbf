"""The outputs that a request asks for of its prompt's rows, beside or instead of new tokens, as far
as they have come.

The frontend gives such an object to the first sequence of a request; the scheduler lists the rows
in plans and leaves the prefix cache out where that would skip them; `engine.prompt_outputs` enters
the values that the workers send back. A request without such outputs has None there, and nothing of
this module runs.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from aioinfer.ipc.prompt_rows import LAST, PooledStates, PromptLogprobs, TokenStates
from aioinfer.ipc.sections import F32, I32
from aioinfer.sampling_params import POOLINGS


@dataclass(slots=True)
class PromptScores:
    """The requested log-probabilities of the prompt's tokens, each given the tokens before it.

    Entry i of the arrays belongs to token i + 1 of the prompt.

    Attributes:
        tokens: int32, the prompt.
        logprobs, ranks: float32 and int32 [P - 1], of the tokens.
        top_tokens, top_logprobs: int32 and float32 [P - 1, K], the likeliest tokens in their place.
        num_scored: how many entries, from the first one on, have come.
    """

    tokens: array[int]
    logprobs: F32
    ranks: I32
    top_tokens: I32
    top_logprobs: F32
    num_scored: int = 0

    #: Bytes of a result that the request holds while it runs.
    held_bytes = 0

    @classmethod
    def of(cls, prompt: array[int], num_top: int) -> PromptScores:
        """Returns empty arrays for a prompt, with `num_top` of the likeliest tokens."""
        count = len(prompt) - 1
        return cls(
            prompt,
            np.full(count, np.nan, np.float32),
            np.zeros(count, np.int32),
            np.full((count, num_top), -1, np.int32),
            np.full((count, num_top), np.nan, np.float32),
        )

    @property
    def num_top(self) -> int:
        """How many of the likeliest tokens are wanted."""
        return self.top_tokens.shape[1]

    @property
    def is_done(self) -> bool:
        """Whether all log-probabilities have come."""
        return self.num_scored >= len(self.logprobs)

    def max_prefix(self) -> int:
        """Returns how many tokens of the prompt may be taken from the cache: the tokens whose rows
        are not needed any more."""
        return self.num_scored

    def count(self, start: int, end: int) -> int:
        """Returns how many tokens of a row from `start` to `end` are to be scored, from its first
        one on."""
        return 0 if end <= self.num_scored else min(end, len(self.logprobs)) - start

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


@dataclass(slots=True)
class PromptPool:
    """The requested pooled hidden state of the prompt.

    Attributes:
        pooling: how to pool, one of `POOLINGS`.
        prompt_len: tokens of the prompt.
        hidden_size: of the state.
        state: float32 [hidden_size], once it has come.
    """

    pooling: str
    prompt_len: int
    hidden_size: int
    state: F32 | None = None
    number: int = field(init=False)

    def __post_init__(self) -> None:
        self.number = POOLINGS.index(self.pooling)

    @property
    def held_bytes(self) -> int:
        """Bytes of a result that the request holds while it runs: any step may be its last."""
        return 4 * self.hidden_size

    @property
    def is_done(self) -> bool:
        """Whether the state has come."""
        return self.state is not None

    def max_prefix(self) -> int:
        """Returns how many tokens of the prompt may be taken from the cache."""
        return self.prompt_len if self.number == LAST else 0

    def wants(self, end: int) -> bool:
        """Whether a row that ends before token `end` takes part."""
        return self.number != LAST or end >= self.prompt_len

    def take(self, found: PooledStates, row: int) -> None:
        """Enters row `row` of a result's pooled states."""
        self.state = found.states[row]


@dataclass(slots=True)
class PromptStates:
    """The requested hidden states of all tokens of the prompt.

    Attributes:
        states: float32 [P, hidden_size].
        num_known: how many of them, from the first one on, have come.
    """

    states: F32
    num_known: int = 0

    #: Bytes of a result that the request holds while it runs: a step bounds them by its rows.
    held_bytes = 0

    @classmethod
    def of(cls, prompt_len: int, hidden_size: int) -> PromptStates:
        """Returns an array for a prompt; it takes memory as it is filled."""
        return cls(np.empty((prompt_len, hidden_size), np.float32))

    @property
    def token_bytes(self) -> int:
        """Bytes of a result that a token takes."""
        return 4 * self.states.shape[1]

    @property
    def is_done(self) -> bool:
        """Whether all hidden states have come."""
        return self.num_known >= len(self.states)

    def max_prefix(self) -> int:
        """Returns how many tokens of the prompt may be taken from the cache."""
        return self.num_known

    def count(self, start: int, end: int) -> int:
        """Returns how many tokens of a row from `start` to `end`, from its first one on, have their
        states requested."""
        return 0 if end <= self.num_known else min(end, len(self.states)) - start

    def take(self, start: int, found: TokenStates, first: int, count: int) -> None:
        """Enters the results of a row that began at token `start`: entries `first` to `first +
        count` of a result."""
        self.states[start : start + count] = found.states[first : first + count]
        if start <= self.num_known:
            self.num_known = max(self.num_known, start + count)


@dataclass(slots=True)
class PromptProgress:
    """The requested progress of the prompt: how much of it is computed, after each step that has
    computed some of it.

    Attributes:
        prompt_len: tokens of the prompt.
        report: called when `num_computed` has grown.
        num_computed: tokens that are computed or were in the cache.
    """

    prompt_len: int
    report: Callable[[], None] | None = None
    num_computed: int = 0

    #: It adds nothing to a result, and siblings need not wait for it.
    held_bytes = 0
    is_done = True

    def max_prefix(self) -> int:
        """Returns how many tokens of the prompt may be taken from the cache."""
        return self.prompt_len

    def take(self, end: int) -> None:
        """Notes the result of a row that ended before token `end`. After a preemption `end` is less
        than before, and nothing is reported."""
        end = min(end, self.prompt_len)
        if end > self.num_computed:
            self.num_computed = end
            if self.report is not None:
                self.report()


#: The outputs of prompt rows that a request may ask for.
PromptRows = PromptScores | PromptPool | PromptStates | PromptProgress
