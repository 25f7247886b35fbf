"""Mamba-2 (Dao and Gu 2024): a layer that keeps a short convolution's window and a matrix a head of
a sequence, in the place of keys and values.

A projection of the stream gives a gate, inputs x of each head, vectors B and C of each group of
heads, and a step of each head. x, B and C pass a short convolution and SiLU. With keys B, values
x times the step, queries C, and decays by the steps, the matrices change as in `recurrence`; the
outputs and the inputs, weighted by head, are added, gated by the SiLU of the gate, and normed: in
this order, the other way round, or not normed at all (Falcon-H1).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from aioinfer.ipc.kv_spec import StateSpec
from aioinfer.layers.attention_maker import head_shards
from aioinfer.layers.backend import Backend
from aioinfer.layers.convolution import Convolution, select_sampled
from aioinfer.layers.layer import LayerCache, Mixer
from aioinfer.layers.linear import ColumnParallelLinear, RowParallelLinear
from aioinfer.layers.norm import GroupRMSNorm, Norm
from aioinfer.layers.recurrence import HeadDecay, HeadInputs, Mamba2Shape, recur
from aioinfer.layers.residual import ResidualStream
from aioinfer.layers.shards import HeadVector, merged_sources
from aioinfer.layers.state_rows import StateRows
from aioinfer.layers.step import Step

if TYPE_CHECKING:
    from aioinfer.layers.kernel_attention import AttentionPlans
    from aioinfer.layers.kernel_states import KernelMamba2
    from aioinfer.layers.part_maker import PartMaker


class Mamba2(Mixer):
    """Mamba-2 of one layer on one rank. Made by `LayerMaker.mamba2`.

    Args:
        shape: of this rank.
        inputs: the merged projection: gates, x, B, C and steps.
        convolution: of x, B and C.
        decay: of the heads.
        skip: of each head, by which its inputs are added to its outputs.
        output_norm: of the outputs, where there is one.
        output: the output projection.
        norm: of the residual stream before the projection.
        residual_scale: multiplied with the addend to the stream.
        backend: of the rank.
    """

    scales = None

    def __init__(
        self,
        shape: Mamba2Shape,
        inputs: ColumnParallelLinear,
        convolution: Convolution,
        decay: HeadDecay,
        skip: HeadVector,
        output_norm: GroupRMSNorm | None,
        output: RowParallelLinear,
        *,
        norm: Norm,
        residual_scale: float = 1.0,
        backend: Backend,
    ):
        self.shape = shape
        self.inputs, self.convolution, self.output = inputs, convolution, output
        self.decay, self.skip = decay, skip
        self.output_norm = output_norm
        self._norm, self._residual_scale = norm, residual_scale
        self._pdl, self._state_dtype = backend.pdl, backend.state_dtype
        self._backend, self._saved = backend, backend.saved_inputs(())
        self._caches: Sequence[LayerCache] = ()
        self._kernel: KernelMamba2 | None = None

    @property
    def kv_specs(self) -> tuple[StateSpec, StateSpec]:
        """See `Mixer.kv_specs`: the convolution's window, and the heads' matrices."""
        shape = self.shape
        matrices = StateSpec(
            (shape.num_heads, shape.state_size, shape.head_size), self._state_dtype
        )
        return self.convolution.kv_spec, matrices

    @property
    def kinds(self) -> tuple[Hashable, ...]:
        """See `Part.kinds`."""
        return self.inputs.weight.kind, self.output.weight.kind

    def lacks(self, block_size: int) -> str | None:
        """See `Mixer.lacks`."""
        from aioinfer.layers.kernel_states import MAX_MAMBA_STATE, supports

        size = self.shape.state_size
        if size > MAX_MAMBA_STATE:
            return f"states of {size} channels"
        return None if supports(block_size) else "states"

    def bind(self, caches: Sequence[LayerCache], plans: AttentionPlans | None) -> None:
        """See `Mixer.bind`."""
        self._caches, self._kernel = caches, None
        self._saved = self._backend.saved_inputs(
            (sum(self.shape.mixed_sizes), self.shape.num_heads)
        )
        if plans is not None:
            from aioinfer.layers.kernel_states import KernelMamba2

            (windows, matrices), taps = caches, self.convolution.weight
            self._kernel = KernelMamba2(
                self.shape, taps, self.convolution.bias, self.decay, self.skip, self.output_norm,
                windows, matrices, self._saved, plans, pdl=self._pdl,
            )  # fmt: skip

    def looks_ahead(self, *, on_kernels: bool) -> bool:
        """See `Mixer.looks_ahead`. In plain torch it needs positions that only a CPU knows."""
        return on_kernels or self._backend.device.type == "cpu"

    def __call__(self, stream: ResidualStream, step: Step, *, is_last: bool = False) -> None:
        """See `Mixer`."""
        shape = self.shape
        projected = self.inputs.of_normed(stream, self._norm)
        sizes = shape.channels, sum(shape.mixed_sizes), shape.num_heads
        gates, mixed, steps = projected.split(sizes, dim=-1)
        if self._kernel is not None:
            outputs = self._kernel.mix(mixed, steps, step)
        else:
            outputs = self._mix_in_torch(mixed, steps, step)
        outputs = self._gate(outputs, gates)
        outputs = select_sampled(stream, step, outputs, is_last=is_last)
        if len(stream):
            self.output.add_to(stream, outputs, scale=self._residual_scale)

    def _gate(self, outputs: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        """Returns the outputs, float32 [T, channels], gated and normed, in the gates' dtype."""
        norm, first = self.output_norm, self.shape.norm == "after gate"
        if self._kernel is not None and not (norm is not None and norm.is_divided):
            return self._kernel.gate(outputs, gates)
        factors = F.silu(gates.float())
        outputs = outputs * factors if first or norm is None else outputs
        outputs = outputs if norm is None else norm(outputs)
        return (outputs if first or norm is None else outputs * factors).to(gates.dtype)

    def _mix_in_torch(self, mixed: torch.Tensor, steps: torch.Tensor, step: Step) -> torch.Tensor:
        """Returns the heads' outputs, float32 [T, channels], for the inputs of the convolution [T,
        channels] and the steps [T, heads]."""
        shape, (windows, matrices) = self.shape, self._caches
        rows = StateRows.of_step(step, windows.group, windows.block_size)
        mixed, steps = self._saved.extend((mixed, steps), rows)
        mixed = F.silu(self.convolution(mixed, windows.tensor, rows), inplace=True)
        x, keys, queries = mixed.split(shape.mixed_sizes, dim=-1)
        x = x.unflatten(-1, (shape.num_heads, shape.head_size))
        steps = self.decay.steps(steps).clamp_(*shape.step_limits)
        inputs = HeadInputs(
            self._of_heads(queries),
            self._of_heads(keys),
            x * steps,
            self.decay(steps),
            None,
        )
        rows = StateRows.of_step(step, matrices.group, matrices.block_size)
        outputs = recur(inputs, matrices.tensor, rows)
        outputs.addcmul_(x, self.skip.values.unsqueeze(-1))
        return outputs[rows.num_replayed :].flatten(1)

    def _of_heads(self, x: torch.Tensor) -> torch.Tensor:
        """Returns B or C [T, groups * state_size] for each head: [T, heads, state_size]."""
        groups = x.unflatten(-1, (self.shape.num_groups, self.shape.state_size))
        return groups.repeat_interleave(self.shape.num_heads // self.shape.num_groups, dim=1)


def make_mamba2(
    make: PartMaker, name: str, shape: Mamba2Shape, *, norm: Norm, residual_scale: float = 1.0,
    input_scales: Sequence[float] = (1.0,) * 5,
) -> Mamba2:  # fmt: skip
    """Returns the Mamba-2 layer of the checkpoint module `name`.

    Args:
        shape: of all ranks together.
        norm, residual_scale: as in `Mamba2`.
        input_scales: multiplied with gates, x, B, C and steps, as the projection gives them.
    """
    backend = make.backend
    heads, groups = head_shards(shape.num_heads, shape.num_groups, backend.group)
    channels, states = heads.times(shape.head_size), groups.times(shape.state_size)
    shards = channels, channels, states, states, heads
    merged = merged_sources(name, ("",) * 5, shards, "in_proj")
    sources = [replace(s, scale=scale) for s, scale in zip(merged, input_scales, strict=True)]
    mixed = merged_sources(name, ("",) * 3, shards[1:4], "conv1d")
    convolution = Convolution(mixed, shape.width, bias=shape.conv_bias, backend=backend)
    output_norm = None
    if shape.norm != "none":
        output_norm = GroupRMSNorm(f"{name}.norm", channels, groups, make.norm_eps, backend)
        make.keep(output_norm)
    return Mamba2(
        replace(shape, num_heads=heads.size, num_groups=groups.size),
        make.column(sources, bias=shape.bias),
        make.keep(convolution),
        make.keep(HeadDecay(name, heads, backend.device)),
        make.keep(HeadVector(f"{name}.D", heads, backend.device, 1.0)),
        output_norm,
        make.row(f"{name}.out_proj", channels, bias=shape.output_bias),
        norm=norm,
        residual_scale=residual_scale,
        backend=backend,
    )
