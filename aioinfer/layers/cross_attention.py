"""Cross attention: the tokens of a decoder attend to the output of an encoder (Vaswani et al.
2017).

Keys and values of a request's source are computed once, by `CrossAttention.write`, and kept in a
block of their own (`ipc.kv_spec.SourceSpec`), which every step reads through entry 0 of the block
table. With kernels each token of a step is a row of the paged decode kernel, whose pages are parts
of that block: no token comes before another in a source. Otherwise torch's own attention reads the
block where it is.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from aioinfer.ipc.kv_spec import SOURCE_PAGE, SourceSpec
from aioinfer.layers.attention_maker import head_shards
from aioinfer.layers.layer import LayerCache, Mixer
from aioinfer.layers.linear import ColumnParallelLinear, RowParallelLinear
from aioinfer.layers.norm import Norm
from aioinfer.layers.residual import ResidualStream
from aioinfer.layers.shards import Source
from aioinfer.layers.step import Step

if TYPE_CHECKING:
    from aioinfer.kernels.decode_plan import DecodeWorkspace
    from aioinfer.layers.kernel_attention import AttentionPlans
    from aioinfer.layers.part_maker import PartMaker

#: Tokens of a launch: the kernel that plans one is compiled for so many rows.
_ROWS = 256
#: Of `Step.memo`, if a feature wants them: a list to which each layer adds its `CrossAttention` and
#: its queries [T, num_heads, head_size].
KEPT_QUERIES = "queries of cross attention"


@dataclass(frozen=True, slots=True)
class CrossShape:
    """The shape of cross attention on one rank.

    Attributes:
        num_heads: of queries, keys and values alike.
        head_size: channels of a head.
        scale: of the scores.
        max_len: the maximum of a source's tokens.
    """

    num_heads: int
    head_size: int
    scale: float
    max_len: int


class SourceLengths:
    """How many tokens the source in each block has, the same for all layers.

    Attributes:
        of_blocks: int32 [num_blocks] on the device; 1 for blocks that were never written. Empty
            before a layer is bound.
    """

    def __init__(self, device: torch.device):
        self.of_blocks = torch.ones(0, dtype=torch.int32, device=device)

    def grow(self, num_blocks: int) -> None:
        """Makes room for so many blocks."""
        if len(self.of_blocks) != num_blocks:
            self.of_blocks = self.of_blocks.new_ones(num_blocks)


class CrossAttention(Mixer):
    """Cross attention of one layer on one rank. Made by `LayerMaker.cross_attention`.

    Args:
        shape: of this rank.
        queries: the projection of the decoder's tokens.
        keys_values: the merged projection of a source's tokens: keys' heads, then values'.
        output: the output projection.
        norm: of the residual stream before it, or none.
        lengths: of sources, shared by all layers.
        pdl: launch kernels as programmatic dependents.
    """

    scales = None
    supports_prefill_graphs = False

    def __init__(
        self,
        shape: CrossShape,
        queries: ColumnParallelLinear,
        keys_values: ColumnParallelLinear,
        output: RowParallelLinear,
        norm: Norm | None,
        lengths: SourceLengths,
        *,
        pdl: bool,
    ):
        self.shape = shape
        self.queries, self.keys_values, self.output = queries, keys_values, output
        self._norm, self._lengths, self._pdl = norm, lengths, pdl
        self._cache: torch.Tensor
        self._group = 0
        self._plan: CrossPlan | None = None

    @property
    def kv_specs(self) -> tuple[SourceSpec]:
        """See `Mixer.kv_specs`."""
        shape = self.shape
        return (SourceSpec(shape.num_heads, shape.head_size, shape.max_len),)

    @property
    def kinds(self) -> tuple[Hashable, ...]:
        """See `Part.kinds`."""
        return self.queries.weight.kind, self.output.weight.kind

    def lacks(self, block_size: int) -> str | None:
        """See `Mixer.lacks`."""
        from aioinfer.kernels.paged_attention import HEAD_SIZES

        size = self.shape.head_size
        return None if size in HEAD_SIZES else f"head size {size}"

    def bind(self, caches: Sequence[LayerCache], plans: AttentionPlans | None) -> None:
        """See `Mixer.bind`. The cache has the dtype of the arithmetic."""
        (given,) = caches
        self._cache, self._group = given.tensor, given.group
        self._lengths.grow(given.tensor.shape[1])
        self._plan = None
        if plans is not None:
            shape, group, lengths = self.shape, self._group, self._lengths
            self._plan = plans.share(
                (CrossAttention, group, shape),
                lambda: CrossPlan(shape, group, self._pages[0], lengths, plans.tokens),
            )

    @property
    def _pages(self) -> torch.Tensor:
        """The cache as [2, num_blocks * num_pages, SOURCE_PAGE, num_heads, head_size]."""
        return self._cache.unflatten(2, (-1, SOURCE_PAGE)).flatten(1, 2)

    def write(self, source: torch.Tensor, block: int) -> None:
        """Computes keys and values of a source [n, size] and keeps them in a block. The rest of its
        last page becomes zero: kernels read whole pages, and mask what is behind the source."""
        count, shape = len(source), self.shape
        both = self.keys_values(source).view(count, 2, shape.num_heads, shape.head_size)
        self._cache[:, block, :count] = both.transpose(0, 1)
        self._cache[:, block, count : -(-count // SOURCE_PAGE) * SOURCE_PAGE] = 0

    def keys_of(self, row: int, step: Step) -> torch.Tensor:
        """Returns the keys [max_len, num_heads, head_size] in the block of a row of a step."""
        block = step.inputs.groups[self._group].block_tables[row, :1]
        return self._cache[0].index_select(0, block)[0, : self.shape.max_len]

    def __call__(self, stream: ResidualStream, step: Step, *, is_last: bool = False) -> None:
        """See `Mixer`."""
        queries = self.queries.of_normed(stream, self._norm)
        queries = queries.view(-1, self.shape.num_heads, self.shape.head_size)
        if KEPT_QUERIES in step.memo:
            step.memo[KEPT_QUERIES].append((self, queries))
        if self._plan is None:
            attended = self._attend_in_torch(queries, step)
        else:
            attended = self._attend_with_kernel(queries, self._plan)
        sampled = step.sampled if is_last else None
        if sampled is not None and len(sampled.rows) < len(attended):
            attended = attended.index_select(0, sampled.last)
            stream.select(sampled.last)
        if len(stream):
            self.output.add_to(stream, attended.flatten(1))

    def _attend_with_kernel(self, queries: torch.Tensor, plan: CrossPlan) -> torch.Tensor:
        """Returns [T, num_heads, head_size] for queries alike."""
        from aioinfer.kernels.paged_attention import paged_attention

        keys, values = self._pages
        out = torch.empty_like(queries, memory_format=torch.contiguous_format)
        for number, first in enumerate(range(0, len(queries), _ROWS)):
            some = queries[first : first + _ROWS]
            rows = slice(first, first + len(some))
            lens = plan.lens[rows]
            paged_attention(
                some, keys, values, plan.tables[rows], lens, lens, num_decodes=len(some),
                workspace=plan.workspaces[number], scale=self.shape.scale, out=out[rows],
                pdl=self._pdl,
            )  # fmt: skip
        return out

    def _attend_in_torch(self, queries: torch.Tensor, step: Step) -> torch.Tensor:
        """Returns [T, num_heads, head_size] for queries alike, a call for each row."""
        assert step.host is not None
        memo = CrossAttention, self._group
        if memo not in step.memo:
            blocks = step.inputs.groups[self._group].block_tables[:, 0]
            lengths = self._lengths.of_blocks[blocks]
            step.memo[memo] = blocks.tolist(), lengths.tolist()
        blocks, lengths = step.memo[memo]
        out, first = torch.empty_like(queries), 0
        for block, length, count in zip(blocks, lengths, step.host.query_lens, strict=True):
            rows = slice(first, first + count)
            keys, values = self._cache[:, block, :length].transpose(1, 2).unsqueeze(1)
            some = queries[rows].transpose(0, 1).unsqueeze(0)
            found = F.scaled_dot_product_attention(some, keys, values, scale=self.shape.scale)
            out[rows] = found[0].transpose(0, 1)
            first += count
        return out


class CrossPlan:
    """The plan of a step that layers of one shape share: the pages that each token attends to, and
    how they are divided among programs.

    Args:
        shape, group: of the layers.
        keys: [num_blocks * num_pages, SOURCE_PAGE, num_heads, head_size], of one of the layers.
        lengths: of sources.
        tokens: the maximum of a step.

    Attributes:
        workspaces: of each launch for up to `_ROWS` tokens.
        tables: int32 [tokens, num_pages], the pages of each token.
        lens: int32 [tokens], how many keys each token attends to; 0 for padding.
    """

    def __init__(
        self,
        shape: CrossShape,
        group: int,
        keys: torch.Tensor,
        lengths: SourceLengths,
        tokens: int,
    ):
        from aioinfer.kernels.decode_plan import DecodeWorkspace

        self._group, self._lengths = group, lengths
        self.workspaces: list[DecodeWorkspace] = [
            DecodeWorkspace.create(shape.num_heads, keys) for _ in range(-(-tokens // _ROWS))
        ]
        num_pages = len(keys) // len(lengths.of_blocks)
        self._pages = torch.arange(num_pages, dtype=torch.int32, device=keys.device)
        self.tables = self._pages.new_zeros(tokens, num_pages)
        self.lens = self._pages.new_zeros(tokens)

    def fill(self, step: Step) -> None:
        """See `kernel_attention.AttentionPlan`."""
        from aioinfer.kernels.decode_plan import plan_decode

        inputs = step.inputs
        count, rows = len(inputs.input_ids), len(inputs.seq_lens)
        tokens = torch.arange(count, dtype=torch.int32, device=self.lens.device)
        row = torch.searchsorted(inputs.query_starts[1:], tokens, right=True).clamp_(max=rows - 1)
        block = inputs.groups[self._group].block_tables[:, 0].index_select(0, row)
        torch.add(block[:, None] * len(self._pages), self._pages, out=self.tables[:count])
        is_real = inputs.seq_lens.index_select(0, row) > 0
        torch.mul(self._lengths.of_blocks.index_select(0, block), is_real, out=self.lens[:count])
        for workspace, lens in zip(self.workspaces, self.lens[:count].split(_ROWS), strict=False):
            plan_decode(workspace, lens)


def make_cross_attention(
    make: PartMaker, name: str, *, num_heads: int, head_size: int, source_size: int, max_len: int,
    norm: Norm | None, lengths: SourceLengths, scale: float | None = None, bias: bool = False,
    key_bias: bool = True,
    projections: tuple[str, str, str, str] = ("q_proj", "k_proj", "v_proj", "out_proj"),
) -> CrossAttention:  # fmt: skip
    """Returns the cross attention of the checkpoint module `name`.

    Args:
        num_heads, head_size: of all ranks together.
        source_size: channels of a source's tokens.
        max_len: the maximum of a source's tokens.
        norm: of the residual stream before it, or none.
        lengths: of sources, shared by all layers.
        scale: of the scores; by default head_size ** -0.5.
        bias: of all projections, but of keys only with `key_bias`.
        projections: the modules of queries, keys, values and output.
    """
    heads, _ = head_shards(num_heads, num_heads, make.backend.group)
    channels = heads.times(head_size)
    query, key, value, output = (f"{name}.{each}" for each in projections)
    scale = head_size**-0.5 if scale is None else scale
    return CrossAttention(
        CrossShape(heads.size, head_size, scale, max_len),
        make.column([Source(query, channels)], bias=bias),
        make.column(
            [Source(key, channels, has_bias=key_bias), Source(value, channels)],
            source_size,
            bias=bias,
        ),
        make.row(output, channels, bias=bias),
        norm,
        lengths,
        pdl=make.backend.pdl,
    )
