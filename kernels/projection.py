"""The fused projection of the newest tokens, from which attention computes queries, keys and
values."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Projection:
    """Queries, keys and values of the newest tokens before norm and RoPE.

    Attributes:
        qkv: [T, (Hq + 2 * Hkv) * D], a row's newest token in each line: q's heads, then k's, then
            v's.
        cos_sin: float32 [max_pos, R], R <= D the rotated part of a head: R / 2 cosines, then R / 2
            sines.
        q_weight, k_weight: [D] of the norms, both or neither.
        eps: of the norms.
        key_shifts: float32 [Hkv, D], subtracted from keys that are written; None: nothing.
    """

    qkv: torch.Tensor
    cos_sin: torch.Tensor
    q_weight: torch.Tensor | None = None
    k_weight: torch.Tensor | None = None
    eps: float = 1e-6
    key_shifts: torch.Tensor | None = None
