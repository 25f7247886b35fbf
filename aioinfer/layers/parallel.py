"""The ranks that share a model (tensor parallelism in the manner of Megatron, Shoeybi et al. 2019).

A layer that is split by its outputs needs no exchange; one that is split by its inputs sums its
results over the ranks. Without other ranks both exchanges do nothing. On GPUs the exchanges of a
step are kernels over peer memory (`kernels.all_reduce`), which the group hands out; NCCL brings the
ranks together and carries what is not in a step's graph.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from aioinfer.errors import ConfigError

if TYPE_CHECKING:
    from aioinfer.kernels.symmetric_memory import SymmetricBuffer


_CPU = torch.device("cpu")


class ParallelGroup:
    """One rank's view of its group. Made by `single` or `connect`."""

    def __init__(self, rank: int, size: int, device: torch.device = _CPU):
        self.rank = rank
        self.size = size
        self._device = device

    @classmethod
    def single(cls) -> ParallelGroup:
        """Returns the group of a rank that is alone."""
        return cls(0, 1)

    @classmethod
    def connect(
        cls, rank: int, size: int, store: dist.Store, device: torch.device
    ) -> ParallelGroup:
        """Joins the other ranks of this machine, through NCCL on GPUs and gloo on CPUs.

        Waits until all are there.
        """
        if device.type == "cuda":
            # which nothing here uses; setting it up needs rights that containers lack
            os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
            dist.init_process_group(
                "nccl", store=store, rank=rank, world_size=size, device_id=device
            )
        else:
            # the only way to tell gloo; ranks are processes of one machine
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        return cls(rank, size, device)

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the sum of `values` over the ranks, computed in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def all_gather_last(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the ranks' `values` [..., n] side by side: [..., size * n]."""
        if self.size == 1:
            return values
        parts = [torch.empty_like(values) for _ in range(self.size)]
        dist.all_gather(parts, values.contiguous())
        return torch.cat(parts, dim=-1)

    def symmetric_buffer(self, nbytes: int) -> SymmetricBuffer:
        """Returns zeroed memory on each rank's GPU that all ranks can read and write. Every rank
        has to call it, in the same order.

        Raises:
            ConfigError: the GPUs cannot reach each other's memory.
        """
        import torch.distributed._symmetric_memory as symmetric_memory

        from aioinfer.kernels.symmetric_memory import SymmetricBuffer

        world = dist.group.WORLD
        assert world is not None
        memory = symmetric_memory.empty(nbytes, dtype=torch.uint8, device=self._device).zero_()
        try:
            handle = symmetric_memory.rendezvous(memory, world)
        except RuntimeError as error:
            message = "parallel.tensor_parallel_size above 1 needs GPUs that can reach each other's memory (NVLink, or PCIe peer access)"
            raise ConfigError(f"{message}: {error}") from error
        parts = [handle.get_buffer(rank, (nbytes,), torch.uint8) for rank in range(self.size)]
        torch.cuda.synchronize(self._device)
        dist.barrier(device_ids=[self._device.index])  # before anybody writes, all are zero
        return SymmetricBuffer(
            memory,
            torch.tensor([part.data_ptr() for part in parts], device=self._device),
            self.rank,
            self.size,
        )
