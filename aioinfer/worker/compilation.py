"""Compilation of Triton kernels: all before the first request, on all cores; none while serving.

The worker compiles its kernels by going through its steps within `compile_only`, and then watches
with a `CompilationWatch` that nothing is compiled any more: a kernel that was left out would stall
every stream for seconds.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import triton
from triton.runtime import driver
from triton.runtime._async_compile import FutureKernel
from triton.runtime.jit import JITFunction

_log = logging.getLogger(__name__)


@contextmanager
def compile_only() -> Iterator[None]:
    """Context in which launched kernels are compiled, in parallel, and not run; at its end all of
    them are compiled.

    Triton can compile asynchronously, but only kernels that are not launched; so launches become
    its `warmup` here. It also has a C compiler make a launcher for each kernel, but at its first
    launch, one after the other: they are made here, too.
    """
    run = JITFunction.run
    kernels: dict[int, Any] = {}

    def compile_instead(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        kernels[id(kernel)] = kernel
        return kernel

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        with triton.AsyncCompileMode(threads):
            JITFunction.run = compile_instead
            try:
                yield
            finally:
                JITFunction.run = run
        list(threads.map(_make_launcher, kernels.values()))


def _make_launcher(kernel: Any) -> None:
    """Puts the launcher of a compiled kernel into Triton's cache, where the first launch will look
    for it."""
    if isinstance(kernel, FutureKernel):
        kernel = kernel.result()
    if kernel is not None and kernel.module is None:
        driver.active.launcher_cls(kernel.src, kernel.metadata)


class CompilationWatch:
    """Records the kernels that are compiled from its creation on.

    Attributes:
        names: of these kernels, in order.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        triton.knobs.runtime.jit_post_compile_hook = self._note

    def stop(self) -> None:
        """Ends the watch."""
        triton.knobs.runtime.jit_post_compile_hook = None

    def _note(self, *, fn: Any, **details: Any) -> None:
        self.names.append(fn.name)
        _log.warning(
            "the kernel %s was compiled while serving, for %s", fn.name, details.get("repr")
        )
