"""Layers with a state by the Triton kernels: Gated DeltaNet, Mamba-2, and short convolutions.

Where rows may look ahead, rows of one token are computed by kernels that replay tokens, in all
steps: `StepInputs.replays` is there or not for as long as the model runs.

The kernels find out on the GPU which rows of a step have one token and which have more, and what
they read and write: so the launches of a layer depend on nothing but the numbers of rows and
tokens, and a CUDA graph may hold them. The lists of chunks that they work through are made once a
step for all layers (`AttentionPlans.share`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from aioinfer.kernels.convolution_lookahead import convolution_lookahead
from aioinfer.kernels.delta_arguments import DeltaInputs, DeltaWeights
from aioinfer.kernels.delta_decode import delta_decode, make_tickets
from aioinfer.kernels.delta_lookahead import delta_lookahead
from aioinfer.kernels.delta_prefill import (
    DeltaWorkspace,
    chunk_length,
    delta_prefill,
    plans_of,
)
from aioinfer.kernels.gated_norm import gated_norm
from aioinfer.kernels.mamba import (
    MambaInputs,
    MambaWeights,
    mamba_decode,
    mamba_lookahead,
    mamba_prefill,
)
from aioinfer.kernels.short_convolution import short_convolution
from aioinfer.kernels.states import ChunkPlan, StateTables, plan_chunks
from aioinfer.layers.layer import LayerCache
from aioinfer.layers.norm import GroupRMSNorm, RMSNorm
from aioinfer.layers.recurrence import DeltaNetShape, HeadDecay, Mamba2Shape
from aioinfer.layers.shards import HeadVector
from aioinfer.layers.state_rows import SavedInputs
from aioinfer.layers.step import Step

if TYPE_CHECKING:
    from aioinfer.layers.kernel_attention import AttentionPlans

#: Kernels take blocks of a multiple of so many tokens.
_BLOCK_MULTIPLE = 16


#: Channels of a state of Mamba-2 for which the kernel of longer rows is known to be right on GPUs:
#: with 256 it is not (`notes/states.md`), so such layers are computed in plain torch.
MAX_MAMBA_STATE = 128


def supports(block_size: int) -> bool:
    """Whether the kernels have the block size."""
    return block_size % _BLOCK_MULTIPLE == 0 and block_size & (block_size - 1) == 0


def _tables_of(cache: LayerCache, step: Step) -> StateTables:
    return StateTables(cache.tensor, step.inputs.groups[cache.group].block_tables)


def _fill(plan: ChunkPlan, step: Step) -> None:
    inputs = step.inputs
    plan_chunks(plan, inputs.query_starts, inputs.seq_lens, len(inputs.input_ids))


class DeltaPlans:
    """The plan of a step that layers of Gated DeltaNet share, and their buffers.

    Args:
        shape: of the layers.
        block_size: tokens a block.
        rows, tokens: the maximum of a step.
        dtype: of the inputs.
        device: of all.

    Attributes:
        out: [tokens, heads * value_size], which every layer writes its outputs to. What it has in
            the place of padding is finite.
    """

    def __init__(
        self,
        shape: DeltaNetShape,
        block_size: int,
        rows: int,
        tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.tickets = make_tickets(rows, shape.num_key_heads, device)
        self.blocks, self.chunks = plans_of(rows, tokens, block_size, device)
        self.workspace = DeltaWorkspace.empty(
            tokens, rows, sum(shape.mixed_sizes), shape.num_heads, shape.key_size, block_size,
            dtype, device, by_channel=shape.by_channel,
        )  # fmt: skip
        values = shape.num_heads * shape.value_size
        self.out = torch.zeros(tokens, values, dtype=dtype, device=device)

    def fill(self, step: Step) -> None:
        """See `AttentionPlan`."""
        if step.has_prefill:
            _fill(self.blocks, step)
            _fill(self.chunks, step)


class KernelDeltaNet:
    """The Gated DeltaNet of one layer between its projections.

    Args:
        shape: of this rank.
        taps: [channels, width], of the convolution.
        decay, norm: of the layer, `norm` of a head's outputs.
        windows, matrices: the layer's caches.
        saved: the inputs of its lookahead rows: of the convolution, rates and decays.
        plans: of the model.
        pdl: launch as programmatic dependents.
    """

    def __init__(
        self,
        shape: DeltaNetShape,
        taps: torch.Tensor,
        decay: HeadDecay,
        norm: RMSNorm,
        windows: LayerCache,
        matrices: LayerCache,
        saved: SavedInputs,
        plans: AttentionPlans,
        *,
        pdl: bool,
    ):
        self._shape, self._saved = shape, saved.tensors
        self._weights = DeltaWeights(taps, decay.logs, decay.biases, norm.weight, norm.eps)
        self._windows, self._matrices = windows, matrices
        self._pdl = pdl
        dtype, device, size = taps.dtype, taps.device, windows.block_size
        self._plans = plans.share(
            (DeltaPlans, shape),
            lambda: DeltaPlans(shape, size, plans.rows, plans.tokens, dtype, device),
        )

    def mix(
        self,
        mixed: torch.Tensor,
        gates: torch.Tensor,
        rates: torch.Tensor,
        decays: torch.Tensor,
        step: Step,
    ) -> torch.Tensor:
        """Returns the gated outputs [T, heads * value_size] for results of the projections, in a
        buffer that the next layer writes to.

        Args:
            mixed: [T, channels], of the convolution. gates: [T, heads * value_size].
            rates, decays: [T, heads].
            step: planned by `AttentionPlans.fill`.
        """
        inputs, plans, size = step.inputs, self._plans, self._windows.block_size
        heads = gates.unflatten(1, (self._shape.num_heads, self._shape.value_size))
        given = DeltaInputs(mixed, heads, rates, decays)
        windows, matrices = _tables_of(self._windows, step), _tables_of(self._matrices, step)
        out = plans.out[: len(mixed)]
        starts = inputs.query_starts if step.has_prefill else None
        if inputs.replays is None:
            delta_decode(
                given, self._weights, windows, matrices, inputs.seq_lens, plans.tickets, out,
                block_size=size, query_starts=starts, pdl=self._pdl,
            )  # fmt: skip
        else:
            delta_lookahead(
                given, self._weights, windows, matrices, inputs.seq_lens, inputs.replays,
                self._saved, plans.tickets, out, block_size=size, query_starts=starts,
                pdl=self._pdl,
            )  # fmt: skip
        if step.has_prefill:
            delta_prefill(
                given, self._weights, windows, matrices, inputs.query_starts, inputs.seq_lens,
                plans.blocks, plans.chunks, plans.workspace, out, block_size=size,
                first_row=step.num_decodes or 0, pdl=self._pdl,
            )  # fmt: skip
        return out


class ConvolutionPlans:
    """The plan of a step that short convolutions share; arguments as in `DeltaPlans`.

    Args:
        looks_ahead: whether rows may: the plan then has rows of several tokens alone.
    """

    def __init__(
        self, block_size: int, rows: int, tokens: int, device: torch.device, *, looks_ahead: bool
    ):
        self._looks_ahead = looks_ahead
        self.chunks = ChunkPlan.empty(
            rows, tokens, block_size, device, min_tokens=1 + looks_ahead, is_aligned=False
        )

    def fill(self, step: Step) -> None:
        """See `AttentionPlan`."""
        if step.has_prefill or not self._looks_ahead:
            _fill(self.chunks, step)


class KernelConvolution:
    """The short convolution of one layer.

    Args:
        taps: [channels, width]. bias: [channels], or None.
        windows: the layer's cache.
        saved: the inputs [slots, rows, channels] of its lookahead rows.
        plans: of the model.
        pdl: launch as programmatic dependents.
        has_silu: whether SiLU follows.
    """

    def __init__(
        self,
        taps: torch.Tensor,
        bias: torch.Tensor | None,
        windows: LayerCache,
        saved: torch.Tensor,
        plans: AttentionPlans,
        *,
        pdl: bool,
        has_silu: bool = False,
    ):
        self._taps, self._bias, self._windows, self._pdl = taps, bias, windows, pdl
        self._saved, self._has_silu = saved, has_silu
        size, device, ahead = windows.block_size, taps.device, len(saved) > 0
        self._plans = plans.share(
            (ConvolutionPlans, size),
            lambda: ConvolutionPlans(size, plans.rows, plans.tokens, device, looks_ahead=ahead),
        )

    def __call__(
        self, x: torch.Tensor, step: Step, *, out: torch.Tensor | None = None,
        replayed: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Returns the convolution [T, channels] of x [T, channels]: a new tensor with 0 in padding,
        or `out`, whose padding is left as it is. `replayed` gets that of the replayed tokens; see
        `convolution_lookahead`."""
        out = torch.zeros_like(x) if out is None else out
        windows, inputs = _tables_of(self._windows, step), step.inputs
        size, bias, has_silu = self._windows.block_size, self._bias, self._has_silu
        if inputs.replays is not None:
            convolution_lookahead(
                x, self._taps, windows, inputs.seq_lens, inputs.replays, self._saved, out,
                bias=bias, has_silu=has_silu, block_size=size,
                query_starts=inputs.query_starts if step.has_prefill else None,
                replayed=replayed, pdl=self._pdl,
            )  # fmt: skip
        if inputs.replays is None or step.has_prefill:
            short_convolution(
                x, self._taps, windows, self._plans.chunks, inputs.query_starts, out, bias=bias,
                has_silu=has_silu, block_size=size, max_tokens=len(x) if step.has_prefill else 1,
                pdl=self._pdl,
            )  # fmt: skip
        return out


class MambaPlans:
    """The plan of a step that layers of Mamba-2 share, and their buffers; arguments as in
    `DeltaPlans`.

    Args:
        saved: the inputs [slots, rows, channels] of one layer's lookahead rows.

    Attributes:
        mixed: [tokens, channels of x, B and C], after the convolution.
        replayed: [slots, rows, these channels], the same of replayed tokens.
        out: float32 [tokens, channels of x], which every layer writes its outputs to. What both
            have in the place of padding is finite.
    """

    def __init__(
        self,
        shape: Mamba2Shape,
        block_size: int,
        rows: int,
        tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        saved: torch.Tensor,
    ):
        self.chunks = ChunkPlan.empty(
            rows, tokens, chunk_length(block_size), device, min_tokens=2, is_aligned=True
        )
        self.replayed = torch.zeros_like(saved, dtype=dtype)
        self.mixed = torch.zeros(tokens, sum(shape.mixed_sizes), dtype=dtype, device=device)
        self.out = torch.zeros(tokens, shape.channels, dtype=torch.float32, device=device)

    def fill(self, step: Step) -> None:
        """See `AttentionPlan`."""
        if step.has_prefill:
            _fill(self.chunks, step)


class KernelMamba2:
    """The convolution and the recurrence of one layer of Mamba-2.

    Args:
        shape: of this rank.
        taps: [channels of x, B and C, width], of the convolution. bias: [channels], or None.
        decay, skip, norm: of the layer.
        windows, matrices: the layer's caches.
        saved: the inputs of its lookahead rows: of the convolution, and steps.
        plans: of the model.
        pdl: launch as programmatic dependents.
    """

    def __init__(
        self,
        shape: Mamba2Shape,
        taps: torch.Tensor,
        bias: torch.Tensor | None,
        decay: HeadDecay,
        skip: HeadVector,
        norm: GroupRMSNorm | None,
        windows: LayerCache,
        matrices: LayerCache,
        saved: SavedInputs,
        plans: AttentionPlans,
        *,
        pdl: bool,
    ):
        self._weights = MambaWeights(decay.logs, decay.biases, skip.values, *shape.step_limits)
        self._matrices, self._pdl = matrices, pdl
        self._norm, self._gates_first = norm, shape.norm == "after gate"
        of_convolution, self._saved = saved.tensors
        self._convolve = KernelConvolution(
            taps, bias, windows, of_convolution, plans, pdl=pdl, has_silu=True
        )
        size, dtype, device = matrices.block_size, taps.dtype, taps.device
        self._plans = plans.share(
            (MambaPlans, shape),
            lambda: MambaPlans(
                shape, size, plans.rows, plans.tokens, dtype, device, of_convolution
            ),
        )

    def mix(self, mixed: torch.Tensor, steps: torch.Tensor, step: Step) -> torch.Tensor:
        """Returns the heads' outputs, float32 [T, channels], in a buffer that the next layer writes
        to.

        Args:
            mixed: [T, channels of x, B and C], of the convolution.
            steps: [T, heads], before their bias.
            step: planned by `AttentionPlans.fill`.
        """
        inputs, plans, size = step.inputs, self._plans, self._matrices.block_size
        tokens = len(mixed)
        out = plans.out[:tokens]
        mixed = self._convolve(mixed, step, out=plans.mixed[:tokens], replayed=plans.replayed)
        given, matrices = MambaInputs(mixed, steps), _tables_of(self._matrices, step)
        starts = inputs.query_starts if step.has_prefill else None
        if inputs.replays is None:
            mamba_decode(
                given, self._weights, matrices, inputs.seq_lens, out, block_size=size,
                query_starts=starts, pdl=self._pdl,
            )  # fmt: skip
        else:
            mamba_lookahead(
                given, self._weights, matrices, inputs.seq_lens, inputs.replays, plans.replayed,
                self._saved, out, block_size=size, query_starts=starts, pdl=self._pdl,
            )  # fmt: skip
        if step.has_prefill:
            mamba_prefill(
                given, self._weights, matrices, inputs.query_starts, inputs.seq_lens, plans.chunks,
                out, block_size=size, pdl=self._pdl,
            )  # fmt: skip
        return out

    def gate(self, outputs: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        """Returns the outputs of `mix` gated and normed, of gates [T, channels] and in their dtype,
        where this rank has whole groups."""
        norm, out = self._norm, torch.empty_like(outputs, dtype=gates.dtype)
        weight, groups, eps = (None, 1, 0.0) if norm is None else (
            norm.weight, norm.groups.size, norm.eps,
        )  # fmt: skip
        return gated_norm(
            outputs, gates, out, weight=weight, groups=groups, eps=eps,
            gates_first=self._gates_first, pdl=self._pdl,
        )  # fmt: skip
