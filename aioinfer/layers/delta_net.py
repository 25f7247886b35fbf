"""Gated DeltaNet (Yang et al. 2025): the layers of Qwen3-Next and Qwen3.5 that keep a state instead
of keys and values; and Kimi delta attention (Moonshot AI 2025), Kimi-Linear's.

Queries, keys and values pass a short convolution and SiLU; queries and keys are scaled to length
one, and several heads of values share a head of these. Each head of values keeps a matrix, which
changes by the gated delta rule (`recurrence`). The outputs are normed by head, times the SiLU of a
gate. In Kimi delta attention each key channel has a decay of its own, and gates are sigmoids;
decays and gates come from projections of low rank.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from aioinfer.ipc.kv_spec import StateSpec
from aioinfer.layers.backend import Backend
from aioinfer.layers.convolution import Convolution, select_sampled
from aioinfer.layers.layer import LayerCache, Mixer
from aioinfer.layers.linear import ColumnParallelLinear, RowParallelLinear, row_shard
from aioinfer.layers.norm import Norm, RMSNorm
from aioinfer.layers.recurrence import DeltaNetShape, HeadDecay, HeadInputs, recur
from aioinfer.layers.residual import ResidualStream
from aioinfer.layers.shards import Shard, Source, merged_sources
from aioinfer.layers.state_rows import StateRows
from aioinfer.layers.step import Step

if TYPE_CHECKING:
    from aioinfer.layers.kernel_attention import AttentionPlans
    from aioinfer.layers.kernel_states import KernelDeltaNet
    from aioinfer.layers.part_maker import PartMaker

#: Added to the squared length of queries and keys.
_LENGTH_EPS = 1e-6


class GatedDeltaNet(Mixer):
    """Gated DeltaNet or Kimi delta attention of one layer on one rank. Made by
    `LayerMaker.gated_delta_net` and `LayerMaker.kimi_delta_attention`.

    Args:
        shape: of this rank.
        inputs: the projections of the stream, one or several, whose outputs one after the other
            are queries, keys, values, gates, rates and decays; with `low_rank` queries, keys,
            values, rates, and the inputs of the projections of decays and gates.
        row_orders: of each projection, its rows in the order above; None where the checkpoint has
            them so.
        convolution: of queries, keys and values.
        decay: of the heads.
        output_norm: of a head's outputs.
        output: the output projection.
        norm: of the residual stream before the projections.
        backend: of the rank.
        low_rank: the second projections of decays and of gates, of Kimi delta attention.
    """

    scales = None

    def __init__(
        self,
        shape: DeltaNetShape,
        inputs: Sequence[ColumnParallelLinear],
        row_orders: Sequence[torch.Tensor | None],
        convolution: Convolution,
        decay: HeadDecay,
        output_norm: RMSNorm,
        output: RowParallelLinear,
        *,
        norm: Norm,
        backend: Backend,
        low_rank: tuple[ColumnParallelLinear, ...] = (),
    ):
        self.shape = shape
        self.inputs, self._row_orders = inputs, row_orders
        self.low_rank = low_rank
        self.convolution, self.decay = convolution, decay
        self.output_norm, self.output = output_norm, output
        self._norm = norm
        self._pdl, self._state_dtype = backend.pdl, backend.state_dtype
        self._backend, self._saved = backend, backend.saved_inputs(())
        self._caches: Sequence[LayerCache] = ()
        self._kernel: KernelDeltaNet | None = None

    @property
    def kv_specs(self) -> tuple[StateSpec, StateSpec]:
        """See `Mixer.kv_specs`: the convolution's window, and the heads' matrices."""
        shape = self.shape
        matrices = StateSpec((shape.num_heads, shape.key_size, shape.value_size), self._state_dtype)
        return self.convolution.kv_spec, matrices

    @property
    def kinds(self) -> tuple[Hashable, ...]:
        """See `Part.kinds`."""
        projections = (*self.inputs, *self.low_rank)
        return *(linear.weight.kind for linear in projections), self.output.weight.kind

    def finalize(self) -> None:
        """Brings the rows of the projections into the order in which they are computed with. Called
        before the projections' own `finalize`."""
        for linear, order in zip(self.inputs, self._row_orders, strict=True):
            if order is not None:
                linear.reorder_rows(order)

    def lacks(self, block_size: int) -> str | None:
        """See `Mixer.lacks`."""
        from aioinfer.layers.kernel_states import supports

        return None if supports(block_size) else "states"

    def bind(self, caches: Sequence[LayerCache], plans: AttentionPlans | None) -> None:
        """See `Mixer.bind`."""
        self._caches, self._kernel = caches, None
        shape = self.shape
        decays = shape.num_heads * (shape.key_size if shape.by_channel else 1)
        self._saved = self._backend.saved_inputs((sum(shape.mixed_sizes), shape.num_heads, decays))
        if plans is not None:
            from aioinfer.layers.kernel_states import KernelDeltaNet

            windows, matrices = caches
            self._kernel = KernelDeltaNet(
                shape, self.convolution.weight, self.decay, self.output_norm, windows,
                matrices, self._saved, plans, pdl=self._pdl,
            )  # fmt: skip

    def looks_ahead(self, *, on_kernels: bool) -> bool:
        """See `Mixer.looks_ahead`. In plain torch it needs positions that only a CPU knows."""
        return on_kernels or self._backend.device.type == "cpu"

    def __call__(self, stream: ResidualStream, step: Step, *, is_last: bool = False) -> None:
        """See `Mixer`."""
        mixed, gates, rates, decays = self._project(stream)
        if self._kernel is not None:
            outputs = self._kernel.mix(mixed, gates, rates, decays, step)
        else:
            outputs = self._mix_in_torch(mixed, rates, decays, step)
            activate = torch.sigmoid if self.shape.by_channel else F.silu
            gates = activate(gates.float()).view(outputs.shape)
            outputs = self.output_norm(outputs).mul_(gates).to(mixed.dtype).flatten(1)
        outputs = select_sampled(stream, step, outputs, is_last=is_last)
        if len(stream):
            self.output.add_to(stream, outputs)

    def _project(self, stream: ResidualStream) -> tuple[torch.Tensor, ...]:
        """Returns the inputs of the convolution [T, channels], gates [T, heads * value_size],
        rates [T, heads] and decays [T, heads * their channels]; rows are strided."""
        sizes = self.shape.projected_sizes
        if len(self.inputs) == 1:
            parts = self.inputs[0].of_normed(stream, self._norm).split(sizes, dim=-1)
        else:
            x, first = stream.normed(self._norm), 1 if self.low_rank else 2
            wide, narrow = (linear(x) for linear in self.inputs)
            parts = *wide.split(sizes[:first], dim=-1), *narrow.split(sizes[first:], dim=-1)
        if not self.low_rank:
            return parts
        mixed, rates, *narrow_parts = parts
        # these products take inputs in one piece
        decays, gates = (
            linear(x.contiguous()) for linear, x in zip(self.low_rank, narrow_parts, strict=True)
        )
        return mixed, gates, rates, decays

    def _mix_in_torch(
        self, mixed: torch.Tensor, rates: torch.Tensor, decays: torch.Tensor, step: Step
    ) -> torch.Tensor:
        """Returns the heads' outputs [T, heads, value_size] in float32."""
        shape, (windows, matrices) = self.shape, self._caches
        rows = StateRows.of_step(step, windows.group, windows.block_size)
        mixed, rates, decays = self._saved.extend((mixed, rates, decays), rows)
        mixed = F.silu(self.convolution(mixed, windows.tensor, rows), inplace=True)
        size, _, value_size = shape.mixed_sizes
        both, values = mixed.split((2 * size, value_size), dim=-1)
        queries, keys = self._of_length_one(both).split(shape.num_heads, dim=1)
        inputs = HeadInputs(
            queries * shape.key_size**-0.5,
            keys,
            values.unflatten(-1, (shape.num_heads, shape.value_size)),
            self.decay(self.decay.steps(decays)),
            rates.float().sigmoid(),
        )
        rows = StateRows.of_step(step, matrices.group, matrices.block_size)
        return recur(inputs, matrices.tensor, rows)[rows.num_replayed :]

    def _of_length_one(self, x: torch.Tensor) -> torch.Tensor:
        """Returns queries and keys [T, 2 * key heads * key_size] scaled to length one, for each
        head of values: queries, then keys [T, 2 * heads, key_size]."""
        heads = x.unflatten(-1, (-1, self.shape.key_size))
        lengths = heads.square().sum(-1, keepdim=True).add_(_LENGTH_EPS)
        heads = heads * lengths.rsqrt_()
        return heads.repeat_interleave(self.shape.shared, dim=1) if self.shape.shared > 1 else heads


def _projections_by_group(
    name: str, shape: DeltaNetShape, key_heads: Shard
) -> list[tuple[list[Source], torch.Tensor | None]]:
    """Returns the modules of the projections, and the order of their rows, of a checkpoint that
    has the rows of each head of keys together (Qwen3-Next).

    Args:
        name: of the checkpoint module.
        shape: of all ranks together.
        key_heads: which of its heads of keys this rank has.
    """
    values = shape.shared * shape.value_size

    def order(*sizes: int) -> torch.Tensor:
        """Returns the order that has parts of such sizes of all heads one after the other."""
        rows = torch.arange(key_heads.size * sum(sizes)).view(key_heads.size, -1)
        return torch.cat([part.flatten() for part in rows.split(sizes, dim=1)])

    wide = Source(f"{name}.in_proj_qkvz", key_heads.times(2 * shape.key_size + 2 * values))
    narrow = Source(f"{name}.in_proj_ba", key_heads.times(2 * shape.shared))
    return [
        ([wide], order(shape.key_size, shape.key_size, values, values)),
        ([narrow], order(shape.shared, shape.shared)),
    ]


def _projections(
    name: str, shape: DeltaNetShape, key_heads: Shard, heads: Shard
) -> list[tuple[list[Source], torch.Tensor | None]]:
    """Returns what `_projections_by_group` does, of a checkpoint that has queries, keys and values
    one after the other in one module, and each of the others in one of its own (Qwen3.5)."""
    keys, values = key_heads.times(shape.key_size), heads.times(shape.value_size)
    mixed = merged_sources(name, ("", "", ""), (keys, keys, values), "in_proj_qkv")
    narrow = [Source(f"{name}.in_proj_{letter}", heads) for letter in "ba"]
    return [([*mixed, Source(f"{name}.in_proj_z", values)], None), (narrow, None)]


def make_gated_delta_net(
    make: PartMaker, name: str, shape: DeltaNetShape, *, norm: Norm, by_group: bool = False
) -> GatedDeltaNet:
    """Returns the Gated DeltaNet of the checkpoint module `name`.

    Args:
        shape: of all ranks together.
        norm: of the residual stream before it.
        by_group: whether the checkpoint has the rows of each head of keys together.
    """
    backend = make.backend
    key_heads, heads = row_shard(shape.num_key_heads, backend), row_shard(shape.num_heads, backend)
    if by_group:
        parts = _projections_by_group(name, shape, key_heads)
    else:
        parts = _projections(name, shape, key_heads, heads)
    if make.is_one_product([source.name for sources, _ in parts for source in sources]):
        parts = [_joined(parts)]
    keys, values = key_heads.times(shape.key_size), heads.times(shape.value_size)
    mixed = merged_sources(name, ("", "", ""), (keys, keys, values), "conv1d")
    convolution = Convolution(mixed, shape.width, bias=False, backend=backend)
    local = replace(shape, num_key_heads=key_heads.size, num_heads=heads.size)
    net = GatedDeltaNet(
        local,
        [make.column(sources) for sources, _ in parts],
        [order for _, order in parts],
        make.keep(convolution),
        make.keep(HeadDecay(name, heads, backend.device)),
        make.norm(f"{name}.norm", shape.value_size),
        make.row(f"{name}.out_proj", values, bias=False),
        norm=norm,
        backend=backend,
    )
    return make.prepare(net)


def make_kimi_delta_attention(
    make: PartMaker, name: str, shape: DeltaNetShape, *, norm: Norm
) -> GatedDeltaNet:
    """Returns the Kimi delta attention of the checkpoint module `name`.

    Args:
        shape: of all ranks together; as many heads of keys as of values.
        norm: of the residual stream before it.
    """
    backend, size = make.backend, shape.key_size
    heads = row_shard(shape.num_heads, backend)
    keys, values = heads.times(size), heads.times(shape.value_size)

    def sources(ending: str) -> list[Source]:
        """Returns the channels of queries, keys and values of modules with such names."""
        rows = zip("qkv", (keys, keys, values), strict=True)
        return [Source(f"{name}.{letter}_{ending}", part) for letter, part in rows]

    low_rank = [Source(f"{name}.{letter}_a_proj", Shard.whole(size)) for letter in "fg"]
    parts = [sources("proj"), [Source(f"{name}.b_proj", heads), *low_rank]]
    if make.is_one_product([source.name for part in parts for source in part]):
        parts = [[*parts[0], *parts[1]]]
    decays, gates = Source(f"{name}.f_b_proj", keys), Source(f"{name}.g_b_proj", values)
    convolution = Convolution(sources("conv1d"), shape.width, bias=False, backend=backend)
    return GatedDeltaNet(
        replace(shape, num_key_heads=heads.size, num_heads=heads.size),
        [make.column(part) for part in parts],
        [None] * len(parts),
        make.keep(convolution),
        make.keep(HeadDecay(name, heads, backend.device, size)),
        make.norm(f"{name}.o_norm", shape.value_size),
        make.row(f"{name}.o_proj", values, bias=False),
        norm=norm,
        backend=backend,
        low_rank=(make.column([decays], size), make.column([gates], size)),
    )


def _joined(
    parts: Sequence[tuple[list[Source], torch.Tensor | None]],
) -> tuple[list[Source], torch.Tensor | None]:
    """Returns projections as one product, with the order of its rows."""
    orders, first = [], 0
    for sources, order in parts:
        count = sum(source.rows.size for source in sources)
        orders.append(first + (torch.arange(count) if order is None else order))
        first += count
    is_ordered = all(order is None for _, order in parts)
    return [source for sources, _ in parts for source in sources], (
        None if is_ordered else torch.cat(orders)
    )
