"""What holds for all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Tests run several compute processes at a time on few cores. Threads that spin while they wait for
# one another would then keep the one they wait for from running. OpenMP reads this when torch is
# imported, here and in child processes.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Several test files at a time (`make test`): each computes with one thread, its child processes
# included, unless a test asks for more. So none waits at every layer of a model for a thread that
# another file keeps from running, and the files together keep the cores busy while some of them
# wait. The first process sets this for the others that it starts.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Models come and go, some by the dozen in one process, each loaded by a thread of its own. By
# default glibc keeps a heap for each thread, whose free memory no other uses, and gives back to the
# kernel what is free at a heap's end; getting, zeroing and mapping a gigabyte anew takes as long as
# loading the model. It reads these when a process starts: they hold for child processes.
os.environ.setdefault("MALLOC_ARENA_MAX", "1")
os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(2**33))
os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(2**25))

#: What takes longest begins first, and does not at last keep one core alone.
LONGEST = ("test_interpreter.py", "test_equality.py", "test_multiprocess.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the files that take longest first; the sort leaves the others, and the tests of each, in
    their order."""
    items.sort(
        key=lambda item: (
            LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST)
        )
    )


@pytest.fixture(scope="session")
def tokenizer_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which `tests.real_tokenizers` builds each tokenizer once, for all processes of
    a run."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "tokenizers"
