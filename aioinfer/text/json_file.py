"""Reading the small JSON files of a model folder, for the modules of this package that need their
content."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from aioinfer.errors import ConfigError


def read_json(file: Path) -> dict[str, Any]:
    """Returns the object in a JSON file; a missing file counts as an empty one.

    Raises:
        ConfigError: the file cannot be read, or holds something else.
    """
    try:
        content = json.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file} must hold a JSON object")
    return content
