"""A request's body with a long list of token ids as its prompt, decoded piece by piece.

The decoder of JSON does not let other threads run while it works, and a list of 200 000 numbers takes it 6 ms, in which the
event loop would stand still. So the list is first skipped, which takes a sixth of that, and then decoded in pieces, between
which other threads have their turn. Used by `read_body`, in a thread, for bodies too large for the event loop's.
"""

from __future__ import annotations

import time
from typing import TypeVar, cast

import msgspec
from msgspec import Struct

from aioinfer.api.protocol import Body, CompletionRequest, TokenId, decode

#: Bytes of a piece: some 10 000 ids, a third of a millisecond.
PIECE = 64 * 1024

B = TypeVar("B", bound=Body)

_Ids = msgspec.json.Decoder(list[TokenId])


class _Outline(Struct):
    prompt: msgspec.Raw = msgspec.Raw()


_Outlines = msgspec.json.Decoder(_Outline)


def decode_large(raw: bytes, kind: type[B]) -> B:
    """Does what `protocol.decode` does. What is no completion of one list of ids, or is at fault, is left to that."""
    if kind is CompletionRequest:
        try:
            body = _decode_in_pieces(raw)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            body = None
        if body is not None:
            body.check()
            return cast(B, body)
    return decode(raw, kind)


def _decode_in_pieces(raw: bytes) -> CompletionRequest | None:
    """Returns the body, not checked yet, or None if its prompt is no long, flat list."""
    skipped = bytes(_Outlines.decode(raw).prompt)
    if len(skipped) < 2 * PIECE or skipped[:1] != b"[" or skipped.find(b"[", 1) >= 0 or b'"' in skipped:
        return None
    before, _, after = raw.partition(skipped)
    body = msgspec.json.decode(before + b"[0]" + after, type=CompletionRequest)
    if body.prompt != [0]:  # the same bytes stood elsewhere, too
        return None
    ids: list[int] = []
    start, end = 1, len(skipped) - 1
    while start < end:
        time.sleep(0)  # lets go of the interpreter
        comma = skipped.find(b",", min(start + PIECE, end))
        stop = comma if comma >= 0 else end
        ids += _Ids.decode(b"[" + skipped[start:stop] + b"]")
        start = stop + 1
    body.prompt = ids  # type: ignore[assignment]
    return body
