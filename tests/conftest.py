"""Settings for all tests: threads and memory, the order of files, and Triton's interpreter for
`tests/kernels`. Which tests a run takes follows from markers (pyproject.toml lists them)."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

import pytest

# Tests run several compute processes at a time on few cores. Threads that spin while they wait for
# one another would then keep the one they wait for from running. OpenMP reads this when torch is
# imported, here and in child processes.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Several test files at a time (`make test`): each computes with one thread, its child processes
# included, unless a test sets more. So none waits at every layer of a model for a thread that
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

# Some environments forbid bytecode files. Each of the processes that tests start, and each of those
# that run tests, would then compile all modules anew, which takes them a second and more.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

TESTS = Path(__file__).parent
#: `make test-clients` runs these with packages of their own.
collect_ignore = ["clients"]
KERNELS = TESTS / "kernels"


def pytest_configure(config: pytest.Config) -> None:
    """Switches Triton's interpreter on for a run of the kernel tests alone. Triton reads the
    variable at its import; worker processes of pytest-xdist inherit it."""
    invoked_in = config.invocation_params.dir
    paths = [(invoked_in / argument.split("::")[0]).resolve() for argument in config.args]
    if (
        paths
        and all(path.is_relative_to(KERNELS) for path in paths)
        and "triton" not in sys.modules
    ):
        os.environ["TRITON_INTERPRET"] = "1"
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    if is_interpreted():
        # The interpreter computes with numpy, which warns where a kernel computes NaN or infinity
        # on purpose, and uses functions that numpy has deprecated.
        for category in ("RuntimeWarning", "DeprecationWarning"):
            config.addinivalue_line("filterwarnings", f"ignore::{category}")


def is_interpreted() -> bool:
    """Whether this process interprets kernels instead of compiling them."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collects garbage neither while the tests are imported nor, later, among what has been: these
    million objects stay, and to look through them takes half a second each time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_report_header(config: pytest.Config) -> str:
    """Returns whether the kernel tests are in this run."""
    if is_interpreted():
        return "Triton's interpreter: on"
    return "Triton's interpreter: off; tests/kernels takes a run of its own (pytest tests/kernels)"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the files that take longest first; the sort leaves the others, and the tests of each, in
    order."""
    items.sort(key=lambda item: item.get_closest_marker("longest") is None)


@pytest.fixture(scope="session")
def tokenizer_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which `tests.real_tokenizers` builds each tokenizer once, for all processes of
    a run."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "tokenizers"


@pytest.fixture(scope="session", autouse=True)
def tokenizers_are_read_once() -> Iterator[None]:
    """Reads a tokenizer again only where the files of its folder have changed, and keeps the last
    few, with their tables for grammars: nearly all engines of a process have the demo model's,
    which takes half a second of CPU time."""
    from aioinfer.text.grammar import GrammarCompiler
    from aioinfer.text.tokenizer import Tokenizer

    load, loaded = Tokenizer.load, dict[object, Tokenizer]()
    make_table, tables = GrammarCompiler._vocabulary.func, WeakKeyDictionary[Tokenizer, Any]()

    def load_once(folder: Path, chat_template: str | Path | None = None) -> Tokenizer:
        if chat_template is not None or not folder.is_dir():
            return load(folder, chat_template)
        files = [(each.name, each.stat()) for each in sorted(folder.iterdir())]
        key = folder, *((name, of.st_ino, of.st_size, of.st_mtime_ns) for name, of in files)
        found = loaded.pop(key, None) or load(folder)
        loaded[key] = found
        if len(loaded) > 4:
            loaded.pop(next(iter(loaded)), None)
        return found

    def table_of(compiler: GrammarCompiler) -> Any:
        own = tables.setdefault(compiler._tokenizer, {})
        key = compiler._vocab_size, compiler.end_tokens
        if key not in own:
            own[key] = make_table(compiler)
        return own[key]

    with (
        mock.patch.object(Tokenizer, "load", load_once),
        mock.patch.object(GrammarCompiler, "_vocabulary", property(table_of)),
    ):
        yield
