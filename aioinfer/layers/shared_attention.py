"""Attention to the keys and values of an earlier layer (cross-layer attention, Brandon et al. 2024;
Gemma 3n and Gemma 4): the layer has queries alone, keeps nothing in the KV cache, and reads what
the other one has kept, which has the same heads and the same window.

Both layers are in one pipeline stage (`DecoderConfig.stage_starts`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from aioinfer.layers.attention import Attention, QKNorms
from aioinfer.layers.attention_maker import head_shards
from aioinfer.layers.kv_cache import AttentionShape
from aioinfer.layers.layer import LayerCache, Mixer
from aioinfer.layers.norm import RMSNorm
from aioinfer.layers.rotary import RopeConfig, apply_rope
from aioinfer.layers.shards import Source
from aioinfer.layers.step import Step
from aioinfer.layers.torch_attention import TorchAttention

if TYPE_CHECKING:
    from aioinfer.layers.kernel_attention import AttentionPlans
    from aioinfer.layers.part_maker import PartMaker


class SharedAttention(Attention):
    """Attention of one layer on one rank to the keys and values of another layer. Made by
    `LayerMaker.shared_attention`.

    Args:
        source_layer: the number of the other layer.
        query_norm: of each head's queries.
        others: as in `Attention`; `qkv` projects queries alone, and `scales` are the other layer's
            from `read_from` on.
    """

    def __init__(self, *others: Any, source_layer: int, query_norm: RMSNorm, **options: Any):
        super().__init__(*others, **options)
        self.source_layer = source_layer
        self._query_norm, self._fused_norms = query_norm, (query_norm, query_norm)
        self._source: Attention | None = None

    @property
    def kv_specs(self) -> tuple[()]:
        """See `Mixer.kv_specs`: none."""
        return ()

    def read_from(self, source: Mixer) -> None:
        """See `Mixer.read_from`."""
        assert isinstance(source, Attention)
        assert source.shape.kv_spec == self.shape.kv_spec
        self._source, self.scales = source, source.scales
        source.is_read = True

    def bind(self, caches: Sequence[LayerCache], plans: AttentionPlans | None) -> None:
        """See `Mixer.bind`; the other layer has been bound."""
        assert self._source is not None
        cache, group = self._source.cache, self._source.group
        self.cache, self.group = cache, group
        self._torch = self._kernel = None
        if plans is None:
            self._torch = TorchAttention(self.shape, group)
            return
        from aioinfer.layers.kernel_attention import KernelAttention

        self._kernel = KernelAttention(
            self.shape, group, cache, plans, self._rotary, self._fused_norms, writes=False,
            pdl=self._backend.pdl,
        )  # fmt: skip

    def _attend_in_torch(self, qkv: torch.Tensor, step: Step) -> torch.Tensor:
        """Returns [T, num_heads, head_size] for the queries [T, features]."""
        queries = self._query_norm(qkv.unflatten(1, (self.shape.num_heads, -1)))
        if self._rotary is not None:
            queries = apply_rope(queries, *self._rotary.at_step(step))
        assert self._torch is not None
        return self._torch.read(queries, self.cache, step)


def make_shared_attention(
    make: PartMaker, name: str, source_layer: int, *, num_heads: int, num_kv_heads: int,
    head_size: int, rope: RopeConfig | None, window: int | None = None, scale: float | None = None,
    bias: bool = False, output_bias: bool = False, **options: Any,
) -> SharedAttention:  # fmt: skip
    """Returns the attention of the checkpoint module `name` to the keys and values of layer
    `source_layer`. Checkpoints may have modules of keys and values for it, which are not loaded.

    Args:
        num_heads, num_kv_heads, head_size: of all ranks together; KV heads of the other layer.
        rope, window, scale, output_bias: as in `make_attention`.
        bias: of queries.
        options: `norm`, `post_norm` and `residual_scale`, as in `make_attention`.
    """
    heads, kv_heads = head_shards(num_heads, num_kv_heads, make.backend.group)
    scale = head_size**-0.5 if scale is None else scale
    make.add_elsewhere(f"{name}.{module}" for module in ("k_proj", "v_proj", "k_norm", "v_norm"))
    queries = [Source(f"{name}.q_proj", heads.times(head_size))]
    attention = SharedAttention(
        AttentionShape(heads.size, kv_heads.size, head_size, scale, window),
        make.column(queries, bias=bias),
        make.row(f"{name}.o_proj", heads.times(head_size), bias=output_bias),
        None if rope is None else make.rotary(rope, head_size),
        None,
        source_layer=source_layer,
        query_norm=make.norm(f"{name}.{QKNorms().names[0]}", head_size),
        backend=make.backend,
        **options,
    )
    return make.prepare(attention)
