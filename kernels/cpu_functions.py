"""Compiles kernels for CPUs, with a cache on disk, and runs them in the threads of OpenMP."""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numba
from aioinfer.kernels import cpu_vectors
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


def compile_functions(run: Callable[..., None], work: Callable[..., None], file: str) -> Compiled:
    """Compiles two functions of the address of a task, or reads from the cache folder what an
    earlier process compiled.

    Args:
        run: computes a task, in threads that each call `work`.
        file: the module of both. The cache has a folder for each version of the sources, since
            numba would miss changes of what the two call.
    """
    sources = (Path(module).read_bytes() for module in (file, cpu_vectors.__file__))
    key = hashlib.sha256(b"".join(sources)).hexdigest()[:12]
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "aioinfer"
    before, numba.config.CACHE_DIR = numba.config.CACHE_DIR, str(root / f"numba-{key}")
    try:
        signature = types.void(types.int64)
        compiled_work = cfunc(signature, cache=True)(work)
        compiled_run = cfunc(signature, cache=True)(run)
    finally:
        numba.config.CACHE_DIR = before
    start = getattr(ctypes.CDLL(None), "GOMP_parallel", None)
    address = 0 if start is None else ctypes.cast(start, ctypes.c_void_p).value or 0
    return Compiled(compiled_run.ctypes, compiled_work.address, address)
