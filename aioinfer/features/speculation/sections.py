"""What speculation sends down: texts that were predicted for the output of requests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from aioinfer.ipc.sections import I32, Section, array


@dataclass(frozen=True, slots=True)
class PredictedTexts(Section):
    """The predicted texts of requests that have taken their slots. P requests, N tokens.

    Attributes:
        slots: int32 [P].
        counts: int32 [P], how many of the tokens each has.
        tokens: int32 [N], one text behind the other.
    """

    slots: I32 = array(np.int32)
    counts: I32 = array(np.int32)
    tokens: I32 = array(np.int32)
