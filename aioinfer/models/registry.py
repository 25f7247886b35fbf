"""From an architecture to a model, and what the worker asks of one."""

from __future__ import annotations

from typing import Protocol

import torch

from aioinfer.layers.attention import AttentionMetadata, KVCache
from aioinfer.layers.embedding import Vocabulary
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.models.architecture import Architecture
from aioinfer.models.llama import LlamaModel, NamedTargets


class CausalLM(Protocol):
    """A model as the worker sees it: see `LlamaModel` for what each means."""

    num_layers: int
    num_kv_heads: int
    head_size: int
    weights_bytes: int
    vocabulary: Vocabulary

    def targets(self) -> NamedTargets: ...

    def finalize(self) -> None: ...

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        caches: list[KVCache],
        metadata: AttentionMetadata,
    ) -> torch.Tensor: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


def build_model(
    arch: Architecture, group: ParallelGroup, dtype: torch.dtype, device: torch.device
) -> CausalLM:
    """Returns this rank's share of the model, its weights unset. Raises `ConfigError` if the ranks
    do not divide it.

    All supported families are one transformer; `Architecture.load` refuses others.
    """
    arch.check_tensor_parallel(group.size)
    return LlamaModel(arch, group, dtype, device)
