"""What crosses between the halves of alignment."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from aioinfer.ipc.sections import F32, I32, Section, array

#: Bytes of a result that alignments may take. A message of the usual ring has 16 MiB at most.
MAX_ALIGNMENT_BYTES = 3 * 2**20


@dataclass(frozen=True, slots=True)
class AlignmentRows(Section):
    """Rows of a plan, each a whole transcript, that are aligned with their sound. A rows.

    Attributes:
        slots: int32 [A].
        firsts: int32 [A], the first token that is aligned; all behind it are, too.
        frames: int32 [A], of how many tokens of the encoder's output the sound takes.
        heads: int32 [2 * H], the layer and the number of each head that tells of alignment.
    """

    slots: I32 = array(np.int32)
    firsts: I32 = array(np.int32)
    frames: I32 = array(np.int32)
    heads: I32 = array(np.int32)


@dataclass(frozen=True, slots=True)
class Alignments(Section):
    """The matrices [tokens, frames] of `AlignmentRows`, one behind the other.

    Attributes:
        values: float32 [sum of tokens * frames].
    """

    values: F32 = array(np.float32)
