"""Large bodies: their values are counted before they are decoded, and long lists of token ids are
decoded in pieces.

The decoder of JSON does not let other threads run while it works, nor does Python while it frees
the decoded values: for millions of values the event loop would stand still for up to a second. So a
large body may hold many values only where a request needs them: as token ids. These are decoded in
pieces, between which other threads run. `read_body` uses this, in a thread, for bodies that are too
large to be decoded on the event loop.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec

from aioinfer.api.decoding import as_request_error
from aioinfer.api.json_members import Member, find_members
from aioinfer.api.llama_cpp_body import LlamaCompletion
from aioinfer.api.pooling_bodies import ClassifyRequest, EmbeddingRequest, PoolingRequest
from aioinfer.api.protocol import (
    MAX_PROMPTS,
    MAX_VALUES,
    Body,
    CompletionRequest,
    DetokenizeRequest,
    TokenId,
    decode,
)
from aioinfer.errors import RequestError

#: Bytes of a piece: some 10 000 ids, less than half a millisecond.
PIECE = 64 * 1024
#: Token ids in one body.
MAX_TOKEN_IDS = 2**20

B = TypeVar("B", bound=Body)

_FIELDS: dict[type[Body], str] = {
    CompletionRequest: "prompt",
    LlamaCompletion: "prompt",
    DetokenizeRequest: "tokens",
    EmbeddingRequest: "input",
    PoolingRequest: "input",
    ClassifyRequest: "input",
}
# as the fields are declared, so that errors are the same
_decode_ids: dict[type[Body], Callable[[bytes], list[Any]]] = {
    **dict.fromkeys(
        (CompletionRequest, LlamaCompletion),
        msgspec.json.Decoder(list[str | TokenId | list[TokenId]]).decode,
    ),
    DetokenizeRequest: msgspec.json.Decoder(list[TokenId]).decode,
    **dict.fromkeys(
        (EmbeddingRequest, PoolingRequest, ClassifyRequest),
        msgspec.json.Decoder(list[str | TokenId | list[TokenId]]).decode,
    ),
}
_INDEX = re.compile(r"`\$\[(\d+)\]")
_BYTE = re.compile(r"\(byte (\d+)\)")


def decode_large(raw: bytes, kind: type[B], *, ignores_unknown: bool = False) -> B:
    """Decodes a body as `protocol.decode` does.

    Raises `RequestError`, also for more than `MAX_VALUES` values in lists and objects, token ids
    not counted, and for more than `MAX_TOKEN_IDS` of these.
    """
    field = _FIELDS.get(kind)
    ids: Member | None = None
    num_values = 0
    for member in find_members(raw):
        if field is not None and _name_of(member) == field:
            if ids is not None:
                raise RequestError(f"{field} is given twice", param=field)
            ids = member
            continue
        num_values += member.num_values
        if num_values > MAX_VALUES:
            raise _too_many(_name_of(member), MAX_VALUES, "values")
    if ids is None or field is None or ids.num_values * 2 < PIECE // 4:
        return decode(raw, kind, ignores_unknown=ignores_unknown)
    listed = raw[ids.start : ids.end].strip()
    if listed[:1] != b"[" or b'"' in listed:
        if ids.num_values > MAX_VALUES:
            raise _too_many(field, MAX_VALUES, "values that are no token ids")
        return decode(raw, kind, ignores_unknown=ignores_unknown)
    start = raw.index(listed, ids.start)
    lists = _inner_lists(raw, field, start, start + len(listed))
    if ids.num_values > MAX_TOKEN_IDS:
        raise _too_many(field, MAX_TOKEN_IDS, "token ids")
    return _decode_in_pieces(raw, kind, field, start, lists, ignores_unknown)


def _too_many(name: str, limit: int, what: str) -> RequestError:
    return RequestError(f"{name} may hold at most {limit} {what}", param=name)


def _name_of(member: Member) -> str:
    try:
        return msgspec.json.decode(member.key, type=str)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return "the body"


def _decode_in_pieces(
    raw: bytes,
    kind: type[B],
    field: str,
    start: int,
    inner: Sequence[tuple[int, int]],
    ignores_unknown: bool,
) -> B:
    """Returns a body whose `field` is a list that begins at `start`, of numbers or of lists of
    numbers; `inner` are the places of the lists that hold numbers."""
    # the body is decoded with a number in place of each list, which shows where it belongs
    skeleton, before = [], start
    for number, (first, last) in enumerate(inner):
        skeleton += [raw[before:first], b"[%d]" % number]
        before = last
    outline = raw[:start] + b"".join(skeleton) + raw[before:]
    body = decode(outline, kind, check=False, ignores_unknown=ignores_unknown)
    flat = inner[0][0] == start
    expected: list[Any] = [0] if flat else [[number] for number in range(len(inner))]
    if getattr(body, field) != expected:
        raise RequestError(
            f"{field} must be a list of token ids, or a list of such lists", param=field
        )
    lists = []
    for number, (first, last) in enumerate(inner):
        name = field if flat else f"{field}[{number}]"
        lists.append(list(_ids(raw, kind, name, first, last)))
    setattr(body, field, lists[0] if flat else lists)
    body.check()
    return body


def _inner_lists(raw: bytes, field: str, start: int, end: int) -> list[tuple[int, int]]:
    """Returns the places of the lists in a list, or the place of the list itself if it holds
    none."""
    lists: list[tuple[int, int]] = []
    first = raw.find(b"[", start + 1, end)
    while first >= 0:
        if len(lists) == MAX_PROMPTS:
            raise _too_many(field, MAX_PROMPTS, "prompts")
        last = raw.find(b"]", first, end) + 1
        lists.append((first, last))
        first = raw.find(b"[", last, end)
    return lists or [(start, end)]


def _ids(raw: bytes, kind: type[Body], name: str, start: int, end: int) -> Iterator[Any]:
    """Yields the items of the list between these places; `name` is what errors call it."""
    decoder, index, position, last = _decode_ids[kind], 0, start + 1, end - 1
    while position < last:
        time.sleep(0)  # lets go of the interpreter
        comma = raw.find(b",", min(position + PIECE, last), last)
        stop = comma if comma >= 0 else last
        try:
            piece = decoder(b"[" + raw[position:stop] + b"]")
        except (msgspec.DecodeError, RecursionError) as error:
            raise _moved(error, name, index, position - 1) from error
        yield from piece
        index += len(piece)
        position = stop + 1


def _moved(error: Exception, name: str, index: int, position: int) -> RequestError:
    """Returns the error of a piece as one of the body: `index` items and `position` bytes stand
    before the piece."""
    text = _INDEX.sub(lambda found: f"`$.{name}[{index + int(found[1])}]", str(error), count=1)
    text = _BYTE.sub(lambda found: f"(byte {position + int(found[1])})", text)
    return as_request_error(type(error)(text))
