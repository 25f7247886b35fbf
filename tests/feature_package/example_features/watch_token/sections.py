from dataclasses import dataclass

import numpy as np

from aioinfer.ipc.sections import F32, I32, Section, array


@dataclass(frozen=True, slots=True)
class WatchedTokens(Section):
    """Of a plan: the places among the sampled rows, and the token that is watched in each."""

    rows: I32 = array(np.int32)
    tokens: I32 = array(np.int32)


@dataclass(frozen=True, slots=True)
class WatchedLogits(Section):
    """Of its result: the logits of the watched tokens, in the order of the plan."""

    logits: F32 = array(np.float32)
