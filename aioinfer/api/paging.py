"""Lists in OpenAI's pages: `limit`, `after` and `order` of a query."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from aioinfer.api.errors import shorten
from aioinfer.errors import RequestError


class Listed(Protocol):
    """What a list holds."""

    id: str


def page_of(items: Sequence[Listed], query: Mapping[str, str], *, max_limit: int) -> dict[str, Any]:
    """Returns the page of `items`, the newest first, that a query asks for: at most `max_limit`.

    Raises `RequestError` naming the parameter.
    """
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise RequestError("order must be 'asc' or 'desc'", param="order")
    text = query.get("limit", str(min(max_limit, 100)))
    if not (text.isascii() and text.isdecimal() and len(text) < 9 and 1 <= int(text) <= max_limit):
        raise RequestError(
            f"limit must be an integer from 1 to {max_limit}, not {shorten(text)!r}", param="limit"
        )
    ordered = list(items if order == "desc" else reversed(items))
    if (after := query.get("after")) is not None:
        ids = [item.id for item in ordered]
        if after not in ids:
            raise RequestError("after is not the id of one in this list", param="after")
        ordered = ordered[ids.index(after) + 1 :]
    page = ordered[: int(text)]
    return {
        "object": "list",
        "data": [msgspec.to_builtins(item) for item in page],
        "first_id": page[0].id if page else None,
        "last_id": page[-1].id if page else None,
        "has_more": len(ordered) > len(page),
    }
