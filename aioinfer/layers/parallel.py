"""The ranks that share a model (tensor parallelism in the manner of Megatron, Shoeybi et al. 2019).

A layer that is split by its outputs needs no exchange; one that is split by its inputs sums its results over the
ranks. Without other ranks both exchanges do nothing.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist


class ParallelGroup:
    """One rank's view of its group. Made by `single` or `connect`."""

    def __init__(self, rank: int, size: int):
        self.rank = rank
        self.size = size

    @classmethod
    def single(cls) -> ParallelGroup:
        """Returns the group of a rank that is alone."""
        return cls(0, 1)

    @classmethod
    def connect(cls, rank: int, size: int, store: dist.Store, device: torch.device) -> ParallelGroup:
        """Joins the other ranks of this machine, through NCCL on GPUs and gloo on CPUs. Waits until all are there."""
        if device.type == "cuda":
            dist.init_process_group("nccl", store=store, rank=rank, world_size=size, device_id=device)
        else:
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # the only way to tell gloo; ranks are processes of one machine
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        return cls(rank, size)

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
