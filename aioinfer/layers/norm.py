"""RMSNorm (Zhang and Sennrich 2019), alone and with the residual sum before it."""

from __future__ import annotations

import torch


class RMSNorm:
    """Scales the last dimension to a root mean square of one, then by a learned weight."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device):
        self.weight = torch.ones(size, dtype=dtype, device=device)
        self.eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the norm of x [..., size]; the mean is taken in float32."""
        if x.dtype == torch.float32:
            return (x * torch.rsqrt(x.square().mean(-1, keepdim=True).add_(self.eps))).mul_(
                self.weight
            )
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(
            x.dtype
        ) * self.weight

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the norm of x + residual, and that sum, both [..., size].

        `residual` is overwritten with the sum.
        """
        residual += x
        return self(residual), residual
