"""Tool calls as JSON objects: `{"name": ..., "arguments": ...}`, which several families write."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Container

from aioinfer.text.formats.draft import Draft
from aioinfer.text.formats.reader import Emit, Reader, Steps, ignore

_ARGUMENTS = ("arguments", "parameters")
#: Members that a call may have beside these; an object with any other before its name is none.
_OTHERS = ("type", "id")


def read_call(
    reader: Reader, draft: Draft, *, names: Container[str] | None = None, stop: str = ""
) -> Steps[bool]:
    """Reads a call as an object.

    Args:
        reader, draft: where the text comes from and where the call goes.
        names: the functions that may be called; None: any.
        stop: see `Reader.value`.

    Returns:
        Whether it was a call. If not, the text read so far is in `reader.record`, which the caller
        has set to an empty list.
    """
    named = False
    held: list[str] = []  # arguments that come before the name

    def emit(text: str) -> None:
        (draft.arguments if named else held.append)(text)

    has_arguments = False
    if (yield from reader.peek()) != "{":
        return False
    reader.skip()
    while True:
        yield from reader.space()
        following = yield from reader.peek()
        if following in ("}", ","):
            reader.skip()
            if following == "}":
                break
            continue
        key = yield from reader.string()
        if key is None or not (named or key in ("name", *_ARGUMENTS, *_OTHERS)):
            return named
        yield from reader.space()
        if not (yield from reader.comes(":")):
            return named
        yield from reader.space()
        if key == "name" and not named:
            name = yield from reader.string()
            if not name or (names is not None and name not in names):
                return False
            named, reader.record = True, None
            draft.begin_call(name)
            draft.arguments("".join(held))
            if has_arguments:
                draft.end_call()
        elif key in _ARGUMENTS and not has_arguments:
            has_arguments = True
            if not (yield from read_arguments(reader, emit, stop)):
                return named
            if named:
                draft.end_call()
        elif not (yield from reader.value(ignore, stop)):
            return named
    if named and not has_arguments:
        draft.arguments("{}")
        draft.end_call()
    return named


def read_arguments(reader: Reader, emit: Emit, stop: str = "") -> Steps[bool]:
    """Reads arguments: JSON of an object, or a string that holds it. `emit` gets the JSON of the
    object; returns whether it is complete."""
    if (yield from reader.peek()) != '"':
        return (yield from reader.value(emit, stop))
    parts: list[str] = []
    complete = yield from reader.value(parts.append, stop)
    text = "".join(parts)
    with contextlib.suppress(ValueError):
        text = json.loads(text)
    emit(text)
    return complete
