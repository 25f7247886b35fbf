"""Planning half of sources: which sources a step encodes before its layers.

A request's source is encoded in the step that first computes a token of it, unless a block with its
keys and values is in the cache (`scheduler.source_blocks`). A step encodes as many as
`MediaConfig.encoder_budget` allows; further requests wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from aioinfer.features.sources.sections import NewSources
from aioinfer.ipc.sections import Section
from aioinfer.models.source import SourceData
from aioinfer.scheduler.features import StepFeature, SubmittedRequest
from aioinfer.scheduler.request import Request, Source, Use
from aioinfer.scheduler.steps import Row

#: Bytes of values that a plan carries, beside one source at least: a message of the plans' ring has
#: 32 MiB at most.
MAX_VALUE_BYTES = 12 * 2**20


@dataclass(slots=True, eq=False)
class SourceUse(Use):
    """The source of a request."""

    feature: ClassVar[str] = "sources"

    source: Source

    @property
    def data(self) -> SourceData:
        """What the workers encode."""
        found: SourceData = self.source.data
        return found

    def covers(self, start: int, end: int, samples: bool) -> bool:
        """See `Use.covers`: the row of the step that writes the source."""
        return self.source.is_unwritten


class Planning(StepFeature):
    """See `StepFeature`."""

    name = "sources"

    def __init__(self, host: Any):
        super().__init__(host)
        self._budget = host.config.media.encoder_budget

    @classmethod
    def use_of(cls, submitted: SubmittedRequest, index: int) -> Use | None:
        """See `StepFeature.use_of`."""
        prompt = submitted.source
        return None if prompt is None else SourceUse(Source(prompt.key, prompt.data))

    def limit(self, use: SourceUse, wanted: int, rows: Sequence[Row], start: int) -> int:
        """See `StepFeature.limit`: none of a request whose source would have to be encoded in a
        step that encodes as many as it may."""
        if not rows or not self._is_encoded(use):
            return wanted
        taken = [row.use.data for row in rows]
        tokens = use.data.num_tokens + sum(data.num_tokens for data in taken)
        nbytes = use.data.values.nbytes + sum(data.values.nbytes for data in taken)
        return wanted if tokens <= self._budget and nbytes <= MAX_VALUE_BYTES else 0

    def _is_encoded(self, use: SourceUse) -> bool:
        """Whether the next step of a request encodes its source."""
        if use.source.is_held:
            return False
        sources = self.host.scheduler().kv_cache.sources
        return sources is None or not sources.has(use.source.key)

    def fit(
        self, use: SourceUse, tokens: int, start: int, more: int, rows: Sequence[Row]
    ) -> tuple[int, int]:
        """See `StepFeature.fit`: a source takes as long as its tokens."""
        return tokens, use.data.num_tokens if self._is_encoded(use) else 0

    def plan(self, rows: Sequence[Row]) -> Section:
        """See `StepFeature.plan`."""
        group = self.host.scheduler().kv_cache.sources.number
        values = [row.use.data.values.view(np.int32) for row in rows]
        for row in rows:
            row.use.source.is_unwritten = False
        return NewSources(
            np.array([row.request.blocks[group][0] for row in rows], np.int32),
            np.array([len(each) for each in values], np.int32),
            np.concatenate(values),
        )

    def drop(self, request: Request) -> None:
        """See `StepFeature.drop`: frees the values. Else they would stay until Python collects
        garbage, since an ended request and its output refer to each other."""
        assert request.source is not None
        request.source.data = None
