"""The transformer of `llama` on a GPU: the same weights, computed by the Triton kernels and cuBLAS in fused steps.

`llama` says what is computed; here it is arranged so that little moves through memory. The stream between the
layers, `residual`, is one buffer that every layer adds to. On one GPU a norm goes into the product that follows it where there is
one row, and residual sums go into the product before; on several both go into the sum over the ranks. Decode
attention norms, rotates and caches its own keys. The last layer computes only what somebody will read. Everything reads its
sizes from tensors on the GPU or from fixed shapes, so a step can be captured in a CUDA graph. The model runner calls
`forward` and `logits`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from aioinfer.kernels.activation import silu_mul
from aioinfer.kernels.all_reduce import Exchange
from aioinfer.kernels.decode_attention import DecodeWorkspace, Projection, plan_decode
from aioinfer.kernels.linear import skinny_linear
from aioinfer.kernels.norm import rms_norm
from aioinfer.kernels.paged_attention import BLOCK_SIZES, HEAD_SIZES, paged_attention
from aioinfer.kernels.prefill_hopper import PrefillPlan, plan_prefill
from aioinfer.kernels.prepare import StepInputs, embed
from aioinfer.kernels.qk_norm_rope_cache import qk_norm_rope_cache
from aioinfer.layers.attention import KVCache
from aioinfer.layers.linear import Linear
from aioinfer.layers.norm import RMSNorm
from aioinfer.models.architecture import Architecture
from aioinfer.models.llama import Attention, Layer, LlamaModel

#: Up to so many rows the own products beat cuBLAS where nothing but a residual sum goes with them (docs/kernels-notes.md).
SKINNY_ROWS = 8


@dataclass(slots=True)
class ChosenRows:
    """The rows of a step whose next token is wanted. S rows, in any order.

    Attributes:
        last: int32 [S], the last token of each, as a line of the step's tokens.
        seq_lens: int32 [S]. block_tables: int32 [S, max_blocks]. Theirs, as in `StepInputs`.
    """

    last: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor

    @classmethod
    def of(cls, inputs: StepInputs, rows: torch.Tensor, last: torch.Tensor) -> ChosenRows:
        """Returns `rows` (int32 [S]) of a step whose inputs are prepared."""
        return cls(last, inputs.seq_lens.index_select(0, rows), inputs.block_tables.index_select(0, rows))


@dataclass(slots=True)
class GpuStep:
    """What the layers need to know of a step.

    Attributes:
        inputs: the rows, decodes first.
        num_decodes: rows of one token at the beginning; each has to be among the chosen, if there are such.
        prefill: the query tiles of the other rows.
        chosen: if given, the step's hidden states are of the last tokens of these rows; else of all tokens.
    """

    inputs: StepInputs
    num_decodes: int
    prefill: PrefillPlan | None = None
    chosen: ChosenRows | None = None


@dataclass(slots=True)
class Residual:
    """The stream between the layers.

    Attributes:
        sum: [T, hidden_size], to which every layer adds.
        normed: [T, hidden_size], by the norm that comes next, where the sum over the ranks has made it; else None.
    """

    sum: torch.Tensor
    normed: torch.Tensor | None = None


class GpuLlama:
    """A `LlamaModel` with its KV cache, computed by kernels.

    Args:
        model: loaded and finalized, on the GPU.
        kv: [2, layers, num_blocks, block_size, kv_heads, head_size].
        dependent_launch: launch kernels as programmatic dependents (Hopper and later).
        exchange: the sums over the ranks; None if there is one.
        programs: of decode attention, instead of what fits the GPU.
    """

    def __init__(
        self, model: LlamaModel, kv: torch.Tensor, *, dependent_launch: bool, exchange: Exchange | None = None, programs: int | None = None
    ):
        self.model = model
        self._exchange = exchange
        self._pdl = dependent_launch
        self._caches = [KVCache(keys, values) for keys, values in zip(kv[0], kv[1], strict=True)]
        self._cos_sin = model.rotary.cos_sin()
        self._group = model.vocabulary.group
        attend = model.layers[0].attention.attend
        self._group_size = attend.num_heads // attend.num_kv_heads
        windows = {layer.attention.attend.sliding_window or 0 for layer in model.layers}
        self._workspaces = {
            window: DecodeWorkspace.create(attend.num_heads, kv[0, 0], window=window, programs=programs) for window in windows
        }

    @staticmethod
    def supports(arch: Architecture, block_size: int) -> bool:
        """Whether the kernels have the model's head size and the cache's block size."""
        return arch.head_size in HEAD_SIZES and block_size in BLOCK_SIZES

    def plan(self, inputs: StepInputs, num_decodes: int, chosen: ChosenRows | None = None) -> GpuStep:
        """Divides a step's attention among programs, on the GPU. To be called once its inputs are prepared; see `GpuStep`."""
        if num_decodes:
            for workspace in self._workspaces.values():
                plan_decode(workspace, inputs.seq_lens[:num_decodes])
        if num_decodes == len(inputs.seq_lens):
            return GpuStep(inputs, num_decodes, chosen=chosen)
        prefill = plan_prefill(inputs.query_starts[num_decodes:], len(inputs.input_ids), self._group_size)
        return GpuStep(inputs, num_decodes, prefill, chosen)

    def forward(self, step: GpuStep) -> torch.Tensor:
        """Returns hidden states [T or S, hidden_size] after the last layer, before the last norm (see `GpuStep`); writes the KV cache."""
        layers = self.model.layers
        residual = self._embed(step.inputs.input_ids)
        for number, (layer, cache) in enumerate(zip(layers, self._caches, strict=True)):
            is_last = number == len(layers) - 1
            if is_last and step.chosen is not None:
                residual = self._last_attention(layer, residual, cache, step, step.chosen)
                if not len(residual.sum):
                    break
            else:
                self._attention(layer, residual, cache, step)
            gated = self._normed_product(residual, layer.mlp_norm, layer.mlp.gate_up, gated=True)
            self._add_product(residual, gated, layer.mlp.down, None if is_last else layers[number + 1].attention_norm)
        return residual.sum

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Returns [S, held] in the model's dtype, of the tokens that this rank holds, for rows of what `forward` returned.

        Args:
            out: [S, share] to write to, of which the result is a part; by default a new tensor.
        """
        head, norm = self.model.head.weight, self.model.norm
        assert head is not None
        if len(hidden) <= SKINNY_ROWS:
            scores = skinny_linear(hidden, head, norm_weight=norm.weight, eps=norm.eps, out=out, pdl=self._pdl)
        else:
            scores = torch.mm(self._norm(hidden, norm), head.t(), out=out)
        return scores[:, : self.model.vocabulary.held]

    def _embed(self, input_ids: torch.Tensor) -> Residual:
        """Returns the embeddings of input_ids int32 [T]."""
        vocabulary, weight = self.model.vocabulary, self.model.embedding.weight
        if self._exchange is None:
            return Residual(embed(input_ids, weight, first=vocabulary.start, pdl=self._pdl))
        partial = self._exchange.partial[: len(input_ids)]
        embed(input_ids, weight, first=vocabulary.start, out=partial, pdl=self._pdl)
        total, norm = torch.empty_like(partial), self.model.layers[0].attention_norm
        return Residual(total, self._exchange.add(partial, total, norm.weight, norm.eps, is_first=True, pdl=self._pdl))

    def _attention(self, layer: Layer, residual: Residual, cache: KVCache, step: GpuStep) -> None:
        """Adds a layer's attention to the residual stream."""
        part, inputs, first = layer.attention, step.inputs, step.num_decodes
        qkv = self._normed_product(residual, layer.attention_norm, part.qkv)
        queries = self._queries(part, qkv)
        if first < len(qkv):
            queries = self._turn_and_cache(part, qkv, cache, inputs, first)
        attended = paged_attention(
            queries, cache.keys, cache.values, inputs.block_tables, inputs.query_starts, inputs.seq_lens,
            num_decodes=first, workspace=self._workspaces[part.attend.sliding_window or 0], prefill_plan=step.prefill,
            scale=part.attend.scale, projection=Projection(qkv, self._cos_sin, **_norms(part)), pdl=self._pdl,
        )  # fmt: skip
        self._add_product(residual, attended.flatten(1), part.output, layer.mlp_norm)

    def _last_attention(self, layer: Layer, residual: Residual, cache: KVCache, step: GpuStep, chosen: ChosenRows) -> Residual:
        """Returns what the last layer's attention makes of the residual stream for the chosen rows: [S, hidden_size].

        Of the other tokens only the keys and values will ever be read, so their attention and what follows it is left
        out. The chosen rows are decodes then: one token each, with all that came before it in the cache.
        """
        part, inputs, rows = layer.attention, step.inputs, len(chosen.last)
        workspace = self._workspaces[part.attend.sliding_window or 0]
        if rows:
            plan_decode(workspace, chosen.seq_lens)
        qkv = self._normed_product(residual, layer.attention_norm, part.qkv)
        if step.num_decodes < len(qkv):
            self._turn_and_cache(part, qkv, cache, inputs, step.num_decodes)
        residual = Residual(residual.sum.index_select(0, chosen.last))
        if not rows:
            return residual
        qkv = qkv.index_select(0, chosen.last)
        attended = paged_attention(
            self._queries(part, qkv), cache.keys, cache.values, chosen.block_tables, inputs.query_starts[: rows + 1], chosen.seq_lens,
            num_decodes=rows, workspace=workspace, scale=part.attend.scale,
            projection=Projection(qkv, self._cos_sin, **_norms(part)), pdl=self._pdl,
        )  # fmt: skip
        self._add_product(residual, attended.flatten(1), part.output, layer.mlp_norm)
        return residual

    @staticmethod
    def _queries(part: Attention, qkv: torch.Tensor) -> torch.Tensor:
        heads, size = part.attend.num_heads, part.attend.head_size
        return qkv[:, : heads * size].view(-1, heads, size)

    def _turn_and_cache(self, part: Attention, qkv: torch.Tensor, cache: KVCache, inputs: StepInputs, first: int) -> torch.Tensor:
        """Norms and rotates the tokens from `first` on: keys and values go to the cache, queries are returned [T, heads, head_size]."""
        out = torch.empty_like(self._queries(part, qkv), memory_format=torch.contiguous_format)
        qk_norm_rope_cache(
            qkv[first:], inputs.positions[first:], self._cos_sin, inputs.slot_mapping[first:], cache.keys, cache.values,
            num_q_heads=part.attend.num_heads, out=out[first:], pdl=self._pdl, **_norms(part),
        )  # fmt: skip
        return out

    def _norm(self, x: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        return rms_norm(x, norm.weight, norm.eps, pdl=self._pdl)

    def _normed_product(self, residual: Residual, norm: RMSNorm, linear: Linear, *, gated: bool = False) -> torch.Tensor:
        """Returns the product of the normed stream [T, hidden_size]; with `gated`, silu of its first half times its second."""
        assert linear.weight is not None
        x = residual.sum if residual.normed is None else residual.normed
        if len(x) == 1 and linear.bias is None:
            weight = norm.weight if residual.normed is None else None
            return skinny_linear(x, linear.weight, norm_weight=weight, eps=norm.eps, gated=gated, pdl=self._pdl)
        product = F.linear(self._norm(x, norm) if residual.normed is None else x, linear.weight, linear.bias)
        return silu_mul(product, pdl=self._pdl) if gated else product

    def _add_product(self, residual: Residual, x: torch.Tensor, linear: Linear, norm: RMSNorm | None) -> None:
        """Adds a row-parallel product of x [T, in] to the residual stream; `norm` is the one that comes next, if it is known."""
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

    def _exchange_product(self, exchange: Exchange, residual: Residual, x: torch.Tensor, linear: Linear, norm: RMSNorm | None) -> None:
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


def _norms(part: Attention) -> dict[str, Any]:
    """Returns the norms of queries and keys as the kernels take them; nothing where a model has none."""
    query_norm, key_norm = part.query_norm, part.key_norm
    if query_norm is None or key_norm is None:
        return {}
    return {"q_weight": query_norm.weight, "k_weight": key_norm.weight, "eps": query_norm.eps}
