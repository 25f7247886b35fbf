"""Sections for log-probabilities of the prompt's tokens.

The slots name the rows of a step: a slot has one row in it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from aioinfer.ipc.sections import F32, I32, Section, array

#: Bytes of a result that log-probabilities of prompt tokens may take. A message of the usual ring
#: has 16 MiB at most.
MAX_LOGPROB_BYTES = 6 * 2**20


def logprob_bytes(num_top: int) -> int:
    """Returns the bytes of a prompt token's log-probabilities in a result, with `num_top` of the
    likeliest tokens."""
    return 8 + 8 * num_top


@dataclass(frozen=True, slots=True)
class PromptLogprobRows(Section):
    """Rows of a plan with requested log-probabilities of prompt tokens. P rows.

    Attributes:
        slots: int32 [P].
        counts: int32 [P], of how many tokens from the row's first one on the next token of the
            prompt is to be scored: all but the last of a prompt.
        num_top: int32 [P], how many of the likeliest tokens are wanted for each.
    """

    slots: I32 = array(np.int32)
    counts: I32 = array(np.int32)
    num_top: I32 = array(np.int32)


@dataclass(frozen=True, slots=True)
class PromptLogprobs(Section):
    """Log-probabilities of prompt tokens, of the rows of `PromptLogprobRows` one after the other: N
    tokens in all.

    Attributes:
        logprobs: float32 [N], of the prompt's next token.
        ranks: int32 [N], its place among all tokens by likelihood, from 1 on.
        top_tokens: int32 [N, K], the likeliest tokens, likeliest first.
        top_logprobs: float32 [N, K], of `top_tokens`.
    """

    logprobs: F32 = array(np.float32)
    ranks: I32 = array(np.int32)
    top_tokens: I32 = array(np.int32, ndim=2)
    top_logprobs: F32 = array(np.float32, ndim=2)
