"""Models of transformers whose attention reads keys and values rounded to float8, as from a KV
cache in float8: what such a cache is compared with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import AttentionInterface

_INTERFACE = "rounded_to_float8"


def rounded(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Returns keys or values [batch, heads, tokens, size] as a cache with scales [heads] holds
    them."""
    factors = scales[:, None, None].to(x.device)
    return (x / factors).clamp(-448, 448).to(torch.float8_e4m3fn).float() * factors


def rounding_model(
    folder: Path,
    scales: Mapping[int, tuple[torch.Tensor, torch.Tensor]],
    device: str = "cpu",
    shifts: Mapping[int, torch.Tensor] | None = None,
) -> Any:
    """Returns the model of a folder in float32.

    Args:
        scales: of the keys and of the values of each layer, each [num_kv_heads].
        shifts: what keys of each layer are stored less, [num_kv_heads, head_size]; None: nothing.
    """

    def attend(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        *,
        scaling: float,
        softcap: float | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        of_keys, of_values = scales[module.layer_idx]
        group = query.shape[1] // key.shape[1]
        shift = 0.0 if shifts is None else shifts[module.layer_idx][:, None].to(key.device)
        key = (rounded(key - shift, of_keys) + shift).repeat_interleave(group, dim=1)
        value = rounded(value, of_values).repeat_interleave(group, dim=1)
        scores = query @ key.transpose(2, 3) * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if mask is not None:
            scores = scores + mask
        return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None

    AttentionInterface.register(_INTERFACE, attend)
    _register_mask()
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=_INTERFACE
    )
    return model.eval().to(device)


def _register_mask() -> None:
    """Has transformers make masks to be added, as for its own attention step by step."""
    from transformers.masking_utils import AttentionMaskInterface, eager_mask

    AttentionMaskInterface.register(_INTERFACE, eager_mask)


@torch.inference_mode()
def generate(model: Any, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Returns `count` greedy tokens for each prompt, all of it computed anew for each token."""
    outputs = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(count):
            logits = model(torch.tensor([ids], device=model.device), use_cache=False).logits[0, -1]
            ids.append(int(logits.argmax()))
        outputs.append(ids[len(prompt) :])
    return outputs
