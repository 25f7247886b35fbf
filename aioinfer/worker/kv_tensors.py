"""The KV cache of one rank: a tensor for each KV group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from aioinfer.ipc.kv_spec import SOURCE_PAGE, KVGroup, SourceSpec, StateSpec
from aioinfer.ipc.plan import I32, StepPlan
from aioinfer.layers.kv_cache import as_bytes
from aioinfer.worker.memory import make_kv

#: Returns a tensor of zeros of a shape and a dtype on the rank's device.
MakeTensor = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]
#: Copying blocks takes so much memory at most beside the cache, or what one layer of them takes.
_MAX_COPY_BYTES = 256 << 20


class KVTensors:
    """The KV cache tensors of all layers, zero at first.

    Attributes:
        groups: the layers that share block tables, of this rank's pipeline stage.
        tensors: of each group, [parts, layers, num_blocks, block_size, heads, channels]: keys and
            values are two parts, latent vectors one, of one head (`token_shape` of the
            specification). Of states, [layers, num_blocks, *shape], in the dtype of their
            specification.
    """

    def __init__(
        self,
        groups: Sequence[KVGroup],
        num_blocks: Sequence[int],
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        make: MakeTensor | None = None,
    ):
        """`make` makes the tensors, if it is given."""
        make = make or (lambda shape, kind: make_kv(shape, kind, device))
        self.groups = tuple(groups)
        self.tensors = [
            _make_tensor(group, blocks, block_size, dtype, make)
            for group, blocks in zip(groups, num_blocks, strict=True)
        ]
        # the same, all as [parts, layers, num_blocks, ...]
        self._blocks = [
            as_bytes(tensor[None] if group.keeps_states else tensor)
            for group, tensor in zip(groups, self.tensors, strict=True)
        ]

    def divided(
        self, first: int
    ) -> tuple[tuple[list[KVGroup], list[torch.Tensor]], tuple[list[KVGroup], list[torch.Tensor]]]:
        """Returns groups and tensors of the layers before layer `first`, and those of the others,
        numbered from `first` on. Each has all groups, some without layers."""
        before: tuple[list[KVGroup], list[torch.Tensor]] = ([], [])
        behind: tuple[list[KVGroup], list[torch.Tensor]] = ([], [])
        for group, tensor in zip(self.groups, self.tensors, strict=True):
            count = sum(layer < first for layer in group.layers)
            own, others = group.layers[:count], group.layers[count:]
            sizes, dim = (len(own), len(others)), 0 if group.keeps_states else 1
            parts = tensor.split(sizes, dim)
            before[0].append(replace(group, layers=own))
            before[1].append(parts[0])
            behind[0].append(replace(group, layers=tuple(layer - first for layer in others)))
            behind[1].append(parts[1])
        return before, behind

    def copy_blocks(
        self, counts: Sequence[int], sources: torch.Tensor, targets: torch.Tensor
    ) -> None:
        """Copies KV blocks; all sources of a group are read before any target is written.

        Args:
            counts: how many copies each group has.
            sources, targets: int32 [copies] on the device, one group after the other.
        """
        start = 0
        for blocks, count in zip(self._blocks, counts, strict=True):
            if count and len(blocks[0]):
                here = slice(start, start + count)
                self._copy(blocks, sources[here], targets[here].long())
            start += count

    @staticmethod
    def _copy(blocks: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copies blocks of one group [parts, layers, num_blocks, ...], so many layers at a time
        that the copy of the sources takes little memory: it is not counted when memory is
        divided."""
        layer_bytes = blocks[:, 0, 0].nbytes * len(sources)
        for layers in blocks.split(max(1, _MAX_COPY_BYTES // layer_bytes), dim=1):
            layers.index_copy_(2, targets, layers.index_select(2, sources))

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self.tensors[0].device

    @property
    def num_blocks(self) -> tuple[int, ...]:
        """Blocks of each group."""
        return tuple(blocks.shape[2] for blocks in self._blocks)

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return sum(blocks.nbytes for blocks in self._blocks)

    @property
    def block_bytes(self) -> tuple[int, ...]:
        """Bytes of a block of each group; 0 where the rank has none of its layers."""
        return tuple(blocks[:, :, 0].nbytes for blocks in self._blocks)

    def block(self, group: int, block: int) -> torch.Tensor:
        """Returns a view of a block: [parts, layers, ...], not contiguous."""
        return self._blocks[group][:, :, block]

    def blocks(self, group: int) -> torch.Tensor:
        """Returns a view of all blocks of a group: [parts, layers, num_blocks, ...]."""
        return self._blocks[group]

    def zero(self, count: int) -> None:
        """Writes zeros to the first `count` blocks of each group."""
        for blocks in self._blocks:
            blocks[:, :, :count] = 0


def sort_copies(plan: StepPlan, num_groups: int) -> tuple[list[int], I32]:
    """Returns the arguments of `KVTensors.copy_blocks` for a plan's copies: the counts, and sources
    and targets as int32 [2, copies]."""
    order = np.argsort(plan.copy_groups, kind="stable")
    counts = np.bincount(plan.copy_groups, minlength=num_groups).tolist()
    return counts, np.stack([plan.copy_sources, plan.copy_targets])[:, order]


def _make_tensor(
    group: KVGroup, num_blocks: int, block_size: int, dtype: torch.dtype, make: MakeTensor
) -> torch.Tensor:
    """Returns the tensor of a group."""
    layers, spec = len(group.layers), group.spec
    if isinstance(spec, StateSpec):
        return make((layers, num_blocks, *spec.shape), getattr(torch, spec.dtype))
    parts, heads, channels = spec.token_shape
    if isinstance(spec, SourceSpec):
        block_size = spec.num_pages * SOURCE_PAGE
    return make((parts, layers, num_blocks, block_size, heads, channels), dtype)
