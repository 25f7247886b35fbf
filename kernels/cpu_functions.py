"""Compiles kernels for CPUs, with a cache on disk.

As a program it compiles all of them: see `cpu_cache.compile_ahead`.
"""

from __future__ import annotations

import fcntl
import importlib
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import numba
from aioinfer.kernels.cpu_cache import KERNELS, cache_folder, complete_mark
from numba import cfunc, types


def compile_functions(kernel: str, *functions: Callable[..., None]) -> list[Any]:
    """Compiles functions of one address to functions for C, or reads them from the cache folder,
    where an earlier process has compiled them. Of several processes one compiles, and the others
    wait for it.

    Args:
        kernel: the name of the functions' module.
        functions: called from Python, as `.ctypes` of the returned functions, they do not hold the
            GIL.
    """
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
