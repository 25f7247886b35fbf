"""What holds for all tests."""

from __future__ import annotations

import os

# Tests run several compute processes at a time on few cores. Threads that spin while they wait for one another would
# then keep the one they wait for from running. OpenMP reads this when torch is imported, here and in child processes.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
