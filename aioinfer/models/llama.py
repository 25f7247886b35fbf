"""The transformer of Llama, Mistral, Qwen2 and Qwen3 over tensor-parallel layers.

The families differ by fields of `Architecture` alone. Of the split layers, QKV and gate+up are
merged into one product each and are split by heads and by channels; the output and down projections
sum over the ranks: two exchanges a layer. The worker calls `forward` for all tokens of a step and
`logits` for those that choose a token.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from aioinfer.layers.activation import silu_mul
from aioinfer.layers.attention import AttentionMetadata, KVCache, PagedAttention
from aioinfer.layers.embedding import Embedding, LMHead, Vocabulary
from aioinfer.layers.linear import Linear, RowParallelLinear, Target
from aioinfer.layers.norm import RMSNorm
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.layers.rotary import RotaryTable, apply_rope
from aioinfer.models.architecture import Architecture

NamedTargets = Iterator[tuple[str, Target]]


class Attention:
    """Queries, keys and values of this rank's heads, turned by position; attention; the output
    projection."""

    def __init__(
        self,
        arch: Architecture,
        layer: int,
        group: ParallelGroup,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self._heads, self._kv_heads = arch.heads_of_rank(group.rank, group.size)
        self._all_heads, self._all_kv_heads = arch.num_heads, arch.num_kv_heads
        self._size = size = arch.head_size
        heads, kv_heads = len(self._heads), len(self._kv_heads)
        self.qkv = Linear(
            arch.hidden_size,
            (heads + 2 * kv_heads) * size,
            bias=arch.qkv_bias,
            dtype=dtype,
            device=device,
        )
        self.output = RowParallelLinear(
            arch.num_heads * size,
            arch.hidden_size,
            group,
            bias=arch.output_bias,
            dtype=dtype,
            device=device,
        )
        self.query_norm = (
            RMSNorm(size, arch.rms_norm_eps, dtype=dtype, device=device) if arch.qk_norm else None
        )
        self.key_norm = (
            RMSNorm(size, arch.rms_norm_eps, dtype=dtype, device=device) if arch.qk_norm else None
        )
        self.attend = PagedAttention(heads, kv_heads, size, size**-0.5, arch.sliding_windows[layer])

    def __call__(
        self,
        x: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        cache: KVCache,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        heads, kv_heads = len(self._heads), len(self._kv_heads)
        qkv = self.qkv(x).view(len(x), heads + 2 * kv_heads, self._size)
        turned, values = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
        if self.query_norm is not None and self.key_norm is not None:
            turned = torch.cat(
                (self.query_norm(qkv[:, :heads]), self.key_norm(qkv[:, heads : heads + kv_heads])),
                dim=1,
            )
        turned = apply_rope(turned, *angles)
        attended = self.attend(turned[:, :heads], turned[:, heads:], values, cache, metadata)
        return self.output(attended.flatten(1))

    def targets(self, prefix: str) -> NamedTargets:
        """Yields where this rank's parts of the checkpoint's tensors go."""
        size, first = self._size, 0
        parts = (
            ("q_proj", self._heads, self._all_heads),
            ("k_proj", self._kv_heads, self._all_kv_heads),
            ("v_proj", self._kv_heads, self._all_kv_heads),
        )
        for name, heads, all_heads in parts:
            rows = slice(first, first + len(heads) * size)
            first = rows.stop
            for kind, parameter in (("weight", self.qkv.weight), ("bias", self.qkv.bias)):
                if parameter is not None:
                    yield (
                        f"{prefix}.{name}.{kind}",
                        Target(parameter[rows], 0, heads.start * size, all_heads * size),
                    )
        yield from _row_parallel_targets(
            f"{prefix}.o_proj", self.output, self._heads.start * size, self._all_heads * size
        )
        if self.query_norm is not None and self.key_norm is not None:
            yield f"{prefix}.q_norm.weight", Target(self.query_norm.weight)
            yield f"{prefix}.k_norm.weight", Target(self.key_norm.weight)


class MLP:
    """The gated MLP: this rank's share of the intermediate channels.

    Attributes:
        gate_up: both projections, the gate's rows first.
        interleaved: whether the rows are in the order of the GPU kernels instead (`llama_gpu`), who
            alone can use them then.
    """

    def __init__(
        self, arch: Architecture, group: ParallelGroup, dtype: torch.dtype, device: torch.device
    ):
        self._size = arch.intermediate_size
        self._share = self._size // group.size
        self._start = group.rank * self._share
        self.gate_up = Linear(
            arch.hidden_size, 2 * self._share, bias=arch.mlp_bias, dtype=dtype, device=device
        )
        self.down = RowParallelLinear(
            arch.intermediate_size,
            arch.hidden_size,
            group,
            bias=arch.mlp_bias,
            dtype=dtype,
            device=device,
        )
        self.interleaved = False

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        assert not self.interleaved
        return self.down(silu_mul(self.gate_up(x)))

    def targets(self, prefix: str) -> NamedTargets:
        """Yields where this rank's parts of the checkpoint's tensors go."""
        for number, name in enumerate(("gate_proj", "up_proj")):
            rows = slice(number * self._share, (number + 1) * self._share)
            for kind, parameter in (("weight", self.gate_up.weight), ("bias", self.gate_up.bias)):
                if parameter is not None:
                    yield (
                        f"{prefix}.{name}.{kind}",
                        Target(parameter[rows], 0, self._start, self._size),
                    )
        yield from _row_parallel_targets(f"{prefix}.down_proj", self.down, self._start, self._size)


class Layer:
    """One layer: attention and MLP, each after a norm and before a residual sum."""

    def __init__(
        self,
        arch: Architecture,
        number: int,
        group: ParallelGroup,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.attention = Attention(arch, number, group, dtype, device)
        self.mlp = MLP(arch, group, dtype, device)
        self.attention_norm = RMSNorm(
            arch.hidden_size, arch.rms_norm_eps, dtype=dtype, device=device
        )
        self.mlp_norm = RMSNorm(arch.hidden_size, arch.rms_norm_eps, dtype=dtype, device=device)

    def targets(self, prefix: str) -> NamedTargets:
        """Yields where this rank's parts of the checkpoint's tensors go."""
        yield from self.attention.targets(f"{prefix}.self_attn")
        yield from self.mlp.targets(f"{prefix}.mlp")
        yield f"{prefix}.input_layernorm.weight", Target(self.attention_norm.weight)
        yield f"{prefix}.post_attention_layernorm.weight", Target(self.mlp_norm.weight)

    def linears(self) -> list[Linear]:
        """Returns the linear layers."""
        return [self.attention.qkv, self.attention.output, self.mlp.gate_up, self.mlp.down]


class LlamaModel:
    """One rank's share of a model.

    Attributes:
        num_layers, num_kv_heads, head_size: of this rank's KV cache.
        weights_bytes: of this rank's parameters, a tied one counted once.
        vocabulary: which token ids this rank holds.
        layers, embedding, norm, head, rotary: the parts.
    """

    def __init__(
        self, arch: Architecture, group: ParallelGroup, dtype: torch.dtype, device: torch.device
    ):
        self.num_layers, self.head_size = arch.num_layers, arch.head_size
        self.num_kv_heads = len(arch.heads_of_rank(group.rank, group.size)[1])
        self.vocabulary = Vocabulary(arch.vocab_size, group)
        self.embedding = Embedding(
            self.vocabulary, self.vocabulary.rows(arch.hidden_size, dtype, device)
        )
        self.layers = [
            Layer(arch, number, group, dtype, device) for number in range(arch.num_layers)
        ]
        self.norm = RMSNorm(arch.hidden_size, arch.rms_norm_eps, dtype=dtype, device=device)
        tied = arch.tie_word_embeddings
        self.head = LMHead(
            self.vocabulary,
            self.embedding.weight
            if tied
            else self.vocabulary.rows(arch.hidden_size, dtype, device),
        )
        self._is_tied = tied
        self.rotary = RotaryTable(arch.rope, arch.head_size, arch.max_position_embeddings, device)
        self.weights_bytes = sum(target.destination.nbytes for _, target in self.targets())

    def targets(self) -> NamedTargets:
        """Yields (checkpoint name, where this rank's part of it goes) of every tensor, before
        `finalize`."""
        yield "model.embed_tokens.weight", self.vocabulary.target(self.embedding.weight)
        for number, layer in enumerate(self.layers):
            yield from layer.targets(f"model.layers.{number}")
        yield "model.norm.weight", Target(self.norm.weight)
        if not self._is_tied:
            assert self.head.weight is not None
            yield "lm_head.weight", self.vocabulary.target(self.head.weight)

    def finalize(self) -> None:
        """Prepares the loaded weights for the device."""
        self.head.finalize()
        for layer in self.layers:
            for linear in layer.linears():
                linear.finalize()

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        caches: list[KVCache],
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Returns the last hidden states [T, hidden_size].

        Args:
            input_ids, positions: int64 [T], the tokens of all rows, one row after the other.
            caches: one a layer.
            metadata: the step's.
        """
        angles = self.rotary.at(positions)
        residual = self.embedding(input_ids)
        x = self.layers[0].attention_norm(residual)
        for number, layer in enumerate(self.layers):
            if number:
                x, residual = layer.attention_norm.add(x, residual)
            x, residual = layer.mlp_norm.add(
                layer.attention(x, angles, caches[number], metadata), residual
            )
            x = layer.mlp(x)
        return self.norm.add(x, residual)[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns float32 [S, held], the logits of the tokens that this rank holds, for hidden
        states [S, hidden_size]."""
        return self.head(hidden)


def _row_parallel_targets(
    name: str, linear: RowParallelLinear, start: int, whole: int
) -> NamedTargets:
    assert linear.weight is not None
    yield f"{name}.weight", Target(linear.weight, 1, start, whole)
    if linear.bias is not None:
        yield f"{name}.bias", Target(linear.bias)
