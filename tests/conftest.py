"""What holds for all tests."""

from __future__ import annotations

import os

import pytest

# Tests run several compute processes at a time on few cores. Threads that spin while they wait for one another would
# then keep the one they wait for from running. OpenMP reads this when torch is imported, here and in child processes.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Several test files at a time (`make test`) share the machine's cores out. What computes in one of them, its child processes
# included, then takes as many threads as it has cores, and none waits at every layer of a model for one that another file keeps
# from running.
if (number := os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")).isdigit():
    cores, count = sorted(os.sched_getaffinity(0)), int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.sched_setaffinity(0, cores[int(number) :: count] or [cores[int(number) % len(cores)]])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the kernels' tests first: they take longest, and would at last keep one core alone."""
    items.sort(key=lambda item: "kernels" not in item.path.parts)
