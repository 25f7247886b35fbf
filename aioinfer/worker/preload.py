"""What the fork server of worker processes imports before it forks the first one: PyTorch and the
modules of a worker, which take seconds. See `executor.fork_server`; nothing else imports this
module, since its import changes the process.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import threading

from aioinfer.worker.compilers import may_compile, prepare_triton
from aioinfer.worker.process import name_process, set_library_defaults

gc.disable()  # as in `cli.serve`

# A service manager sends SIGTERM to all processes of a service. Workers have to outlive it (see
# `worker.process.main`), and the parent learns from this process how they ended.
signal.signal(signal.SIGTERM, signal.SIG_IGN)
# Ctrl-C, which a terminal sends to all processes, is for the parent. It has been blocked so far
# (see `executor.fork_server`). The parent ends without workers; so this process ends, too, without
# a word, and not after its imports.
signal.signal(signal.SIGINT, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])

name_process("aioinfer-fork")
set_library_defaults()

preparing = threading.Thread(target=prepare_triton)
if may_compile():
    preparing.start()

import aioinfer.worker.worker  # noqa: E402, F401

if may_compile():
    import triton.compiler  # noqa: F401

    preparing.join()  # threads end with a fork

gc.freeze()  # nor need workers look at it
gc.enable()

# This process ends with its parent, and at once: to take PyTorch apart would need a second. What is
# registered last runs first, so that no handler of an imported module runs.
atexit.register(os._exit, 0)

signal.signal(signal.SIGINT, signal.SIG_IGN)  # from now on the parent may have workers
