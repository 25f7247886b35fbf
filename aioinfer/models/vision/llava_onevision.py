"""Pictures of LLaVA-OneVision (Li et al. 2024): the one picture of a conversation is read as
LLaVA-NeXT reads pictures, in more resolutions, and scaled down to a maximum of embeddings; of
several pictures each is one tile. SigLIP's tower."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from PIL import Image

from aioinfer.errors import ConfigError
from aioinfer.models.vision.format import PictureFormat, ProcessedPicture, resized
from aioinfer.models.vision.llava import padded_to_square
from aioinfer.models.vision.llava_next import NextFormat, NextTower

_MOST = "anyres_max_"


@dataclass(frozen=True, slots=True, kw_only=True)
class OneVisionFormat(NextFormat):
    """See the module.

    Attributes:
        splits: whether there are tiles beside that of the whole picture.
    """

    STATES: ClassVar[str] = "full"
    TILES: ClassVar[Sequence[tuple[int, int]]] = tuple(itertools.product(range(1, 7), range(1, 7)))

    splits: bool = True

    @classmethod
    def read_max_tiles(cls, config: Mapping[str, Any]) -> int | None:
        """See `NextFormat.read_max_tiles`."""
        shape = str(config.get("vision_aspect_ratio", f"{_MOST}9"))
        if not shape.removeprefix(_MOST).isdecimal():
            raise ConfigError(f"vision_aspect_ratio must be {_MOST} and a number, not {shape!r}")
        return int(shape.removeprefix(_MOST))

    def among(self, count: int) -> PictureFormat:
        """See `PictureFormat.among`: one picture alone is read in tiles."""
        return replace(self, splits=count == 1)

    def process(self, picture: Image.Image) -> ProcessedPicture:
        """See `PictureFormat.process`."""
        if self.splits:
            return NextFormat.process(self, picture)
        square = padded_to_square(picture, self.mean)
        return self.of_tiles([resized(square, self.tile, self.tile, self.resample)], (0, 0))


class OneVisionTower(NextTower):
    """The tower of LLaVA-NeXT, of which other states are read."""

    LAYER, STATES = -1, "full"
