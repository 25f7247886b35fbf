"""Attention of transformers' modules over our paged KV cache.

`FallbackModel` registers `attend` with transformers, and gives each module that attends a
`PagedAttention`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from aioinfer.errors import ConfigError
from aioinfer.layers.backend import Backend
from aioinfer.layers.kv_cache import AttentionShape, KVCache
from aioinfer.layers.step import Step
from aioinfer.layers.torch_attention import TorchAttention

#: Arguments of transformers' attention interface that change its result beyond what we compute.
_UNSUPPORTED = {"s_aux": "attention sinks", "position_bias": "a position bias"}


class PagedAttention:
    """The attention of one layer, which transformers' module calls in place of its own.

    Attributes:
        shape: of the layer; known once the module has called it.
        step: which the next call is for; None while shapes are found out.
    """

    shape: AttentionShape

    def __init__(self, module: nn.Module, found: dict[int, PagedAttention]):
        self.step: Step | None = None
        self._module = module
        self._found = found
        self._cache: KVCache | None = None
        self._torch: TorchAttention | None = None
        self._kernel: Any = None

    def bind(self, cache: KVCache, group: int, plans: Any, backend: Backend) -> None:
        """Gives the layer its KV cache; with plans, for the kernels."""
        self._cache, self._torch = cache, TorchAttention(self.shape, group)
        if plans is not None:
            from aioinfer.layers.kernel_attention import KernelAttention

            self._kernel = KernelAttention(
                self.shape, group, cache, plans, None, None, pdl=backend.pdl
            )

    def __call__(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        options: Mapping[str, Any],
    ) -> torch.Tensor:
        """Returns [1, T, heads, head_size] for queries [1, heads, T, head_size], keys and values
        [1, kv_heads, T, head_size], rotated."""
        if self.step is None:
            self._note_shape(queries, keys, values, options)
            return queries.transpose(1, 2)
        q, k, v = (part[0].transpose(0, 1).contiguous() for part in (queries, keys, values))
        if self._kernel is not None:
            return self._kernel.attend_rotated(q, k, v, self.step)[None]
        assert self._torch is not None
        assert self._cache is not None
        return self._torch(q, k, v, self._cache, self.step)[None]

    def _note_shape(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        options: Mapping[str, Any],
    ) -> None:
        name = type(self._module).__name__
        for option, meaning in _UNSUPPORTED.items():
            if options.get(option) is not None:
                raise ConfigError(f"{name} has {meaning}, which is not supported")
        if values.shape != keys.shape or queries.shape[-1] != keys.shape[-1]:
            raise ConfigError(f"{name} has heads of different sizes, which is not supported")
        if not getattr(self._module, "is_causal", True):
            raise ConfigError(f"{name} is not causal")
        scale = options.get("scaling")
        self.shape = AttentionShape(
            queries.shape[1],
            keys.shape[1],
            keys.shape[-1],
            keys.shape[-1] ** -0.5 if scale is None else float(scale),
            options.get("sliding_window"),
            float(options.get("softcap") or 0.0),
        )
        number = self._module.layer_idx
        assert isinstance(number, int)
        self._found[number] = self


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Our attention, as transformers' attention interface calls it; there is no mask."""
    return module.paged_attention(query, key, value, options), None
