"""Ranks of a group over gloo, each a process, for the tests of what they compute together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import multiprocessing


def run_ranks(body: Callable[[int, int, Path], None], size: int, folder: Path) -> list[Any]:
    """Runs `body(rank, size, folder)`, a function of a module, in `size` processes; returns what
    each saved as `rank-{rank}-of-{size}`.

    The processes are forked from one that has imported torch and has no threads: importing it takes
    each longer than what it does.

    Raises:
        ProcessRaisedException: one of them failed.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload([__name__])
    multiprocessing.start_processes(
        body, args=(size, folder), nprocs=size, start_method="forkserver"
    )
    return [torch.load(folder / f"rank-{rank}-of-{size}") for rank in range(size)]
