"""Ranks as processes on a CPU: the interpreter runs the kernels, and shared memory stands in for
the symmetric memory of GPUs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from aioinfer.kernels.symmetric_memory import SymmetricBuffer
from torch import multiprocessing


def run_ranks(size: int, nbytes: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Calls `work(peers, *arguments)` in each of `size` processes with `nbytes` of symmetric memory
    a rank, and returns the results by rank.

    Raises:
        ProcessRaisedException: one of them failed.
    """
    parts = [torch.zeros(nbytes, dtype=torch.uint8).share_memory_() for _ in range(size)]
    with TemporaryDirectory() as folder:
        # Forked: a spawned process would spend more time on importing torch and Triton than on the
        # test.
        multiprocessing.start_processes(
            _run, (parts, Path(folder), work, arguments), nprocs=size, start_method="fork"
        )
        return [torch.load(Path(folder, str(rank))) for rank in range(size)]


def _run(
    rank: int,
    parts: list[torch.Tensor],
    folder: Path,
    work: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    addresses = torch.tensor([part.data_ptr() for part in parts])
    torch.save(
        work(SymmetricBuffer(parts[rank], addresses, rank, len(parts)), *arguments),
        folder / str(rank),
    )
