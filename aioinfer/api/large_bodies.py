"""Large bodies: their values are counted before they are decoded.

The decoder of JSON does not let other threads run while it works, nor does Python while it frees
the decoded values. That takes 20 ms for the longest text that a body may hold, and up to a second
for millions of small values: for so long the event loop would stand still. So a large body may hold
many values only where a request needs them, as token ids. `read_body` uses this, in a thread, for
bodies that are too large to be decoded on the event loop.

Values are counted by `value_count`, up to the first error in the JSON: the decoder gets no further.
"""

from __future__ import annotations

from functools import cache
from typing import TypeVar

import msgspec

from aioinfer.api.decoding import as_request_error, count_values
from aioinfer.api.llama_cpp.body import LlamaCompletion
from aioinfer.api.openai.pooling_bodies import ClassifyRequest, EmbeddingRequest, PoolingRequest
from aioinfer.api.protocol import (
    MAX_PROMPTS,
    MAX_VALUES,
    Body,
    CompletionRequest,
    DetokenizeRequest,
    decode,
)
from aioinfer.errors import RequestError

#: Token ids in one body: they are decoded in 25 ms.
MAX_TOKEN_IDS = 2**19

B = TypeVar("B", bound=Body)

#: The fields that hold token ids, by the types of their bodies.
_TOKEN_FIELDS: dict[type[Body], str] = {
    CompletionRequest: "prompt",
    LlamaCompletion: "prompt",
    DetokenizeRequest: "tokens",
    EmbeddingRequest: "input",
    PoolingRequest: "input",
    ClassifyRequest: "input",
}


def decode_large(raw: bytes, kind: type[B], *, ignores_unknown: bool = False) -> B:
    """Decodes a body as `protocol.decode` does.

    Raises `RequestError`, also for more than `MAX_VALUES` values in lists and objects, token ids
    not counted, and for more than `MAX_TOKEN_IDS` of these.
    """
    num_values = count_values(raw)
    if num_values > MAX_VALUES:
        _check_fields(raw, kind, num_values)
    return decode(raw, kind, ignores_unknown=ignores_unknown)


def _check_fields(raw: bytes, kind: type[Body], num_values: int) -> None:
    """Raises `RequestError` naming the field with the most values, unless enough of the body's
    `num_values` are token ids."""
    try:
        members = msgspec.json.decode(raw, type=_outline(kind))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise as_request_error(error, raw) from error
    given = {name: bytes(value) for name, value in msgspec.structs.asdict(members).items()}
    counts = {name: count_values(value) for name, value in given.items()}
    field = _TOKEN_FIELDS.get(kind, "")
    if field and b'"' not in given[field]:
        if given[field].count(b"[") > MAX_PROMPTS + 1:
            raise _too_many(field, MAX_PROMPTS, "prompts")
        num_ids = counts.pop(field)
        if num_ids > MAX_TOKEN_IDS:
            raise _too_many(field, MAX_TOKEN_IDS, "token ids")
        num_values -= num_ids
    if num_values > MAX_VALUES:
        most = max(counts, key=counts.__getitem__)
        raise _too_many(most if counts[most] else "the body", MAX_VALUES, "values")


@cache
def _outline(kind: type[Body]) -> type[msgspec.Struct]:
    """Returns a type of objects with the fields of a body, whose values are not decoded."""
    fields = [
        (field.encode_name, msgspec.Raw, msgspec.Raw()) for field in msgspec.structs.fields(kind)
    ]
    return msgspec.defstruct(f"{kind.__name__}Outline", fields)


def _too_many(name: str, limit: int, what: str) -> RequestError:
    return RequestError(f"{name} may hold at most {limit} {what}", param=name)
