"""Multi-head latent attention (MLA; DeepSeek-V2, DeepSeek-AI 2024): of a token the KV cache keeps
one latent vector for all heads, of which keys and values are projections, and one rotated key.

With DeepSeek's sizes these are 512 + 64 channels: a token takes 1152 bytes a layer in 16 bits,
31 104 bytes in the 27 layers of DeepSeek-V2-Lite and 70 272 in the 61 of DeepSeek-V3. Keys and
values of V3's 128 heads would take 71 times as much. Tensor-parallel ranks divide the heads, and
each has the latents of all tokens.

The projection from latents to keys and values (`LatentExpansion`) is used in two ways, which are
equal but for rounding:

- expanded: keys and values of all context tokens are computed, then attention over heads of 192
  channels (keys) and 128 (values), as for any model. For rows of several tokens, whose queries
  share the keys.
- absorbed: the projection is applied to the queries and to the outputs instead, since
  (W k) . q = k . (W^T q). Attention is then over one head of 576 channels, whose values are the
  first 512 of them, and nothing is computed for each context token. For rows of one token.

Both ways are taken on CPUs, too, where all of it is plain torch (`TorchLatentAttention`).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from aioinfer.errors import ConfigError
from aioinfer.ipc.kv_spec import LatentSpec
from aioinfer.layers.backend import Backend
from aioinfer.layers.kv_cache import LatentShape
from aioinfer.layers.layer import LayerCache, Mixer
from aioinfer.layers.linear import (
    ColumnParallelLinear,
    LatentExpansion,
    RowParallelLinear,
    row_shard,
)
from aioinfer.layers.norm import RMSNorm
from aioinfer.layers.residual import ResidualStream
from aioinfer.layers.rotary import RopeConfig, RotaryTable, apply_rope, half_split_order
from aioinfer.layers.shards import Shard, Source
from aioinfer.layers.step import Step
from aioinfer.layers.torch_attention import Gather, plan_gathers

if TYPE_CHECKING:
    from aioinfer.layers.kernel_attention import AttentionPlans, KernelLatentAttention
    from aioinfer.layers.part_maker import PartMaker


class LatentAttention(Mixer):
    """Latent attention of one layer on one rank. Made by `LayerMaker.latent_attention`.

    Args:
        shape: of this rank.
        down: the merged projection of the hidden states: queries, or the input of `query_up`, then
            the latent vector and the key to be rotated, which every rank has whole.
        query_up: norm and projection to queries, or none.
        latent_norm: of the latent vector.
        expansion: the projection to keys and values.
        output: the output projection.
        rotary: the table of angles.
        norm: of the residual stream before the projection.
        backend: of the rank.
    """

    #: Latents have no scales: the KV cache has the dtype of the arithmetic.
    scales = None
    #: How many context tokens are expanded is not in a step's number of tokens.
    supports_prefill_graphs = False

    def __init__(
        self,
        shape: LatentShape,
        down: ColumnParallelLinear,
        query_up: tuple[RMSNorm, ColumnParallelLinear] | None,
        latent_norm: RMSNorm,
        expansion: LatentExpansion,
        output: RowParallelLinear,
        rotary: RotaryTable,
        *,
        norm: RMSNorm,
        backend: Backend,
    ):
        self.shape = shape
        self.down, self.query_up, self.output = down, query_up, output
        self.latent_norm, self.expansion = latent_norm, expansion
        self._rotary = rotary
        self._norm = norm
        self._backend = backend
        self._torch: TorchLatentAttention | None = None
        self._kernel: KernelLatentAttention | None = None

    @property
    def kv_specs(self) -> tuple[LatentSpec]:
        """See `Mixer.kv_specs`."""
        return (self.shape.kv_spec,)

    @property
    def kinds(self) -> tuple[Hashable, ...]:
        """See `Part.kinds`."""
        query_kind = None if self.query_up is None else self.query_up[1].weight.kind
        return "latent", self.down.weight.kind, query_kind, self.output.weight.kind

    def lacks(self, block_size: int) -> str | None:
        """See `Mixer.lacks`."""
        from aioinfer.layers.kernel_attention import supports_latents

        is_supported = supports_latents(self.shape, block_size)
        return None if is_supported else f"latent vectors of {self.shape.cached_size} channels"

    def finalize(self) -> None:
        """Brings the rotated channels into GPT-NeoX's order where the checkpoint has them in
        GPT-J's: the channels of all heads' queries, and of the shared key. Called before the
        projections' own `finalize`."""
        if not self._rotary.interleaved:
            return
        shape = self.shape
        rotated = half_split_order(1, shape.rotary_size, shape.rotary_size)
        head = torch.cat((torch.arange(shape.plain_size), shape.plain_size + rotated))
        queries = (torch.arange(shape.num_heads)[:, None] * shape.head_size + head).flatten()
        if self.query_up is not None:
            query_norm, linear = self.query_up
            linear.reorder_rows(queries)
            queries = torch.arange(len(query_norm.weight))
        latents = torch.cat((torch.arange(shape.latent_size), shape.latent_size + rotated))
        self.down.reorder_rows(torch.cat((queries, len(queries) + latents)))

    def bind(self, caches: Sequence[LayerCache], plans: AttentionPlans | None) -> None:
        """See `Mixer.bind`."""
        (given,) = caches
        cache, group = given.tensor[0, :, :, 0], given.group
        if plans is None:
            self._torch = TorchLatentAttention(self.shape, self.expansion, cache, group)
            self._kernel = None
            return
        from aioinfer.layers.kernel_attention import KernelLatentAttention

        self._kernel = KernelLatentAttention(
            self.shape, self.expansion, self.latent_norm, self._rotary.cos_sin, cache, group,
            plans, pdl=self._backend.pdl,
        )  # fmt: skip

    def __call__(self, stream: ResidualStream, step: Step, *, is_last: bool = False) -> None:
        """See `Mixer`."""
        sampled = step.sampled if is_last else None
        queries, latents = self._project(stream)
        if self._kernel is None:
            attended = self._attend_in_torch(queries, latents, step)
            if sampled is not None and len(sampled.rows) < len(attended):
                attended = attended.index_select(0, sampled.last)
        elif sampled is None:
            attended = self._kernel.attend(queries, latents, step)
        else:
            attended = self._kernel.attend_sampled(queries, latents, step, sampled)
        if sampled is not None and len(sampled.rows) < len(stream):
            stream.select(sampled.last)
        if len(stream):
            self.output.add_to(stream, attended.flatten(1))

    def _project(self, stream: ResidualStream) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns queries [T, num_heads, head_size], not rotated yet, and latents [T, cached_size],
        neither normed nor rotated; rows may be strided."""
        both = self.down.of_normed(stream, self._norm)
        size = self.shape.cached_size
        queries, latents = both[:, :-size], both[:, -size:]
        if self.query_up is not None:
            norm, linear = self.query_up
            queries = linear(norm(queries))
        return queries.unflatten(1, (self.shape.num_heads, -1)), latents

    def _attend_in_torch(
        self, queries: torch.Tensor, latents: torch.Tensor, step: Step
    ) -> torch.Tensor:
        """Returns [T, num_heads, value_size] for the results of `_project`."""
        shape, angles = self.shape, self._rotary.at_step(step)
        plain, rotated = queries.split((shape.plain_size, shape.rotary_size), dim=-1)
        queries = torch.cat((plain, apply_rope(rotated, *angles)), dim=-1)
        latent, key = latents.split((shape.latent_size, shape.rotary_size), dim=-1)
        key = apply_rope(key.unsqueeze(1), *angles).squeeze(1)
        latents = torch.cat((self.latent_norm(latent), key), dim=-1)
        assert self._torch is not None
        return self._torch(queries, latents, step)


class TorchLatentAttention:
    """Writes a step's latents to the cache of a layer, then attends: rows of one token with
    absorbed projections, longer rows over expanded keys and values.

    Args:
        shape, expansion: of the layer.
        cache: [num_blocks, block_size, cached_size], the layer's.
        group: the number of its KV group.
    """

    def __init__(
        self, shape: LatentShape, expansion: LatentExpansion, cache: torch.Tensor, group: int
    ):
        self._shape, self._expansion = shape, expansion
        self._cache = cache
        self._group = group

    def __call__(self, queries: torch.Tensor, latents: torch.Tensor, step: Step) -> torch.Tensor:
        """Returns [T, num_heads, value_size].

        Args:
            queries: [T, num_heads, head_size], rotated.
            latents: [T, cached_size], normed and rotated.
            step: with `host`; without padding.
        """
        inputs = step.inputs.groups[self._group]
        self._cache.flatten(0, 1).index_copy_(0, inputs.slot_mapping, latents)
        memo = (TorchLatentAttention, self._group)
        gathers = step.memo.get(memo)
        if gathers is None:
            assert step.host is not None
            gathers = plan_gathers(step.host, inputs.block_tables, self._cache, None)
            step.memo[memo] = gathers
        output = queries.new_empty(*queries.shape[:2], self._shape.value_size)
        for gather in gathers:
            tokens = slice(gather.first, gather.first + gather.count)
            attend, own = self._attend_decodes, tokens
            if not gather.shape[0]:  # one sequence: its first token stands for all
                attend, own = self._attend_row, slice(gather.first, gather.first + 1)
            expansion = self._expansion.of_tokens(step, own)
            output[tokens] = attend(queries[tokens], latents[tokens], gather, expansion)
        return output

    def _attend_decodes(
        self, queries: torch.Tensor, latents: torch.Tensor, gather: Gather,
        expansion: LatentExpansion,
    ) -> torch.Tensor:  # fmt: skip
        """Attends one token of each of several sequences, absorbed: the heads are the queries of
        one product over the latents."""
        shape, (rows, length) = self._shape, gather.shape
        assert gather.blocks is not None
        context = self._cache.index_select(0, gather.blocks).flatten(0, 1)
        # a former owner of the block may have left NaN there, which no mask hides
        if gather.padding is not None:
            context.index_fill_(0, gather.padding, 0)
        context = context.view(rows, 1, -1, shape.cached_size)[:, :, :length]
        plain, rotated = queries.split((shape.plain_size, shape.rotary_size), dim=-1)
        absorbed = torch.cat((expansion.absorb(plain), rotated), dim=-1)
        sums = F.scaled_dot_product_attention(
            absorbed.unsqueeze(1),
            context,
            context[..., : shape.latent_size],
            attn_mask=gather.mask,
            scale=shape.scale,
        )
        return expansion.values_of(sums.squeeze(1))

    def _attend_row(
        self, queries: torch.Tensor, latents: torch.Tensor, gather: Gather,
        expansion: LatentExpansion,
    ) -> torch.Tensor:  # fmt: skip
        """Attends the tokens of one sequence to everything of it that is in the cache, expanded."""
        shape = self._shape
        if gather.blocks is not None:
            latents = self._cache.index_select(0, gather.blocks).flatten(0, 1)[: gather.shape[1]]
        latent, shared = latents.split((shape.latent_size, shape.rotary_size), dim=-1)
        plain, values = expansion.expand(latent)
        shared = shared.unsqueeze(1).expand(-1, shape.num_heads, -1)
        keys = torch.cat((plain, shared), dim=-1)
        attended = F.scaled_dot_product_attention(
            queries.transpose(0, 1).unsqueeze(0),
            keys.transpose(0, 1).unsqueeze(0),
            values.transpose(0, 1).unsqueeze(0),
            attn_mask=gather.mask,
            is_causal=gather.mask is None and gather.count > 1,
            scale=shape.scale,
        )
        return attended[0].transpose(0, 1)


def make_latent_attention(
    make: PartMaker,
    name: str,
    *,
    shape: LatentShape,
    query_rank: int | None,
    rope: RopeConfig,
    norm: RMSNorm,
    norm_eps: float,
    bias: bool = False,
) -> LatentAttention:
    """Returns the latent attention of the checkpoint module `name`.

    Args:
        shape: of all ranks together.
        query_rank: channels between the two projections of the queries; None for one projection.
        rope: of the rotated channels.
        norm: as in `Attention`.
        norm_eps: of the norms within.
        bias: of the first projections, for which there have to be two of the queries, and of the
            output's.
    """
    heads = row_shard(shape.num_heads, make.backend)
    local, backend = replace(shape, num_heads=heads.size), make.backend

    latents = Source(f"{name}.kv_a_proj_with_mqa", Shard.whole(shape.cached_size))
    query_up = None
    if query_rank is None:
        first = Source(f"{name}.q_proj", heads.times(shape.head_size))
    else:
        first = Source(f"{name}.q_a_proj", Shard.whole(query_rank))
        query_up = (
            make.norm(f"{name}.q_a_layernorm", query_rank, eps=norm_eps),
            make.column([Source(f"{name}.q_b_proj", heads.times(shape.head_size))], query_rank),
        )
    down = make.column([first, latents], bias=bias)
    latent_norm = make.norm(f"{name}.kv_a_layernorm", shape.latent_size, eps=norm_eps)
    expanded = Source(f"{name}.kv_b_proj", heads.times(shape.plain_size + shape.value_size))
    weight = make.weight([expanded], Shard.whole(shape.latent_size))
    expansion = make.keep(LatentExpansion(weight, local, expanded, backend, make.quantization))
    output = make.row(f"{name}.o_proj", heads.times(shape.value_size), bias=bias)
    rotary = make.rotary(rope, shape.rotary_size)
    if rotary.query_scales is not None:
        raise ConfigError("latent attention does not scale queries by position")
    attention = LatentAttention(
        local, down, query_up, latent_norm, expansion, output, rotary, norm=norm,
        backend=backend,
    )  # fmt: skip
    return make.prepare(attention)
