"""Attention: norm, merged projection of queries, keys and values, rotary embeddings, attention over
the paged KV cache, output projection, sum into the residual stream.

With kernels, queries and keys are normed, rotated and cached by the attention kernels themselves
(`kernel_attention`); otherwise all of it is plain torch (`torch_attention`), or partly compiled by
numba (`compiled_attention`).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from aioinfer.errors import ConfigError
from aioinfer.ipc.kv_spec import AttentionSpec
from aioinfer.layers.backend import Backend
from aioinfer.layers.compiled_attention import CompiledAttention, supports
from aioinfer.layers.distance_bias import DistanceBias
from aioinfer.layers.kv_cache import AttentionShape, KVCache, KVScales
from aioinfer.layers.layer import LayerCache, Mixer
from aioinfer.layers.linear import ColumnParallelLinear, RowParallelLinear
from aioinfer.layers.norm import (
    HeadLayerNorms,
    Norm,
    RMSNorm,
    SplitRMSNorm,
    norm_in_place,
    norm_without_weight,
)
from aioinfer.layers.picture_attention import attend_within_pictures
from aioinfer.layers.residual import ResidualStream
from aioinfer.layers.rotary import RotaryTable, apply_rope, half_split_order
from aioinfer.layers.shards import HeadVector, Shard
from aioinfer.layers.step import Step
from aioinfer.layers.torch_attention import TorchAttention

if TYPE_CHECKING:
    from aioinfer.layers.kernel_attention import AttentionPlans, KernelAttention
    from aioinfer.layers.part_maker import PartMaker


@dataclass(frozen=True, slots=True)
class QKNorms:
    """The norms of queries and keys.

    Attributes:
        names: the checkpoint modules, below the attention's.
        kind: an RMSNorm or a LayerNorm, with one weight for all heads; or a LayerNorm "by head",
            with a weight for each.
        over_heads: whether an RMSNorm is over all heads of all ranks together, and not by head.
        after_rope: whether they are normed once they are rotated.
        unit_offset: as in `RMSNorm`.
        bias: as in `LayerNorm`.
    """

    names: tuple[str, str] = ("q_norm", "k_norm")
    kind: Literal["rms", "layer", "layer by head"] = "rms"
    over_heads: bool = False
    after_rope: bool = False
    unit_offset: bool = False
    bias: bool = False

    @property
    def is_fused(self) -> bool:
        """Whether the attention kernels norm along the way."""
        return self.kind == "rms" and not self.over_heads

    def make(
        self, make: PartMaker, name: str, heads: Shard, kv_heads: Shard, head_size: int
    ) -> tuple[Norm, Norm]:
        """Returns the norms of queries and keys.

        Args:
            name: of the attention's checkpoint module.
            heads, kv_heads: of this rank.
            head_size: channels of a head.
        """
        backend, eps = make.backend, make.norm_eps

        def norm(module: str, shard: Shard, copies: int) -> Norm:
            full = f"{name}.{module}"
            if self.over_heads:
                return make.keep(SplitRMSNorm(full, shard.times(head_size), copies, eps, backend))
            if self.kind == "rms":
                return make.norm(full, head_size, unit_offset=self.unit_offset)
            if self.kind == "layer":
                return make.layer_norm(full, head_size, bias=self.bias)
            local = range(shard.start, shard.start + shard.size)
            others = (head for head in range(shard.total) if head not in local)
            make.add_elsewhere(f"{full}.norms.{head}" for head in others)
            return make.keep(HeadLayerNorms(full, shard, head_size, eps, backend))

        queries, keys = self.names
        # ranks beyond the KV heads share them
        copies = max(1, backend.group.size // kv_heads.total)
        return norm(queries, heads, 1), norm(keys, kv_heads, copies)


class Attention(Mixer):
    """Attention of one layer on one rank. Made by `LayerMaker.attention`.

    Args:
        shape: of this rank.
        qkv: the merged projection: queries' heads, then keys', then values'.
        output: the output projection.
        rotary: the table of angles; None for queries and keys that are not rotated.
        scales: of keys and values, where the KV cache is in float8.
        qk_norms: of queries and keys, or none.
        qk_norm_rule: what these are, if there are any.
        sinks: a learned logit for each query head, which takes part in the sum of its softmax and
            has no value, so that a head may attend to nothing (gpt-oss, OpenAI 2025; after
            "attention sinks", Xiao et al. 2023); or none.
        slopes: float32 [num_heads], of ALiBi (see `TorchAttention`), or none.
        distance_bias: of the scores, or none; the kernels do not have it.
        gated: whether outputs are multiplied with the sigmoid of gates, which the projection has
            behind each head's queries in the checkpoint.
        norm: of the residual stream before the projection, or none.
        post_norm: of the addend to the stream, or none.
        residual_scale: multiplied with the addend to the stream.
        compiled: whether decodes are computed by kernels that numba compiles, where they can be.
        value_norm_eps: of an RMSNorm of each head's values, which has no weight; None for none.
        backend: of the rank.

    Attributes:
        cache, group: its KV cache and the number of its KV group, once bound.
        is_read: whether later layers read the cache (`SharedAttention`).
    """

    def __init__(
        self,
        shape: AttentionShape,
        qkv: ColumnParallelLinear,
        output: RowParallelLinear,
        rotary: RotaryTable | None,
        scales: KVScales,
        *,
        qk_norms: tuple[Norm, Norm] | None = None,
        qk_norm_rule: QKNorms | None = None,
        sinks: HeadVector | None = None,
        slopes: torch.Tensor | None = None,
        distance_bias: DistanceBias | None = None,
        gated: bool = False,
        norm: Norm | None = None,
        post_norm: Norm | None = None,
        residual_scale: float = 1.0,
        compiled: bool = False,
        value_norm_eps: float | None = None,
        backend: Backend,
    ):
        self.shape = shape
        self.scales: KVScales = scales
        self.qkv, self.output = qkv, output
        self._rotary = rotary
        self._qk_norms, self._norm_rule = qk_norms, qk_norm_rule or QKNorms()
        self._fused_norms = None
        if qk_norms is not None and self._norm_rule.is_fused:
            self._fused_norms = _as_fused(*qk_norms)
        self._query_scales = None if rotary is None else rotary.query_scales
        if self._query_scales is not None and self._fused_norms is not None:
            raise ConfigError("queries that are scaled by position cannot be normed")
        self._sinks = None if sinks is None else sinks.values
        self._slopes, self._distance_bias = slopes, distance_bias
        self._gated = gated
        self._qkv_size = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_size
        self._norm, self._post_norm = norm, post_norm
        self._residual_scale = residual_scale
        self._compiled = compiled
        self._value_norm_eps = value_norm_eps
        self._backend = backend
        self.cache: KVCache
        self.group: int
        self.is_read = False
        self._torch: TorchAttention | None = None
        self._kernel: KernelAttention | None = None

    @property
    def kv_specs(self) -> tuple[AttentionSpec, ...]:
        """See `Mixer.kv_specs`."""
        return (self.shape.kv_spec,)

    def finalize(self) -> None:
        """Brings the rotated channels of heads into GPT-NeoX's order, the only one that is computed
        with, where the checkpoint has them in GPT-J's. Scores stay the same, since queries and keys
        are reordered alike. Brings gates behind the values. Called before the projection's own
        `finalize`."""
        if self._gated:
            assert self._rotary is None or not self._rotary.interleaved
            self.qkv.reorder_rows(self._gates_last())
        if self._rotary is None or not self._rotary.interleaved:
            return
        shape = self.shape
        rotated = shape.num_heads + shape.num_kv_heads
        order = torch.arange((rotated + shape.num_kv_heads) * shape.head_size)
        order[: rotated * shape.head_size] = half_split_order(
            rotated, shape.head_size, self._rotary.cos_sin.shape[1]
        )
        self.qkv.reorder_rows(order)

    def _gates_last(self) -> torch.Tensor:
        """Returns the order of the projection's rows that has all heads' queries, keys, values and
        then gates, of a checkpoint in which each head's gates follow its queries."""
        shape = self.shape
        heads, size = shape.num_heads, shape.head_size
        gated = torch.arange(2 * heads * size).view(heads, 2, size)
        others = 2 * heads * size + torch.arange(2 * shape.num_kv_heads * size)
        return torch.cat((gated[:, 0].flatten(), others, gated[:, 1].flatten()))

    @property
    def kinds(self) -> tuple[Hashable, ...]:
        """See `Part.kinds`."""
        return self.qkv.weight.kind, self.output.weight.kind

    def lacks(self, block_size: int) -> str | None:
        """See `Mixer.lacks`."""
        from aioinfer.layers.kernel_attention import supports

        if self._distance_bias is not None:
            return "biases by distance"
        is_supported = supports(self.shape, block_size)
        return None if is_supported else f"head size {self.shape.head_size}"

    def bind(self, caches: Sequence[LayerCache], plans: AttentionPlans | None) -> None:
        """See `Mixer.bind`."""
        (given,) = caches
        self.cache, self.group = KVCache.of_layer(given.tensor, self.scales), given.group
        if plans is None:
            self._torch, self._kernel = self._without_plans(), None
            return
        from aioinfer.layers.kernel_attention import KernelAttention

        self._kernel = KernelAttention(
            self.shape, self.group, self.cache, plans, self._rotary, self._fused_norms,
            norm_last=self._norm_rule.after_rope, value_norm_eps=self._value_norm_eps,
            sinks=self._sinks, slopes=self._slopes, pdl=self._backend.pdl,
        )  # fmt: skip

    def _without_plans(self) -> TorchAttention:
        """Returns the attention without Triton kernels: decodes by compiled kernels where weights
        are multiplied by such, too, all else in torch."""
        is_plain = self._sinks is None and self._slopes is None and not self._norm_rule.after_rope
        is_plain = is_plain and not self.is_read and self._distance_bias is None
        if self._compiled and is_plain and supports(self.shape, self._rotary, self.cache):
            return CompiledAttention(self.shape, self.group, self.cache, self._rotary)
        attention = TorchAttention(
            self.shape, self.group, self._sinks, self._slopes, self._distance_bias
        )
        attention.is_read = self.is_read
        return attention

    def __call__(self, stream: ResidualStream, step: Step, *, is_last: bool = False) -> None:
        """See `Mixer`."""
        sampled = step.sampled if is_last else None
        if self._kernel is not None and sampled is not None:
            self._kernel.plan_sampled(sampled)
        qkv = self.qkv.of_normed(stream, self._norm)
        gates = None
        if self._gated:
            gates = qkv[:, self._qkv_size :]
            qkv = qkv[:, : self._qkv_size]
        if self._qk_norms is not None and self._fused_norms is None:
            self._norm_queries_and_keys(qkv)
        if self._query_scales is not None:
            self._scale_queries(qkv, self._query_scales, step)
        of_pictures = None
        pictures = None if sampled is not None else step.pictures
        if pictures is not None and pictures.is_bidirectional(self.shape.window):
            assert pictures.places is not None
            of_pictures = self._picture_queries(qkv, step, pictures.places)
        if self._kernel is None:
            attended = self._attend_in_torch(qkv, step)
            if sampled is not None and len(sampled.rows) < len(attended):
                attended = attended.index_select(0, sampled.last)
        elif sampled is None:
            attended = self._kernel.attend(qkv, step)
        else:
            attended = self._kernel.attend_sampled(qkv, step, sampled)
        if of_pictures is not None:
            attend_within_pictures(attended, of_pictures, self.shape, self.group, self.cache, step)
        if sampled is not None and len(sampled.rows) < len(stream):
            stream.select(sampled.last)
            gates = None if gates is None else gates.index_select(0, sampled.last)
        if len(stream):
            attended = attended.flatten(1)
            if gates is not None:
                attended = self._apply_gates(attended, gates)
            self.output.add_to(stream, attended, norm=self._post_norm, scale=self._residual_scale)

    def _picture_queries(self, qkv: torch.Tensor, step: Step, places: torch.Tensor) -> torch.Tensor:
        """Returns the queries [n, num_heads, head_size] of picture tokens (int64 [n]), rotated."""
        heads, size = self.shape.num_heads, self.shape.head_size
        queries = qkv[:, : heads * size].index_select(0, places).unflatten(1, (heads, size))
        norms, is_last = self._fused_norms, self._norm_rule.after_rope
        if norms is not None and not is_last:
            queries = norms[0](queries)
        if self._rotary is not None:
            cos, sin = self._rotary.at_step(step)
            queries = apply_rope(queries, cos.index_select(0, places), sin.index_select(0, places))
        return norms[0](queries) if norms is not None and is_last else queries

    def _apply_gates(self, attended: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        """Returns outputs [T, num_heads * head_size] times the sigmoid of the gates, in place."""
        if self._backend.has_kernels:
            from aioinfer.kernels.activation import gate_in_place

            return gate_in_place(attended, gates, pdl=self._backend.pdl)
        return attended.mul_(gates.sigmoid())

    def _scale_queries(self, qkv: torch.Tensor, scales: torch.Tensor, step: Step) -> None:
        """Multiplies the queries of the projection [T, features] with the scales of their positions
        (`RotaryTable.query_scales`), in place: it makes no difference whether they are rotated."""
        queries, _, _ = self._split_heads(qkv)
        queries.mul_(scales.index_select(0, step.inputs.positions))

    def _norm_queries_and_keys(self, qkv: torch.Tensor) -> None:
        """Norms queries and keys of the projection [T, features] in place."""
        assert self._qk_norms is not None
        queries, keys, _ = self._split_heads(qkv)
        if self._norm_rule.over_heads:
            norms = [norm for norm in self._qk_norms if isinstance(norm, SplitRMSNorm)]
            norm_in_place((queries, keys), norms, self._backend)
            return
        for part, norm in zip((queries, keys), self._qk_norms, strict=True):
            heads = part.unflatten(1, (-1, self.shape.head_size))
            norm(heads, out=heads)

    def _split_heads(self, qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns the queries, keys and values of the projection, each [T, features]."""
        shape = self.shape
        queries, keys = shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
        return qkv.split((queries, keys, keys), dim=-1)

    def _attend_in_torch(self, qkv: torch.Tensor, step: Step) -> torch.Tensor:
        """Returns [T, num_heads, head_size] for the projection [T, features]."""
        heads, kv_heads, size = (
            self.shape.num_heads,
            self.shape.num_kv_heads,
            self.shape.head_size,
        )
        projected = qkv.unflatten(1, (heads + 2 * kv_heads, size))
        assert self._torch is not None
        queries, keys = projected[:, :heads], projected[:, heads : heads + kv_heads]
        norms, values = self._fused_norms, projected[:, heads + kv_heads :]
        if self._value_norm_eps is not None:
            values.copy_(norm_without_weight(values, self._value_norm_eps))
        if isinstance(self._torch, CompiledAttention):
            if norms is not None:
                norms[0](queries, out=queries)
                norms[1](keys, out=keys)
            return self._torch.rotate_and_attend(projected, step)
        rotated = projected[:, : heads + kv_heads]
        if norms is not None and not self._norm_rule.after_rope:
            rotated = torch.cat((norms[0](queries), norms[1](keys)), dim=1)
        if self._rotary is not None:
            rotated = apply_rope(rotated, *self._rotary.at_step(step))
        queries, keys = rotated[:, :heads], rotated[:, heads:]
        if norms is not None and self._norm_rule.after_rope:
            queries, keys = norms[0](queries), norms[1](keys)
        return self._torch(queries, keys, values, self.cache, step)


def _as_fused(query_norm: Norm, key_norm: Norm) -> tuple[RMSNorm, RMSNorm]:
    """Returns the norms of queries and keys that attention computes along the way."""
    assert isinstance(query_norm, RMSNorm)
    assert isinstance(key_norm, RMSNorm)
    return query_norm, key_norm
