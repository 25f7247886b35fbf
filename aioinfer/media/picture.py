"""Decoding of pictures that clients send, which may be anything.

Pillow decodes, in a thread and with the formats alone that browsers show. A picture's size is known
from its header, and one that is too large is refused before its pixels are decoded.
"""

from __future__ import annotations

import io

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from aioinfer.config import MediaConfig
from aioinfer.errors import FieldError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
#: Formats that may have several frames, of which a model would see one.
_ANIMATED = ("PNG", "WEBP", "GIF")


def decode_picture(data: bytes, config: MediaConfig, place: str) -> Image.Image:
    """Returns a picture in RGB, turned as its EXIF data says; of transparent pixels the colour
    counts.

    Args:
        data: the file.
        config: the section `[media]`.
        place: of the picture in the body, for errors.

    Raises:
        FieldError: it is no picture, broken, animated or too large.
    """
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as picture:
            _check(picture, config, place)
            picture.load()
            return _as_rgb(ImageOps.exif_transpose(picture))
    except FieldError:
        raise
    except UnidentifiedImageError as error:
        known = ", ".join(FORMATS)
        raise FieldError(place, f"is not a picture of one of the formats {known}") from error
    # the warning is an error where a process has it so
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise _too_large(config, place) from error
    except MemoryError:
        raise
    except Exception as error:  # decoders raise whatever they like
        raise FieldError(place, "is broken: its pixels cannot be decoded") from error


def _check(picture: Image.Image, config: MediaConfig, place: str) -> None:
    width, height = picture.size
    if width < 1 or height < 1:
        raise FieldError(place, "has no pixels")
    if width * height > config.max_pixels:
        raise _too_large(config, place)
    if picture.format in _ANIMATED and getattr(picture, "is_animated", False):
        raise FieldError(place, "is animated: send one frame of it")


def _too_large(config: MediaConfig, place: str) -> FieldError:
    return FieldError(place, f"has more than {config.max_pixels} pixels")


def _as_rgb(picture: Image.Image) -> Image.Image:
    if picture.mode.startswith("I;16"):  # which `convert` would cut off at 255
        return Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8)).convert("RGB")
    if picture.mode == "I":
        return Image.fromarray(np.clip(np.asarray(picture) >> 8, 0, 255).astype(np.uint8)).convert(
            "RGB"
        )
    if picture.mode == "P":
        picture = picture.convert("RGBA")
    return picture if picture.mode == "RGB" else picture.convert("RGB")
