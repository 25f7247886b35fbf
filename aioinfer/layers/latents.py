"""The latent vectors of latent attention: their shape, and the projection from them to keys and
values, applied to them (`LatentExpansion.expand`) or, from the other side, to queries and outputs
(`absorb`, `values_of`). `latent_attention` says when which."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from aioinfer.ipc.kv_spec import LatentSpec
from aioinfer.layers.backend import Backend
from aioinfer.layers.formats.base import Weight
from aioinfer.layers.shards import NamedShards


@dataclass(frozen=True, slots=True)
class LatentShape:
    """The shape of a layer of latent attention.

    Attributes:
        num_heads: of the model, or of this rank.
        latent_size: channels of the latent vector (`kv_lora_rank`).
        rotary_size: channels of a head's queries and of the key that all heads share that are
            rotated (`qk_rope_head_dim`).
        plain_size: further channels of a head's queries and keys (`qk_nope_head_dim`).
        value_size: channels of a head's values (`v_head_dim`).
        scale: of the scores.
    """

    num_heads: int
    latent_size: int
    rotary_size: int
    plain_size: int
    value_size: int
    scale: float

    @property
    def cached_size(self) -> int:
        """Channels that the KV cache keeps of a token: the latent vector, then the rotated key."""
        return self.latent_size + self.rotary_size

    @property
    def head_size(self) -> int:
        """Channels of a head's queries and expanded keys: first the channels that are not
        rotated."""
        return self.plain_size + self.rotary_size

    @property
    def kv_spec(self) -> LatentSpec:
        """The specification of the layer's KV cache."""
        return LatentSpec(self.cached_size)


class LatentExpansion:
    """The projection from latent vectors to the keys (without the rotated one) and values of this
    rank's heads.

    It is kept in the dtype of the arithmetic, whatever the checkpoint's format: absorbed, it is
    applied from the other side.

    Args:
        weight: of the projection, as it is loaded; head by head the keys' channels, then the
            values'.
        shape: of this rank.
        backend: of the rank.
    """

    def __init__(self, weight: Weight, shape: LatentShape, backend: Backend):
        self._weight: Weight | None = weight
        self._shape = shape
        self._backend = backend
        self._matrix: torch.Tensor | None = None

    def weight_shards(self) -> NamedShards:
        """Yields where this rank's part of the checkpoint's tensors goes, before `finalize`."""
        assert self._weight is not None
        yield from self._weight.weight_shards()

    def finalize(self) -> None:
        """Dequantizes the weight, if it is quantized."""
        assert self._weight is not None
        self._matrix = self._weight.dequantized().to(self._backend.dtype)
        self._weight = None

    @property
    def matrix(self) -> torch.Tensor:
        """The weight [num_heads * (plain_size + value_size), latent_size], after `finalize`."""
        assert self._matrix is not None, "finalize was not called"
        return self._matrix

    @property
    def _parts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The weights of keys [num_heads, plain_size, latent_size] and of values [num_heads,
        value_size, latent_size]."""
        shape = self._shape
        by_head = self.matrix.view(shape.num_heads, -1, shape.latent_size)
        return by_head[:, : shape.plain_size], by_head[:, shape.plain_size :]

    def expand(
        self, latents: torch.Tensor, out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns keys [N, num_heads, plain_size] and values [N, num_heads, value_size] of latents
        [N, latent_size], as views of one tensor.

        Args:
            out: [N, num_heads * (plain_size + value_size)] to write to; by default a new tensor.
        """
        shape = self._shape
        if out is None:
            out = F.linear(latents, self.matrix)
        else:
            torch.mm(latents, self.matrix.t(), out=out)
        both = out.view(len(latents), shape.num_heads, shape.plain_size + shape.value_size)
        keys, values = both.split((shape.plain_size, shape.value_size), dim=-1)
        return keys, values

    def absorb(self, queries: torch.Tensor) -> torch.Tensor:
        """Returns queries over latents [T, num_heads, latent_size] for queries [T, num_heads,
        plain_size]."""
        weight, _ = self._parts
        shape = len(queries), self._shape.num_heads, self._shape.latent_size
        absorbed = queries.new_empty(shape)
        torch.bmm(queries.transpose(0, 1), weight, out=absorbed.transpose(0, 1))
        return absorbed

    def values_of(self, sums: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Returns outputs [T, num_heads, value_size] for sums of latents [T, num_heads,
        latent_size].

        Args:
            out: to write to; by default a new tensor.
        """
        _, weight = self._parts
        if out is None:
            out = sums.new_empty(len(sums), self._shape.num_heads, self._shape.value_size)
        torch.bmm(sums.transpose(0, 1), weight.transpose(1, 2), out=out.transpose(0, 1))
        return out
