"""RMSNorm (Zhang and Sennrich 2019)."""

from __future__ import annotations

import torch

from aioinfer.layers.backend import Backend
from aioinfer.layers.formats.base import NamedShards, WeightShard


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
            self.weight.zero_()  # what random weights leave as it is
        self._pdl = backend.pdl
        self._kernel = None
        if backend.has_kernels:
            from aioinfer.kernels.norm import rms_norm

            self._kernel = rms_norm

    def weight_shards(self) -> NamedShards:
        """Yields the weight, which every rank has whole."""
        yield f"{self._name}.weight", WeightShard(self.weight)

    def finalize(self) -> None:
        """Adds the one that the checkpoint leaves out."""
        if self._unit_offset:
            self.weight += 1

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the norm of x [..., size]; the mean is taken in float32."""
        if self._kernel is not None and x.ndim == 2:
            return self._kernel(x, self.weight, self.eps, pdl=self._pdl)
        if x.dtype == torch.float32:
            scale = torch.rsqrt(x.square().mean(-1, keepdim=True).add_(self.eps))
            return (x * scale).mul_(self.weight)
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        if self._unit_offset:
            return (normed * self.weight).to(x.dtype)
        return normed.to(x.dtype) * self.weight
