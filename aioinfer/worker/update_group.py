"""A process group of a trainer and the workers, in which the trainer broadcasts new weights.

Trainers that know SGLang, OpenRLHF or slime set such a group up in one way: a `TCPStore` at their
address, behind a prefix of the group's name, and torch's helper that makes a group beside the
default one, which adds prefixes of its own. Workers make the same group of the same prefixes, but
without the helper, which lets a name be used once.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from aioinfer.errors import WorkerCallError

#: A trainer may take so many seconds to join, and to send a tensor.
TIMEOUT_S = 120.0
_POLL_S = 0.0005


class UpdateGroup:
    """This worker's place in the group.

    Args:
        rank: of the worker.
        world_size: trainer and workers together.
        master_address, master_port: where the trainer, rank 0, listens.
        device: of the worker.
        group_name: the same for all.
        backend: "nccl" or "gloo"; by default the first on GPUs and the second on CPUs.
        timeout_s: how long the trainer is waited for, each time.
    """

    def __init__(
        self, rank: int, world_size: int, master_address: str, master_port: int, *,
        device: torch.device, group_name: str = "weight_update_group",
        backend: str | None = None, timeout_s: float = TIMEOUT_S,
    ):  # fmt: skip
        """Raises `WorkerCallError` if the others do not join in time. (With NCCL they are waited
        for when the first tensor is to come.)"""
        self._device, self._timeout_s = device, timeout_s
        backend = backend or ("gloo" if device.type == "cpu" else "nccl")
        limit = timedelta(seconds=timeout_s)
        try:
            store: Any = dist.TCPStore(master_address, master_port, world_size, False, limit)
            of_backend = "cuda/" if backend == "nccl" else "cpu/"
            for prefix in (group_name, f"{group_name}/", of_backend):
                store = dist.PrefixStore(prefix, store)
            self._group = _make_group(backend, store, rank, world_size, limit)
        except (RuntimeError, ValueError) as error:
            first = str(error).partition("\n")[0]
            raise WorkerCallError(
                f"the group of {world_size} ranks did not form: {first}"
            ) from error

    def receive(
        self, shape: Sequence[int], dtype: torch.dtype, source: int, name: str
    ) -> torch.Tensor:
        """Returns the tensor that rank `source` broadcasts next. Raises `WorkerCallError` if it
        does not come in time; the group cannot be used any more then."""
        tensor = torch.empty(tuple(shape), dtype=dtype, device=self._device)
        options = dist.BroadcastOptions()
        options.rootRank = source
        deadline = time.monotonic() + self._timeout_s
        try:
            work = self._group.broadcast([tensor], options)
            while not work.is_completed():
                if time.monotonic() > deadline:
                    raise WorkerCallError(
                        f"{name} did not come from rank {source} within {self._timeout_s:g} s"
                    )
                time.sleep(_POLL_S)
            work.wait()
        except RuntimeError as error:
            first = str(error).partition("\n")[0]
            raise WorkerCallError(f"{name} did not come from rank {source}: {first}") from error
        return tensor


def _make_group(backend: str, store: Any, rank: int, world_size: int, limit: timedelta) -> Any:
    if backend == "gloo":
        return dist.ProcessGroupGloo(store, rank, world_size, limit)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    return dist.ProcessGroupNCCL(store, rank, world_size, options)
