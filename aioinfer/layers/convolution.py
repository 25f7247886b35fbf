"""Causal convolutions of a few tokens, each channel by itself, and the layer that consists of one
(LFM2, Liquid AI 2025).

The state of a convolution of width W is the last W - 1 inputs of each channel, its window.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import torch

from aioinfer.ipc.kv_spec import StateSpec
from aioinfer.layers.backend import Backend
from aioinfer.layers.layer import LayerCache, Mixer
from aioinfer.layers.linear import ColumnParallelLinear, RowParallelLinear, row_shard
from aioinfer.layers.norm import Norm
from aioinfer.layers.residual import ResidualStream
from aioinfer.layers.shards import NamedShards, Source, WeightShard, merged_sources
from aioinfer.layers.state_rows import StateRows
from aioinfer.layers.step import Step

if TYPE_CHECKING:
    from aioinfer.layers.kernel_attention import AttentionPlans
    from aioinfer.layers.kernel_states import KernelConvolution
    from aioinfer.layers.part_maker import PartMaker


class Convolution:
    """The taps of a causal convolution, of this rank's channels.

    Args:
        sources: the checkpoint modules, and which of their channels this rank has, in order.
        width: how many tokens it takes, the last of them included.
        bias: whether there is one.
        backend: of the rank.

    Attributes:
        weight: [channels, width], the oldest token's tap first.
        bias: [channels], or None.
    """

    def __init__(self, sources: Sequence[Source], width: int, *, bias: bool, backend: Backend):
        self._sources, self._dtype = sources, backend.dtype
        size, device = sum(source.rows.size for source in sources), backend.device
        self.weight = torch.zeros(size, width, dtype=backend.dtype, device=device)
        self.bias = torch.zeros(size, dtype=backend.dtype, device=device) if bias else None
        self._taps = self.weight

    @property
    def kv_spec(self) -> StateSpec:
        """The specification of the window."""
        channels, width = self.weight.shape
        return StateSpec((channels, width - 1), str(self._dtype).removeprefix("torch."))

    def weight_shards(self) -> NamedShards:
        """Yields where this rank's channels of the checkpoint's tensors go."""
        first = 0
        for source in self._sources:
            shard = source.rows
            part = slice(first, first + shard.size)
            first = part.stop
            weight = self.weight[part].unsqueeze(1)
            yield f"{source.name}.weight", WeightShard(weight, 0, shard.start, shard.total)
            if self.bias is not None:
                bias = WeightShard(self.bias[part], 0, shard.start, shard.total)
                yield f"{source.name}.bias", bias

    def finalize(self) -> None:
        """Lays out the taps for products with the tokens of a row."""
        taps = self.weight.float().t().contiguous()
        self._taps = taps if self._taps is self.weight else self._taps.copy_(taps)

    def __call__(self, x: torch.Tensor, cache: torch.Tensor, rows: StateRows) -> torch.Tensor:
        """Returns the convolution of a step's tokens [T, channels], behind those that it replays,
        in float32, and writes the windows after them.

        Args:
            x: [T, channels].
            cache: [num_blocks, channels, width - 1], the layer's windows.
            rows: of the step.
        """
        out = torch.empty(x.shape, dtype=torch.float32, device=x.device)

        def slide(tokens: slice | torch.Tensor, windows: torch.Tensor) -> torch.Tensor:
            inputs = torch.cat((windows, x[tokens].unsqueeze(-1)), dim=-1)
            out[tokens] = torch.sum(inputs.float() * self.weight, dim=-1)
            return inputs[..., 1:]

        rows.advance(cache, slide, x.dtype)
        before = len(self._taps) - 1
        for row in rows.rows:
            inputs = torch.cat((row.initial(cache).t(), x[row.tokens]))
            for end in row.ends:
                cache[end.block] = inputs[end.length : end.length + before].t()
            some, inputs = out[row.tokens], inputs.float()
            torch.mul(inputs[: row.count], self._taps[0], out=some)
            for age in range(1, before + 1):
                some.addcmul_(inputs[age : age + row.count], self._taps[age])
        return out if self.bias is None else out.add_(self.bias)


class ShortConvolution(Mixer):
    """A gated convolution of one layer on one rank: C * convolution(B * x), where B, C and x are
    projections of the stream. Made by `LayerMaker.short_convolution`.

    Args:
        inputs: the merged projection: this rank's channels of B, then of C, then of x.
        convolution: of these channels.
        output: the output projection.
        norm: of the residual stream before the projection.
        backend: of the rank.
    """

    scales = None

    def __init__(
        self,
        inputs: ColumnParallelLinear,
        convolution: Convolution,
        output: RowParallelLinear,
        *,
        norm: Norm,
        backend: Backend,
    ):
        self.inputs, self.convolution, self.output = inputs, convolution, output
        self._norm = norm
        self._pdl, self._backend = backend.pdl, backend
        self._cache: LayerCache | None = None
        self._saved = backend.saved_inputs(())
        self._kernel: KernelConvolution | None = None

    @property
    def kv_specs(self) -> tuple[StateSpec]:
        """See `Mixer.kv_specs`."""
        return (self.convolution.kv_spec,)

    @property
    def kinds(self) -> tuple[Hashable, ...]:
        """See `Part.kinds`."""
        return self.inputs.weight.kind, self.output.weight.kind

    def lacks(self, block_size: int) -> str | None:
        """See `Mixer.lacks`."""
        from aioinfer.layers.kernel_states import supports

        return None if supports(block_size) else "states"

    def bind(self, caches: Sequence[LayerCache], plans: AttentionPlans | None) -> None:
        """See `Mixer.bind`."""
        (self._cache,) = caches
        self._kernel = None
        self._saved = self._backend.saved_inputs((len(self.convolution.weight),))
        if plans is not None:
            from aioinfer.layers.kernel_states import KernelConvolution

            self._kernel = KernelConvolution(
                self.convolution.weight, self.convolution.bias, self._cache,
                self._saved.tensors[0], plans, pdl=self._pdl,
            )  # fmt: skip

    def looks_ahead(self, *, on_kernels: bool) -> bool:
        """See `Mixer.looks_ahead`. In plain torch it needs positions that only a CPU knows."""
        return on_kernels or self._backend.device.type == "cpu"

    def __call__(self, stream: ResidualStream, step: Step, *, is_last: bool = False) -> None:
        """See `Mixer`."""
        assert self._cache is not None
        first, second, x = self.inputs.of_normed(stream, self._norm).chunk(3, dim=-1)
        if self._kernel is not None:
            mixed = self._kernel(first * x, step)
        else:
            rows = StateRows.of_step(step, self._cache.group, self._cache.block_size)
            (mixed,) = self._saved.extend((first * x,), rows)
            mixed = self.convolution(mixed, self._cache.tensor, rows)[rows.num_replayed :]
            mixed = mixed.to(x.dtype)
        mixed = mixed * second
        mixed = select_sampled(stream, step, mixed, is_last=is_last)
        if len(stream):
            self.output.add_to(stream, mixed)


def select_sampled(
    stream: ResidualStream, step: Step, mixed: torch.Tensor, *, is_last: bool
) -> torch.Tensor:
    """Keeps the sampled rows' tokens alone where nothing else is wanted of a step; see `Mixer`.
    Returns these rows of `mixed` [T, ...]."""
    sampled = step.sampled if is_last else None
    if sampled is None or len(sampled.rows) == len(stream):
        return mixed
    stream.select(sampled.last)
    return mixed.index_select(0, sampled.last)


def make_short_convolution(
    make: PartMaker, name: str, width: int, *, norm: Norm, bias: bool = False
) -> ShortConvolution:
    """Returns the gated convolution of the checkpoint module `name`.

    Args:
        width: tokens of the convolution.
        norm: as in `ShortConvolution`.
        bias: of the projections and of the convolution.
    """
    channels = row_shard(make.hidden_size, make.backend)
    sources = merged_sources(name, ("", "", ""), (channels,) * 3, "in_proj")
    taps = [Source(f"{name}.conv", channels)]
    convolution = Convolution(taps, width, bias=bias, backend=make.backend)
    return ShortConvolution(
        make.column(sources, bias=bias),
        make.keep(convolution),
        make.row(f"{name}.out_proj", channels, bias=bias),
        norm=norm,
        backend=make.backend,
    )
