"""The files of `/v1/files`, and the records of batches, in a folder: `server.files_folder`.

    files/ID.data, files/ID.json        a file, and what is known of it
    batches/ID.json                     a batch
    batches/ID.output, batches/ID.error results of a batch in progress
    incoming/                           uploads that are under way; emptied by a start

A record is replaced as a whole, so that a process that is killed leaves either the old or the new
one. Methods that touch the folder are called in threads; `files` and `batches` are the callers.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from aiohttp import web
from msgspec import Struct

from aioinfer.config import ServerConfig
from aioinfer.errors import ConfigError, RequestError

T = TypeVar("T")

#: Files in the folder, results of batches included: all of their records are in memory.
MAX_FILES = 1000
#: Bytes of an uploaded file; OpenAI's bound for batches.
MAX_FILE_BYTES = 200 * 2**20


class FileObject(Struct, kw_only=True):
    """A file, as OpenAI describes it."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    object: str = "file"
    status: str = "processed"
    status_details: str | None = None
    expires_at: int | None = None


class _FileRecord(Struct):
    """A file and the name of the API key that it belongs to."""

    owner: str
    file: FileObject


class FileStore:
    """The folder. Files of one API key are not known to others."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._files: dict[str, _FileRecord] = {}
        self._num_incoming = 0
        self._lock: int | None = None

    @classmethod
    def open(cls, config: ServerConfig) -> FileStore | None:
        """Returns the store of `server.files_folder`, None if there is none.

        Raises `ConfigError` if the folder cannot be used, or another server uses it.
        """
        if not config.files_folder:
            return None
        store = cls(Path(config.files_folder))
        try:
            store._take()
        except (OSError, msgspec.DecodeError) as error:
            store.close()
            raise ConfigError(f"server.files_folder = {config.files_folder!r}: {error}") from error
        return store

    def _take(self) -> None:
        shutil.rmtree(self._folder / "incoming", ignore_errors=True)
        for name in ("files", "batches", "incoming"):
            (self._folder / name).mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = os.open(self._folder / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OSError("another server uses this folder") from None
        for record in read_records(self._folder / "files", _FileRecord):
            self._files[record.file.id] = record

    def close(self) -> None:
        """Lets another server use the folder. Safe to call twice."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # ---------------------------------------------------------------- on the event loop

    def find(self, file_id: str, owner: str) -> FileObject:
        """Returns a file of an API key. Raises `RequestError` (404)."""
        record = self._files.get(file_id)
        if record is None or record.owner != owner:
            raise RequestError(
                "there is no file of this id", param="file_id", status=404, code="file_not_found"
            )
        return record.file

    def of(self, owner: str) -> Iterator[FileObject]:
        """Yields the files of an API key, the newest first."""
        for record in reversed(self._files.values()):
            if record.owner == owner:
                yield record.file

    def data(self, file_id: str) -> Path:
        """Returns where a file's content is."""
        return self._folder / "files" / f"{file_id}.data"

    def batch_file(self, batch_id: str, kind: str) -> Path:
        """Returns where the record ("json") or the results ("output", "error") of a batch are."""
        return self._folder / "batches" / f"{batch_id}.{kind}"

    def begin_upload(self) -> Path:
        """Returns where to write a file that comes. Raises `RequestError` if there are too many."""
        if len(self._files) + self._num_incoming >= MAX_FILES:
            raise RequestError(
                f"the server keeps at most {MAX_FILES} files: delete some first",
                code="too_many_files",
            )
        self._num_incoming += 1
        return self._folder / "incoming" / secrets.token_hex(12)

    def end_upload(self) -> None:
        """Records that an upload started by `begin_upload` is a file now, or has failed."""
        self._num_incoming -= 1

    def note(self, owner: str, file: FileObject) -> None:
        """Makes a file that `keep` has stored known."""
        self._files[file.id] = _FileRecord(owner, file)

    def forget(self, file_id: str) -> None:
        """Makes a file unknown, before `remove`."""
        del self._files[file_id]

    # ---------------------------------------------------------------- in threads

    def keep(
        self, source: Path, owner: str, filename: str, purpose: str, file_id: str | None = None
    ) -> FileObject:
        """Moves `source` into the store, under an id if one is given. Safe to repeat with an id:
        then `source` may be gone. Raises OSError."""
        file_id = file_id or f"file-{secrets.token_hex(12)}"
        data = self.data(file_id)
        if source.exists():
            os.replace(source, data)
        file = FileObject(
            id=file_id,
            bytes=data.stat().st_size,
            created_at=int(time.time()),
            filename=filename,
            purpose=purpose,
        )
        write_record(data.with_suffix(".json"), _FileRecord(owner, file))
        return file

    def remove(self, file_id: str) -> None:
        """Deletes a file. Raises OSError."""
        self.data(file_id).with_suffix(".json").unlink(missing_ok=True)
        self.data(file_id).unlink(missing_ok=True)

    def read_batches(self, kind: type[T]) -> list[T]:
        """Returns the records of all batches, of type `kind`. Raises OSError, `DecodeError`."""
        return read_records(self._folder / "batches", kind)


def write_record(file: Path, record: Any) -> None:
    """Writes a record as JSON in the place of the old one. Raises OSError."""
    new = file.with_suffix(".new")
    with new.open("wb") as stream:
        stream.write(msgspec.json.encode(record))
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(new, file)


def read_records(folder: Path, kind: type[T]) -> list[T]:
    """Returns the records of a folder by age. Raises OSError, `DecodeError`."""
    files = sorted(folder.glob("*.json"), key=lambda file: (file.stat().st_mtime_ns, file.name))
    return [msgspec.json.decode(file.read_bytes(), type=kind) for file in files]


FILES: web.AppKey[FileStore | None] = web.AppKey("files")


def require_store(request: web.Request) -> FileStore:
    """Returns the server's store. Raises `RequestError` (404) if it has none."""
    store = request.app[FILES]
    if store is None:
        raise RequestError(
            "this server keeps no files: server.files_folder is not set",
            status=404,
            code="not_enabled",
        )
    return store
