"""Methods that the workers of tests have beside their own."""

from __future__ import annotations

import os
import resource
import sys
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file

if TYPE_CHECKING:
    from aioinfer.worker.worker import Worker as Base
else:
    Base = object


class Extension(Base):
    """As a trainer writes one: `self` is the worker."""

    def place(self, offset: int, *, factor: int = 1) -> list[int]:
        return [factor * self.rank + offset, os.getpid()]

    def scale_norm(self, factor: float) -> None:
        """Loads a weight."""
        name = "model.norm.weight"
        self.load_weights([(name, torch.full((32,), factor))])

    def copy_weights(self, file: str) -> None:
        """Loads the tensors of a file one by one."""
        for name, tensor in load_file(file).items():
            self.load_weights([(name, tensor)])

    def fail(self) -> None:
        raise ValueError("on purpose")

    def opaque(self) -> Any:
        return torch.ones(1)

    def _hidden(self) -> None: ...


class Replacing:
    """Has a name that workers have."""

    def sleep(self) -> None: ...


def rank_of(worker: Any, offset: int) -> int:
    return int(worker.rank) + offset


def identity_of(worker: Any) -> str:
    """Returns what KV blocks of a worker are known by."""
    return str(worker._identify_kv().hex())


def has_compiler(worker: Any) -> bool:
    """Returns whether torch's compiler is imported, which takes each worker two seconds."""
    return "torch._dynamo" in sys.modules


def num_adapters(worker: Any) -> tuple[int, int]:
    """Returns how many adapters memory of the host has, and how many of them are being read."""
    from aioinfer.features.adapters.worker import Work

    (host,) = [each.host for each in worker.runner.works.all if type(each) is Work]
    return len(host._kept), len(host._unreported)


def limit_open_files(worker: Any, rank: int, count: int) -> int:
    """Has a rank open no file with a number from `count` on. Returns the former limit."""
    before, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if worker.rank == rank:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
    return before


def count_pictures(worker: Any) -> list[int]:
    """Has a worker count from now on how many pictures its tower computes at a time. Returns what
    it has counted so far."""
    tower = worker.runner.model.tower
    if not hasattr(worker, "counted_pictures"):
        encode, worker.counted_pictures = tower.encode, []

        def counted(pixels: Any, grids: Any) -> torch.Tensor:
            worker.counted_pictures.append(len(pixels))
            return encode(pixels, grids)

        tower.encode = counted
    return list(worker.counted_pictures)
