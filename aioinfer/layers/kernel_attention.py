"""Attention and latent attention over the paged KV cache by the Triton kernels.

The data of a step that the kernels need is computed on the GPU, once a step for all layers that
agree in it (`AttentionPlans`): how decodes are divided among programs, and which query tiles the
other rows have. So the launches of a layer depend on nothing but the number of tokens, and a CUDA
graph may hold them.

Latent attention computes rows of one token with absorbed projections
(`kernels/latent_attention.py`), longer rows over expanded keys and values
(`kernels/latent_prefill.py`). How many context tokens are expanded depends on the rows' lengths:
steps with such rows are launched kernel by kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import torch

from aioinfer.kernels.decode_plan import DecodeWorkspace, plan_decode
from aioinfer.kernels.latent_attention import latent_decode, make_latent_workspace
from aioinfer.kernels.latent_cache import latent_cache
from aioinfer.kernels.latent_prefill import (
    ContextSegment,
    PrefillState,
    latent_prefill,
    plan_segments,
    tile_config,
)
from aioinfer.kernels.paged_attention import (
    BLOCK_SIZES,
    HEAD_SIZES,
    make_prefill_plan,
    paged_attention,
)
from aioinfer.kernels.prefill_plan import PrefillPlan, plan_prefill
from aioinfer.kernels.projection import Projection, Rotation
from aioinfer.kernels.qk_norm_rope_cache import qk_norm_rope_cache, rotated_queries
from aioinfer.layers.kv_cache import AttentionShape, KVCache, LatentShape
from aioinfer.layers.linear import LatentExpansion
from aioinfer.layers.norm import RMSNorm
from aioinfer.layers.rotary import RotaryTable
from aioinfer.layers.step import SampledRows, Step

#: The maximum of channels of latent vectors, of the rotated part, and of a head's other parts: of
#: these, tiles fit into a multiprocessor.
_MAX_LATENT, _MAX_ROTARY, _MAX_HEAD = 512, 64, 128
#: Numbers that the keys and values of a segment of the context take at most: 128 MiB in 16 bits.
_SEGMENT_NUMBERS = 1 << 26
_MIN_SEGMENT, _MAX_SEGMENT = 1024, 1 << 16


def supports(shape: AttentionShape, block_size: int) -> bool:
    """Whether the kernels have the head size and the block size."""
    return shape.head_size in HEAD_SIZES and block_size in BLOCK_SIZES


def supports_latents(shape: LatentShape, block_size: int) -> bool:
    """Whether the kernels have the sizes of latent attention."""
    return (
        shape.latent_size <= _MAX_LATENT
        and shape.rotary_size <= _MAX_ROTARY
        and max(shape.plain_size, shape.value_size) <= _MAX_HEAD
        and block_size in BLOCK_SIZES
    )


class AttentionPlan(Protocol):
    """The plan of a step that layers of another kind of attention share."""

    def fill(self, step: Step) -> None:
        """Plans a step whose inputs are prepared; `step.num_decodes` is given."""
        ...


_Plan = TypeVar("_Plan", bound=AttentionPlan)


class AttentionPlans:
    """The plans of a step, for all attention layers of a model.

    Attributes:
        rows, tokens: the maximum of a step.
        programs: of decode attention, instead of the number that fits the GPU (for tests).
        cascade: whether to look for prefixes that decodes share, and read their keys once.
    """

    def __init__(
        self,
        rows: int,
        tokens: int,
        dtype: torch.dtype,
        programs: int | None = None,
        *,
        cascade: bool = False,
    ):
        """`dtype`: of queries; the others as above."""
        self.rows, self.tokens, self._dtype = rows, tokens, dtype
        self.programs, self.cascade = programs, cascade
        self._shared: dict[Hashable, Any] = {}
        self._workspaces: dict[tuple[int, AttentionShape, bool], DecodeWorkspace] = {}
        self._prefills: dict[tuple[int, int, bool], PrefillPlan] = {}

    def of_layer(
        self, shape: AttentionShape, group: int, cache: KVCache, *, has_slopes: bool = False
    ) -> tuple[DecodeWorkspace, PrefillPlan]:
        """Returns the plans that a layer shares with all that are like it. With slopes (ALiBi)
        neither the cascade nor the prefill kernel for Hopper is used."""
        key = group, shape, has_slopes
        if key not in self._workspaces:
            self._workspaces[key] = DecodeWorkspace.create(
                shape.num_heads, cache.keys, window=shape.window or 0, programs=self.programs,
                cascade_rows=self.rows if self.cascade and not has_slopes else 0,
                max_rows=self.rows,
            )  # fmt: skip
        prefill = make_prefill_plan(
            self.rows, self.tokens, shape.num_heads, self._dtype, cache.keys, cache.values,
            hopper=not has_slopes,
        )  # fmt: skip
        kind = prefill.group, prefill.tile_rows, prefill.hopper
        return self._workspaces[key], self._prefills.setdefault(kind, prefill)

    def share(self, key: Hashable, make: Callable[[], _Plan]) -> _Plan:
        """Returns the plan that layers with an equal `key` share; the first of them makes it."""
        if key not in self._shared:
            self._shared[key] = make()
        plan: _Plan = self._shared[key]
        return plan

    def fill(self, step: Step) -> None:
        """Plans a step whose inputs are prepared; `step.num_decodes` is given."""
        for plan in self._shared.values():
            plan.fill(step)
        inputs, num_decodes = step.inputs, step.num_decodes
        assert num_decodes is not None
        for (group, shape, _), workspace in self._workspaces.items():
            tables = inputs.groups[group].block_tables
            if step.offsets is not None:
                workspace = workspace.for_lookahead(shape.num_heads, shape.head_size, num_decodes)
            elif not step.shares_prefix:
                workspace = replace(workspace, cascade=None)
            plan_decode(workspace, inputs.seq_lens[:num_decodes], tables, step.offsets)
        if step.has_prefill:
            starts, lens, tokens = inputs.query_starts, inputs.seq_lens, len(inputs.input_ids)
            for prefill in self._prefills.values():
                plan_prefill(prefill, starts, lens, num_decodes, tokens)


class KernelAttention:
    """The attention of one layer: norm and rotation of queries and keys, cache, attention.

    Args:
        shape, group: of the layer.
        cache: the layer's.
        plans: of the model.
        rotary: of queries and keys; None where they are not rotated.
        norms: of queries and keys by head, or none.
        norm_last: whether the norms follow the rotation.
        value_norm_eps: of an RMSNorm of each head's values without a weight; None for none.
        writes: whether the layer has keys and values; else there are queries alone, and an earlier
            layer has written the step's keys and values to the cache.
        sinks, slopes: as in `paged_attention`, or none.
        pdl: launch as programmatic dependents.
    """

    def __init__(
        self,
        shape: AttentionShape,
        group: int,
        cache: KVCache,
        plans: AttentionPlans,
        rotary: RotaryTable | None,
        norms: tuple[RMSNorm, RMSNorm] | None,
        *,
        norm_last: bool = False,
        value_norm_eps: float | None = None,
        writes: bool = True,
        sinks: torch.Tensor | None = None,
        slopes: torch.Tensor | None = None,
        pdl: bool,
    ):
        self._writes = writes
        self._shape, self._group, self._cache = shape, group, cache
        self._workspace, self._prefill = plans.of_layer(
            shape, group, cache, has_slopes=slopes is not None
        )
        self._plain_workspace = replace(self._workspace, cascade=None)
        self._pdl = pdl
        weights: tuple[Any, ...] = ()
        if norms is not None:
            query_norm, key_norm = norms
            weights = query_norm.weight, key_norm.weight, query_norm.eps
        self._rotation = Rotation(
            None if rotary is None else rotary.cos_sin, *weights,
            sections=None if rotary is None else rotary.sections, norm_last=norm_last,
            value_norm_eps=value_norm_eps,
        )  # fmt: skip
        self._options: dict[str, Any] = {
            "scale": shape.scale, "soft_cap": shape.soft_cap, "scales": cache.scales,
            "sinks": sinks, "slopes": slopes,
        }  # fmt: skip

    def plan_sampled(self, sampled: SampledRows) -> None:
        """Plans `attend_sampled`, which has other decodes than the step."""
        if len(sampled.rows):
            plan_decode(self._workspace, sampled.seq_lens)

    def attend(self, qkv: torch.Tensor, step: Step) -> torch.Tensor:
        """Caches the step's keys and values and returns [T, num_heads, head_size].

        Args:
            qkv: [T, (num_heads + 2 * num_kv_heads) * head_size], before norm and rotation; [T,
                num_heads * head_size] of a layer that does not write.
            step: planned by `AttentionPlans.fill`.
        """
        inputs, group = step.inputs, step.inputs.groups[self._group]
        queries = self._queries(qkv)
        projection, first = None, 0
        # decode attention caches its own keys, if the host knows how many rows it has
        if step.num_decodes is not None and self._writes and not step.has_lookahead:
            projection, first = self._projection(qkv, inputs.rotary), step.num_decodes
        if first < len(qkv):
            queries = self._rotate_and_cache(qkv, step, first)
        workspace = self._workspace if step.shares_prefix else self._plain_workspace
        if step.offsets is not None:
            assert step.num_decodes is not None
            shape = self._shape
            workspace = workspace.for_lookahead(shape.num_heads, shape.head_size, step.num_decodes)
        return paged_attention(
            queries, self._cache.keys, self._cache.values, group.block_tables, inputs.query_starts,
            inputs.seq_lens, num_decodes=step.num_decodes, workspace=workspace,
            prefill_plan=self._prefill, projection=projection,
            older_keys_cached=first == len(qkv), pdl=self._pdl, **self._options,
        )  # fmt: skip

    def attend_sampled(self, qkv: torch.Tensor, step: Step, sampled: SampledRows) -> torch.Tensor:
        """Caches the step's keys and values and returns the sampled rows' [S, num_heads,
        head_size].

        The rows are decodes here: one token each, with all that came before it in the cache.
        """
        num_decodes = step.num_decodes
        assert num_decodes is not None
        projection, last = None, sampled.last
        if not self._writes:
            qkv = qkv.index_select(0, last)
            positions = step.inputs.rotary_positions.index_select(-1, last)
            queries = self._queries(qkv)
            if len(queries):
                rotated = self._projection(qkv, positions)
                queries = rotated_queries(rotated, self._cache.keys, pdl=self._pdl)
        elif step.has_lookahead:
            queries = self._rotate_and_cache(qkv, step, 0).index_select(0, last)
        else:
            if num_decodes < len(qkv):
                self._rotate_and_cache(qkv, step, num_decodes)
            qkv = qkv.index_select(0, last)
            queries, projection = self._queries(qkv), self._projection(qkv, sampled.rotary)
        rows = len(queries)
        if not rows:
            return queries
        tables = step.inputs.groups[self._group].block_tables.index_select(0, sampled.rows)
        return paged_attention(
            queries, self._cache.keys, self._cache.values, tables,
            step.inputs.query_starts[: rows + 1], sampled.seq_lens, num_decodes=rows,
            workspace=self._workspace, projection=projection, pdl=self._pdl, **self._options,
        )  # fmt: skip

    def attend_rotated(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, step: Step
    ) -> torch.Tensor:
        """Caches keys and values and returns [T, num_heads, head_size], for a step without padding
        whose queries, keys and values [T, heads, head_size] are normed and rotated already."""
        inputs, group, cache = step.inputs, step.inputs.groups[self._group], self._cache
        cache.write(group.slot_mapping, keys, values)
        return paged_attention(
            queries, cache.keys, cache.values, group.block_tables, inputs.query_starts,
            inputs.seq_lens, num_decodes=step.num_decodes, workspace=self._workspace,
            prefill_plan=self._prefill, **self._options,
        )  # fmt: skip

    def _projection(self, qkv: torch.Tensor, positions: torch.Tensor | None) -> Projection:
        return Projection(qkv, self._rotation, positions, self._cache.key_shifts)

    def _queries(self, qkv: torch.Tensor) -> torch.Tensor:
        heads, size = self._shape.num_heads, self._shape.head_size
        return qkv[:, : heads * size].view(-1, heads, size)

    def _rotate_and_cache(self, qkv: torch.Tensor, step: Step, first: int) -> torch.Tensor:
        """Norms and rotates the tokens from `first` on: keys and values go to the cache, queries
        are returned [T, num_heads, head_size]."""
        inputs, group, cache = step.inputs, step.inputs.groups[self._group], self._cache
        if not self._writes:
            projection = self._projection(qkv, inputs.rotary_positions)
            return rotated_queries(projection, cache.keys, pdl=self._pdl)
        out = torch.empty_like(self._queries(qkv), memory_format=torch.contiguous_format)
        qk_norm_rope_cache(
            self._projection(qkv[first:], inputs.rotary_positions[..., first:]),
            group.slot_mapping[first:], cache.keys, cache.values, num_q_heads=self._shape.num_heads,
            scales=cache.scales, out=out[first:], pdl=self._pdl,
        )  # fmt: skip
        return out


def segment_size(shape: LatentShape) -> int:
    """Returns how many context tokens are expanded at a time."""
    numbers = shape.num_heads * (shape.plain_size + shape.value_size)
    return min(_MAX_SEGMENT, max(_MIN_SEGMENT, _SEGMENT_NUMBERS // numbers))


class LatentPlans:
    """The plan of a step that layers of one shape share: how decodes are divided among programs,
    the segments of the longer rows' context, and the buffers of both.

    Args:
        shape: of the layers.
        cache: [num_blocks, block_size, cached_size], of one of the layers.
        tokens: the maximum of a step.
        programs: of decode attention, instead of the number that fits the GPU (for tests).
    """

    def __init__(
        self, shape: LatentShape, cache: torch.Tensor, tokens: int, programs: int | None = None
    ):
        device, dtype = cache.device, cache.dtype
        self.workspace = make_latent_workspace(
            shape.num_heads, shape.latent_size, cache, programs=programs
        )
        self.state = PrefillState.empty(tokens, shape.num_heads, shape.value_size, device)
        self.segments: list[ContextSegment] = []
        self.config = tile_config(cache.element_size())
        numbers = shape.num_heads * (shape.plain_size + shape.value_size)
        self.expanded = torch.empty(segment_size(shape), numbers, dtype=dtype, device=device)

    def fill(self, step: Step) -> None:
        """See `AttentionPlan`."""
        num_decodes, host = step.num_decodes, step.host
        assert num_decodes is not None
        plan_decode(self.workspace, step.inputs.seq_lens[:num_decodes])
        self.segments = []
        if host is not None and step.has_prefill:
            self.segments = plan_segments(
                host.query_lens,
                host.seq_lens,
                num_decodes,
                len(self.expanded),
                self.config.rows,
                self.expanded.device,
            )


class KernelLatentAttention:
    """The latent attention of one layer: norm and rotation, cache, attention.

    Args:
        shape, expansion, norm: of the layer; `norm` of the latent vectors.
        cos_sin: float32 [max_len, rotary_size], of `RotaryTable`.
        cache: [num_blocks, block_size, cached_size], the layer's.
        group: the number of its KV group.
        plans: of the model.
        pdl: launch as programmatic dependents.
    """

    def __init__(
        self,
        shape: LatentShape,
        expansion: LatentExpansion,
        norm: RMSNorm,
        cos_sin: torch.Tensor,
        cache: torch.Tensor,
        group: int,
        plans: AttentionPlans,
        *,
        pdl: bool,
    ):
        self._shape, self._expansion, self._norm = shape, expansion, norm
        self._cos_sin, self._cache, self._group = cos_sin, cache, group
        self._pdl = pdl
        self._plans = plans.share(
            (group, shape), lambda: LatentPlans(shape, cache, plans.tokens, plans.programs)
        )

    def attend(self, queries: torch.Tensor, latents: torch.Tensor, step: Step) -> torch.Tensor:
        """Caches the step's latents and returns [T, num_heads, value_size].

        Args:
            queries: [T, num_heads, head_size], not rotated; written to.
            latents: [T, cached_size], neither normed nor rotated.
            step: planned by `AttentionPlans.fill`.
        """
        inputs, group, decodes = step.inputs, step.inputs.groups[self._group], step.num_decodes
        assert decodes is not None
        self._rotate_and_cache(queries, latents, step)
        out = queries.new_empty(*queries.shape[:2], self._shape.value_size)
        if decodes:
            tables, lens = group.block_tables[:decodes], inputs.seq_lens[:decodes]
            expansion = self._expansion.of_tokens(step, slice(0, decodes))
            self._decode(queries[:decodes], tables, lens, out[:decodes], expansion)
        for number, segment in enumerate(self._plans.segments):
            self._attend_segment(queries, step, number, segment, out)
        return out

    def attend_sampled(
        self, queries: torch.Tensor, latents: torch.Tensor, step: Step, sampled: SampledRows
    ) -> torch.Tensor:
        """Caches the step's latents and returns the sampled rows' [S, num_heads, value_size]. The
        rows are decodes here: one token each, with all that came before it in the cache."""
        self._rotate_and_cache(queries, latents, step)
        queries = queries.index_select(0, sampled.last)
        out = queries.new_empty(*queries.shape[:2], self._shape.value_size)
        if len(queries):
            plan_decode(self._plans.workspace, sampled.seq_lens)
            tables = step.inputs.groups[self._group].block_tables.index_select(0, sampled.rows)
            expansion = self._expansion.of_tokens(step, sampled.last)
            self._decode(queries, tables, sampled.seq_lens, out, expansion)
        return out

    def _rotate_and_cache(self, queries: torch.Tensor, latents: torch.Tensor, step: Step) -> None:
        """Rotates the queries in place, and writes the latents to the cache."""
        latent_cache(
            latents, queries[..., self._shape.plain_size :], step.inputs.rotary_positions,
            self._cos_sin,
            step.inputs.groups[self._group].slot_mapping, self._cache, self._norm.weight,
            self._norm.eps, pdl=self._pdl,
        )  # fmt: skip

    def _decode(
        self,
        queries: torch.Tensor,
        tables: torch.Tensor,
        seq_lens: torch.Tensor,
        out: torch.Tensor,
        expansion: LatentExpansion,
    ) -> None:
        """Attends rows of one token, absorbed; writes to `out` [R, num_heads, value_size]."""
        shape = self._shape
        plain, rotated = queries.split((shape.plain_size, shape.rotary_size), dim=-1)
        sums = latent_decode(
            expansion.absorb(plain), rotated, self._cache, tables, seq_lens,
            self._plans.workspace, scale=shape.scale, pdl=self._pdl,
        )  # fmt: skip
        expansion.values_of(sums, out)

    def _attend_segment(
        self,
        queries: torch.Tensor,
        step: Step,
        number: int,
        segment: ContextSegment,
        out: torch.Tensor,
    ) -> None:
        """Expands the latents of a segment of the longer rows' context, and attends to it."""
        shape, plans = self._shape, self._plans
        latents = self._cache.flatten(0, 1).index_select(0, self._slots(step, number, segment))
        expanded = plans.expanded[: len(latents)]
        expansion = self._expansion.of_rows(step, segment.rows)
        expansion.expand(latents[:, : shape.latent_size], expanded)
        latent_prefill(
            queries, expanded, latents[:, shape.latent_size :], segment, plans.state, out,
            plain_size=shape.plain_size, scale=shape.scale, config=plans.config, pdl=self._pdl,
        )  # fmt: skip

    def _slots(self, step: Step, number: int, segment: ContextSegment) -> torch.Tensor:
        """Returns where in the cache the tokens of a segment are, int64 [S]; computed once for all
        layers of the KV group."""
        memo = KernelLatentAttention, self._group, number
        slots = step.memo.get(memo)
        if slots is None:
            block_size = self._cache.shape[1]
            tables = step.inputs.groups[self._group].block_tables
            blocks = tables[segment.rows, segment.positions // block_size].long()
            slots = step.memo[memo] = blocks * block_size + segment.positions % block_size
        return slots
