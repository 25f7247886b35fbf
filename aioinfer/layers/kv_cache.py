"""The KV cache as a layer sees it, and the shape of its attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from aioinfer.ipc.kv_spec import AttentionSpec


@dataclass(frozen=True, slots=True)
class KVCache:
    """The keys and values of one layer of one rank.

    Attributes:
        keys, values: [num_blocks, block_size, num_kv_heads, head_size] in the cache's dtype.
    """

    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What an attention layer of one rank computes.

    Attributes:
        num_heads, num_kv_heads, head_size: of this rank.
        scale: of the scores.
        window: how many tokens a token attends to, itself included, or None for all before it.
        soft_cap: scores become soft_cap * tanh(score / soft_cap); 0 for none.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    window: int | None = None
    soft_cap: float = 0.0

    @property
    def kv_spec(self) -> AttentionSpec:
        """What the layer keeps in the cache."""
        return AttentionSpec(self.num_kv_heads, self.head_size, self.window)
