"""Tests with real weights, which `make test-models` fetches: over half a gigabyte, so that they run
only where `--models FOLDER` names their folder."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from aioinfer.checkpoint.gguf import convert_gguf


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--models", type=Path, help="the folder with the GGUF files of `make models`")


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """Leaves these tests out without `--models`."""
    return True if config.getoption("--models", default=None) is None else None


@pytest.fixture(scope="session")
def gguf_path(pytestconfig: pytest.Config) -> Callable[[str], Path]:
    """Returns the path of a GGUF file by its name."""
    return lambda name: pytestconfig.getoption("--models") / name


@pytest.fixture(scope="session")
def converted(
    gguf_path: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Path]]:
    """Converts a GGUF file by its name, once in a session, and returns the folder."""
    root, folders = tmp_path_factory.mktemp("converted"), dict[str, Path]()

    def convert(name: str) -> Path:
        if name not in folders:
            folder = root / Path(name).stem
            folder.mkdir()
            wall, cpu = time.perf_counter(), time.process_time()
            convert_gguf(gguf_path(name), folder)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            print(f"{name} was converted in {wall:.1f} s, {cpu:.1f} s of CPU time")  # noqa: T201
            folders[name] = folder
        return folders[name]

    yield convert
    shutil.rmtree(root)  # gigabytes, of which pytest would keep those of three runs
