"""The rows of a step that have virtual tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from aioinfer.ipc.sections import I32, Section, array


@dataclass(frozen=True, slots=True)
class SoftPromptRows(Section):
    """The rows that compute virtual tokens, which come first in a prompt. R rows.

    Attributes:
        slots: int32 [R], of the requests.
        adapters: int32 [R], the adapter slots that have their soft prompts.
        starts, counts: int32 [R], which of the virtual tokens each computes.
    """

    slots: I32 = array(np.int32)
    adapters: I32 = array(np.int32)
    starts: I32 = array(np.int32)
    counts: I32 = array(np.int32)
