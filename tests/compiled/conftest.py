"""The tests of this folder compile kernels for Hopper GPUs, without a GPU; an interpreter compiles
nothing."""

from __future__ import annotations

import os
from pathlib import Path


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leaves this folder out where kernels are interpreted."""
    return True if os.environ.get("TRITON_INTERPRET") == "1" else None
