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
from aioinfer.kernels.cpu_vectors import (
    call,
    fetch_add,
    load_integer,
    run_in_threads,
    store_integer,
)
from numba import cfunc, njit, types


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


@njit
def run_work(task, places):
    """Has the threads of a task call its `work` and waits for them.

    `places` are the offsets, in bytes, of: the number of threads; the addresses of GOMP_parallel
    and of `Compiled.work`; two counters, which begin at zero: of threads that have begun, and of
    work that a thread has taken.
    """
    threads_place, start, body, arrived, taken = places
    store_integer(task + arrived, 0)
    store_integer(task + taken, 0)
    threads = load_integer(task + threads_place)
    if threads > 1:
        run_in_threads(load_integer(task + start), load_integer(task + body), task, threads)
    else:
        call(load_integer(task + body), task)


@njit
def own_scratch(arrived, scratch, stride):
    """Returns the scratch memory of a thread that begins: the next part, of `stride` bytes, of
    `scratch`. The threads that have begun are counted at the address `arrived`."""
    return scratch + fetch_add(arrived, 1) * stride


def _end_with_parent() -> None:
    """Ends the process when the one that started it is gone: standard input ends then."""
    os.read(sys.stdin.fileno(), 1)  # unlike a read of sys.stdin it holds no lock at exit
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    for name in KERNELS:
        importlib.import_module(f"aioinfer.kernels.{name}").compile_kernel()
