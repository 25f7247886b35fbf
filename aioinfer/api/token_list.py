"""A request's body with a long list of token ids, decoded piece by piece.

The decoder of JSON does not let other threads run while it works, and a list of 200 000 numbers
takes it 6 to 9 ms, in which the event loop would stand still. So the list is first skipped, which
takes a sixth of that, and then decoded in pieces, between which other threads run. `read_body` uses
it, in a thread, for bodies that are too large to be decoded on the event loop.
"""

from __future__ import annotations

import time
from typing import TypeVar

import msgspec
from msgspec import Struct

from aioinfer.api.protocol import Body, CompletionRequest, DetokenizeRequest, TokenId, decode

#: Bytes of a piece: some 10 000 ids, less than half a millisecond.
PIECE = 64 * 1024

B = TypeVar("B", bound=Body)


class _Skipped(Struct):
    """The fields of bodies that may be such a list, as the bytes that they are."""

    prompt: msgspec.Raw = msgspec.Raw()
    tokens: msgspec.Raw = msgspec.Raw()


_FIELDS: dict[type[Body], str] = {CompletionRequest: "prompt", DetokenizeRequest: "tokens"}
_skip = msgspec.json.Decoder(_Skipped).decode
_decode_ids = msgspec.json.Decoder(list[TokenId]).decode


def decode_large(raw: bytes, kind: type[B]) -> B:
    """Decodes a body as `protocol.decode` does.

    Bodies without a single long list of ids, and wrong ones, are passed on to `protocol.decode`.
    """
    field = _FIELDS.get(kind)
    if field is not None:
        try:
            body = _decode_in_pieces(raw, kind, field)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            body = None
        if body is not None:
            body.check()
            return body
    return decode(raw, kind)


def _decode_in_pieces(raw: bytes, kind: type[B], field: str) -> B | None:
    """Returns the body, not checked yet, or None if `field` is no long, flat list."""
    listed = bytes(getattr(_skip(raw), field))
    if len(listed) < 2 * PIECE or listed[:1] != b"[" or listed.find(b"[", 1) >= 0 or b'"' in listed:
        return None
    before, _, after = raw.partition(listed)
    body = msgspec.json.decode(before + b"[0]" + after, type=kind)
    if getattr(body, field) != [0]:  # the same bytes stood elsewhere, too
        return None
    ids: list[int] = []
    start, end = 1, len(listed) - 1
    while start < end:
        time.sleep(0)  # lets go of the interpreter
        comma = listed.find(b",", min(start + PIECE, end))
        stop = comma if comma >= 0 else end
        ids += _decode_ids(b"[" + listed[start:stop] + b"]")
        start = stop + 1
    setattr(body, field, ids)
    return body
