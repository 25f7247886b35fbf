"""Makes the executor that the configuration names."""

from __future__ import annotations

from pathlib import Path

from aioinfer.config import Config
from aioinfer.executor.base import Executor
from aioinfer.executor.inline import InlineExecutor
from aioinfer.executor.multiprocess import MultiprocessExecutor
from aioinfer.ipc.meeting_file import Meetings


def make_executor(
    config: Config, folder: Path, engine: int = 0, meetings: Meetings | None = None
) -> Executor:
    """Returns the executor of `parallel.executor` for an engine, by its number; `auto` gives
    workers processes of their own. `meetings` bring the ranks of several engines together."""
    if config.parallel.executor == "inline":
        return InlineExecutor(config, folder)
    meeting = meetings.next(engine) if meetings is not None else None
    return MultiprocessExecutor(config, folder, engine, meeting)
