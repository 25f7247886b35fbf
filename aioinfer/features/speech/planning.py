"""Planning half of speech: which rows of a step sample tokens of a transcript, and by which rules.

The rules are Whisper's (Radford et al. 2022); the transcriber of the server passes them on as
`SamplingParams.speech`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from aioinfer.features.speech.sections import SpeechRows
from aioinfer.ipc.sections import Section
from aioinfer.scheduler.features import StepFeature, SubmittedRequest
from aioinfer.scheduler.request import Use
from aioinfer.scheduler.steps import Row

#: The largest number that crosses.
_NO_LIMIT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class SpeechRules:
    """The rules of a model's transcripts.

    Attributes:
        first_time: the token of the timestamp 0; later ones follow, one for each 20 ms, and the
            token before it says that there are none.
        end: the end token.
        suppressed, first_suppressed: the tokens that may not be sampled: ever, and as the first.
        max_first_time: the largest timestamp, in steps of 20 ms, with which a transcript may begin;
            None for any.
        has_times: whether the transcript has timestamps.
    """

    first_time: int
    end: int
    suppressed: tuple[int, ...] = ()
    first_suppressed: tuple[int, ...] = ()
    max_first_time: int | None = None
    has_times: bool = False


@dataclass(slots=True, eq=False)
class SpeechUse(Use):
    """The rules of a request, whose output begins at position `begin`."""

    feature: ClassVar[str] = "speech"
    allows_lookahead: ClassVar[bool] = False

    rules: SpeechRules
    begin: int


class Planning(StepFeature):
    """See `StepFeature`."""

    name = "speech"

    @classmethod
    def use_of(cls, submitted: SubmittedRequest, index: int) -> Use | None:
        """See `StepFeature.use_of`."""
        rules = submitted.params.speech
        return SpeechUse(rules, len(submitted.tokens)) if isinstance(rules, SpeechRules) else None

    def plan(self, rows: Sequence[Row]) -> Section:
        """See `StepFeature.plan`. The rules are a model's: all rows have the same tokens."""
        rules: SpeechRules = rows[0].use.rules
        latest = _NO_LIMIT if rules.max_first_time is None else rules.max_first_time
        return SpeechRows(
            np.array([row.request.slot for row in rows], np.int32),
            np.array([row.use.begin for row in rows], np.int32),
            np.array([row.use.rules.has_times for row in rows], np.int32),
            np.array([rules.first_time, rules.end, latest], np.int32),
            np.array(rules.suppressed, np.int32),
            np.array(rules.first_suppressed, np.int32),
        )
