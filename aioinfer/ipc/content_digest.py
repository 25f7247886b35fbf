"""Digests of files: whether the weights behind KV blocks are the same, in another process or on
another host, where neither paths nor times need to agree."""

from __future__ import annotations

import json
import os
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

DIGEST_BYTES = 16
#: Of a longer file so many samples are read, at equal distances, and one of each tensor: training
#: may have changed some tensors alone, but a tensor that it has changed differs nearly everywhere.
_SAMPLES, _SAMPLE_BYTES = 64, 4096
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


def digest_files(path: Path) -> bytes:
    """Returns a digest of the names, sizes and contents of a file, or of the files in a folder;
    of long ones samples. Raises OSError."""
    digest = blake2b(digest_size=DIGEST_BYTES)
    files = sorted(each for each in path.iterdir() if each.is_file()) if path.is_dir() else [path]
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as opened:
            if size <= _SAMPLES * _SAMPLE_BYTES:
                digest.update(opened.read())
                continue
            step = (size - _SAMPLE_BYTES) / (_SAMPLES - 1)
            places = [int(number * step) for number in range(_SAMPLES)]
            places = sorted(places + _tensor_places(file, opened))
            samples = (os.pread(opened.fileno(), _SAMPLE_BYTES, place) for place in places)
            digest.update(b"".join(samples))
    return digest.digest()


def _tensor_places(file: Path, opened: BinaryIO) -> list[int]:
    """Returns where tensors begin in a safetensors file; nothing for another file."""
    if file.suffix != ".safetensors":
        return []
    length = int.from_bytes(opened.read(8), "little")
    try:
        header = json.loads(opened.read(min(length, _MAX_HEADER_BYTES)))
        return [8 + length + each["data_offsets"][0] for each in header.values() if "dtype" in each]
    except (ValueError, TypeError, LookupError, AttributeError):
        return []
