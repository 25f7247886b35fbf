"""Log-probabilities of sampled tokens: which rows bring them, and how readers of outputs get them,
token by token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, overload

import numpy as np

from aioinfer.features.logprobs.sections import ALL, LogprobRows, Logprobs
from aioinfer.ipc.plan import StepResult
from aioinfer.ipc.sections import F32, I32, Section
from aioinfer.sampling_params import SamplingParams
from aioinfer.scheduler.features import StepFeature, SubmittedRequest
from aioinfer.scheduler.request import Use
from aioinfer.scheduler.steps import Row


@dataclass(slots=True)
class TokenLogprob:
    """The log-probability of a sampled token, and (token id, log-probability) of the likeliest
    tokens at its position, or of the tokens that the request names. `text` is the text that its
    delta adds."""

    token_id: int
    logprob: float
    top: Sequence[tuple[int, float]]
    text: str = ""


class LikeliestTokens(Sequence[tuple[int, float]]):
    """The likeliest tokens of the whole vocabulary, sorted when they are first read: that takes
    milliseconds, which are not to be spent on the event loop.

    Args:
        logprobs: float32, by token id.
        count: how many tokens.
    """

    def __init__(self, logprobs: F32, count: int):
        self._logprobs = logprobs
        self._count = min(count, len(logprobs))
        self._sorted: list[tuple[int, float]] | None = None

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> tuple[int, float]: ...

    @overload
    def __getitem__(self, index: slice) -> list[tuple[int, float]]: ...

    def __getitem__(self, index: int | slice) -> tuple[int, float] | list[tuple[int, float]]:
        return self._tokens()[index]

    def __iter__(self) -> Iterator[tuple[int, float]]:
        return iter(self._tokens())

    def _tokens(self) -> list[tuple[int, float]]:
        if self._sorted is None:
            order = np.argsort(-self._logprobs, kind="stable")[: self._count]
            values = self._logprobs[order].tolist()
            self._sorted = list(zip(order.tolist(), values, strict=True))
        return self._sorted


class TokenLogprobs(Use):
    """The log-probabilities that a request asks for at each sampled token.

    Attributes:
        num_top: how many of the likeliest tokens, if none are named.
        named: int32, the named tokens, in whose place log-probabilities come; None without any.
        whole: how many tokens the vocabulary has, where the log-probabilities of all are asked for;
            else 0.
    """

    __slots__ = ("named", "num_top", "whole")
    feature: ClassVar[str] = "logprobs"

    def __init__(self, num_top: int, named: I32 | None = None, whole: int = 0):
        self.num_top = num_top
        self.named = named
        self.whole = whole

    @property
    def count(self) -> int:
        """How many named tokens there are; `ALL` for the whole vocabulary."""
        if self.whole:
            return ALL
        return 0 if self.named is None else len(self.named)

    @property
    def result_bytes(self) -> int:
        """See `Use.result_bytes`; a few of the likeliest tokens always fit."""
        count = self.whole or self.count
        return 8 + 4 * count if count else 0


class Planning(StepFeature):
    """Lists the sampled rows that bring log-probabilities. `ResultLogprobs` reads what has come."""

    name = "logprobs"

    @classmethod
    def use_of(cls, submitted: SubmittedRequest, index: int) -> Use | None:
        """See `StepFeature.use_of`."""
        params = submitted.params
        if params.logprobs is None:
            return None
        if params.logprob_token_ids is not None:
            return TokenLogprobs(0, np.array(params.logprob_token_ids, np.int32))
        if params.requests_tokens:
            return TokenLogprobs(0, whole=submitted.vocab_size)
        return TokenLogprobs(min(params.logprobs, submitted.vocab_size))

    def plan(self, rows: Sequence[Row]) -> Section:
        """See `StepFeature.plan`."""
        columns = np.array([(row.place, row.use.num_top, row.use.count) for row in rows], np.int32)
        places, num_top, counts = np.ascontiguousarray(columns.T)
        named = [row.use.named for row in rows if row.use.named is not None]
        tokens = np.concatenate(named) if named else np.empty(0, np.int32)
        return LogprobRows(places, num_top, counts, tokens)


class ResultLogprobs:
    """The log-probabilities of a step's result."""

    def __init__(self, found: Logprobs):
        self._found = found
        self._index = {row: index for index, row in enumerate(found.rows.tolist())}
        self._ends = np.cumsum(found.counts).tolist()

    @classmethod
    def of_result(cls, result: StepResult) -> ResultLogprobs | None:
        """Returns the log-probabilities of a result, if it has any."""
        found = result.section(Logprobs)
        return None if found is None else cls(found)

    def likeliest(self, row: int) -> tuple[I32, F32]:
        """Returns the likeliest tokens of a row and their log-probabilities, int32 and float32
        [K]."""
        index = self._index[row]
        return self._found.top_tokens[index], self._found.top_logprobs[index]

    def of(self, row: int, token: int, params: SamplingParams) -> TokenLogprob | None:
        """Returns the log-probabilities that a request asks for of its row's token, or None."""
        if params.logprobs is None:
            return None
        found, index = self._found, self._index[row]
        top: Sequence[tuple[int, float]]
        if not params.requests_tokens:
            tokens = found.top_tokens[index, : params.logprobs].tolist()
            values = found.top_logprobs[index, : params.logprobs].tolist()
            top = list(zip(tokens, values, strict=True))
        else:
            named = found.named[self._ends[index] - int(found.counts[index]) : self._ends[index]]
            if params.logprob_token_ids is not None:
                top = list(zip(params.logprob_token_ids, named.tolist(), strict=True))
            else:
                count = len(named) if params.logprobs < 0 else params.logprobs
                top = LikeliestTokens(named, count)
        return TokenLogprob(token, float(found.sampled[index]), top)
