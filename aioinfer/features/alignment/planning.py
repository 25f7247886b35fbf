"""Planning half of alignment: which transcripts are computed once more, to find where in the sound
their tokens are.

The transcriber of the server asks for it by `SamplingParams.speech`. One step computes the whole
transcript, none of it from the prefix cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from aioinfer.errors import RequestError
from aioinfer.features.alignment.sections import MAX_ALIGNMENT_BYTES, AlignmentRows, Alignments
from aioinfer.ipc.plan import StepResult
from aioinfer.ipc.sections import F32, Section
from aioinfer.scheduler.features import StepFeature, SubmittedRequest
from aioinfer.scheduler.request import Use
from aioinfer.scheduler.steps import Row, StepOutput


@dataclass(frozen=True, slots=True)
class Alignment:
    """What a request for an alignment asks.

    Attributes:
        first: the first token of the prompt that is aligned; all behind it are, too.
        stride: samples of the sound for each token of the encoder's output, a frame.
        heads: the layer and the number of each head of cross attention that tells of alignment.
    """

    first: int
    stride: int
    heads: tuple[tuple[int, int], ...]


@dataclass(slots=True, eq=False)
class AlignmentUse(Use):
    """The alignment of a transcript of `length` tokens with `frames` of sound.

    Attributes:
        output: float32 [length - first, frames], how much each token attends to each frame, less
            the mean of all tokens and in standard deviations of them; None until it has come.
    """

    feature: ClassVar[str] = "alignment"

    asked: Alignment
    length: int
    frames: int
    output: F32 | None = None

    @property
    def num_tokens(self) -> int:
        """How many are aligned."""
        return self.length - self.asked.first

    @property
    def nbytes(self) -> int:
        """Of the output."""
        return 4 * self.num_tokens * self.frames

    @property
    def max_cached(self) -> int | None:
        """See `Use.max_cached`."""
        return 0 if self.output is None else None

    def covers(self, start: int, end: int, samples: bool) -> bool:
        """See `Use.covers`."""
        return self.output is None and start == 0


class Planning(StepFeature):
    """See `StepFeature`."""

    name = "alignment"

    @classmethod
    def use_of(cls, submitted: SubmittedRequest, index: int) -> Use | None:
        """See `StepFeature.use_of`."""
        asked = submitted.params.speech
        if not isinstance(asked, Alignment):
            return None
        frames = max(1, len(submitted.source.data.values) // asked.stride)
        use = AlignmentUse(asked, len(submitted.tokens), frames)
        if use.length > submitted.token_budget or use.nbytes > MAX_ALIGNMENT_BYTES:
            raise RequestError(
                f"the times of {use.length} tokens need a step of as many "
                "(scheduler.max_num_batched_tokens)"
            )
        return use

    def limit(self, use: AlignmentUse, wanted: int, rows: Sequence[Row], start: int) -> int:
        """See `StepFeature.limit`."""
        taken = sum(row.use.nbytes for row in rows)
        return wanted if start or taken + use.nbytes <= MAX_ALIGNMENT_BYTES else 0

    def fit(
        self, use: AlignmentUse, tokens: int, start: int, more: int, rows: Sequence[Row]
    ) -> tuple[int, int]:
        """See `StepFeature.fit`: all tokens in one step."""
        if start or use.output is not None:
            return tokens, 0
        return use.length if use.length <= tokens + more else 0, 0

    def plan(self, rows: Sequence[Row]) -> Section:
        """See `StepFeature.plan`. The heads are a model's: all rows have the same."""
        return AlignmentRows(
            np.array([row.request.slot for row in rows], np.int32),
            np.array([row.use.asked.first for row in rows], np.int32),
            np.array([row.use.frames for row in rows], np.int32),
            np.array(rows[0].use.asked.heads, np.int32).reshape(-1),
        )

    def take(self, rows: Sequence[Row], result: StepResult, output: StepOutput) -> StepOutput:
        """See `StepFeature.take`."""
        found, first = result.section(Alignments), 0
        if found is None:
            return output
        for row in rows:
            end = first + row.use.num_tokens * row.use.frames
            row.use.output = found.values[first:end].reshape(-1, row.use.frames).copy()
            first = end
        return output
