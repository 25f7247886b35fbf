"""The kernel tests of this folder run in Triton's interpreter, on a CPU.

Triton decides at its import whether it interprets, for the whole process. So the outer pytest
collects only `test_interpreter.py`, which runs the folder in a process of its own, and what has to
be compiled instead; in that process this file sees the variable and collects the rest.
"""

from __future__ import annotations

import os
from pathlib import Path

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
NOT_INTERPRETED = {"test_interpreter.py", "test_gated_product.py", "test_decode_compiled.py"}


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leaves to each of the two processes its files."""
    if collection_path.suffix != ".py":
        return None
    return (collection_path.name in NOT_INTERPRETED) == INTERPRETED or None
