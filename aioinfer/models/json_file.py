"""Reading the small JSON files of a model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from aioinfer.errors import ConfigError


def read_json(file: Path, *, missing_ok: bool = False) -> dict[str, Any]:
    """Returns the object in a JSON file; with `missing_ok` a missing file counts as an empty one.

    Raises:
        ConfigError: the file cannot be read, or holds something else.
    """
    try:
        content = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        if missing_ok and isinstance(error, FileNotFoundError):
            return {}
        raise ConfigError(f"{file} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file} must hold a JSON object")
    return content
