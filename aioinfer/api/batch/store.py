"""Stores of clients' objects, of which each API key finds its own alone.

`ObjectStore` has responses of `/v1/responses` and conversations, in memory; they share one limit,
in number and in bytes. `FileStore` has the files of `/v1/files` and the records of batches in a
folder, `server.files_folder`:

    files/ID.data, files/ID.json        a file, and what is known of it
    batches/ID.json                     a batch
    batches/ID.failed                   the last record of a batch that failed when the disk had no
                                        room for another one

The results of a batch in progress are data without a record yet. A record, and an upload, is
written under another name and then renamed, so that a process that is killed leaves either the old
or the new one; a start removes what has the other name. `page_of` makes OpenAI's pages of lists.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from aiohttp import web
from msgspec import UNSET, Meta, Struct, UnsetType

from aioinfer.api.http.limits import ACCOUNT
from aioinfer.batch_file import BatchFault
from aioinfer.config import ServerConfig
from aioinfer.errors import ConfigError, FieldError, RequestError

#: The kinds of stored objects, by the `object` of their JSON.
Kind = Literal["response", "conversation", "file", "batch"]

#: OpenAI's bounds of an object's metadata.
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=16),
]
#: Objects in memory, and their bytes as JSON; with the usual ones the latter is reached before.
MAX_STORED = 1000
MAX_STORED_BYTES = 64 * 2**20
#: Files in the folder, results of batches included: all of their records are in memory.
MAX_FILES = 1000
#: The statuses in which a batch stays.
ENDED = frozenset(("completed", "failed", "cancelled"))


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


class RequestCounts(Struct, kw_only=True):
    """The number of requests of a batch, in total, completed and failed."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchFaults(Struct, kw_only=True):
    """Everything that is wrong with a batch."""

    data: list[BatchFault]
    object: str = "list"


class BatchObject(Struct, kw_only=True):
    """A batch, as OpenAI describes it."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int | None = None
    status: str = "validating"
    object: str = "batch"
    errors: BatchFaults | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = msgspec.field(default_factory=RequestCounts)
    metadata: dict[str, str] | None = None

    def enter(self, status: str) -> None:
        """Changes the status, now."""
        self.status = status
        setattr(self, f"{status}_at", int(time.time()))


class _Record(Struct):
    """A file or a batch and the name of the API key that it belongs to, as they are on the
    disk."""

    owner: str
    file: FileObject | None = None
    batch: BatchObject | None = None


@dataclass(slots=True)
class Stored:
    """An object and what belongs to it.

    Attributes:
        owner: the name of the API key that it belongs to.
        body: the struct that replies show.
        items: of a response, the items before its output; of a conversation, all of its items.
        events: of the stream of a response in the background, by sequence number.
        item_bytes, num_bytes: of an object in memory, the length of its items as JSON, and of all
            of it.
    """

    owner: str
    body: Any
    items: Sequence[Any] = ()
    events: Sequence[bytes] = ()
    item_bytes: int = 0
    num_bytes: int = 0


class Store:
    """Objects by API key and id."""

    def __init__(self) -> None:
        self._stored: OrderedDict[tuple[str, str], Stored] = OrderedDict()

    def __len__(self) -> int:
        return len(self._stored)

    def __contains__(self, place: tuple[str, str]) -> bool:
        """Whether an API key has an object of this id."""
        return place in self._stored

    def find(self, owner: str, kind: Kind, id: str, param: str | None = None) -> Stored:
        """Returns the record of an object. Raises `RequestError` (404, or 400 for a previous
        response), which names `param`, the field that has the id."""
        record = self._stored.get((owner, id))
        if record is None or record.body.object != kind:
            previous, is_on_disk = param == "previous_response_id", kind in ("file", "batch")
            code = f"{kind}_not_found" if is_on_disk else "not_found"
            raise RequestError(
                f"there is no {kind} {id[:80]!r}, or no longer",
                param=(param or f"{kind}_id") if is_on_disk else param,
                status=400 if previous else 404,
                code="previous_response_not_found" if previous else code,
            )
        return record

    def all_of(self, owner: str, kind: Kind) -> Iterator[Stored]:
        """Yields the records of a kind that an API key has, the newest first."""
        for (of, _), record in reversed(self._stored.items()):
            if of == owner and record.body.object == kind:
                yield record

    async def delete(self, owner: str, kind: Kind, id: str) -> None:
        """Deletes an object for its client. Raises `RequestError`, OSError."""
        self.remove(owner, kind, id)

    def remove(self, owner: str, kind: Kind, id: str) -> Stored:
        """Drops the record of an object and returns it. Raises `RequestError` (404)."""
        record = self.find(owner, kind, id)
        del self._stored[owner, id]
        return record


class ObjectStore(Store):
    """Objects in memory. Beyond `MAX_STORED` objects and `MAX_STORED_BYTES` the oldest go,
    conversations by their last change."""

    def check_room(self, num_bytes: int, what: str, param: str | None = None) -> None:
        """Raises `RequestError` if an object of this size could not be stored at all. `what` names
        the object in the message."""
        if num_bytes > MAX_STORED_BYTES:
            message = (
                f"{what} is stored, and larger than the server's {MAX_STORED_BYTES} bytes for all"
            )
            raise RequestError(message, param=param)

    def add(
        self,
        owner: str,
        body: Any,
        items: Sequence[Any],
        events: Sequence[bytes] = (),
        item_bytes: int | None = None,
    ) -> None:
        """Stores an object of an API key as the newest, in the place of an older one of its id;
        `item_bytes` is the length of the items as JSON where that is known. An object that is
        nested too deeply for JSON, or larger than the limit of all objects, is not kept."""
        try:
            of_items = json_size(items) if item_bytes is None else item_bytes
            size = of_items + json_size(body) + sum(map(len, events))
        except RecursionError:
            return
        self._stored.pop((owner, body.id), None)
        if size <= MAX_STORED_BYTES:
            self._stored[owner, body.id] = Stored(owner, body, items, events, of_items, size)
            self._evict()

    def extend(self, stored: Stored, items: Sequence[Any]) -> None:
        """Adds items to an object, which becomes the newest; one that is too large is dropped."""
        stored.items = [*stored.items, *items]
        size = json_size(items)
        stored.item_bytes += size
        stored.num_bytes += size
        self._stored.move_to_end((stored.owner, stored.body.id))
        if stored.num_bytes > MAX_STORED_BYTES:
            del self._stored[stored.owner, stored.body.id]
        self._evict()

    def change_metadata(self, stored: Stored, metadata: dict[str, str]) -> None:
        """Replaces the metadata of an object."""
        stored.num_bytes += json_size(metadata) - json_size(stored.body.metadata)
        stored.body = msgspec.structs.replace(stored.body, metadata=metadata)
        self._evict()

    def _evict(self) -> None:
        excess = sum(each.num_bytes for each in self._stored.values()) - MAX_STORED_BYTES
        while excess > 0 or len(self._stored) > MAX_STORED:
            excess -= self._stored.popitem(last=False)[1].num_bytes


#: Where `FileStore` has the records of files and of batches.
_FOLDERS = ("files", "batches")
#: The suffix of records of batches that failed and whose last state could not be written.
_FAILED = ".failed"


class FileStore(Store):
    """Files and batches in a folder, which one server uses at a time."""

    def __init__(self, folder: Path):
        """Takes the folder and reads its records. Raises `ConfigError` if it cannot be used, or
        another server uses it."""
        super().__init__()
        self._folder = folder
        self._num_incoming = 0
        self._lock: int | None = None
        self._saving = asyncio.Lock()
        try:
            self._take()
        except OSError as error:
            self.close()
            raise ConfigError(f"server.files_folder = {str(folder)!r}: {error}") from error

    @classmethod
    def open(cls, config: ServerConfig) -> FileStore | None:
        """Returns the store of `server.files_folder`, None if there is none. Raises
        `ConfigError`."""
        return cls(Path(config.files_folder)) if config.files_folder else None

    def _take(self) -> None:
        for name in _FOLDERS:
            (self._folder / name).mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = os.open(self._folder / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OSError("another server uses this folder") from None
        for left in self._folder.glob("*/*.new"):
            left.unlink()
        places = [*self._folder.glob("*/*.json"), *self._folder.glob(f"batches/*{_FAILED}")]
        for place in sorted(places, key=lambda file: (file.stat().st_mtime_ns, file.name)):
            try:
                record = msgspec.json.decode(place.read_bytes(), type=_Record)
            except msgspec.DecodeError as error:
                raise OSError(f"{place} is damaged, delete it to go on without: {error}") from error
            body: Any = record.file or record.batch
            if place.suffix == _FAILED:
                message = "the server could not write the batch's files"
                body.errors = BatchFaults(data=[BatchFault(code="server_error", message=message)])
                body.enter("failed")
            self._stored[record.owner, body.id] = Stored(record.owner, body)
        # contents without a record, between whose writing or deleting a server ended; of a batch
        # that has not ended they are the results so far
        known = {id for _, id in self._stored}
        batches = {each.body.id.removeprefix("batch_") for each in self.open_batches()}
        for data in self._folder.glob("files/file-*.data"):
            if data.stem not in known and data.stem.rpartition("-")[2] not in batches:
                data.unlink()

    def close(self) -> None:
        """Lets another server use the folder. Safe to call twice."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def data(self, file_id: str) -> Path:
        """Returns where a file's content is."""
        return self._folder / "files" / f"{file_id}.data"

    def _place(self, body: FileObject | BatchObject) -> Path:
        """Returns where the record of an object is."""
        return self._folder / _FOLDERS[isinstance(body, BatchObject)] / f"{body.id}.json"

    @asynccontextmanager
    async def incoming(self) -> AsyncIterator[Path]:
        """The place for a file that comes; one that was not kept goes with the block. Raises
        `RequestError` if there are too many."""
        num_files = sum(stored.body.object == "file" for stored in self._stored.values())
        if num_files + self._num_incoming >= MAX_FILES:
            message = f"the server keeps at most {MAX_FILES} files: delete some first"
            raise RequestError(message, code="too_many_files")
        self._num_incoming += 1
        place = self.data(f"file-{secrets.token_hex(12)}").with_suffix(".new")
        try:
            yield place
        finally:
            self._num_incoming -= 1
            await asyncio.to_thread(place.unlink, True)

    async def keep(self, source: Path, owner: str, filename: str, purpose: str) -> FileObject:
        """Makes a file of `source`, which is named by its id, and is where `incoming` or `data` has
        it. Safe to repeat. Raises OSError."""
        data = self.data(source.stem)

        def move() -> int:
            if source != data:
                os.replace(source, data)
            return data.stat().st_size

        file = FileObject(
            id=data.stem,
            bytes=await asyncio.to_thread(move),
            created_at=int(time.time()),
            filename=filename,
            purpose=purpose,
        )
        try:
            await self.save(Stored(owner, file))
        except OSError:
            if source != data:  # results of a batch stay
                await asyncio.to_thread(data.unlink, True)
            raise
        return file

    async def save(self, stored: Stored) -> None:
        """Writes the record of an object. A new one that cannot be written is not kept: a batch
        would never end, and a later start might run it. Raises OSError."""
        owner, body = stored.owner, stored.body
        at, is_new = (owner, body.id), (owner, body.id) not in self
        self._stored[at] = stored
        try:
            async with self._saving:  # the last to begin writes the current state
                data = msgspec.json.encode({"owner": owner, body.object: body})
                await asyncio.to_thread(_write, self._place(body), data)
        except OSError:
            if is_new:
                del self._stored[at]
            raise

    async def save_failure(self, stored: Stored) -> None:
        """Writes the record of a batch that has failed, or marks the one that is there, which takes
        no room: a later start must not go on with the batch."""
        place = self._place(stored.body)
        try:
            await self.save(stored)
        except OSError:
            with suppress(OSError):
                await asyncio.to_thread(os.replace, place, place.with_suffix(_FAILED))

    def open_batches(self) -> list[Stored]:
        """Returns the batches of all API keys that have not ended."""
        batches = [each for each in self._stored.values() if each.body.object == "batch"]
        return [batch for batch in batches if batch.body.status not in ENDED]

    async def delete(self, owner: str, kind: Kind, id: str) -> None:
        """Deletes a file. Raises `RequestError` if a batch in progress reads it, OSError."""
        self.find(owner, kind, id)
        if any(batch.body.input_file_id == id for batch in self.open_batches()):
            message = "a batch in progress reads this file"
            raise RequestError(message, param="file_id", status=409, code="file_in_use")
        file = self.remove(owner, kind, id).body
        for place in (self._place(file), self.data(id)):
            await asyncio.to_thread(place.unlink, True)


def _write(file: Path, data: bytes) -> None:
    """Writes data in the place of the old ones. Raises OSError."""
    new = file.with_suffix(".new")
    try:
        with new.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(new, file)
    except OSError:
        new.unlink(missing_ok=True)
        raise


def json_size(value: Any) -> int:
    """Returns the length of a value as JSON, in bytes."""
    return len(msgspec.json.encode(value))


OBJECT_STORE = web.AppKey("object_store", ObjectStore)
FILES: web.AppKey[FileStore | None] = web.AppKey("files")


def require_files(request: web.Request) -> FileStore:
    """Returns the server's store of files. Raises `RequestError` (404) if it has none."""
    store = request.app[FILES]
    if store is None:
        message = "this server keeps no files: server.files_folder is not set"
        raise RequestError(message, status=404, code="not_enabled")
    return store


def owner_of(request: web.Request) -> str:
    """Returns the name of the API key whose objects a request may see."""
    return request[ACCOUNT].key.name


class Page(Struct, kw_only=True):
    """A part of a list."""

    object: Literal["list"] = "list"
    data: list[Any]
    first_id: str | None
    last_id: str | None
    has_more: bool


class PageQuery(Struct, kw_only=True):
    """Which part of a list a request asks for: at most `limit`, behind the one of the id `after`,
    the oldest first under `asc`."""

    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    after: str | UnsetType = UNSET
    order: Literal["asc", "desc"] = "desc"


def page_of(items: Sequence[Any], query: PageQuery | None = None) -> Page:
    """Returns a page of `items` (structs with an `id`, the newest first). Raises `RequestError`."""
    query = query or PageQuery()
    ordered = list(items if query.order == "desc" else reversed(items))
    first = 0
    if query.after is not UNSET:
        places = {item.id: place for place, item in enumerate(ordered, 1)}
        if not (first := places.get(query.after, 0)):
            raise FieldError("after", "is not the id of one in this list")
    shown, end = ordered[first : first + query.limit], first + query.limit
    ids = [item.id for item in shown] or [None]
    return Page(data=shown, first_id=ids[0], last_id=ids[-1], has_more=len(ordered) > end)
