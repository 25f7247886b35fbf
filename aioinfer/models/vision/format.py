"""How a family of models reads pictures: sizes, pixels, and the tokens that stand for a picture.

`engine.pictures` prepares pictures with a `PictureFormat` in the server's process, and a `Tower`
computes their embeddings on the workers. Imports no torch. Sizes and pixels are those of the
family's processor in transformers with Pillow, which tests compare.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from PIL import Image

from aioinfer.errors import ConfigError

U8 = npt.NDArray[np.uint8]
#: Returns the text of a special token.
TextOf = Callable[[int], str]
_KEY_BYTES = 16


class PictureError(ValueError):
    """A family cannot read a picture; the message goes to the client."""


@dataclass(frozen=True, slots=True)
class ProcessedPicture:
    """A picture as a tower takes it, and its place in a prompt.

    Attributes:
        pixels: uint8 [N, height, width, 3]: N tiles of the picture.
        runs: how many placeholder tokens each run of them has; together its embeddings.
        key: equal for pictures with the same embeddings.
        grid: rows and columns of the embeddings, for models whose tokens have three positions; or
            the family's own numbers.
    """

    pixels: U8
    runs: tuple[int, ...]
    key: bytes
    grid: tuple[int, int]

    @classmethod
    def of(
        cls, pixels: U8, runs: Sequence[int], grid: tuple[int, int] = (0, 0)
    ) -> ProcessedPicture:
        """Returns a picture with the key of its pixels."""
        hashed = blake2b(repr((pixels.shape, grid)).encode(), digest_size=_KEY_BYTES)
        hashed.update(np.ascontiguousarray(pixels).data)
        return cls(np.ascontiguousarray(pixels), tuple(runs), hashed.digest(), grid)

    @property
    def num_embeddings(self) -> int:
        """How many placeholder tokens stand for the picture."""
        return sum(self.runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureFormat:
    """Base class of the families' formats.

    Attributes:
        has_sections: whether each token has three rotary positions (M-RoPE).
        interleaves_sections: whether their pairs of channels are interleaved.
        is_bidirectional: whether the tokens of a picture attend to each other both ways.
        keeps_windows: whether they then do so in layers with a window alone, and within it.
        hears: whether the pictures are clips of sound (`vision.sound`).
        behind: what follows a picture in a message, for families whose chat templates may know
            texts alone; None for others.
        marker_id: the token that chat templates write for a picture.
        placeholder_id: the token that an embedding takes the place of.
        mean, std: of the channels, by which pixels from 0 to 1 are normalised.
    """

    has_sections: ClassVar[bool] = False
    interleaves_sections: bool = False
    is_bidirectional: bool = False
    keeps_windows: ClassVar[bool] = False
    hears: ClassVar[bool] = False
    behind: ClassVar[str | None] = None

    marker_id: int
    placeholder_id: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    def among(self, count: int) -> PictureFormat:
        """Returns the format of the pictures of a conversation that has `count` of them."""
        return self

    def process(self, picture: Image.Image) -> ProcessedPicture:
        """Returns an RGB picture as the tower takes it.

        Raises `PictureError` for a picture that the family cannot read.
        """
        raise NotImplementedError

    def text(self, picture: ProcessedPicture, text_of: TextOf) -> str:
        """Returns the text in the place of the marker, with one placeholder for each run."""
        return text_of(self.placeholder_id)

    def dummy(self, num_embeddings: int) -> ProcessedPicture:
        """Returns a picture of about so many embeddings, one at least, for warm-up."""
        raise NotImplementedError


def resized(picture: Image.Image, width: int, height: int, resample: int) -> Image.Image:
    """Returns a picture in another size, or itself if it has that size."""
    if picture.size == (width, height):
        return picture
    return picture.resize((width, height), Image.Resampling(resample))


def tiles_of(picture: Image.Image, side: int) -> list[Image.Image]:
    """Returns the square tiles of a picture, row by row; its sides are multiples of `side`."""
    width, height = picture.size
    return [
        picture.crop((x, y, x + side, y + side))
        for y in range(0, height, side)
        for x in range(0, width, side)
    ]


def as_pixels(picture: Image.Image) -> U8:
    """Returns the pixels of an RGB picture: uint8 [height, width, 3]."""
    return np.asarray(picture, np.uint8)


def read_processor(folder: Path) -> dict[str, Any]:
    """Returns the configuration of a folder's image processor, of either file that transformers
    writes; empty without one. Raises `ConfigError` if it cannot be read."""
    for name, part in (
        ("preprocessor_config.json", None),
        ("processor_config.json", "image_processor"),
    ):
        file = folder / name
        if not file.is_file():
            continue
        try:
            found = json.loads(file.read_text("utf-8"))
            found = found if part is None else found.get(part)
        except (OSError, ValueError, AttributeError) as error:
            raise ConfigError(f"{file} cannot be read: {error}") from error
        if isinstance(found, dict):
            return found
    return {}


def read_channels(
    processor: Mapping[str, Any], name: str, default: tuple[float, float, float]
) -> tuple[float, float, float]:
    """Returns `image_mean` or `image_std` of a processor. Raises `ConfigError`."""
    given = processor.get(name) or default
    if len(given) != 3 or not all(isinstance(each, int | float) for each in given):
        raise ConfigError(f"{name} of the image processor must be three numbers, not {given!r}")
    red, green, blue = map(float, given)
    return red, green, blue
