"""Sections for log-probabilities of sampled tokens, of the likeliest tokens, and of tokens that a
request names.

A plan lists the sampled rows of such requests, and other plans have no such section.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from aioinfer.ipc.sections import F32, I32, Section, array

#: In the place of a number of tokens: all of the vocabulary.
ALL = -1


@dataclass(frozen=True, slots=True)
class LogprobRows(Section):
    """The sampled rows of a plan with requested log-probabilities. R rows.

    Attributes:
        rows: int32 [R], their places among the sampled rows, ascending.
        num_top: int32 [R], how many of the likeliest tokens of each.
        counts: int32 [R], how many named tokens of each; `ALL` for the whole vocabulary.
        tokens: int32 [N], the named tokens of the rows one after the other, rows with `ALL` left
            out.
    """

    rows: I32 = array(np.int32)
    num_top: I32 = array(np.int32)
    counts: I32 = array(np.int32)
    tokens: I32 = array(np.int32)


@dataclass(frozen=True, slots=True)
class Logprobs(Section):
    """Log-probabilities of the rows of `LogprobRows`, from the logits before the sampler changes
    them. R rows.

    Attributes:
        rows: int32 [R], as in the plan.
        sampled: float32 [R], of the sampled tokens.
        top_tokens: int32 [R, K], the likeliest tokens, likeliest first; K is the largest number
            that a row asks for, and may be 0.
        top_logprobs: float32 [R, K], of `top_tokens`.
        counts: int32 [R], how many named tokens of each row.
        named: float32 [N], of the named tokens of the rows one after the other, in the order of the
            plan; of the whole vocabulary by token id.
    """

    rows: I32 = array(np.int32)
    sampled: F32 = array(np.float32)
    top_tokens: I32 = array(np.int32, ndim=2)
    top_logprobs: F32 = array(np.float32, ndim=2)
    counts: I32 = array(np.int32)
    named: F32 = array(np.float32)
