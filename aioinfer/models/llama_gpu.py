"""The transformer of `llama` on a GPU: the same weights, computed by the Triton kernels and cuBLAS
in fused steps.

`llama` says what is computed; here it is arranged so that little moves through memory. The stream
between the layers, `residual`, is one buffer that every layer adds to. On one GPU a norm goes into
the product that follows it where there is one row, and residual sums go into the product before; on
several both go into the sum over the ranks. Decode attention norms, rotates and caches its own
keys. The last layer computes only what somebody will read. Everything reads its sizes from tensors
on the GPU or from fixed shapes, so a step can be captured in a CUDA graph. The model runner calls
`forward` and `logits`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from aioinfer.kernels.activation import GATE_RUN, silu_mul
from aioinfer.kernels.all_reduce import AllReduce
from aioinfer.kernels.decode_attention import DecodeWorkspace, Projection, plan_decode
from aioinfer.kernels.gated_product import TILE_TIMES, gated_product, interleave, pays
from aioinfer.kernels.gated_product import supports as supports_gated_product
from aioinfer.kernels.linear import skinny_linear
from aioinfer.kernels.norm import rms_norm
from aioinfer.kernels.paged_attention import (
    BLOCK_SIZES,
    HEAD_SIZES,
    make_prefill_plan,
    paged_attention,
)
from aioinfer.kernels.prefill_plan import PrefillPlan, plan_prefill
from aioinfer.kernels.prepare import StepInputs, embed
from aioinfer.kernels.qk_norm_rope_cache import qk_norm_rope_cache
from aioinfer.layers.attention import KVCache
from aioinfer.layers.linear import Linear
from aioinfer.layers.norm import RMSNorm
from aioinfer.models.architecture import Architecture
from aioinfer.models.llama import MLP, Attention, Layer, LlamaModel

#: Up to so many rows the own products beat cuBLAS where nothing but a residual sum goes with them
#: (docs/kernels-notes.md).
SKINNY_ROWS = 8


@dataclass(slots=True)
class SampledRows:
    """The rows of a step whose next token is wanted. S rows, in any order.

    Attributes:
        last: int32 [S], the last token of each, as a line of the step's tokens.
        seq_lens: int32 [S]. block_tables: int32 [S, max_blocks]. Theirs, as in `StepInputs`.
    """

    last: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor

    @classmethod
    def of(cls, inputs: StepInputs, rows: torch.Tensor, last: torch.Tensor) -> SampledRows:
        """Returns `rows` (int32 [S]) of a step whose inputs are prepared."""
        return cls(
            last, inputs.seq_lens.index_select(0, rows), inputs.block_tables.index_select(0, rows)
        )


@dataclass(slots=True)
class GpuStep:
    """What the layers need to know of a step.

    Attributes:
        inputs: the rows, decodes first.
        num_decodes: rows of one token at the beginning; each has to be among the chosen, if there
            are such. None: the plans on the GPU say it, so that a graph may be replayed for any
            number.
        prefill: the query tiles of the other rows.
        chosen: if given, the step's hidden states are of the last tokens of these rows; else of all
            tokens.
    """

    inputs: StepInputs
    num_decodes: int | None
    prefill: PrefillPlan | None = None
    chosen: SampledRows | None = None


@dataclass(slots=True)
class Residual:
    """The stream between the layers.

    Attributes:
        sum: [T, hidden_size], to which every layer adds.
        normed: [T, hidden_size], by the norm that comes next, where the sum over the ranks has made
            it; else None.
    """

    sum: torch.Tensor
    normed: torch.Tensor | None = None


class GpuLlama:
    """A `LlamaModel` with its KV cache, computed by kernels.

    Args:
        model: loaded and finalized, on the GPU. Its MLPs' weights are put in the kernels' order, if
            they are not yet.
        kv: [2, layers, num_blocks, block_size, kv_heads, head_size].
        dependent_launch: launch kernels as programmatic dependents (Hopper and later).
        exchange: the sums over the ranks; None if there is one.
        programs: of decode attention, instead of what fits the GPU.
    """

    def __init__(
        self,
        model: LlamaModel,
        kv: torch.Tensor,
        *,
        dependent_launch: bool,
        exchange: AllReduce | None = None,
        programs: int | None = None,
    ):
        self.model = model
        for layer in model.layers:
            _interleave(layer.mlp)
        # rows of hidden_size
        gate_up, like_inputs = model.layers[0].mlp.gate_up, model.embedding.weight
        assert gate_up.weight is not None
        self._has_gated_product = gate_up.bias is None and supports_gated_product(
            like_inputs, gate_up.weight
        )
        self._exchange = exchange
        self._pdl = dependent_launch
        self._caches = [KVCache(keys, values) for keys, values in zip(kv[0], kv[1], strict=True)]
        self._cos_sin = model.rotary.cos_sin()
        self._group = model.vocabulary.group
        attend = model.layers[0].attention.attend
        windows = {layer.attention.attend.sliding_window or 0 for layer in model.layers}
        self._workspaces = {
            window: DecodeWorkspace.create(
                attend.num_heads, kv[0, 0], window=window, programs=programs
            )
            for window in windows
        }

    @staticmethod
    def supports(arch: Architecture, block_size: int, num_ranks: int) -> bool:
        """Whether the kernels have the model's head size, the cache's block size, and a rank's
        share of the MLPs' channels."""
        return (
            arch.head_size in HEAD_SIZES
            and block_size in BLOCK_SIZES
            and arch.intermediate_size // num_ranks % GATE_RUN == 0
        )

    def rehearse(self) -> None:
        """Launches what the number of a step's tokens chooses among, so that all of it is
        compiled."""
        gate_up = self.model.layers[0].mlp.gate_up.weight
        if self._has_gated_product and gate_up is not None:
            for config in TILE_TIMES:
                gated_product(gate_up[: config.tokens], gate_up, pdl=self._pdl, config=config)

    def make_prefill_plan(self, rows: int, tokens: int) -> PrefillPlan:
        """Returns room for the query tiles of steps of up to so many rows and tokens."""
        attend, cache = self.model.layers[0].attention.attend, self._caches[0]
        return make_prefill_plan(
            rows, tokens, attend.num_heads, cache.keys.dtype, cache.keys, cache.values
        )

    def plan(
        self,
        inputs: StepInputs,
        num_decodes: int,
        chosen: SampledRows | None = None,
        prefill: PrefillPlan | None = None,
    ) -> GpuStep:
        """Divides a step's attention among programs, on the GPU. To be called once its inputs are
        prepared; see `GpuStep`.

        Args:
            prefill: to be filled. By default one is made for this step, if there are rows of
                several tokens.
        """
        rows, tokens = len(inputs.seq_lens), len(inputs.input_ids)
        for workspace in self._workspaces.values():
            plan_decode(workspace, inputs.seq_lens[:num_decodes])
        if prefill is None and num_decodes < rows:
            prefill = self.make_prefill_plan(rows, tokens)
        if prefill is not None:
            plan_prefill(prefill, inputs.query_starts, inputs.seq_lens, num_decodes, tokens)
        return GpuStep(inputs, num_decodes, prefill, chosen)

    def forward(self, step: GpuStep) -> torch.Tensor:
        """Returns hidden states [T or S, hidden_size] after the last layer, before the last norm
        (see `GpuStep`); writes the KV cache."""
        return self.finish(step, self.begin(step))

    def begin(self, step: GpuStep, out: torch.Tensor | None = None) -> Residual:
        """Computes all layers but the last. With `num_decodes` None this depends on the number of
        tokens only, so that a graph may hold it.

        Args:
            out: [T, hidden_size] to write to; by default a new tensor.
        """
        layers = self.model.layers
        residual = self._embed(step.inputs.input_ids, out)
        for number, layer in enumerate(layers[:-1]):
            self._attention(layer, residual, self._caches[number], step)
            self._mlp(layer, residual, layers[number + 1].attention_norm)
        return residual

    def finish(self, step: GpuStep, residual: Residual) -> torch.Tensor:
        """Computes the last layer and returns what `forward` does; `residual` is what `begin`
        returned, or its sum alone."""
        layer, cache = self.model.layers[-1], self._caches[-1]
        if step.chosen is not None:
            residual = self._last_attention(layer, residual, cache, step, step.chosen)
        else:
            self._attention(layer, residual, cache, step)
        if len(residual.sum):
            self._mlp(layer, residual, None)
        return residual.sum

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Returns [S, held] in the model's dtype, of the tokens that this rank holds, for rows of
        what `forward` returned.

        Args:
            out: [S, share] to write to, of which the result is a part; by default a new tensor.
        """
        head, norm = self.model.head.weight, self.model.norm
        assert head is not None
        if len(hidden) <= SKINNY_ROWS:
            scores = skinny_linear(
                hidden, head, norm_weight=norm.weight, eps=norm.eps, out=out, pdl=self._pdl
            )
        else:
            scores = torch.mm(self._norm(hidden, norm), head.t(), out=out)
        return scores[:, : self.model.vocabulary.local_size]

    def _embed(self, input_ids: torch.Tensor, out: torch.Tensor | None) -> Residual:
        """Returns the embeddings of input_ids int32 [T], in `out` if it is given."""
        vocabulary, weight = self.model.vocabulary, self.model.embedding.weight
        if self._exchange is None:
            return Residual(
                embed(input_ids, weight, first=vocabulary.start, out=out, pdl=self._pdl)
            )
        partial = self._exchange.partial[: len(input_ids)]
        embed(input_ids, weight, first=vocabulary.start, out=partial, pdl=self._pdl)
        total, norm = (
            torch.empty_like(partial) if out is None else out,
            self.model.layers[0].attention_norm,
        )
        return Residual(
            total,
            self._exchange.add(partial, total, norm.weight, norm.eps, is_first=True, pdl=self._pdl),
        )

    def _attention(self, layer: Layer, residual: Residual, cache: KVCache, step: GpuStep) -> None:
        """Adds a layer's attention to the residual stream."""
        part, inputs = layer.attention, step.inputs
        qkv = self._normed_product(residual, layer.attention_norm, part.qkv)
        queries = self._queries(part, qkv)
        projection = (
            None if step.num_decodes is None else Projection(qkv, self._cos_sin, **_norms(part))
        )
        # decode attention caches its own keys, if the host knows how many rows it has
        first = step.num_decodes or 0
        if first < len(qkv):
            queries = self._turn_and_cache(part, qkv, cache, inputs, first)
        attended = paged_attention(
            queries, cache.keys, cache.values, inputs.block_tables, inputs.query_starts,
            inputs.seq_lens,
            num_decodes=step.num_decodes,
            workspace=self._workspaces[part.attend.sliding_window or 0], prefill_plan=step.prefill,
            scale=part.attend.scale, projection=projection, pdl=self._pdl,
        )  # fmt: skip
        self._add_product(residual, attended.flatten(1), part.output, layer.mlp_norm)

    def _mlp(self, layer: Layer, residual: Residual, norm: RMSNorm | None) -> None:
        """Adds a layer's MLP to the residual stream; `norm` is the one that comes next, if it is
        known."""
        gated = self._normed_product(residual, layer.mlp_norm, layer.mlp.gate_up, gated=True)
        self._add_product(residual, gated, layer.mlp.down, norm)

    def _last_attention(
        self, layer: Layer, residual: Residual, cache: KVCache, step: GpuStep, chosen: SampledRows
    ) -> Residual:
        """Returns what the last layer's attention makes of the residual stream for the chosen rows:
        [S, hidden_size].

        Of the other tokens only the keys and values will ever be read, so their attention and what
        follows it is left out. The chosen rows are decodes then: one token each, with all that came
        before it in the cache.
        """
        part, inputs, rows = layer.attention, step.inputs, len(chosen.last)
        workspace = self._workspaces[part.attend.sliding_window or 0]
        if rows:
            plan_decode(workspace, chosen.seq_lens)
        qkv = self._normed_product(residual, layer.attention_norm, part.qkv)
        assert step.num_decodes is not None
        if step.num_decodes < len(qkv):
            self._turn_and_cache(part, qkv, cache, inputs, step.num_decodes)
        residual = Residual(residual.sum.index_select(0, chosen.last))
        if not rows:
            return residual
        qkv = qkv.index_select(0, chosen.last)
        attended = paged_attention(
            self._queries(part, qkv), cache.keys, cache.values, chosen.block_tables,
            inputs.query_starts[: rows + 1], chosen.seq_lens,
            num_decodes=rows, workspace=workspace, scale=part.attend.scale,
            projection=Projection(qkv, self._cos_sin, **_norms(part)), pdl=self._pdl,
        )  # fmt: skip
        self._add_product(residual, attended.flatten(1), part.output, layer.mlp_norm)
        return residual

    @staticmethod
    def _queries(part: Attention, qkv: torch.Tensor) -> torch.Tensor:
        heads, size = part.attend.num_heads, part.attend.head_size
        return qkv[:, : heads * size].view(-1, heads, size)

    def _turn_and_cache(
        self, part: Attention, qkv: torch.Tensor, cache: KVCache, inputs: StepInputs, first: int
    ) -> torch.Tensor:
        """Norms and rotates the tokens from `first` on: keys and values go to the cache, queries
        are returned [T, heads, head_size]."""
        out = torch.empty_like(self._queries(part, qkv), memory_format=torch.contiguous_format)
        qk_norm_rope_cache(
            qkv[first:], inputs.positions[first:], self._cos_sin, inputs.slot_mapping[first:],
            cache.keys, cache.values,
            num_q_heads=part.attend.num_heads, out=out[first:], pdl=self._pdl, **_norms(part),
        )  # fmt: skip
        return out

    def _norm(self, x: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        return rms_norm(x, norm.weight, norm.eps, pdl=self._pdl)

    def _normed_product(
        self, residual: Residual, norm: RMSNorm, linear: Linear, *, gated: bool = False
    ) -> torch.Tensor:
        """Returns the product of the normed stream [T, hidden_size]; with `gated`, silu of the
        gate's columns times the others."""
        assert linear.weight is not None
        x = residual.sum if residual.normed is None else residual.normed
        if len(x) == 1 and linear.bias is None:
            weight = norm.weight if residual.normed is None else None
            return skinny_linear(
                x, linear.weight, norm_weight=weight, eps=norm.eps, gated=gated, pdl=self._pdl
            )
        normed = self._norm(x, norm) if residual.normed is None else x
        if gated and self._has_gated_product and pays(len(x), linear.weight):
            return gated_product(normed, linear.weight, pdl=self._pdl)
        product = F.linear(normed, linear.weight, linear.bias)
        return silu_mul(product, pdl=self._pdl) if gated else product

    def _add_product(
        self, residual: Residual, x: torch.Tensor, linear: Linear, norm: RMSNorm | None
    ) -> None:
        """Adds a row-parallel product of x [T, in] to the residual stream; `norm` is the one that
        comes next, if it is known."""
        weight, bias = linear.weight, linear.bias
        assert weight is not None
        if self._exchange is not None:
            self._exchange_product(self._exchange, residual, x, linear, norm)
            return
        if len(x) <= SKINNY_ROWS:
            skinny_linear(x, weight, residual=residual.sum, out=residual.sum, pdl=self._pdl)
        else:
            residual.sum.addmm_(x, weight.t())
        if bias is not None:
            residual.sum += bias

    def _exchange_product(
        self,
        exchange: AllReduce,
        residual: Residual,
        x: torch.Tensor,
        linear: Linear,
        norm: RMSNorm | None,
    ) -> None:
        """Does what `_add_product` does, over the ranks, and norms the sum."""
        weight, bias = linear.weight, linear.bias
        assert weight is not None
        partial = exchange.partial[: len(x)]
        if len(x) <= SKINNY_ROWS:
            skinny_linear(x, weight, out=partial, pdl=self._pdl)
        else:
            torch.mm(x, weight.t(), out=partial)
        if bias is not None and self._group.rank == 0:
            partial += bias
        norm_weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        residual.normed = exchange.add(partial, residual.sum, norm_weight, eps, pdl=self._pdl)


def _interleave(mlp: MLP) -> None:
    """Puts the rows of gate and up in the order that all kernels take them in: see
    `gated_product`."""
    if not mlp.interleaved:
        for parameter in (mlp.gate_up.weight, mlp.gate_up.bias):
            if parameter is not None:
                parameter.copy_(interleave(parameter))
        mlp.interleaved = True


def _norms(part: Attention) -> dict[str, Any]:
    """Returns the norms of queries and keys as the kernels take them; nothing where a model has
    none."""
    query_norm, key_norm = part.query_norm, part.key_norm
    if query_norm is None or key_norm is None:
        return {}
    return {"q_weight": query_norm.weight, "k_weight": key_norm.weight, "eps": query_norm.eps}
