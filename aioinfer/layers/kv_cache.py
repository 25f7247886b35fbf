"""The KV cache as a layer sees it, the scales of one in float8, and the shapes of attention.

A cache in float8 (e4m3) holds `stored = round(x / scale)`, x being a key or a value in the dtype of
the arithmetic, and `scale` a number for each KV head. The quotient is rounded once, to the nearest
(ties to even); numbers beyond the range become the largest finite number, and NaN stays NaN. The
number read is `stored * scale`. Queries and probabilities keep their dtype.

Keys may be stored less a constant vector of their head (`KVScales.key_shifts`), near their mean, as
SageAttention (Zhang et al. 2024) smooths keys: float8 rounds to a part of a number, so numbers near
zero are rounded finely. The vector changes all scores of a query alike and the softmax not at all,
so that nothing is added when keys are read. A soft cap of the scores would see it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from aioinfer.ipc.kv_spec import AttentionSpec, LatentSpec
from aioinfer.layers.rotary import RotaryTable
from aioinfer.layers.shards import Shard

FLOAT8 = torch.float8_e4m3fn
#: The largest finite number of float8.
FLOAT8_MAX = 448.0


class KVScales:
    """The scales of one layer's keys and values in float8, for the KV heads of one rank; 1 at
    first. They are written in place: CUDA graphs refer to their memory.

    Attributes:
        module: the attention module in the checkpoint.
        heads: which of the model's KV heads this rank has.
        table: float32 [4, num_kv_heads]: the scales of keys, the scales of values, and the
            reciprocals of both.
        rotary: of the keys; None where scores must not be shifted, or the rotation is not known.
        key_shifts: float32 [num_kv_heads, head_size], subtracted from keys before they are
            divided by the scale; None for nothing.
    """

    def __init__(
        self, module: str, heads: Shard, device: torch.device, rotary: RotaryTable | None = None
    ):
        self.module = module
        self.heads = heads
        self.rotary = rotary
        self.key_shifts: torch.Tensor | None = None
        self.table = torch.ones(4, heads.size, dtype=torch.float32, device=device)

    @property
    def keys(self) -> torch.Tensor:
        """float32 [num_kv_heads]."""
        return self.table[0]

    @property
    def values(self) -> torch.Tensor:
        """float32 [num_kv_heads]."""
        return self.table[1]

    @torch.inference_mode()
    def set(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Sets the scales, each float32 [num_kv_heads]."""
        scales = torch.stack((keys, values)).float()
        self.table.copy_(torch.cat((scales, 1 / scales)))

    def allow_key_shifts(self, head_size: int) -> None:
        """Makes `key_shifts`, zero at first, if keys may be shifted at all. Caches that are bound
        before have none."""
        if self.rotary is not None:
            self.key_shifts = torch.zeros(self.heads.size, head_size, device=self.table.device)


@dataclass(frozen=True, slots=True)
class KVCache:
    """The keys and values of one layer of one rank.

    Attributes:
        keys, values: [num_blocks, block_size, num_kv_heads, head_size] in the cache's dtype.
        scales: float32 [4, num_kv_heads] of a cache in float8 (see `KVScales.table`); None
            otherwise, where keys and values have the dtype of the arithmetic.
        key_shifts: float32 [num_kv_heads, head_size], subtracted from keys in float8; see
            `KVScales`.
    """

    keys: torch.Tensor
    values: torch.Tensor
    scales: torch.Tensor | None = None
    key_shifts: torch.Tensor | None = None

    @classmethod
    def of_layer(cls, kv: torch.Tensor, scales: KVScales) -> KVCache:
        """Returns the cache of a layer: `kv` is [2, num_blocks, block_size, num_kv_heads,
        head_size]."""
        if kv.dtype != FLOAT8:
            return cls(kv[0], kv[1])
        return cls(kv[0], kv[1], scales.table, scales.key_shifts)

    def write(
        self, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes keys and values [T, num_kv_heads, head_size] to the slots (int64 [T]); returns
        them as they are stored."""
        if self.scales is not None:
            if self.key_shifts is not None:
                keys = keys.float() - self.key_shifts
            keys, values = (
                to_float8(new, inverse)
                for new, inverse in zip((keys, values), self.scales[2:], strict=True)
            )
        for cache, new in ((self.keys, keys), (self.values, values)):
            as_bytes(cache).flatten(0, 1).index_copy_(0, slots, as_bytes(new))
        return keys, values

    def read(
        self, keys: torch.Tensor, values: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns stored keys and values [..., num_kv_heads, head_size] as numbers in `dtype`, the
        dtype of the arithmetic; keys less their shifts."""
        if self.scales is None:
            return keys, values
        key_scales, value_scales = self.scales[0, :, None], self.scales[1, :, None]
        return (keys.float() * key_scales).to(dtype), (values.float() * value_scales).to(dtype)


def to_float8(x: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """Returns x [..., num_kv_heads, head_size] in float8, multiplied with the reciprocals of the
    scales [num_kv_heads]. Numbers beyond the range saturate; NaN stays NaN."""
    return (x.float() * inverse[:, None]).clamp(-FLOAT8_MAX, FLOAT8_MAX).to(FLOAT8)


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """Returns a view of a tensor in float8 as bytes, since torch copies by index no float8 on a
    CPU; other tensors as they are."""
    return x.view(torch.uint8) if x.dtype == FLOAT8 else x


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The shape of an attention layer on one rank.

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
    def is_shift_invariant(self) -> bool:
        """Whether a number that is added to all scores of a query changes nothing."""
        return not self.soft_cap

    @property
    def kv_spec(self) -> AttentionSpec:
        """The specification of the layer's KV cache."""
        return AttentionSpec(self.num_kv_heads, self.head_size, self.window)


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
