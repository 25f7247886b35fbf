"""The cache folder of compiled CPU kernels, and their compilation ahead of use. Imports no
numba."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import threading
from pathlib import Path

#: The modules of kernels, all of which are compiled ahead.
KERNELS = ("cpu_team", "affine_product", "cpu_attention")
#: The modules that all kernels use.
_COMMON = ("cpu_vectors", "cpu_functions", "cpu_team")


def cache_folder(kernel: str) -> Path:
    """Returns the folder of a module's compiled functions, another for each version of the sources:
    numba would miss changes of the functions that a function calls in other modules."""
    here = Path(__file__).parent
    sources = (here.joinpath(f"{name}.py").read_bytes() for name in (kernel, *_COMMON))
    key = hashlib.sha256(b"".join(sources)).hexdigest()[:12]
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "aioinfer"
    return root / f"{kernel}-{key}"


def complete_mark(kernel: str) -> Path:
    """Returns the file that is there once a module has been compiled."""
    return cache_folder(kernel) / "complete"


def compile_ahead() -> None:
    """Compiles the kernels in a process beside this one, which takes seconds, unless they are
    compiled already or numba is missing. A caller that needs them meanwhile waits for it
    (`compile_functions`)."""
    if importlib.util.find_spec("numba") is None:
        return
    if all(complete_mark(kernel).exists() for kernel in KERNELS):
        return
    command = [sys.executable, "-m", "aioinfer.kernels.cpu_functions"]
    silent = subprocess.DEVNULL
    # the pipe ends with this process, and with it the other one
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=silent, stderr=silent)

    def wait() -> None:
        with process:
            process.wait()

    threading.Thread(target=wait, name="compile kernels", daemon=True).start()
