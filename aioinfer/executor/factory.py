"""Makes the executor that the configuration names."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path

from aioinfer.config import Config
from aioinfer.errors import ConfigError
from aioinfer.executor.base import Executor
from aioinfer.executor.inline import InlineExecutor
from aioinfer.executor.multiprocess import MultiprocessExecutor
from aioinfer.executor.torchrun import TorchrunExecutor, torchrun_place
from aioinfer.ipc.anonymous_file import RendezvousFiles


def make_executor(
    config: Config,
    folder: Path,
    engine: int = 0,
    *,
    find: Callable[[Config], Path] | None = None,
    rendezvous_files: RendezvousFiles | None = None,
) -> Executor:
    """Returns the executor of `parallel.executor` for an engine, by its number; `auto` gives
    workers processes of their own, or takes those that torchrun has started.

    Args:
        folder: of the model, on this host.
        find: finds the model on another host that does not have this folder.
        rendezvous_files: bring the ranks of several engines together.

    Raises:
        ConfigError: a package that the executor needs is missing, or this process may not start
            others.
    """
    if config.parallel.executor == "inline":
        return InlineExecutor(config, folder)
    if config.parallel.executor == "ray":
        try:
            from aioinfer.executor.ray import RayExecutor
        except ImportError as error:
            raise ConfigError(
                f"parallel.executor = 'ray' needs Ray: pip install 'aioinfer[ray]' ({error})"
            ) from error
        return RayExecutor(config, folder, engine, find)
    if (place := torchrun_place(config)) is not None:
        return TorchrunExecutor(config, folder, place)
    if multiprocessing.current_process().daemon:
        raise ConfigError(
            "a process of multiprocessing that is a daemon, as those of a Pool are, may have no "
            'worker processes: set parallel.executor to "inline", or make the process with '
            "daemon=False"
        )
    rendezvous = rendezvous_files.next(engine) if rendezvous_files is not None else None
    return MultiprocessExecutor(config, folder, engine, rendezvous)


def can_restart(config: Config) -> bool:
    """Whether an executor whose workers were lost can be followed by another one: torchrun ends
    all of its processes when one fails."""
    return torchrun_place(config) is None
