"""What crosses between the halves of sources."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from aioinfer.ipc.sections import I32, Section, array


@dataclass(frozen=True, slots=True)
class NewSources(Section):
    """The sources that a step encodes first.

    Attributes:
        blocks: int32 [S], the block of each in the KV groups of sources.
        lengths: int32 [S], the values of each.
        values: int32 [sum of lengths], of all sources: token ids, or the bits of float32 samples.
    """

    blocks: I32 = array(np.int32)
    lengths: I32 = array(np.int32)
    values: I32 = array(np.int32)
