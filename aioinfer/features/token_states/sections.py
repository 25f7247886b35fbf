"""Sections for the hidden states of a prompt's tokens.

The slots name the rows of a step: a slot has one row in it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from aioinfer.ipc.sections import F32, I32, Section, array

#: Bytes of a result that hidden states of tokens may take. A message of the usual ring has 16 MiB
#: at most.
MAX_STATE_BYTES = 3 * 2**20


@dataclass(frozen=True, slots=True)
class TokenStateRows(Section):
    """Rows of a plan with requested hidden states, after the model's last norm. P rows.

    Attributes:
        slots: int32 [P].
        counts: int32 [P], of how many tokens from the row's first one on.
    """

    slots: I32 = array(np.int32)
    counts: I32 = array(np.int32)


@dataclass(frozen=True, slots=True)
class TokenStates(Section):
    """The hidden states of the tokens of `TokenStateRows`, one row after the other.

    Attributes:
        states: float32 [tokens, hidden_size].
    """

    states: F32 = array(np.float32, ndim=2)
