"""Digests of files: whether the weights behind KV blocks are the same, in another process or on
another host, where neither paths nor times need to agree."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

DIGEST_BYTES = 16
#: Of a longer file so many samples are read, at equal distances: weights that differ at all differ
#: nearly everywhere.
_SAMPLES, _SAMPLE_BYTES = 64, 4096


def digest_files(path: Path, *, whole: bool = False) -> bytes:
    """Returns a digest of the names, sizes and contents of a file, or of the files in a folder;
    of long ones samples, unless `whole`. Raises OSError."""
    digest = blake2b(digest_size=DIGEST_BYTES)
    files = sorted(each for each in path.iterdir() if each.is_file()) if path.is_dir() else [path]
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as opened:
            if whole or size <= _SAMPLES * _SAMPLE_BYTES:
                while data := opened.read(1 << 20):
                    digest.update(data)
                continue
            for number in range(_SAMPLES):
                opened.seek(number * (size - _SAMPLE_BYTES) // (_SAMPLES - 1))
                digest.update(opened.read(_SAMPLE_BYTES))
    return digest.digest()
