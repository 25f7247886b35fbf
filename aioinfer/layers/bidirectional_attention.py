"""Attention of encoders: each token attends to all tokens of its text, before and behind it.
Nothing is kept: a step has whole texts.

The texts of a step stand one behind the other, without padding. On a GPU one kernel takes them as
they are (`kernels.bidirectional_attention`). On a CPU torch's own attention takes adjacent texts of
equal length in one call; `by_length` brings the rows of a step into that order, before the first
layer computes.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from aioinfer.layers.attention_maker import head_shards
from aioinfer.layers.backend import Backend
from aioinfer.layers.distance_bias import DistanceBias
from aioinfer.layers.layer import LayerCache, Mixer
from aioinfer.layers.linear import ColumnParallelLinear, RowParallelLinear
from aioinfer.layers.norm import Norm
from aioinfer.layers.residual import ResidualStream
from aioinfer.layers.rotary import RopeConfig, RotaryTable, apply_rope
from aioinfer.layers.shards import merged_sources
from aioinfer.layers.step import HostRows, Step

if TYPE_CHECKING:
    from aioinfer.layers.kernel_attention import AttentionPlans
    from aioinfer.layers.part_maker import PartMaker


@dataclass(frozen=True, slots=True)
class BidirectionalShape:
    """The shape of attention on one rank.

    Attributes:
        num_heads: of queries, keys and values alike.
        head_size: channels of a head.
        reach: how far behind or before a token the tokens are that it attends to; None: any
            distance.
    """

    num_heads: int
    head_size: int
    reach: int | None = None


class BidirectionalAttention(Mixer):
    """Attention of one layer on one rank. Made by `LayerMaker.bidirectional_attention`.

    Args:
        shape: of this rank.
        qkv: the merged projection: queries' heads, then keys', then values'.
        output: the output projection.
        rotary: the table of angles; None for queries and keys that are not rotated.
        norm: of the residual stream before the projection, or none.
        distance_bias: of the scores, or none.
        backend: of the rank.
    """

    scales = None
    supports_graphs = False
    supports_prefill_graphs = False

    def __init__(
        self,
        shape: BidirectionalShape,
        qkv: ColumnParallelLinear,
        output: RowParallelLinear,
        rotary: RotaryTable | None,
        norm: Norm | None,
        distance_bias: DistanceBias | None,
        backend: Backend,
    ):
        self.shape = shape
        self.qkv, self.output = qkv, output
        self._rotary, self._norm, self._backend = rotary, norm, backend
        self._distance_bias = distance_bias

    @property
    def kv_specs(self) -> tuple[()]:
        """See `Mixer.kv_specs`: nothing is kept."""
        return ()

    def bind(self, caches: Sequence[LayerCache], plans: AttentionPlans | None) -> None:
        """See `Mixer.bind`: there is nothing to bind."""

    def looks_ahead(self, *, on_kernels: bool) -> bool:
        """See `Mixer.looks_ahead`."""
        return False

    @property
    def kinds(self) -> tuple[Hashable, ...]:
        """See `Part.kinds`."""
        return self.qkv.weight.kind, self.output.weight.kind

    def __call__(self, stream: ResidualStream, step: Step, *, is_last: bool = False) -> None:
        """See `Mixer`. All tokens stay in the stream, also in the last layer."""
        qkv = self.qkv.of_normed(stream, self._norm)
        if self._rotary is not None:
            rotated = 2 * self.shape.num_heads * self.shape.head_size
            heads = qkv[:, :rotated].unflatten(1, (-1, self.shape.head_size))
            heads.copy_(apply_rope(heads, *self._rotary.at_step(step)))
        attend = self._attend_with_kernel if self._backend.has_kernels else self._attend_in_torch
        self.output.add_to(stream, attend(qkv, step))

    def _attend_with_kernel(self, qkv: torch.Tensor, step: Step) -> torch.Tensor:
        from aioinfer.kernels.bidirectional_attention import LOG2_E, bidirectional_attention

        bias, biases = self._distance_bias, None
        if bias is not None:
            # of this step alone: the weights may be updated between two steps
            if bias not in step.memo:
                step.memo[bias] = bias.table * LOG2_E
            biases = step.memo[bias]
        heads, size = self.shape.num_heads, self.shape.head_size
        return bidirectional_attention(
            qkv, step.inputs.query_starts, num_heads=heads, num_kv_heads=heads, head_size=size,
            scale=size**-0.5, reach=self.shape.reach or 0, biases=biases,
        )  # fmt: skip

    def _attend_in_torch(self, qkv: torch.Tensor, step: Step) -> torch.Tensor:
        """Returns attention [T, num_heads * head_size] of the projection [T, features]: adjacent
        texts of equal length in one call."""
        assert step.host is not None
        heads, size = self.shape.num_heads, self.shape.head_size
        out = torch.empty(len(qkv), heads * size, dtype=qkv.dtype, device=qkv.device)
        first = 0
        for length, texts in groupby(step.host.query_lens):
            last = first + length * len(list(texts))
            # [3, texts, heads, tokens, channels]
            parts = qkv[first:last].view(-1, length, 3, heads, size).permute(2, 0, 3, 1, 4)
            mask = self._mask(length, step)
            queries, keys, values = parts
            attended = F.scaled_dot_product_attention(queries, keys, values, mask)
            out[first:last].view(-1, length, heads, size).copy_(attended.transpose(1, 2))
            first = last
        return out

    def _mask(self, length: int, step: Step) -> torch.Tensor | None:
        """Returns which tokens of a text of so many tokens attend to which: bool [length, length],
        or what is added to their scores: [num_heads, length, length]; None for all to all."""
        reach, bias = self.shape.reach, self._distance_bias
        if bias is not None:
            if (bias, length) not in step.memo:
                step.memo[bias, length] = bias.of_length(length)
            return step.memo[bias, length]
        if reach is None or length <= reach + 1:
            return None
        key = BidirectionalAttention, reach, length
        if key not in step.memo:
            places = torch.arange(length, device=step.inputs.positions.device)
            step.memo[key] = (places[:, None] - places).abs() <= reach
        return step.memo[key]


@dataclass(frozen=True, slots=True)
class SortedStep:
    """A step whose rows are in another order.

    Attributes:
        step: with the rows, and so the tokens, by rising length.
        order: int64 [T], the place in the given step of each of its tokens.
        places: int64 [T], the place in it of each token of the given step.
    """

    step: Step
    order: torch.Tensor
    places: torch.Tensor


def by_length(step: Step) -> SortedStep | None:
    """Returns a step, which has `host`, with its rows by rising length; None if they are already.
    Only what encoders read of it is reordered."""
    assert step.host is not None
    lengths = torch.tensor(step.host.query_lens)
    rows = lengths.argsort(stable=True)
    if bool((rows[1:] > rows[:-1]).all()):
        return None
    sorted_lengths = lengths[rows]
    ends = sorted_lengths.cumsum(0)
    given_starts = lengths.cumsum(0) - lengths
    shift = given_starts[rows] - (ends - sorted_lengths)
    order = torch.arange(int(ends[-1])) + shift.repeat_interleave(sorted_lengths)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order))
    inputs = step.inputs
    types = inputs.token_types
    reordered = replace(
        inputs,
        input_ids=inputs.input_ids[order],
        positions=inputs.positions[order],
        query_starts=F.pad(ends, (1, 0)).int(),
        seq_lens=inputs.seq_lens[rows],
        token_types=None if types is None else types[order],
    )
    host = HostRows(sorted_lengths.tolist(), sorted_lengths.tolist())
    return SortedStep(replace(step, inputs=reordered, host=host, memo={}), order, places)


def make_bidirectional_attention(
    make: PartMaker, name: str, *, num_heads: int, head_size: int, norm: Norm | None = None,
    rope: RopeConfig | None = None, reach: int | None = None, bias: bool = True,
    projections: tuple[str, str, str, str] = ("query", "key", "value", "output"),
    merged: str | None = None, distance_bias: DistanceBias | None = None,
) -> BidirectionalAttention:  # fmt: skip
    """Returns the attention of the checkpoint module `name`.

    Args:
        num_heads, head_size: of all ranks together.
        norm: of the residual stream before it, or none.
        rope: of this layer; None for queries and keys that are not rotated.
        reach: as in `BidirectionalShape`.
        bias: of all projections.
        projections: the modules of queries, keys, values and output.
        merged: the module that holds queries, then keys, then values, if one does.
        distance_bias: of the scores, or none.
    """
    heads, _ = head_shards(num_heads, num_heads, make.backend.group)
    channels = heads.times(head_size)
    sources = merged_sources(name, projections[:3], (channels,) * 3, merged)
    return BidirectionalAttention(
        BidirectionalShape(heads.size, head_size, reach),
        make.column(sources, bias=bias),
        make.row(f"{name}.{projections[3]}", channels, bias=bias),
        None if rope is None else make.rotary(rope, head_size),
        norm,
        distance_bias,
        make.backend,
    )


def make_distance_bias(
    make: PartMaker, name: str, *, num_buckets: int, num_heads: int, max_len: int, **options: Any
) -> DistanceBias:
    """Returns the bias of the checkpoint module `name`, for heads and texts of all ranks together;
    arguments as in `DistanceBias`."""
    heads, _ = head_shards(num_heads, num_heads, make.backend.group)
    return make.keep(DistanceBias(name, num_buckets, heads, max_len, make.backend, **options))
