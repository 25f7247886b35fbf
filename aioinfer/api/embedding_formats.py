"""Encoding of vectors in replies: as lists of numbers, or as base64 of little-endian float32."""

from __future__ import annotations

import base64

import orjson

from aioinfer.ipc.sections import F32

#: Bytes that are encoded at once, a multiple of three: 0.1 ms.
_BASE64_BYTES = 3 * 2**16


def to_base64(vector: F32) -> bytes:
    """Returns the numbers of a vector, float32 [size], or of several one behind the other, as a
    JSON text of base64."""
    data = memoryview(vector.astype("<f4").tobytes())
    starts = range(0, len(data), _BASE64_BYTES)
    # other threads run between two pieces
    pieces = [base64.b64encode(data[start : start + _BASE64_BYTES]) for start in starts]
    return b"".join([b'"', *pieces, b'"'])


def numbers_json(vectors: F32) -> bytes:
    """Returns a vector, float32 [size], or several of them [P, size], as JSON."""
    if vectors.ndim == 1:
        return orjson.dumps(vectors, option=orjson.OPT_SERIALIZE_NUMPY)
    # other threads run between two of them
    rows = [orjson.dumps(each, option=orjson.OPT_SERIALIZE_NUMPY) for each in vectors]
    return b"[" + b",".join(rows) + b"]"
