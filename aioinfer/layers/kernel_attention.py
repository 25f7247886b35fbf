"""Attention over the paged KV cache by the Triton kernels.

The data of a step that the kernels need is computed on the GPU, once a step for all layers that
agree in it (`AttentionPlans`): how decodes are divided among programs, and which query tiles the
other rows have. So the launches of a layer depend on nothing but the number of tokens, and a CUDA
graph may hold them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import torch

from aioinfer.kernels.decode_plan import DecodeWorkspace, plan_decode
from aioinfer.kernels.paged_attention import (
    BLOCK_SIZES,
    HEAD_SIZES,
    make_prefill_plan,
    paged_attention,
)
from aioinfer.kernels.prefill_plan import PrefillPlan, plan_prefill
from aioinfer.kernels.projection import Projection, Rotation
from aioinfer.kernels.qk_norm_rope_cache import qk_norm_rope_cache
from aioinfer.layers.kv_cache import AttentionShape, KVCache
from aioinfer.layers.norm import RMSNorm
from aioinfer.layers.rotary import RotaryTable
from aioinfer.layers.step import SampledRows, Step


def supports(shape: AttentionShape, block_size: int) -> bool:
    """Whether the kernels have the head size and the block size."""
    return shape.head_size in HEAD_SIZES and block_size in BLOCK_SIZES


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
        for (group, _, _), workspace in self._workspaces.items():
            tables = inputs.groups[group].block_tables
            if not step.shares_prefix:
                workspace = replace(workspace, cascade=None)
            plan_decode(workspace, inputs.seq_lens[:num_decodes], tables)
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
        sinks: torch.Tensor | None = None,
        slopes: torch.Tensor | None = None,
        pdl: bool,
    ):
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
            qkv: [T, (num_heads + 2 * num_kv_heads) * head_size], before norm and rotation.
            step: planned by `AttentionPlans.fill`.
        """
        inputs, group = step.inputs, step.inputs.groups[self._group]
        queries = self._queries(qkv)
        projection = None
        if step.num_decodes is not None:
            projection = self._projection(qkv, inputs.rotary)
        # decode attention caches its own keys, if the host knows how many rows it has
        first = step.num_decodes or 0
        if first < len(qkv):
            queries = self._rotate_and_cache(qkv, step, first)
        workspace = self._workspace if step.shares_prefix else self._plain_workspace
        return paged_attention(
            queries, self._cache.keys, self._cache.values, group.block_tables, inputs.query_starts,
            inputs.seq_lens, num_decodes=step.num_decodes, workspace=workspace,
            prefill_plan=self._prefill, projection=projection, pdl=self._pdl, **self._options,
        )  # fmt: skip

    def attend_sampled(self, qkv: torch.Tensor, step: Step, sampled: SampledRows) -> torch.Tensor:
        """Caches the step's keys and values and returns the sampled rows' [S, num_heads,
        head_size].

        The rows are decodes here: one token each, with all that came before it in the cache.
        """
        num_decodes = step.num_decodes
        assert num_decodes is not None
        if num_decodes < len(qkv):
            self._rotate_and_cache(qkv, step, num_decodes)
        qkv = qkv.index_select(0, sampled.last)
        queries, rows = self._queries(qkv), len(qkv)
        if not rows:
            return queries
        tables = step.inputs.groups[self._group].block_tables.index_select(0, sampled.rows)
        return paged_attention(
            queries, self._cache.keys, self._cache.values, tables,
            step.inputs.query_starts[: rows + 1], sampled.seq_lens, num_decodes=rows,
            workspace=self._workspace, projection=self._projection(qkv, sampled.rotary),
            pdl=self._pdl, **self._options,
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
        out = torch.empty_like(self._queries(qkv), memory_format=torch.contiguous_format)
        qk_norm_rope_cache(
            self._projection(qkv[first:], inputs.rotary_positions[..., first:]),
            group.slot_mapping[first:], cache.keys, cache.values, num_q_heads=self._shape.num_heads,
            scales=cache.scales, out=out[first:], pdl=self._pdl,
        )  # fmt: skip
        return out
