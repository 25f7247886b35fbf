"""Compiles kernels for CPUs, with a cache on disk, and runs them in the threads of OpenMP.

As a program it compiles all of them: see `cpu_cache.compile_ahead`.
"""

from __future__ import annotations

import ctypes
import fcntl
import importlib
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numba
from aioinfer.kernels.cpu_cache import KERNELS, cache_folder, complete_mark
from numba import cfunc, types


class Compiled(NamedTuple):
    """The functions of a kernel.

    Attributes:
        run: takes the address of a task and computes it; does not hold the GIL.
        work: the address of what each thread calls with that address.
        start: the address of GOMP_parallel, or 0 if torch brings no such threads.
    """

    run: Any
    work: int
    start: int


def compile_functions(run: Callable[..., None], work: Callable[..., None], kernel: str) -> Compiled:
    """Compiles two functions of the address of a task, or reads from the cache folder what an
    earlier process compiled. Of several processes one compiles, and the others wait for it.

    Args:
        run: computes a task, in threads that each call `work`.
        kernel: the name of the module of both.
    """
    folder = cache_folder(kernel)
    folder.mkdir(parents=True, exist_ok=True)
    before, numba.config.CACHE_DIR = numba.config.CACHE_DIR, str(folder)
    try:
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed
            signature = types.void(types.int64)
            compiled_work = cfunc(signature, cache=True)(work)
            compiled_run = cfunc(signature, cache=True)(run)
            complete_mark(kernel).touch()
    finally:
        numba.config.CACHE_DIR = before
    start = getattr(ctypes.CDLL(None), "GOMP_parallel", None)
    address = 0 if start is None else ctypes.cast(start, ctypes.c_void_p).value or 0
    return Compiled(compiled_run.ctypes, compiled_work.address, address)


def _end_with_parent() -> None:
    """Ends the process when the one that started it is gone: standard input ends then."""
    os.read(sys.stdin.fileno(), 1)  # unlike a read of sys.stdin it holds no lock at exit
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    for name in KERNELS:
        importlib.import_module(f"aioinfer.kernels.{name}").compile_kernel()
