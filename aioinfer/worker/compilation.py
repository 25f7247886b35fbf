"""Compilation of Triton kernels: all before the first request, on all cores; none while serving.

The worker compiles its kernels by going through its steps within `compile_only`, and then watches
with a `CompilationWatch` that nothing is compiled any more: a kernel that was left out would stall
every stream for seconds.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from aioinfer.worker.compilers import Compilers, compile_with, hash_compiler

_log = logging.getLogger(__name__)


def prepare_compiler() -> None:
    """Does what Triton does before it compiles its first kernel, unless the fork server has done it
    (`worker.preload`): it hashes its own files and has a C compiler build its driver, two seconds.
    To be called in a thread of its own while the model is made."""
    from triton.runtime import driver

    hash_compiler()
    _ = driver.active


@contextmanager
def compile_only(compilers: Compilers | None = None) -> Iterator[None]:
    """Context in which launched kernels are compiled, in parallel, and not run; at its end all of
    them are compiled and loaded. They are compiled by `compilers`, or in threads.

    Triton can compile asynchronously, but only kernels that are not launched; so launches become
    its `warmup` here. It also has a C compiler make a launcher for each kernel, but at its first
    launch, one after the other: they are made here, too. And while a kernel is being compiled, each
    further launch of it computes the hash by which it is found on disk, in some milliseconds; here
    a launch is recognised by its specialization.
    """
    import triton
    from triton.runtime import driver
    from triton.runtime.errors import OutOfResources
    from triton.runtime.jit import JITFunction

    run = JITFunction.run
    kernels: dict[Any, Any] = {}
    compile_kernel = None if compilers is None else compile_with(compilers)

    def compile_instead(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        binder = self.device_caches[driver.active.get_current_device()][-1]
        _, specialization, given = binder(*args, **options)
        key = id(self), tuple(specialization), str(given)
        if key not in kernels:
            if compile_kernel is not None:
                self.compile = compile_kernel
            kernels[key] = run(self, *args, grid=grid, warmup=True, **options)
        return kernels[key]

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        with triton.AsyncCompileMode(threads):
            JITFunction.run = compile_instead
            try:
                yield
            finally:
                JITFunction.run = run
        compiled = list(threads.map(_make_launcher, kernels.values()))
    for kernel in compiled:
        # threads may get each other's launchers, which are modules of one name in sys.modules
        with contextlib.suppress(OutOfResources):  # which is raised at its launch, too
            kernel._init_handles()


def _make_launcher(kernel: Any) -> Any:
    """Puts the launcher of a compiled kernel into Triton's cache, where it is looked for when the
    kernel is loaded. Returns the kernel."""
    from triton.runtime import driver
    from triton.runtime._async_compile import FutureKernel

    if isinstance(kernel, FutureKernel):
        kernel = kernel.result()
    if kernel.module is None:
        driver.active.launcher_cls(kernel.src, kernel.metadata)
    return kernel


class CompilationWatch:
    """Records the kernels that are compiled from its creation on.

    Attributes:
        names: of these kernels, in order.
    """

    def __init__(self) -> None:
        import triton

        self.names: list[str] = []
        self._knobs = triton.knobs.runtime
        self._knobs.jit_post_compile_hook = self._note

    def stop(self) -> None:
        """Ends the watch."""
        self._knobs.jit_post_compile_hook = None

    def _note(self, *, fn: Any, **details: Any) -> None:
        self.names.append(fn.name)
        _log.warning(
            "the kernel %s was compiled while serving, for %s", fn.name, details.get("repr")
        )
