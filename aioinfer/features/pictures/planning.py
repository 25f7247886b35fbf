"""Planning half of pictures: which pictures a step encodes, and which tokens get embeddings.

A picture is encoded in the first step that computes a token of it, unless its embeddings are in the
workers' cache. A step encodes as many as `MediaConfig.encoder_budget` allows; a request whose next
picture does not fit computes the tokens before it, or waits. Nothing has to be remembered between
steps but the cache's contents: a picture that has left the cache before all of its tokens were
computed, as after a preemption, is encoded again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from aioinfer.features.pictures.prompt import PlacedPicture, PromptPictures
from aioinfer.features.pictures.sections import PictureRows, pack_pixels
from aioinfer.ipc.sections import I32, Section
from aioinfer.scheduler.features import StepFeature, SubmittedRequest
from aioinfer.scheduler.request import Request, Use
from aioinfer.scheduler.steps import Row

#: Bytes of pixels that a plan carries, beside one picture at least, and of one picture: a message
#: of the plans' ring has 32 MiB at most.
MAX_PIXEL_BYTES = 12 * 2**20
MAX_PICTURE_BYTES = 20 * 2**20


@dataclass(slots=True, eq=False)
class PictureUse(Use):
    """The pictures of a request."""

    feature: ClassVar[str] = "pictures"

    pictures: PromptPictures

    def covers(self, start: int, end: int, samples: bool) -> bool:
        """See `Use.covers`: up to the last picture, workers do not know where RoPE places
        tokens."""
        return start < self.pictures.end


class EmbeddingCache:
    """Records of the embeddings that the workers keep: rows of their cache by the key of a picture;
    the least recently used go first.

    Workers execute plans in order, so rows may be given to another picture as soon as no step that
    is still to be planned needs them: the planner of a step names the pictures that stay.

    Attributes:
        capacity: rows.
    """

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.clear()

    def __contains__(self, key: bytes) -> bool:
        return key in self._rows

    def __len__(self) -> int:
        return len(self._rows)

    def use(self, key: bytes) -> I32:
        """Returns the rows of a picture that is there, which becomes the most recently used."""
        self._rows.move_to_end(key)
        return self._rows[key]

    def add(self, key: bytes, count: int, kept: Collection[bytes]) -> I32:
        """Returns `count` rows for a new picture, int32; others make room, but not those of `kept`.
        The caller knows that there is room."""
        while self._num_free < count:
            oldest = next(each for each in self._rows if each not in kept)
            rows = self._rows.pop(oldest)
            self._free[self._num_free : self._num_free + len(rows)] = rows
            self._num_free += len(rows)
        self._num_free -= count
        rows = self._free[self._num_free : self._num_free + count].copy()
        self._rows[key] = rows
        return rows

    def clear(self) -> None:
        """Forgets all pictures."""
        self._rows: OrderedDict[bytes, I32] = OrderedDict()
        self._free = np.arange(self.capacity, dtype=np.int32)
        self._num_free = self.capacity


class _Step:
    """What the pictures of a step need.

    Attributes:
        needed: embeddings by picture.
        embeddings, nbytes: of the pictures that are to be encoded, and the bytes of their pixels.
    """

    def __init__(self) -> None:
        self.needed: dict[bytes, int] = {}
        self.embeddings = self.nbytes = 0

    def add(self, placed: PlacedPicture, *, is_cached: bool) -> None:
        """Adds a picture."""
        picture = placed.picture
        if picture.key in self.needed:
            return
        self.needed[picture.key] = picture.num_embeddings
        if not is_cached:
            self.embeddings += picture.num_embeddings
            self.nbytes += picture.pixels.nbytes


class Planning(StepFeature):
    """See `StepFeature`."""

    name = "pictures"

    def __init__(self, host: Any):
        super().__init__(host)
        media = host.config.media
        self._budget = media.encoder_budget
        self.cache = EmbeddingCache(media.cache_embeddings)

    @classmethod
    def use_of(cls, submitted: SubmittedRequest, index: int) -> Use | None:
        """See `StepFeature.use_of`."""
        return None if submitted.pictures is None else PictureUse(submitted.pictures)

    def limit(self, use: PictureUse, wanted: int, rows: Sequence[Row], start: int) -> int:
        """See `StepFeature.limit`: up to the first picture that the step cannot encode."""
        if start >= use.pictures.end:
            return wanted
        step = self._needs_of(rows)
        for placed in use.pictures.touched(start, start + wanted):
            is_cached = placed.picture.key in self.cache
            if not self._fits(step, placed, is_cached=is_cached):
                return max(0, placed.start - start)
            step.add(placed, is_cached=is_cached)
        return wanted

    def fit(
        self, use: PictureUse, tokens: int, start: int, more: int, rows: Sequence[Row]
    ) -> tuple[int, int]:
        """See `StepFeature.fit`: pictures whose tokens attend to each other both ways are computed
        to their end. An embedding that the step encodes counts as a prompt token."""
        if start >= use.pictures.end:
            return tokens, 0
        if use.pictures.is_bidirectional:
            tokens = self._to_ends(use, tokens, start, more)
        step = self._needs_of(rows)
        before = step.embeddings
        for placed in use.pictures.touched(start, start + tokens):
            step.add(placed, is_cached=placed.picture.key in self.cache)
        return tokens, step.embeddings - before

    @staticmethod
    def _to_ends(use: PictureUse, tokens: int, start: int, more: int) -> int:
        """Returns of how many tokens all pictures are whole; 0 if not even the first one fits."""
        end = start + tokens
        cut = next((p for p in use.pictures.touched(start, end) if p.end > end), None)
        if cut is None:
            return tokens
        if cut.start > start:
            return cut.start - start
        return cut.end - start if cut.end - end <= more else 0

    def _needs_of(self, rows: Sequence[Row]) -> _Step:
        step = _Step()
        for row in rows:
            for placed in row.use.pictures.touched(row.start, row.end):
                step.add(placed, is_cached=placed.picture.key in self.cache)
        return step

    def _fits(self, step: _Step, placed: PlacedPicture, *, is_cached: bool) -> bool:
        """Whether a step can take a picture beside others; it can take any picture alone."""
        picture = placed.picture
        if picture.key in step.needed:
            return True
        if sum(step.needed.values()) + picture.num_embeddings > self.cache.capacity:
            return False
        if is_cached or not step.embeddings:
            return True
        return (
            step.embeddings + picture.num_embeddings <= self._budget
            and step.nbytes + picture.pixels.nbytes <= MAX_PIXEL_BYTES
        )

    def plan(self, rows: Sequence[Row]) -> Section:
        """See `StepFeature.plan`."""
        touched = [row.use.pictures.touched(row.start, row.end) for row in rows]
        kept = {placed.picture.key for each in touched for placed in each}
        encoded = {
            placed.picture.key: placed.picture
            for each in touched
            for placed in each
            if placed.picture.key not in self.cache
        }
        targets = [
            self.cache.add(key, picture.num_embeddings, kept) for key, picture in encoded.items()
        ]
        shapes = [
            (*each.pixels.shape[:3], *each.grid, each.num_embeddings) for each in encoded.values()
        ]
        lengths = [row.end - row.start for row in rows]
        sources = [self._sources(row, placed) for row, placed in zip(rows, touched, strict=True)]
        positions = [
            row.use.pictures.positions[:, row.start : row.end]
            if row.end <= row.use.pictures.positions.shape[1]
            else _continued(row)
            for row in rows
            if row.use.pictures.positions is not None
        ]
        return PictureRows(
            np.array([row.request.slot for row in rows], np.int32),
            np.array(lengths, np.int32),
            np.concatenate(sources),
            np.concatenate(positions, axis=1) if positions else np.empty((3, 0), np.int32),
            np.array(shapes, np.int32).reshape(-1, 6),
            np.concatenate(targets) if targets else np.empty(0, np.int32),
            pack_pixels([picture.pixels for picture in encoded.values()]),
            np.array(
                [
                    (number, placed.start, placed.end)
                    for number, (row, each) in enumerate(zip(rows, touched, strict=True))
                    for placed in each
                    if row.use.pictures.is_bidirectional
                ],
                np.int32,
            ).reshape(-1, 3),
        )

    def _sources(self, row: Row, touched: Sequence[PlacedPicture]) -> Any:
        """Returns the cache's row for each token of a row of the step, int32; -1 for text."""
        found = np.full(row.end - row.start, -1, np.int32)
        for placed in touched:
            first, end = max(row.start, placed.start), min(row.end, placed.end)
            own = placed.sources[first - placed.start : end - placed.start]
            rows = self.cache.use(placed.picture.key)
            found[first - row.start : end - row.start] = np.where(own >= 0, rows[own], -1)
        return found

    def drop(self, request: Request) -> None:
        """See `StepFeature.drop`: frees the pixels. Else they would stay until Python collects
        garbage, since an ended request and its output refer to each other."""
        for use in request.uses:
            if isinstance(use, PictureUse):
                use.pictures = PromptPictures(())

    def lose(self) -> None:
        """See `StepFeature.lose`."""
        self.cache.clear()

    def restart(self) -> None:
        """See `StepFeature.restart`: new workers have no embeddings."""
        self.cache.clear()

    def forget_results(self) -> None:
        """See `StepFeature.forget_results`."""
        self.cache.clear()


def _continued(row: Row) -> Any:
    """Returns the positions of a row that goes on behind its prompt: of a request that computes its
    output again."""
    pictures: PromptPictures = row.use.pictures
    assert pictures.positions is not None
    length = pictures.positions.shape[1]
    behind = np.arange(length, row.end, dtype=np.int32) + pictures.rotary_offset
    return np.concatenate(
        (pictures.positions[:, row.start :], np.broadcast_to(behind, (3, len(behind)))), axis=1
    )
