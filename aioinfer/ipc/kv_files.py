"""Files of KV blocks: a rank's part of a block is a file, found by the block's hash, with a header
that says whose it is.

The engine lists the files when its workers have started, and decides which are written and deleted;
each worker writes, reads and checks its own. A file that is short, broken, or of another model,
dtype or layout is not a block; neither is one that another rank lacks. Imports neither torch nor
aiohttp.
"""

from __future__ import annotations

import contextlib
import os
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

_MAGIC = b"aioKV\0\0\1"
#: Magic, identity, hash, group, checksum of the block, bytes of the block.
_HEADER = struct.Struct("=8s16s16sIIQ")
_SUFFIX = ".kv"
_MARK = "identity"


class BrokenFileError(Exception):
    """A file does not hold the block that it is to hold."""


@dataclass(frozen=True, slots=True)
class KVFiles:
    """The folder of a rank's files.

    Attributes:
        folder: made when the worker starts.
        identity: 16 bytes that stand for model, dtype, layout and rank; none where files are only
            listed.
    """

    folder: Path
    identity: bytes = b""

    @classmethod
    def of(cls, disk_path: str, engine: int, rank: int) -> KVFiles:
        """Returns the files of a rank of an engine below `cache.disk_path`."""
        return cls(Path(disk_path) / f"engine-{engine}" / f"rank-{rank}")

    def of_model(self, identity: bytes) -> KVFiles:
        """Returns the folder for files of an identity."""
        return replace(self, identity=identity)

    def prepare(self) -> None:
        """Makes the folder, and removes the files of another identity, and half-written ones.
        Raises `OSError`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        mark = self.folder / _MARK
        is_ours = mark.exists() and mark.read_bytes() == self.identity
        for entry in os.scandir(self.folder):
            if entry.name != _MARK and not (is_ours and entry.name.endswith(_SUFFIX)):
                os.unlink(entry.path)
        self.mark()

    def mark(self) -> None:
        """Notes whose files the folder has. Raises `OSError`."""
        (self.folder / _MARK).write_bytes(self.identity)

    def list(self, num_groups: int) -> list[list[bytes]]:
        """Returns the hashes that have files, of each group, the least recently used first."""
        found: list[tuple[float, int, bytes]] = []
        with contextlib.suppress(FileNotFoundError):
            for entry in os.scandir(self.folder):
                group, _, name = entry.name.removesuffix(_SUFFIX).partition("-")
                if entry.name.endswith(_SUFFIX) and group.isdecimal() and len(name) == 32:
                    with contextlib.suppress(ValueError, OSError):
                        found.append((entry.stat().st_mtime, int(group), bytes.fromhex(name)))
        hashes: list[list[bytes]] = [[] for _ in range(num_groups)]
        for _, number, block_hash in sorted(found):
            if number < num_groups:
                hashes[number].append(block_hash)
        return hashes

    def path_of(self, group: int, block_hash: bytes) -> Path:
        """Returns where the file of a block is."""
        return self.folder / f"{group}-{block_hash.hex()}{_SUFFIX}"

    def write(self, group: int, block_hash: bytes, block: bytes) -> None:
        """Writes a file; it is there as a whole or not at all. Raises `OSError`."""
        path = self.path_of(group, block_hash)
        temporary = path.with_suffix(".tmp")
        header = _HEADER.pack(
            _MAGIC, self.identity, block_hash, group, zlib.crc32(block), len(block)
        )
        try:
            with temporary.open("wb", buffering=0) as file:
                for part in (header, block):
                    if file.write(part) != len(part):
                        raise OSError(f"{temporary}: not all was written")
            temporary.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise

    def read(self, group: int, block_hash: bytes, out: memoryview) -> None:
        """Reads a file into `out`, which is as long as the block. Raises `OSError` or
        `BrokenFileError`; `out` may hold anything then."""
        path = self.path_of(group, block_hash)
        with path.open("rb", buffering=0) as file:
            header = file.read(_HEADER.size)
            if len(header) != _HEADER.size:
                raise BrokenFileError(f"{path} is cut short")
            *whose, checksum, size = _HEADER.unpack(header)
            if whose != [_MAGIC, self.identity, block_hash, group] or size != len(out):
                raise BrokenFileError(f"{path} is of another model or form")
            done = 0
            while done < size and (count := file.readinto(out[done:])):
                done += count
            if done != size or file.read(1):
                raise BrokenFileError(f"{path} is cut short, or longer than its block")
        if zlib.crc32(out) != checksum:
            raise BrokenFileError(f"{path} has another checksum than its block")
        with contextlib.suppress(OSError):
            os.utime(path)

    def delete(self, group: int, block_hash: bytes) -> None:
        """Deletes a file, if it is there."""
        with contextlib.suppress(OSError):
            self.path_of(group, block_hash).unlink()


def list_common(ranks: Sequence[KVFiles], num_groups: int) -> list[list[bytes]]:
    """Returns the hashes of which every rank has a file, of each group, the least recently used
    first, and deletes the other files."""
    found = [files.list(num_groups) for files in ranks]
    common = [set.intersection(*(set(of[group]) for of in found)) for group in range(num_groups)]
    for files, of_rank in zip(ranks, found, strict=True):
        for group, hashes in enumerate(of_rank):
            for block_hash in hashes:
                if block_hash not in common[group]:
                    files.delete(group, block_hash)
    return [
        [each for each in found[0][group] if each in common[group]] for group in range(num_groups)
    ]
