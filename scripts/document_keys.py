"""Writes docs/configuration.md from the keys that aioinfer/config.py declares (`make docs`).

python scripts/document_keys.py
"""

from __future__ import annotations

import ast
import json
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

from aioinfer.config import Config, describe_keys

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"

HEAD = """# Configuration

<!-- Made from aioinfer/config.py by `make docs`; a test keeps it up to date. -->

A server is configured by one TOML file, `python -m aioinfer --config FILE`, and by single values
that override it, `--set section.key=value` (repeatable). `LLM(..., settings={"section.key":
value})` takes the same keys. `configs/` holds examples. An unknown key, a wrong type or a value out
of bounds is an error that names the key. Only `model.path` has to be given. aioinfer reads no
environment variables of its own.
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
            _first_line(hints[section.name].__doc__),
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


def _first_line(doc: str | None) -> str:
    return (doc or "").partition("\n")[0]


def main() -> None:
    """Writes the page."""
    PAGE.write_text(render(), "utf-8")


if __name__ == "__main__":
    main()
