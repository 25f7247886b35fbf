"""The attention layer: norm, merged projection of queries, keys and values, rotary embeddings,
attention over the paged KV cache, output projection, sum into the residual stream.

With kernels, queries and keys are normed, rotated and cached by the attention kernels themselves
(`kernel_attention`); otherwise all of it is plain torch (`torch_attention`).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

import torch

from aioinfer.ipc.kv_spec import AttentionSpec
from aioinfer.layers.backend import Backend
from aioinfer.layers.formats.affine import AffineWeight
from aioinfer.layers.kv_cache import AttentionShape, KVCache, KVScales
from aioinfer.layers.linear import ColumnParallelLinear, RowParallelLinear
from aioinfer.layers.norm import RMSNorm, SplitRMSNorm, norm_in_place
from aioinfer.layers.residual import ResidualStream
from aioinfer.layers.rotary import RotaryTable, apply_rope, half_split_order
from aioinfer.layers.shards import NamedShards, Shard, WeightShard
from aioinfer.layers.step import Step
from aioinfer.layers.torch_attention import CompiledAttention, TorchAttention, supports

if TYPE_CHECKING:
    from aioinfer.layers.kernel_attention import AttentionPlans, KernelAttention


class AttentionSinks:
    """A learned logit for each query head, which takes part in the sum of its softmax and has no
    value, so that a head may attend to nothing (gpt-oss, OpenAI 2025; after "attention sinks", Xiao
    et al. 2023).

    Args:
        name: of the attention module in the checkpoint.
        heads: which of the query heads this rank has.
        device: of the parameter.

    Attributes:
        logits: float32 [num_heads].
    """

    def __init__(self, name: str, heads: Shard, device: torch.device):
        self._name, self._heads = name, heads
        self.logits = torch.zeros(heads.size, dtype=torch.float32, device=device)

    def weight_shards(self) -> NamedShards:
        """Yields where this rank's part of the checkpoint's tensor goes."""
        heads = self._heads
        yield f"{self._name}.sinks", WeightShard(self.logits, 0, heads.start, heads.total)

    def finalize(self) -> None:
        """Leaves the logits as they are."""


class Attention:
    """Attention of one layer on one rank. Made by `LayerMaker.attention`.

    Attributes:
        supports_prefill_graphs: whether a CUDA graph can hold it in a step with prompts.

    Args:
        shape: of this rank.
        qkv: the merged projection: queries' heads, then keys', then values'.
        output: the output projection.
        rotary: the table of angles.
        scales: of keys and values, where the KV cache is in float8.
        head_norms: of queries and keys, by head, or none.
        projection_norms: of queries and keys over all heads of all ranks, or none.
        sinks: of the query heads, or none.
        norm: of the residual stream before the projection, or none.
        post_norm: of the addend to the stream, or none.
        residual_scale: multiplied with the addend to the stream.
        backend: of the rank.
    """

    supports_prefill_graphs = True

    def __init__(
        self,
        shape: AttentionShape,
        qkv: ColumnParallelLinear,
        output: RowParallelLinear,
        rotary: RotaryTable,
        scales: KVScales,
        *,
        head_norms: tuple[RMSNorm, RMSNorm] | None = None,
        projection_norms: tuple[SplitRMSNorm, SplitRMSNorm] | None = None,
        sinks: AttentionSinks | None = None,
        norm: RMSNorm | None = None,
        post_norm: RMSNorm | None = None,
        residual_scale: float = 1.0,
        backend: Backend,
    ):
        self.shape = shape
        self.scales = scales
        self.qkv, self.output = qkv, output
        self._rotary = rotary
        self._head_norms, self._projection_norms = head_norms, projection_norms
        self._sinks = None if sinks is None else sinks.logits
        self._norm, self._post_norm = norm, post_norm
        self._residual_scale = residual_scale
        self._backend = backend
        self._cache: KVCache | None = None
        self._torch: TorchAttention | None = None
        self._kernel: KernelAttention | None = None

    @property
    def kv_spec(self) -> AttentionSpec:
        """The specification of the layer's KV cache."""
        return self.shape.kv_spec

    def finalize(self) -> None:
        """Brings the rotated channels of heads into GPT-NeoX's order, the only one that is computed
        with, where the checkpoint has them in GPT-J's. Scores stay the same, since queries and keys
        are reordered alike. Called before the projection's own `finalize`."""
        if not self._rotary.interleaved:
            return
        shape = self.shape
        rotated = shape.num_heads + shape.num_kv_heads
        order = torch.arange((rotated + shape.num_kv_heads) * shape.head_size)
        order[: rotated * shape.head_size] = half_split_order(
            rotated, shape.head_size, self._rotary.cos_sin.shape[1]
        )
        self.qkv.reorder_rows(order)

    def warm_up(self, hidden_size: int) -> None:
        """Launches the projections in every configuration that the number of rows selects."""
        self.qkv.warm_up(self._norm, hidden_size)
        self.output.warm_up(self.shape.num_heads * self.shape.head_size)

    @property
    def kinds(self) -> tuple[Hashable, ...]:
        """The kinds of its weights."""
        return self.qkv.weight.kind, self.output.weight.kind

    def unsupported_head_size(self, block_size: int) -> int | None:
        """Returns the head size if the kernels lack it with blocks of `block_size` tokens, else
        None."""
        from aioinfer.layers.kernel_attention import supports

        return None if supports(self.shape, block_size) else self.shape.head_size

    def bind(self, kv: torch.Tensor, group: int, plans: AttentionPlans | None) -> None:
        """Gives the layer its KV cache [2, num_blocks, block_size, num_kv_heads, head_size], of the
        KV group `group`; with plans, for the kernels."""
        cache = self._cache = KVCache.of_layer(kv, self.scales)
        if plans is None:
            self._torch, self._kernel = self._without_plans(cache, group), None
            return
        from aioinfer.layers.kernel_attention import KernelAttention

        self._kernel = KernelAttention(
            self.shape,
            group,
            cache,
            plans,
            self._rotary.cos_sin,
            self._head_norms,
            sinks=self._sinks,
            pdl=self._backend.pdl,
        )

    def _without_plans(self, cache: KVCache, group: int) -> TorchAttention:
        """Returns the attention without Triton kernels: decodes by compiled kernels where weights
        are multiplied by such, too, all else in torch."""
        weight = self.qkv.weight
        is_compiled = isinstance(weight, AffineWeight) and weight.is_compiled
        if is_compiled and self._sinks is None and supports(self.shape, self._rotary, cache):
            return CompiledAttention(self.shape, group, cache, self._rotary)
        return TorchAttention(self.shape, group, self._sinks)

    def __call__(self, stream: ResidualStream, step: Step, *, is_last: bool = False) -> None:
        """Adds the attention of a step's tokens to the stream.

        Args:
            is_last: no later layer reads the stream: of a step with sampled rows, only the hidden
                states of these rows are kept in it. Of the other tokens only keys and values will
                ever be read.
        """
        sampled = step.sampled if is_last else None
        if self._kernel is not None and sampled is not None:
            self._kernel.plan_sampled(sampled)
        qkv = self.qkv.of_normed(stream, self._norm)
        if self._projection_norms is not None:
            norm_in_place(self._split_heads(qkv)[:2], self._projection_norms, self._backend)
        if self._kernel is None:
            attended = self._attend_in_torch(qkv, step)
            if sampled is not None and len(sampled.rows) < len(attended):
                attended = attended.index_select(0, sampled.last)
        elif sampled is None:
            attended = self._kernel.attend(qkv, step)
        else:
            attended = self._kernel.attend_sampled(qkv, step, sampled)
        if sampled is not None and len(sampled.rows) < len(stream):
            stream.select(sampled.last)
        if len(stream):
            self.output.add_to(
                stream, attended.flatten(1), norm=self._post_norm, scale=self._residual_scale
            )

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
        projected = qkv.view(len(qkv), heads + 2 * kv_heads, size)
        assert self._torch is not None
        if isinstance(self._torch, CompiledAttention):
            if self._head_norms is not None:
                query_norm, key_norm = self._head_norms
                query_norm(projected[:, :heads], out=projected[:, :heads])
                keys = projected[:, heads : heads + kv_heads]
                key_norm(keys, out=keys)
            return self._torch.rotate_and_attend(projected, step)
        rotated, values = projected[:, : heads + kv_heads], projected[:, heads + kv_heads :]
        if self._head_norms is not None:
            query_norm, key_norm = self._head_norms
            queries, keys = rotated[:, :heads], rotated[:, heads:]
            rotated = torch.cat((query_norm(queries), key_norm(keys)), dim=1)
        rotated = apply_rope(rotated, *self._rotary.at_step(step))
        assert self._cache is not None
        return self._torch(rotated[:, :heads], rotated[:, heads:], values, self._cache, step)


def heads_of_rank(num_heads: int, num_kv_heads: int, rank: int, size: int) -> tuple[range, range]:
    """Returns the query heads and the KV heads of a rank of `size`; ranks beyond the KV heads share
    them."""
    heads = num_heads // size
    queries = range(rank * heads, (rank + 1) * heads)
    group = num_heads // num_kv_heads
    return queries, range(queries.start // group, (queries.stop - 1) // group + 1)
