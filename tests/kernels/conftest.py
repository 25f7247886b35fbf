"""The kernel tests of this folder run in Triton's interpreter, on a CPU.

Triton decides at import, for the whole process, whether it interprets. So these tests take a pytest
run of their own, `pytest tests/kernels`, in which `tests/conftest.py` switches the interpreter on;
any other run leaves this folder out.
"""

from __future__ import annotations

import os
from pathlib import Path


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leaves this folder out where kernels are compiled."""
    return None if os.environ.get("TRITON_INTERPRET") == "1" else True
