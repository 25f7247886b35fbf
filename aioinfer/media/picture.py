"""Decoding of pictures that clients send, which may be anything.

Pillow decodes, in a thread and with the formats alone that browsers show. A picture's size is known
from its header, and one that is too large is refused before its pixels are decoded. Files of
millions of empty parts, for which Pillow's parsers take seconds and gigabytes, are refused as well,
and JPEGs of so many scans that each of a few bytes goes through all pixels again.
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
#: Pixels of a WebP, whose decoder takes 16 bytes for each: beside the picture two canvases for
#: frames, and a copy; and of a CMYK JPEG, which takes 12 where it has several scans.
_MAX_COSTLY_PIXELS = 16_000_000
#: Reads of a file by Pillow's parsers: some for each chunk, block, segment or run of a BMP.
_MAX_READS = 500_000
#: Pixels that all scans of a JPEG may go through together: some seconds of decoding. Those of a
#: progressive one are ten, as encoders write it.
_MAX_SCANNED_PIXELS = 10**10
_SCAN = b"\xff\xda"


class _File(io.BytesIO):
    """A file that raises `FieldError` once it was read too many times."""

    def __init__(self, data: bytes, place: str):
        super().__init__(data)
        self._place, self._left = place, _MAX_READS

    def read(self, size: int | None = -1, /) -> bytes:
        """Returns the next bytes, all of them by default. Raises `FieldError`."""
        self._left -= 1
        if self._left < 0:
            raise FieldError(self._place, "is broken: it has too many parts")
        return super().read(size)


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
        with Image.open(_File(data, place), formats=FORMATS) as picture:
            _check(picture, data, config, place)
            picture.load()
            ImageOps.exif_transpose(picture, in_place=True)  # else it copies what is not turned
            return _as_rgb(picture)
    except FieldError:
        raise
    except UnidentifiedImageError as error:
        known = ", ".join(FORMATS)
        raise FieldError(place, f"is not a picture of one of the formats {known}") from error
    # the warning is an error where a process has it so
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise _too_large(config.max_pixels, place) from error
    except MemoryError:
        raise
    except Exception as error:  # decoders raise whatever they like
        raise FieldError(place, "is broken: its pixels cannot be decoded") from error


def _check(picture: Image.Image, data: bytes, config: MediaConfig, place: str) -> None:
    width, height = picture.size
    if width < 1 or height < 1:
        raise FieldError(place, "has no pixels")
    if width * height > config.max_pixels:
        raise _too_large(config.max_pixels, place)
    is_costly = picture.format == "WEBP" or picture.mode == "CMYK"
    if is_costly and width * height > _MAX_COSTLY_PIXELS:
        raise _too_large(_MAX_COSTLY_PIXELS, place)
    is_jpeg = picture.format in ("JPEG", "MPO")  # the latter has other pictures behind the first
    if is_jpeg and data.count(_SCAN) * width * height > _MAX_SCANNED_PIXELS:
        raise FieldError(place, "has too many scans for its size")
    if picture.format in _ANIMATED and getattr(picture, "is_animated", False):
        raise FieldError(place, "is animated: send one frame of it")


def _too_large(pixels: int, place: str) -> FieldError:
    return FieldError(place, f"has more than {pixels} pixels")


def _as_rgb(picture: Image.Image) -> Image.Image:
    if picture.mode.startswith("I;16"):  # which `convert` would cut off at 255
        return Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8)).convert("RGB")
    if picture.mode == "I":
        return Image.fromarray(np.clip(np.asarray(picture) >> 8, 0, 255).astype(np.uint8)).convert(
            "RGB"
        )
    if picture.mode == "P":
        picture = picture.convert("RGBA")
    return picture.convert("RGB")  # or a copy, behind which the decoder's memory is freed
