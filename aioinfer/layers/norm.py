"""The norms of a model: RMSNorm (Zhang and Sennrich 2019), which kernels of products and sums can
compute along the way, and LayerNorm (Ba et al. 2016), which is always a launch of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F

from aioinfer.layers.backend import Backend
from aioinfer.layers.shards import NamedShards, Shard, WeightShard


class Norm(Protocol):
    """A norm over the last dimension, with its parameters."""

    def weight_shards(self) -> NamedShards:
        """Yields where this rank's parts of the checkpoint's tensors go."""
        ...

    def finalize(self) -> None:
        """Prepares the loaded parameters for the device."""
        ...

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the norm of x [..., size], computed in float32, in the dtype of x.

        Args:
            out: like x, to write to; may be x. By default a new tensor.
        """
        ...


class LayerNorm:
    """Scales the last dimension to mean zero and variance one, then by a learned weight, and adds a
    learned bias.

    Args:
        name: of the checkpoint module.
        size: of the dimension.
        eps: added to the variance.
        bias: whether there is one.
        backend: of the rank.
    """

    def __init__(self, name: str, size: int, eps: float, backend: Backend, *, bias: bool = True):
        self.weight = torch.ones(size, dtype=backend.dtype, device=backend.device)
        self.bias = torch.zeros_like(self.weight) if bias else None
        self.eps = eps
        self._name = name

    def weight_shards(self) -> NamedShards:
        """Yields weight and bias, which every rank has whole."""
        yield f"{self._name}.weight", WeightShard(self.weight)
        if self.bias is not None:
            yield f"{self._name}.bias", WeightShard(self.bias)

    def finalize(self) -> None:
        """Leaves the parameters as they are."""

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """See `Norm`. Torch sums in float32 whatever the dtype."""
        normed = F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
        return normed if out is None else out.copy_(normed)


class HeadLayerNorms:
    """A LayerNorm without bias for each head, with a weight of its own (StableLM 2).

    Args:
        name: of the checkpoint module; the norms lie below it by their heads' numbers.
        heads: which heads this rank has.
        size: channels of a head.
        eps: added to the variance.
        backend: of the rank.
    """

    def __init__(self, name: str, heads: Shard, size: int, eps: float, backend: Backend):
        shape = heads.size, size
        self.weight = torch.ones(shape, dtype=backend.dtype, device=backend.device)
        self.eps = eps
        self._name, self._heads = name, heads

    def weight_shards(self) -> NamedShards:
        """Yields the weights of this rank's heads."""
        for index, weight in enumerate(self.weight):
            yield f"{self._name}.norms.{self._heads.start + index}.weight", WeightShard(weight)

    def finalize(self) -> None:
        """Leaves the weights as they are."""

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """See `Norm`; x is [T, heads, size]."""
        normed = F.layer_norm(x, x.shape[-1:], None, None, self.eps) * self.weight
        return normed if out is None else out.copy_(normed)


class RMSNorm:
    """Scales the last dimension to a root mean square of one, then by a learned weight.

    Args:
        name: of the checkpoint tensor, without ".weight".
        size: of the dimension.
        eps: added to the mean square.
        unit_offset: the checkpoint stores the weight less one (Gemma). The sum is kept in float32.
    """

    def __init__(
        self, name: str, size: int, eps: float, backend: Backend, *, unit_offset: bool = False
    ):
        dtype = torch.float32 if unit_offset else backend.dtype
        self.weight = torch.ones(size, dtype=dtype, device=backend.device)
        self.eps = eps
        self._name = name
        self._unit_offset = unit_offset
        if unit_offset:
            self.weight.zero_()  # random weights leave it as it is
        self._pdl = backend.pdl
        self._kernel = None
        if backend.has_kernels:
            from aioinfer.kernels.norm import rms_norm

            self._kernel = rms_norm

    def weight_shards(self) -> NamedShards:
        """Yields the weight, which every rank has whole."""
        yield f"{self._name}.weight", WeightShard(self.weight)

    def finalize(self) -> None:
        """Adds 1 to the weight where the checkpoint stores it less one."""
        if self._unit_offset:
            self.weight += 1

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """See `Norm`."""
        if self._kernel is not None and x.ndim == 2:
            return self._kernel(x, self.weight, self.eps, out=out, pdl=self._pdl)
        normed = self._norm_in_torch(x)
        return normed if out is None else out.copy_(normed)

    def _norm_in_torch(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.float32:
            scale = torch.rsqrt(x.square().mean(-1, keepdim=True).add_(self.eps))
            return (x * scale).mul_(self.weight)
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        if self._unit_offset:
            return (normed * self.weight).to(x.dtype)
        return normed.to(x.dtype) * self.weight


def norm_without_weight(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Returns an RMSNorm without a weight of x [..., size], computed in float32, in the dtype of
    x."""
    return F.rms_norm(x.float(), x.shape[-1:], eps=eps).to(x.dtype)


class SplitRMSNorm(RMSNorm):
    """An RMSNorm of a dimension that is split over the ranks; see `norm_in_place`.

    Args:
        name: of the checkpoint tensor, without ".weight".
        shard: the part of the dimension that this rank has.
        copies: how many ranks have the same part.
        eps: added to the mean square.
        backend: of the rank.
    """

    def __init__(self, name: str, shard: Shard, copies: int, eps: float, backend: Backend):
        super().__init__(name, shard.size, eps, backend)
        self._shard, self._copies = shard, copies

    def weight_shards(self) -> NamedShards:
        """Yields this rank's part of the weight."""
        shard = self._shard
        yield f"{self._name}.weight", WeightShard(self.weight, 0, shard.start, shard.total)

    def square_sum(self, x: torch.Tensor) -> torch.Tensor:
        """Returns this rank's part of the sum of squares: float32 [T], for its x [T, size]."""
        return x.float().square().sum(-1) / self._copies

    def apply(self, x: torch.Tensor, square_sum: torch.Tensor) -> None:
        """Norms x [T, size] in place, given the sum of squares [T] over all ranks."""
        scale = torch.rsqrt(square_sum / self._shard.total + self.eps).unsqueeze(-1)
        x.copy_(x.float() * scale * self.weight)


def norm_in_place(
    parts: Sequence[torch.Tensor], norms: Sequence[SplitRMSNorm], backend: Backend
) -> None:
    """Norms each of `parts` [T, size] by its norm, with one all-reduce for all of them."""
    group = backend.group
    if group.size == 1:
        for x, norm in zip(parts, norms, strict=True):
            norm(x, out=x)
        return
    sums = [norm.square_sum(x) for x, norm in zip(parts, norms, strict=True)]
    totals = group.all_reduce(torch.stack(sums))
    for x, norm, total in zip(parts, norms, totals, strict=True):
        norm.apply(x, total)


class GroupRMSNorm:
    """An RMSNorm of each group of heads' channels, with one weight for all channels. A group may be
    divided among ranks.

    Args:
        name: of the checkpoint module.
        channels: of the heads that this rank has.
        groups: which groups these heads are of.
        eps: added to the mean square.
        backend: of the rank.

    Attributes:
        weight: [channels]. eps: as above.
        groups: which of the model's groups the rank has channels of.
        is_divided: whether the rank has a part of a group.
    """

    def __init__(self, name: str, channels: Shard, groups: Shard, eps: float, backend: Backend):
        self._name, self._channels, self.groups = name, channels, groups
        self.eps = eps
        self._size = channels.total // groups.total
        self.is_divided = channels.size < groups.size * self._size
        self._group = backend.group
        self.weight = torch.ones(channels.size, dtype=backend.dtype, device=backend.device)

    def weight_shards(self) -> NamedShards:
        """Yields this rank's part of the weight."""
        channels = self._channels
        shard = WeightShard(self.weight, 0, channels.start, channels.total)
        yield f"{self._name}.weight", shard

    def finalize(self) -> None:
        """Leaves the weight as it is."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the norm, float32 [T, channels], of x, float32 [T, channels]."""
        groups = x.unflatten(-1, (self.groups.size, -1))
        sums = groups.square().sum(-1)
        if self.is_divided:
            here = slice(self.groups.start, self.groups.start + self.groups.size)
            of_all = sums.new_zeros(len(sums), self.groups.total)
            of_all[:, here] = sums
            sums = self._group.all_reduce(of_all)[:, here]
        scale = torch.rsqrt(sums / self._size + self.eps).unsqueeze(-1)
        return (groups * scale).flatten(1) * self.weight
