"""Writes docs/configuration.md from the keys that aioinfer/config.py declares, and the tables of
fields in docs/api.md from the bodies of requests and `api.fields` (`make docs`).

python scripts/document_keys.py
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import msgspec

from aioinfer.api.decoding import Body
from aioinfer.api.fields import NO_EFFECT_BY_REASON, REFUSED_BY_ORIGIN
from aioinfer.api.protocol import Ignored
from aioinfer.api.routes import ROUTES
from aioinfer.config import Config, describe_keys

_DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = _DOCS / "configuration.md"
API_PAGE = _DOCS / "api.md"
#: The marks before and behind the tables of fields in docs/api.md.
_BEGIN = "<!-- Made from the bodies and aioinfer/api/fields.py by `make docs`. -->\n"
_END = "<!-- The end of what is made. -->\n"

HEAD = """# Configuration

<!-- Made from aioinfer/config.py by `make docs`; a test keeps it up to date. -->

A server is configured by one TOML file, `python -m aioinfer --config FILE`, and by single values
that override it, `--set section.key=value` (repeatable), or `section.key.name=value` for an entry
of a table. `LLM(..., settings={"section.key": value})` takes the same keys. `configs/` holds
examples. An unknown key, a wrong type or a value out of bounds is an error that names the key. Only
`model.path` has to be given. aioinfer reads no environment variables of its own.

A server of several models has a table `[[models]]` for each, with these sections again and the keys
in which the model differs from the file: [models.md](models.md).
"""


def render() -> str:
    """Returns the page: a table for each section."""
    lines = [HEAD]
    keys = list(describe_keys())
    hints = get_type_hints(Config)
    for section in fields(Config):
        lines += [
            f"## [{section.name}]",
            "",
            _first_paragraph(hints[section.name].__doc__),
            "",
            "| key | type | default | |",
            "|---|---|---|---|",
        ]
        for dotted, kind, default, doc in keys:
            if dotted.startswith(f"{section.name}."):
                cells = [
                    f"`{dotted.partition('.')[2]}`",
                    kind.replace("'", '"'),
                    _in_toml(default),
                    doc,
                ]
                lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)


def _in_toml(default: str) -> str:
    """Returns a default, which `describe_keys` gives in Python's notation, in TOML's; for these
    types that is JSON's."""
    return default if default in ("", "required") else f"`{json.dumps(ast.literal_eval(default))}`"


def render_fields(page: str) -> str:
    """Returns docs/api.md, which is `page` now, with the tables of fields as they should be."""
    before, _, rest = page.partition(_BEGIN)
    _, _, behind = rest.partition(_END)
    lines = ["", "| endpoint | supported fields |", "|---|---|"]
    lines += [f"| {_names(paths)} | {_names(found)} |" for found, paths in _by_fields().items()]
    lines += ["", "| refused, of | fields, and values that are accepted beside null |", "|---|---|"]
    for origin, refused in REFUSED_BY_ORIGIN.items():
        cells = [
            f"`{name}`" + "".join(f" ({_joined(values)})" for values in [neutral] if values)
            for name, neutral in refused.items()
        ]
        lines.append(f"| {origin} | {', '.join(cells)} |")
    lines += ["", "| accepted without effect, because | fields |", "|---|---|"]
    lines += [f"| {why} | {_names(names)} |" for why, names in NO_EFFECT_BY_REASON.items()]
    return before + _BEGIN + "\n".join(lines) + "\n\n" + _END + behind


def supported_fields(kind: type[msgspec.Struct]) -> Iterator[str]:
    """Yields the fields of a body that have an effect."""
    hints = get_type_hints(kind, include_extras=True)
    for field in msgspec.structs.fields(kind):
        if hints[field.name] != Ignored:
            yield field.encode_name


def _by_fields() -> dict[tuple[str, ...], list[str]]:
    """Returns the paths of endpoints by the fields that they support."""
    found: dict[tuple[str, ...], list[str]] = {}
    for route in ROUTES:
        if route.body is not None and issubclass(route.body, Body):
            found.setdefault(tuple(supported_fields(route.body)), []).append(route.path)
    return found


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _joined(values: Iterable[object]) -> str:
    return ", ".join(f"`{json.dumps(value)}`" for value in values)


def _first_paragraph(doc: str | None) -> str:
    return inspect.cleandoc(doc or "").partition("\n\n")[0]


def main() -> None:
    """Writes both pages."""
    PAGE.write_text(render(), "utf-8")
    API_PAGE.write_text(render_fields(API_PAGE.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()  # --help writes nothing
    main()
