"""The gate of the MLP."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Returns silu(gate) * up [..., n] for the two side by side in `gate_up` [..., 2 n] (SwiGLU,
    Shazeer 2020)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
