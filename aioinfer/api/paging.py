"""Lists in OpenAI's pages: `limit`, `after` and `order` of a query."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from msgspec import Struct

from aioinfer.api.errors import shorten
from aioinfer.errors import RequestError


class Listed(Protocol):
    """An item of a list."""

    id: str


class Page(Struct, kw_only=True):
    """A part of a list."""

    object: Literal["list"] = "list"
    data: list[Any]
    first_id: str | None
    last_id: str | None
    has_more: bool


def page_of(
    items: Sequence[Listed] | Sequence[dict[str, Any]],
    query: Mapping[str, str],
    *,
    max_limit: int,
    default_limit: int = 100,
    default_order: Literal["asc", "desc"] = "desc",
) -> Page:
    """Returns the page of `items`, the newest first, that a query asks for: at most `max_limit`.
    Items are structs with an `id`, or JSON with one.

    Raises `RequestError` naming the parameter.
    """
    order = query.get("order", default_order)
    if order not in ("asc", "desc"):
        raise RequestError("order must be 'asc' or 'desc'", param="order")
    text = query.get("limit", str(min(max_limit, default_limit)))
    if not (text.isascii() and text.isdecimal() and len(text) < 9 and 1 <= int(text) <= max_limit):
        raise RequestError(
            f"limit must be an integer from 1 to {max_limit}, not {shorten(text)!r}", param="limit"
        )
    ordered = list(items if order == "desc" else reversed(items))
    ids = [item["id"] if isinstance(item, dict) else item.id for item in ordered]
    if (after := query.get("after")) is not None:
        if after not in ids:
            raise RequestError("after is not the id of one in this list", param="after")
        first = ids.index(after) + 1
        ids, ordered = ids[first:], ordered[first:]
    ids, page = ids[: int(text)], ordered[: int(text)]
    return Page(
        data=page,
        first_id=ids[0] if ids else None,
        last_id=ids[-1] if ids else None,
        has_more=len(ordered) > len(page),
    )
