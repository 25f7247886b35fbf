"""The fork server of worker processes: a process that has imported PyTorch, and forks each worker.

It is `multiprocessing`'s own, which `torch.multiprocessing` hands on. A spawned worker would import
PyTorch by itself, at each start and restart; the fork server does so once, while the API process
imports its own modules. It uses no GPU: CUDA cannot be used in a process that is forked from one
that did.

This module imports no PyTorch, so that the command line can call `start` first of all.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker

# processes that start together would restore each other's substitute
_MAIN_MODULE_LOCK = threading.Lock()


def start() -> None:
    """Starts the fork server, unless it runs, and does not wait for its imports: the start of the
    first worker does.

    It begins with SIGINT blocked, and says itself what that does (see `worker.preload`): a
    traceback of its imports would be all that Ctrl-C shows.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(["aioinfer.worker.preload"])
    resource_tracker.ensure_running()  # which would unblock SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        with without_main_module():
            forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def without_main_module() -> Iterator[None]:
    """Keeps a started process from importing the caller's script again, which may have no `if
    __name__` guard."""
    with _MAIN_MODULE_LOCK:
        actual = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = actual
