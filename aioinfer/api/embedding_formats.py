"""Encoding of vectors in replies: as lists of numbers, as base64, or as bytes, in a data type and
an order of bytes (vLLM's `embed_dtype` and `endianness`)."""

from __future__ import annotations

import base64
import sys
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import orjson
import torch
from aiohttp import web

from aioinfer.errors import RequestError
from aioinfer.ipc.sections import F32

EmbedDtype = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
Endianness = Literal["native", "little", "big"]
EncodingFormat = Literal["float", "base64", "bytes", "bytes_only"]

_TORCH_DTYPES = {
    "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
#: Bytes that are encoded at once, a multiple of three: 0.1 ms.
_BASE64_BYTES = 3 * 2**16
#: Bytes of the header that says where each vector is: clients bound the size of headers.
_MAX_METADATA = 6 * 1024


def to_bytes(vector: F32, dtype: EmbedDtype | None, endianness: Endianness | None) -> bytes:
    """Returns the numbers of a vector, float32 [size], or of several one behind the other, in a
    data type and an order of bytes; little-endian float32 where these are missing."""
    is_big = endianness == "big" or (endianness == "native" and sys.byteorder == "big")
    order = ">" if is_big else "<"
    if dtype in (None, "float32", "float16"):
        return vector.astype(f"{order}f{2 if dtype == 'float16' else 4}").tobytes()
    converted = torch.from_numpy(np.ascontiguousarray(vector)).to(_TORCH_DTYPES[str(dtype)])
    if converted.element_size() == 1:
        return converted.view(torch.uint8).numpy().tobytes()
    return converted.view(torch.int16).numpy().astype(f"{order}i2").tobytes()


def to_base64(vector: F32, dtype: EmbedDtype | None, endianness: Endianness | None) -> bytes:
    """Returns the same as a JSON text of base64."""
    data = memoryview(to_bytes(vector, dtype, endianness))
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


def bytes_response(
    head: dict[str, Any],
    vectors: Sequence[F32],
    dtype: EmbedDtype | None,
    endianness: Endianness | None,
    *,
    has_metadata: bool,
) -> web.Response:
    """Returns the vectors one behind the other, and the fields of a JSON reply about them in the
    header `metadata`.

    Raises `RequestError` where that header would be too long.
    """
    parts = [to_bytes(vector, dtype, endianness) for vector in vectors]
    headers = {}
    if has_metadata:
        items, start = [], 0
        for index, (part, vector) in enumerate(zip(parts, vectors, strict=True)):
            items.append(
                {
                    "index": index,
                    "embed_dtype": dtype or "float32",
                    "endianness": endianness or "little",
                    "start": start,
                    "end": start + len(part),
                    "shape": list(vector.shape),
                }
            )
            start += len(part)
        headers["metadata"] = orjson.dumps(head | {"data": items}).decode()
        if len(headers["metadata"]) > _MAX_METADATA:
            raise RequestError(
                "the header with the places of so many vectors would be too long: use the "
                "encoding_format bytes_only",
                param="encoding_format",
            )
    return web.Response(
        body=b"".join(parts), headers=headers, content_type="application/octet-stream"
    )
