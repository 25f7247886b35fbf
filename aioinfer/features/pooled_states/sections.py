"""Sections for the pooled hidden states of prompts.

The slots name the rows of a step: a slot has one row in it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from aioinfer.ipc.sections import F32, I32, Section, array
from aioinfer.sampling_params import POOLINGS

#: The numbers that stand for `POOLINGS` in `PooledRows`.
LAST, MEAN, CLS = range(len(POOLINGS))


@dataclass(frozen=True, slots=True)
class PooledRows(Section):
    """Rows of a plan with hidden states, after the model's last norm, to be pooled. P rows.

    Attributes:
        slots: int32 [P].
        poolings: int32 [P], how: see `POOLINGS`.
        ends: int32 [P], 1 if the row ends the prompt, so that the pooled state is to come back.
    """

    slots: I32 = array(np.int32)
    poolings: I32 = array(np.int32)
    ends: I32 = array(np.int32)


@dataclass(frozen=True, slots=True)
class PooledStates(Section):
    """The pooled hidden states of the rows of `PooledRows` that end a prompt, in their order.

    Attributes:
        states: float32 [ends, hidden_size].
    """

    states: F32 = array(np.float32, ndim=2)
