"""Several ranks over shared memory, each a process in which the interpreter runs its kernels: what
peer memory is on GPUs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from aioinfer.kernels.symmetric_memory import SymmetricBuffer
from torch import multiprocessing


def run_ranks(size: int, nbytes: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Returns what `work(peers, *arguments)` returned in each of `size` processes, which have
    `nbytes` of peer memory a rank.

    Raises:
        ProcessRaisedException: one of them failed.
    """
    parts = [torch.zeros(nbytes, dtype=torch.uint8).share_memory_() for _ in range(size)]
    with TemporaryDirectory() as folder:
        # Forked: importing torch and Triton anew takes each process longer than most of what the
        # tests do.
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
