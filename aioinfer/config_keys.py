"""Keys of the configuration: how one is declared, and how a value that is given for it is checked.

A key is a field of a frozen dataclass, declared by `key` with its documentation and its bounds; its
type annotation is the type of its values. `config` declares all keys and reads the file.
"""

from __future__ import annotations

import difflib
import math
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, Field, field
from typing import Any, Literal

from aioinfer.errors import ConfigError


def key(
    doc: str,
    default: Any = MISSING,
    *,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    names: Sequence[str] = (),
    secret: bool = False,
) -> Any:
    """Declares a key of a section.

    Args:
        doc: its documentation, for users.
        default: its value where the file has none; without a default the key must be given.
        minimum, above, maximum: bounds of a number, or of those in a table; `above` excludes the
            bound itself.
        names: those that a table may hold; empty for any.
        secret: the value appears neither in `repr` nor in error messages.
    """
    bounds = {"minimum": minimum, "above": above, "maximum": maximum}
    metadata = {"doc": doc, "secret": secret, "names": names, **bounds}
    if isinstance(default, list | dict):
        return field(default_factory=default.copy, metadata=metadata, repr=not secret)
    return field(default=default, metadata=metadata, repr=not secret)


def hints_of(cls: type) -> dict[str, Any]:
    """Returns the types of a section's keys by name."""
    return typing.get_type_hints(cls)


def type_name(hint: Any) -> str:
    """Returns what messages and the documentation call a type, such as "list of string"."""
    origin = typing.get_origin(hint)
    if origin is Literal:
        return " | ".join(repr(o) for o in typing.get_args(hint))
    if origin in (types.UnionType, typing.Union):
        return " or ".join(type_name(o) for o in typing.get_args(hint) if o is not type(None))
    if origin is list:
        return f"list of {type_name(typing.get_args(hint)[0])}"
    if origin is dict:
        return "table"
    return {int: "integer", float: "number", str: "string", bool: "boolean"}[hint]


def default_text(item: Field[Any]) -> str:
    """Returns a key's default as the documentation shows it, "required" if it has none."""
    if item.default is not MISSING:
        return "" if item.default is None else repr(item.default)
    return repr(item.default_factory()) if item.default_factory is not MISSING else "required"


def check_value(hint: Any, value: Any, dotted: str, metadata: Mapping[str, Any]) -> Any:
    """Returns a key's value if type and bounds are right; raises `ConfigError`, which does not show
    a secret."""
    try:
        value = _typed(hint, value, dotted)
    except ConfigError:
        if not metadata["secret"]:
            raise
        raise ConfigError(f"{dotted} must be {type_name(hint)}") from None
    entries = value.items() if isinstance(value, dict) else ()
    for name, entry in entries:
        if metadata["names"] and name not in metadata["names"]:
            known = [f"{dotted}.{each}" for each in metadata["names"]]
            raise ConfigError(f"unknown key '{dotted}.{name}'{nearest(f'{dotted}.{name}', known)}")
        _check_bounds(f"{dotted}.{name}", entry, metadata)
    _check_bounds(dotted, value, metadata)
    return value


def _typed(hint: Any, value: Any, dotted: str) -> Any:
    """Returns `value` if it is of type `hint` (an int serves as a float), else raises
    `ConfigError`."""
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        options = typing.get_args(hint)
        if value is None and type(None) in options:
            return None
        first, *others = (o for o in options if o is not type(None))
        if not others:
            return _typed(first, value, dotted)
        for kind in (first, *others):
            with suppress(ConfigError):
                return _typed(kind, value, dotted)
    elif origin is Literal:
        if value in typing.get_args(hint):
            return value
        hint_text = nearest(str(value), [str(o) for o in typing.get_args(hint)])
        raise ConfigError(f"{dotted} must be {type_name(hint)}, not {value!r}{hint_text}")
    elif origin is list:
        (item,) = typing.get_args(hint)
        if isinstance(value, list):
            return [_typed(item, v, dotted) for v in value]
    elif origin is dict:
        item = typing.get_args(hint)[1]
        if isinstance(value, Mapping):
            return {name: _typed(item, v, f"{dotted}.{name}") for name, v in value.items()}
    elif hint is Any:
        return value
    elif hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        if math.isfinite(value):
            return float(value)
        raise ConfigError(f"{dotted} must be a finite number, not {value}")
    elif isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value
    raise ConfigError(f"{dotted} must be {type_name(hint)}, not {value!r}")


def _check_bounds(dotted: str, value: Any, bounds: Mapping[str, Any]) -> None:
    """Raises `ConfigError` if a number lies outside of the bounds that its `key` declares."""
    minimum, above, maximum = bounds["minimum"], bounds["above"], bounds["maximum"]
    if isinstance(value, int | float) and (
        (minimum is not None and value < minimum)
        or (above is not None and value <= above)
        or (maximum is not None and value > maximum)
    ):
        low = f"above {above}" if minimum is None else f"at least {minimum}"
        high = "" if maximum is None else f" and at most {maximum}"
        raise ConfigError(f"{dotted} must be {low}{high}, not {value}")


def nearest(wrong: str, known: Iterable[str]) -> str:
    """Returns " (did you mean ...?)" with the known name nearest to `wrong`, or nothing if none is
    near. The last parts of dotted names are compared, first with those of all sections: the section
    may be what is wrong. A name of the same section may be less near."""
    names = list(known)
    section, _, last = wrong.rpartition(".")
    within = [name for name in names if name.rpartition(".")[0] == section]
    for candidates, cutoff in ((names, 0.75), (within, 0.6)):
        by_last: dict[str, str] = {}
        for name in candidates:
            by_last.setdefault(name.rpartition(".")[2], name)
        if found := difflib.get_close_matches(last, by_last, n=1, cutoff=cutoff):
            return f" (did you mean {by_last[found[0]]!r}?)"
    return ""


def parse_address(address: str) -> tuple[str, int]:
    """Returns host and port of `HOST:PORT` or `[HOST]:PORT`. Raises ValueError."""
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{address!r} is not HOST:PORT")
    return host, int(port)
