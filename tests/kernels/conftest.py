"""The kernel tests of this folder run in Triton's interpreter, on a CPU.

Triton decides at import, for the whole process, whether it interprets. So these tests take a pytest
run of their own, `pytest tests/kernels`, in which `tests/conftest.py` switches the interpreter on;
any other run leaves this folder out.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leaves this folder out where kernels are compiled."""
    return None if os.environ.get("TRITON_INTERPRET") == "1" else True


@pytest.fixture(scope="session", autouse=True)
def interpreter() -> None:
    """Makes the interpreter convert to and from float8 as a GPU does, and saves half its time."""
    # triton must not be imported before it interprets
    import fast_interpreter
    import interpreter_float8

    interpreter_float8.install()
    fast_interpreter.install()
