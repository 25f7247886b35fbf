"""Latent attention by the Triton kernels: rows of one token with absorbed projections
(`kernels/latent_attention.py`), longer rows over expanded keys and values
(`kernels/latent_prefill.py`).

A step that only decodes depends on nothing that the host has to know, so a CUDA graph may hold it.
How many context tokens are expanded for longer rows depends on their lengths: such steps are
launched kernel by kernel.
"""

from __future__ import annotations

import torch

from aioinfer.kernels.decode_plan import plan_decode
from aioinfer.kernels.latent_attention import latent_decode, make_latent_workspace
from aioinfer.kernels.latent_cache import latent_cache
from aioinfer.kernels.latent_prefill import (
    ContextSegment,
    PrefillState,
    latent_prefill,
    plan_segments,
    tile_config,
)
from aioinfer.kernels.paged_attention import BLOCK_SIZES
from aioinfer.layers.kernel_attention import AttentionPlans
from aioinfer.layers.latents import LatentExpansion, LatentShape
from aioinfer.layers.norm import RMSNorm
from aioinfer.layers.step import SampledRows, Step

#: The maximum of channels of latent vectors, of the rotated part, and of a head's other parts: of
#: these, tiles fit into a multiprocessor.
_MAX_LATENT, _MAX_ROTARY, _MAX_HEAD = 512, 64, 128
#: Numbers that the keys and values of a segment of the context take at most: 128 MiB in 16 bits.
SEGMENT_NUMBERS = 1 << 26
_MIN_SEGMENT, _MAX_SEGMENT = 1024, 1 << 16


def supports(shape: LatentShape, block_size: int) -> bool:
    """Whether the kernels have the sizes."""
    return (
        shape.latent_size <= _MAX_LATENT
        and shape.rotary_size <= _MAX_ROTARY
        and max(shape.plain_size, shape.value_size) <= _MAX_HEAD
        and block_size in BLOCK_SIZES
    )


def segment_size(shape: LatentShape) -> int:
    """Returns how many context tokens are expanded at a time."""
    numbers = shape.num_heads * (shape.plain_size + shape.value_size)
    return min(_MAX_SEGMENT, max(_MIN_SEGMENT, SEGMENT_NUMBERS // numbers))


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
            self._decode(queries[:decodes], tables, lens, out[:decodes])
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
            self._decode(queries, tables, sampled.seq_lens, out)
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
    ) -> None:
        """Attends rows of one token, absorbed; writes to `out` [R, num_heads, value_size]."""
        shape, expansion = self._shape, self._expansion
        plain, rotated = queries.split((shape.plain_size, shape.rotary_size), dim=-1)
        sums = latent_decode(
            expansion.absorb(plain), rotated, self._cache, tables, seq_lens, self._plans.workspace,
            scale=shape.scale, pdl=self._pdl,
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
        self._expansion.expand(latents[:, : shape.latent_size], expanded)
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
