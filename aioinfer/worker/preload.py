"""What the fork server of worker processes imports before it forks the first one: PyTorch and the
modules of a worker, which take seconds. See `executor.fork_server`; nothing else imports this
module, since its import changes the process.
"""

from __future__ import annotations

import atexit
import os
import signal

#: Turns of a waiting thread of OpenMP, some 0.1 ms; its own default is 300 000.
_SPINS = 4000

# A service manager sends SIGTERM to all processes of a service. Workers have to outlive it (see
# `worker.process.main`), and the parent learns from this process how they ended.
signal.signal(signal.SIGTERM, signal.SIG_IGN)

# It ends with its parent, at once: to take PyTorch apart would need a second.
atexit.register(os._exit, 0)

# A thread of OpenMP that spins on one core keeps the one that it waits for from running where other
# processes have the rest. libgomp reads this when torch is loaded; the user's own value stays.
if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
    os.environ["GOMP_SPINCOUNT"] = str(_SPINS)
# until the decode steps are captured: see `GraphBodies.capture`
os.environ.setdefault("TORCH_BLAS_PREFER_CUBLASLT", "1")

import aioinfer.worker.worker  # noqa: E402, F401
from aioinfer.worker.process import name_process  # noqa: E402

name_process("aioinfer-fork")
