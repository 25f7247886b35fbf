"""The log-probabilities of a result, token by token, as readers of outputs get them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from aioinfer.ipc.plan import StepResult
from aioinfer.ipc.requested_logprobs import RequestedLogprobs
from aioinfer.ipc.sections import F32
from aioinfer.sampling_params import SamplingParams


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


class ResultLogprobs:
    """The log-probabilities of a step's result."""

    def __init__(self, result: StepResult):
        self._logprobs = result.logprobs
        requested = result.section(RequestedLogprobs)
        self._requested = {} if requested is None else requested.by_row()

    def of(self, row: int, token: int, params: SamplingParams) -> TokenLogprob | None:
        """Returns the log-probabilities that a request asks for of its row's token, or None."""
        if params.logprobs is None or self._logprobs is None:
            return None
        top: Sequence[tuple[int, float]]
        if not params.requests_tokens:
            tokens = self._logprobs.top_tokens[row, : params.logprobs].tolist()
            values = self._logprobs.top_logprobs[row, : params.logprobs].tolist()
            top = list(zip(tokens, values, strict=True))
        elif params.logprob_token_ids is not None:
            values = self._requested[row].tolist()
            top = list(zip(params.logprob_token_ids, values, strict=True))
        else:
            found = self._requested[row]
            top = LikeliestTokens(found, len(found) if params.logprobs < 0 else params.logprobs)
        return TokenLogprob(token, float(self._logprobs.sampled[row]), top)
