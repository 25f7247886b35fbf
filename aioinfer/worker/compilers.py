"""Processes in which a worker compiles Triton kernels: Triton's front end is written in Python, so
that threads would wait for each other. They also make the launchers, for each of which Triton runs
a C compiler: one for all kernels whose arguments have the same types.

A process that has used a GPU cannot be forked. So a worker forks one process before it does, and
that one forks the others when the first kernel is to be compiled: a start that finds all kernels on
disk has no use for them.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import queue
import re
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from aioinfer.config import ParallelConfig

#: More would take memory for little: a start compiles some 100 kernels.
_MAX_PROCESSES = 32
#: The type of a tensor descriptor: the elements' type, the block and its layout.
_DESCRIPTOR = re.compile(r"tensordesc<(\w+)\[([\d, ]*)\][^>]*>")


class Compilers:
    """The processes of one worker; to be made before the worker uses its GPU.

    Args:
        count: of kernels that are compiled at a time, such as the number of cores; less where that
            would take much memory.
    """

    def __init__(self, count: int):
        pipes = [Pipe() for _ in range(min(count, _MAX_PROCESSES))]
        self._pid = os.fork()
        if self._pid == 0:
            _wait_and_fork([far for _, far in pipes])
        _send_functions_by_name()
        self._near = [near for near, _ in pipes]
        self._idle: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        for near, far in pipes:
            far.close()
            self._idle.put(near)

    @classmethod
    def of_rank(cls, parallel: ParallelConfig) -> Compilers | None:
        """Returns the processes of a rank, which has its share of the cores; None where it compiles
        nothing."""
        if parallel.device_type == "cpu" or not may_compile():
            return None
        return cls(max(1, len(os.sched_getaffinity(0)) // parallel.world_size))

    def compile(
        self, source: Any, target: Any, options: Mapping[str, Any], *, makes_launcher: bool = False
    ) -> bool:
        """Has a kernel compiled, which Triton finds on disk afterwards. To be called from as many
        threads as kernels are to be compiled at a time.

        Args:
            source: Triton's `ASTSource`.
            target: the `GPUTarget`.
            options: of Triton's `compile`.
            makes_launcher: whether its launcher is made, too.

        Returns:
            Whether that succeeded.
        """
        connection = self._idle.get()
        try:
            connection.send((source, target, dict(options), makes_launcher))
            return bool(connection.recv())
        except Exception:  # the kernel cannot be sent, or the process has ended
            return False
        finally:
            self._idle.put(connection)

    def close(self) -> None:
        """Ends the processes."""
        for connection in self._near:
            connection.close()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)


def may_compile() -> bool:
    """Whether this host has Triton, and an NVIDIA driver with a GPU; found out without CUDA, which
    must not be used before a process is forked."""
    return Path("/dev/nvidiactl").exists() and importlib.util.find_spec("triton") is not None


def prepare_triton() -> None:
    """Has Triton do, without a GPU, what it does before it compiles its first kernel, half a second
    each: it hashes its own files, and builds the C module of CUDA calls if that is not on disk. A
    process that is forked knows the hash."""
    hash_compiler()
    with contextlib.suppress(Exception):  # the worker meets the error
        from triton.backends.nvidia.driver import CudaUtils

        CudaUtils()


def hash_compiler() -> None:
    """Has Triton hash its own files, which it does also before it looks for a kernel on disk."""
    with contextlib.suppress(ImportError):  # elsewhere in other versions, which do it later
        from triton.runtime.cache import triton_key

        triton_key()


def compile_with(compilers: Compilers) -> Callable[..., Any]:
    """Returns a substitute for Triton's `compile` that has other processes compile a kernel which
    is not on disk yet."""
    from triton.compiler.compiler import compile as compile_here

    made = set[str]()  # the types of arguments that launchers were made for

    def compile_kernel(source: Any, target: Any, options: Any, **more: Any) -> Any:
        if not _is_on_disk(source, target, options, more.get("_env_vars")):
            types = _launcher_types(source.signature)
            is_new = types not in made
            made.add(types)
            compilers.compile(source, target, options, makes_launcher=is_new)
        return compile_here(source, target=target, options=options, **more)

    return compile_kernel


def _launcher_types(signature: Mapping[Any, Any]) -> str:
    """Returns the types of a kernel's arguments, as far as its launcher depends on them: blocks of
    tensor descriptors differ by their dimensions alone."""
    types = str(list(signature.values()))
    return _DESCRIPTOR.sub(lambda found: f"{found[1]} {found[2].count(',') + 1}", types)


def _is_on_disk(source: Any, target: Any, options: Mapping[str, Any], variables: Any) -> bool:
    """Whether Triton finds the kernel in its cache; False in versions that keep it otherwise."""
    try:
        from triton.compiler.compiler import make_backend
        from triton.runtime.cache import get_cache_key, get_cache_manager

        backend = make_backend(target)
        parsed = backend.parse_options({**options, **source.parse_options()})
        key = get_cache_key(source, backend, parsed, env_vars=variables)
        manager = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
        return bool(manager.get_group(f"{source.name[:150]}.json"))
    except (ImportError, AttributeError, TypeError):
        return False


# -------------------------------------------------------------------- in the processes


def _wait_and_fork(connections: Sequence[Connection]) -> None:
    """The body of the first process: forks one for each connection as soon as anything is sent, and
    ends after them, or when the worker closes the connections."""
    try:
        _keep_open(connections)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        wait(connections)
        if not any(map(_has_job, connections)):
            return
        for connection in connections:
            if os.fork() == 0:
                _keep_open([connection])
                _serve(connection)
        for connection in connections:  # first: else the worker would not notice that one has ended
            connection.close()
        for _ in connections:
            os.wait()
    finally:
        os._exit(0)


def _has_job(connection: Connection) -> bool:
    """Whether there is something to receive."""
    with socket.socket(fileno=os.dup(connection.fileno())) as peeked:
        return connection.poll() and bool(peeked.recv(1, socket.MSG_PEEK))


def _keep_open(connections: Sequence[Connection]) -> None:
    """Closes all files but these and the standard ones: the worker's own would stay open when it
    has ended."""
    kept = sorted(connection.fileno() for connection in connections)
    for start, end in zip([2, *kept], [*kept, os.sysconf("SC_OPEN_MAX")], strict=True):
        os.closerange(start + 1, end)


def _serve(connection: Connection) -> NoReturn:
    """Compiles what comes through the connection until it is closed."""
    try:
        while True:
            try:
                source, target, options, makes_launcher = connection.recv()
                from triton.compiler.compiler import compile as compile_kernel

                kernel = compile_kernel(source, target=target, options=options)
                if makes_launcher:
                    _make_launcher(kernel)
                connection.send(True)
            except EOFError:
                break
            except Exception:  # the worker compiles it itself, and reports what is wrong
                connection.send(False)
    finally:
        os._exit(0)


def _make_launcher(kernel: Any) -> None:
    """Puts the launcher of a kernel into Triton's cache, without using a GPU; where that cannot be,
    the worker makes it."""
    with contextlib.suppress(Exception):
        import triton
        from triton.backends.nvidia.driver import CudaLauncher

        triton.knobs.build.impl = _build_launcher
        CudaLauncher(kernel.src, kernel.metadata)


def _build_launcher(*arguments: Any) -> str:
    """Builds a launcher as Triton does, but not optimized, in half the time: it only takes its
    arguments apart, by functions of Python. Returns the built file's path."""
    import triton
    from triton.runtime.build import _build

    with triton.knobs.build.scope():
        triton.knobs.build.impl = None
        return str(_build(*arguments, ["-O0"]))  # a C compiler takes the last of such options


def _send_functions_by_name() -> None:
    """Has connections send Triton's functions by name."""
    from triton.experimental.gluon._runtime import GluonJITFunction
    from triton.runtime.jit import JITFunction

    for kind in (JITFunction, GluonJITFunction):
        ForkingPickler.register(kind, _by_name)


def _by_name(function: Any) -> Any:
    module, name = function.fn.__module__, function.fn.__qualname__
    if _function_named(module, name) is not function:
        raise TypeError(f"{name} is not a function of {module}")
    return _function_named, (module, name)


def _function_named(module: str, name: str) -> Any:
    """Returns the `JITFunction` of a module's function, which decorators may be around."""
    from triton.runtime.jit import JITFunction

    found = sys.modules.get(module) or importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    while not isinstance(found, JITFunction):
        found = found.fn
    return found
