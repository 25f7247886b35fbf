"""Makes the executor that the configuration names."""

from __future__ import annotations

from pathlib import Path

from aioinfer.config import Config
from aioinfer.executor.base import Executor
from aioinfer.executor.inline import InlineExecutor
from aioinfer.executor.multiprocess import MultiprocessExecutor


def make_executor(config: Config, folder: Path, engine: int = 0) -> Executor:
    """Returns the executor of `parallel.executor` for an engine, by its number; `auto` gives
    workers processes of their own."""
    if config.parallel.executor == "inline":
        return InlineExecutor(config, folder)
    return MultiprocessExecutor(config, folder, engine)
