"""Sections of plans and results for outputs of prompt rows: the log-probabilities of the prompt's
tokens, or its hidden states, pooled or one for each token.

A plan lists the rows of a step that belong to such requests; other plans have no such section. The
slots name the rows: a slot has one row in a step. The constants below bound the outputs of a step,
so that a result fits into the ring.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from aioinfer.ipc.sections import F32, I32, Section, array
from aioinfer.sampling_params import POOLINGS

#: Bytes of a result that log-probabilities of prompt tokens, pooled hidden states, and hidden
#: states of each token may take. A message of the usual ring has 16 MiB at most.
MAX_LOGPROB_BYTES = 6 * 2**20
MAX_POOLED_BYTES = 6 * 2**20
MAX_STATE_BYTES = 3 * 2**20

#: The numbers that stand for `POOLINGS` in `PooledRows`.
LAST, MEAN, CLS = range(len(POOLINGS))


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

    kind = 10
    slots: I32 = array(np.int32)
    counts: I32 = array(np.int32)
    num_top: I32 = array(np.int32)


@dataclass(frozen=True, slots=True)
class PooledRows(Section):
    """Rows of a plan with hidden states, after the model's last norm, to be pooled. P rows.

    Attributes:
        slots: int32 [P].
        poolings: int32 [P], how: see `POOLINGS`.
        ends: int32 [P], 1 if the row ends the prompt, so that the pooled state is to come back.
    """

    kind = 11
    slots: I32 = array(np.int32)
    poolings: I32 = array(np.int32)
    ends: I32 = array(np.int32)


@dataclass(frozen=True, slots=True)
class TokenStateRows(Section):
    """Rows of a plan with requested hidden states, after the model's last norm. P rows.

    Attributes:
        slots: int32 [P].
        counts: int32 [P], of how many tokens from the row's first one on.
    """

    kind = 12
    slots: I32 = array(np.int32)
    counts: I32 = array(np.int32)


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

    kind = 10
    logprobs: F32 = array(np.float32)
    ranks: I32 = array(np.int32)
    top_tokens: I32 = array(np.int32, ndim=2)
    top_logprobs: F32 = array(np.float32, ndim=2)


@dataclass(frozen=True, slots=True)
class PooledStates(Section):
    """The pooled hidden states of the rows of `PooledRows` that end a prompt, in their order.

    Attributes:
        states: float32 [ends, hidden_size].
    """

    kind = 11
    states: F32 = array(np.float32, ndim=2)


@dataclass(frozen=True, slots=True)
class TokenStates(Section):
    """The hidden states of the tokens of `TokenStateRows`, one row after the other.

    Attributes:
        states: float32 [tokens, hidden_size].
    """

    kind = 12
    states: F32 = array(np.float32, ndim=2)
