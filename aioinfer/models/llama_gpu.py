"""The transformer of `llama` on a GPU: the same weights, computed by the Triton kernels and cuBLAS in fused steps.

`llama` says what is computed; here it is arranged so that little moves through memory. The stream between the
layers, `residual`, is one buffer that every layer adds to. A norm goes into the product that follows it where there is
one row, residual sums go into the product before, and decode attention norms, rotates and caches its own keys.
Everything reads its sizes from tensors on the GPU or from fixed shapes, so a step can be captured in a CUDA graph.
The model runner calls `forward` and `logits`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from aioinfer.kernels.activation import silu_mul
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
from aioinfer.models.llama import Layer, LlamaModel

#: Up to so many rows the own products beat cuBLAS where nothing but a residual sum goes with them (docs/kernels-notes.md).
SKINNY_ROWS = 8


@dataclass(slots=True)
class GpuStep:
    """What the layers need to know of a step.

    Attributes:
        inputs: the rows, decodes first.
        num_decodes: rows of one token at the beginning.
        prefill: the query tiles of the other rows.
    """

    inputs: StepInputs
    num_decodes: int
    prefill: PrefillPlan | None = None


class GpuLlama:
    """A `LlamaModel` with its KV cache, computed by kernels.

    Args:
        model: loaded and finalized, on the GPU.
        kv: [2, layers, num_blocks, block_size, kv_heads, head_size].
        dependent_launch: launch kernels as programmatic dependents (Hopper and later).
        programs: of decode attention, instead of what fits the GPU.
    """

    def __init__(self, model: LlamaModel, kv: torch.Tensor, *, dependent_launch: bool, programs: int | None = None):
        self.model = model
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

    def plan(self, inputs: StepInputs, num_decodes: int) -> GpuStep:
        """Divides a step's attention among programs, on the GPU. To be called once its inputs are prepared."""
        if num_decodes:
            for workspace in self._workspaces.values():
                plan_decode(workspace, inputs.seq_lens[:num_decodes])
        if num_decodes == len(inputs.seq_lens):
            return GpuStep(inputs, num_decodes)
        prefill = plan_prefill(inputs.query_starts[num_decodes:], len(inputs.input_ids), self._group_size)
        return GpuStep(inputs, num_decodes, prefill)

    def forward(self, step: GpuStep) -> torch.Tensor:
        """Returns the hidden states [T, hidden_size] after the last layer, before the last norm; writes the KV cache."""
        embedding = self.model.embedding
        first = self.model.vocabulary.start
        residual = self._group.all_reduce(embed(step.inputs.input_ids, embedding.weight, first=first, pdl=self._pdl))
        for layer, cache in zip(self.model.layers, self._caches, strict=True):
            self._attention(layer, residual, cache, step)
            gated = self._normed_product(residual, layer.mlp_norm, layer.mlp.gate_up, gated=True)
            self._add_product(residual, gated, layer.mlp.down)
        return residual

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Returns [S, vocab_size] in the model's dtype, the same on every rank, for rows of what `forward` returned.

        Args:
            out: [S, vocab_size] to write to; by default a new tensor.
        """
        head, norm, alone = self.model.head.weight, self.model.norm, self._group.size == 1
        assert head is not None
        if len(hidden) <= SKINNY_ROWS:
            scores = skinny_linear(hidden, head, norm_weight=norm.weight, eps=norm.eps, out=out if alone else None, pdl=self._pdl)
        else:
            scores = torch.mm(self._norm(hidden, norm), head.t(), out=out if alone else None)
        if alone:
            return scores
        whole = self._group.all_gather_last(scores)[:, : self.model.vocabulary.vocab_size]
        return whole if out is None else out.copy_(whole)

    def _attention(self, layer: Layer, residual: torch.Tensor, cache: KVCache, step: GpuStep) -> None:
        """Adds a layer's attention to `residual` [T, hidden_size]."""
        part, inputs = layer.attention, step.inputs
        heads, size, first = part.attend.num_heads, part.attend.head_size, step.num_decodes
        query_norm, key_norm = part.query_norm, part.key_norm
        norms: dict[str, Any] = {}
        if query_norm is not None and key_norm is not None:
            norms = {"q_weight": query_norm.weight, "k_weight": key_norm.weight, "eps": query_norm.eps}
        qkv = self._normed_product(residual, layer.attention_norm, part.qkv)
        queries = qkv[:, : heads * size].view(-1, heads, size)
        if first < len(qkv):
            queries = torch.empty_like(queries, memory_format=torch.contiguous_format)
            qk_norm_rope_cache(
                qkv[first:], inputs.positions[first:], self._cos_sin, inputs.slot_mapping[first:], cache.keys, cache.values,
                num_q_heads=heads, out=queries[first:], pdl=self._pdl, **norms,
            )  # fmt: skip
        attended = paged_attention(
            queries, cache.keys, cache.values, inputs.block_tables, inputs.query_starts, inputs.seq_lens,
            num_decodes=first, workspace=self._workspaces[part.attend.sliding_window or 0], prefill_plan=step.prefill,
            scale=part.attend.scale, projection=Projection(qkv, self._cos_sin, **norms), pdl=self._pdl,
        )  # fmt: skip
        self._add_product(residual, attended.flatten(1), part.output)

    def _norm(self, x: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        return rms_norm(x, norm.weight, norm.eps, pdl=self._pdl)

    def _normed_product(self, x: torch.Tensor, norm: RMSNorm, linear: Linear, *, gated: bool = False) -> torch.Tensor:
        """Returns the product of the normed x [T, hidden_size]; with `gated`, silu of its first half times its second."""
        assert linear.weight is not None
        if len(x) == 1 and linear.bias is None:
            return skinny_linear(x, linear.weight, norm_weight=norm.weight, eps=norm.eps, gated=gated, pdl=self._pdl)
        product = F.linear(self._norm(x, norm), linear.weight, linear.bias)
        return silu_mul(product, pdl=self._pdl) if gated else product

    def _add_product(self, residual: torch.Tensor, x: torch.Tensor, linear: Linear) -> None:
        """Adds a row-parallel product of x [T, in] to `residual` [T, hidden_size], in place."""
        weight, bias = linear.weight, linear.bias
        assert weight is not None
        if self._group.size > 1:
            residual += self._group.all_reduce(F.linear(x, weight))
        elif len(x) <= SKINNY_ROWS:
            skinny_linear(x, weight, residual=residual, out=residual, pdl=self._pdl)
        else:
            residual.addmm_(x, weight.t())
        if bias is not None:
            residual += bias
