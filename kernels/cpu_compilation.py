"""Compilation of the kernels for CPUs by numba, with a cache on disk, from which later processes
read the functions.

As a program it compiles all kernels, which `compile_ahead` starts beside a server. Numba is
imported by what compiles alone.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: The modules of kernels, all of which are compiled ahead.
KERNELS = ("cpu_team", "affine_product", "cpu_attention")
#: The modules that all kernels use.
_COMMON = ("cpu_vectors", "cpu_compilation", "cpu_team")


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
    command = [sys.executable, "-m", "aioinfer.kernels.cpu_compilation"]
    silent = subprocess.DEVNULL
    # the pipe ends with this process, and with it the other one
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=silent, stderr=silent)

    def wait() -> None:
        with process:
            process.wait()

    threading.Thread(target=wait, name="compile kernels", daemon=True).start()


def compile_functions(kernel: str, *functions: Callable[..., None]) -> list[Any]:
    """Compiles functions of one address to functions for C, or reads them from the cache folder,
    where an earlier process has compiled them. Of several processes one compiles, and the others
    wait for it.

    Args:
        kernel: the name of the functions' module.
        functions: called from Python, as `.ctypes` of the returned functions, they do not hold the
            GIL.
    """
    import numba
    from numba import cfunc, types

    folder = cache_folder(kernel)
    folder.mkdir(parents=True, exist_ok=True)
    before, numba.config.CACHE_DIR = numba.config.CACHE_DIR, str(folder)
    try:
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed
            signature = types.void(types.int64)
            compiled = [cfunc(signature, cache=True)(function) for function in functions]
            complete_mark(kernel).touch()
    finally:
        numba.config.CACHE_DIR = before
    return compiled


def _end_with_parent() -> None:
    """Ends the process when the one that started it is gone: standard input ends then."""
    os.read(sys.stdin.fileno(), 1)  # unlike a read of sys.stdin it holds no lock at exit
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    for name in KERNELS:
        importlib.import_module(f"aioinfer.kernels.{name}").compile_kernel()
