"""Runs the other tests of this folder under Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.timeout(600)
def test_kernels_under_the_interpreter() -> None:
    folder = Path(__file__).parent
    # The interpreter computes with numpy, which warns where a kernel means NaN or infinity, and of
    # the interpreter's own ways.
    quiet = ["-W", "ignore::RuntimeWarning", "-W", "ignore::DeprecationWarning"]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        *quiet,
        str(folder),
    ]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command,
        cwd=folder.parent.parent,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
