"""Ctrl-C while modules are imported."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ended_by_interrupts() -> Iterator[None]:
    """Has SIGINT itself end the process within the block, in place of a KeyboardInterrupt; of the
    main thread. It has no effect where SIGINT is ignored or handled.

    Imports do not bear a KeyboardInterrupt: it shows a traceback of them, and one in a callback of
    Python's import system is forgotten, or leaves the lock held for which all later imports wait.
    """
    raises = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if raises:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        if raises:
            signal.signal(signal.SIGINT, signal.default_int_handler)
