"""What crosses between the halves of speech."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from aioinfer.ipc.sections import I32, Section, array


@dataclass(frozen=True, slots=True)
class SpeechRows(Section):
    """The sampled rows whose tokens follow the rules of transcripts.

    Attributes:
        slots, begins: int32 [R], the slot of each row, and the position of the first token of its
            output.
        has_times: int32 [R], 1 for transcripts with timestamps.
        numbers: int32 [3]: the token of the timestamp 0, the end token, and the largest timestamp
            with which a transcript may begin, in steps of 20 ms.
        suppressed, first_suppressed: int32 [n] and [m], the tokens that may not be sampled: ever,
            and as the first one.
    """

    slots: I32 = array(np.int32)
    begins: I32 = array(np.int32)
    has_times: I32 = array(np.int32)
    numbers: I32 = array(np.int32)
    suppressed: I32 = array(np.int32)
    first_suppressed: I32 = array(np.int32)
