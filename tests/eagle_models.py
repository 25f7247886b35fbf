"""Random EAGLE-3 heads in both layouts of checkpoints, and what plain torch computes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

LAYOUTS = ("midlayer", "layers.0")
HEADS, KV_HEADS, HEAD_SIZE, EPS, THETA = 4, 2, 16, 1e-5, 10_000.0


def eagle_head(
    folder: Path, layout: str, *, hidden_size: int = 64, vocab_size: int = 200,
    draft_size: int = 80, target_size: int | None = None, taps: tuple[int, ...] | None = None,
    norms_residual: bool = False, has_embedding: bool = False, deviation: float = 0.2,
    head_size: int = HEAD_SIZE,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Saves a random head into `folder`, and returns its tensors.

    Args:
        layout: of `LAYOUTS`.
        target_size: `hidden_size` of the target.
        taps: the layers of the target before which it reads the stream.
        norms_residual: see `Eagle3Config`.
        has_embedding: whether it has one of its own.
    """
    generator = torch.Generator().manual_seed(5)
    size, middle = hidden_size, 96
    shapes = {
        "fc": (size, 3 * (target_size or size)),
        "lm_head": (draft_size, size),
        f"{layout}.self_attn.q_proj": (HEADS * head_size, 2 * size),
        f"{layout}.self_attn.k_proj": (KV_HEADS * head_size, 2 * size),
        f"{layout}.self_attn.v_proj": (KV_HEADS * head_size, 2 * size),
        f"{layout}.self_attn.o_proj": (size, HEADS * head_size),
        f"{layout}.mlp.gate_proj": (middle, size),
        f"{layout}.mlp.up_proj": (middle, size),
        f"{layout}.mlp.down_proj": (size, middle),
    }
    if has_embedding:
        shapes["embed_tokens"] = (vocab_size, size)
    tensors = {
        f"{name}.weight": torch.empty(shape).normal_(0.0, deviation, generator=generator)
        for name, shape in shapes.items()
    }
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    for name in ("norm", *(f"{layout}.{norm}" for norm in norms)):
        tensors[f"{name}.weight"] = torch.empty(size).uniform_(0.5, 1.5, generator=generator)
    ids = torch.randperm(vocab_size, generator=generator)[:draft_size].sort().values
    tensors["d2t"] = ids - torch.arange(draft_size)
    tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    layer: dict[str, Any] = {
        "model_type": "llama", "hidden_size": size, "intermediate_size": middle,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": head_size,
        "num_hidden_layers": 1, "vocab_size": vocab_size, "rms_norm_eps": EPS,
        "rope_theta": THETA, "max_position_embeddings": 64, "hidden_act": "silu",
    }  # fmt: skip
    config = layer | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": draft_size}
    if taps is not None:  # numbers of layers whose output is read
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [n - 1 for n in taps]}
    if layout == "layers.0":
        config = {
            "architectures": ["Eagle3Speculator"], "draft_vocab_size": draft_size,
            "transformer_layer_config": layer, "norm_before_residual": norms_residual,
        }  # fmt: skip
        if taps is not None:
            config["eagle_aux_hidden_state_layer_ids"] = list(taps)
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    return tensors


class EagleReference:
    """A head in plain torch: whole texts, no cache."""

    def __init__(self, tensors: dict[str, torch.Tensor], layout: str, *, norms_residual: bool):
        self._tensors, self._layout = tensors, layout
        self._norms_residual = norms_residual
        self.ids = torch.arange(len(tensors["d2t"])) + tensors["d2t"]

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self._tensors[f"{name}.weight"], EPS)

    def _product(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ self._tensors[f"{self._layout}.{name}.weight"].T

    def combine(self, taps: torch.Tensor) -> torch.Tensor:
        """Returns [T, hidden_size] for the target's streams [T, 3, target_size]."""
        return taps.flatten(1) @ self._tensors["fc.weight"].T

    def forward(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """Returns [T, hidden_size] for hidden states and embeddings of a text, both alike."""
        normed = self._norm(f"{self._layout}.hidden_norm", hidden)
        joined = torch.cat((self._norm(f"{self._layout}.input_layernorm", embedded), normed), 1)
        queries, keys, values = (
            self._product(f"self_attn.{kind}_proj", joined).unflatten(1, (-1, HEAD_SIZE))
            for kind in "qkv"
        )
        positions = torch.arange(len(hidden))
        queries, keys = _rotate(queries, positions), _rotate(keys, positions)
        shared = (each.repeat_interleave(HEADS // KV_HEADS, 1) for each in (keys, values))
        heads = (each.transpose(0, 1) for each in (queries, *shared))
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        stream = normed if self._norms_residual else hidden
        stream = stream + self._product("self_attn.o_proj", attended.transpose(0, 1).flatten(1))
        x = self._norm(f"{self._layout}.post_attention_layernorm", stream)
        gated = F.silu(self._product("mlp.gate_proj", x)) * self._product("mlp.up_proj", x)
        return stream + self._product("mlp.down_proj", gated)

    def logits(self, hidden: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """Returns [T, vocab_size] over the target's vocabulary."""
        logits = torch.full((len(hidden), vocab_size), -torch.inf)
        logits[:, self.ids] = self._norm("norm", hidden) @ self._tensors["lm_head.weight"].T
        return logits


def _rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Returns x [T, heads, size], rotated by position in halves."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * THETA ** (-torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
