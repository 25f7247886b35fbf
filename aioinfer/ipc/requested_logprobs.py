"""Sections of plans and results for log-probabilities of tokens that a request names, or of all.

A plan lists the sampled rows of such requests, and other plans have no such section. A result has
the values of each row one after the other, so that a row adds no more than the requested values.
The scheduler bounds the bytes that the running requests may add to a result together
(`scheduler.requested_tokens`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from aioinfer.ipc.sections import F32, I32, Section, array

#: In the place of a number of tokens: all of the vocabulary.
ALL = -1


@dataclass(frozen=True, slots=True)
class RequestedLogprobRows(Section):
    """The sampled rows of a plan that bring log-probabilities of given tokens. R rows.

    Attributes:
        rows: int32 [R], their places among the sampled rows, ascending.
        counts: int32 [R], how many tokens of each; `ALL` for the whole vocabulary.
        tokens: int32 [N], the tokens of the rows one after the other, rows with `ALL` left out.
    """

    kind = 13
    rows: I32 = array(np.int32)
    counts: I32 = array(np.int32)
    tokens: I32 = array(np.int32)


@dataclass(frozen=True, slots=True)
class RequestedLogprobs(Section):
    """The model's log-probabilities of the tokens in `RequestedLogprobRows`.

    Attributes:
        rows: int32 [R], as in the plan.
        counts: int32 [R], of how many tokens.
        logprobs: float32 [N], of the rows one after the other, in the order of the tokens asked
            for; of the whole vocabulary by token id.
    """

    kind = 13
    rows: I32 = array(np.int32)
    counts: I32 = array(np.int32)
    logprobs: F32 = array(np.float32)

    def by_row(self) -> dict[int, F32]:
        """Returns the log-probabilities of each row."""
        parts = np.split(self.logprobs, np.cumsum(self.counts)[:-1])
        return dict(zip(self.rows.tolist(), parts, strict=True))
