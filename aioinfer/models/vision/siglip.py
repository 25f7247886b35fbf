"""A vision transformer with learned positions and layers that are normed before they attend, as
SigLIP (Zhai et al. 2023) and CLIP have it: the tower of several families, under their names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from aioinfer.models.replicated import Embedding
from aioinfer.models.vision.tower import activated, activation, attend

_EPS = 1e-6
#: CLIP's defaults, where they are not SigLIP's.
_CLIP: Mapping[str, Any] = {"hidden_act": "quick_gelu", "layer_norm_eps": 1e-5}


def has_class_token(config: Mapping[str, Any]) -> bool:
    """Whether the tower of a `vision_config` has a state before those of the patches, as CLIP's."""
    return config.get("model_type") == "clip_vision_model"


class _Attention(nn.Module):
    def __init__(self, size: int, num_heads: int):
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(size, size), nn.Linear(size, size)
        self.v_proj, self.out_proj = nn.Linear(size, size), nn.Linear(size, size)
        self._num_heads, self._scale = num_heads, (size // num_heads) ** -0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count, length, _ = x.shape
        q, k, v = (
            projection(x).flatten(0, 1).unflatten(1, (self._num_heads, -1))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.out_proj(attend(q, k, v, [length] * count, self._scale).view_as(x))


class _MLP(nn.Module):
    def __init__(self, config: Mapping[str, Any]):
        super().__init__()
        size, inner = config["hidden_size"], config["intermediate_size"]
        self.fc1, self.fc2 = nn.Linear(size, inner), nn.Linear(inner, size)
        self._activation = config.get("hidden_act") or "gelu_pytorch_tanh"
        activation(self._activation)  # which refuses an unknown one

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(activated(x, self.fc1, self._activation))


class _Layer(nn.Module):
    def __init__(self, config: Mapping[str, Any]):
        super().__init__()
        size, eps = config["hidden_size"], config.get("layer_norm_eps", _EPS)
        self.layer_norm1, self.layer_norm2 = nn.LayerNorm(size, eps), nn.LayerNorm(size, eps)
        self.self_attn = _Attention(size, config["num_attention_heads"])
        self.mlp = _MLP(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.layer_norm1(x))
        return x + self.mlp(self.layer_norm2(x))


class _Encoder(nn.Module):
    def __init__(self, config: Mapping[str, Any]):
        super().__init__()
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config["num_hidden_layers"]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class _Embeddings(nn.Module):
    """Patches and their positions, behind a class token in CLIP. A picture of another size than the
    table's has for each patch the position at the same fraction of a side."""

    def __init__(self, config: Mapping[str, Any]):
        super().__init__()
        size, patch = config["hidden_size"], config["patch_size"]
        self._side = config["image_size"] // patch
        self._has_class = has_class_token(config)
        self.patch_embedding = nn.Conv2d(3, size, patch, patch, bias=not self._has_class)
        self.position_embedding = Embedding(self._has_class + self._side**2, size)
        if self._has_class:
            self.class_embedding = nn.Parameter(torch.empty(size))

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        patches = self.patch_embedding(pixels)
        rows, columns = (self._places(size, pixels.device) for size in patches.shape[2:])
        places = (rows[:, None] * self._side + columns).flatten() + int(self._has_class)
        x = patches.flatten(2).transpose(1, 2) + self.position_embedding(places)
        if not self._has_class:
            return x
        first = self.class_embedding + self.position_embedding.weight[0]
        return torch.cat((first.expand(len(x), 1, -1), x), dim=1)

    def _places(self, size: int, device: torch.device) -> torch.Tensor:
        at = torch.arange(size, dtype=torch.float32, device=device) * (1.0 / size)
        step = 1 / self._side
        bounds = torch.arange(step, 1.0, step, device=device)
        return torch.bucketize(at.clamp_(max=1.0 - 1e-6), bounds, right=True)


class SiglipTransformer(nn.Module):
    """See the module.

    Args:
        config: `vision_config`.
        layer: the number of the layer before which states are read, and not normed; -1 for those
            behind the last. None: they are read behind the last norm.
    """

    def __init__(self, config: Mapping[str, Any], layer: int | None = None):
        super().__init__()
        if has_class_token(config):
            config = {**_CLIP, **config}
        if layer is not None:
            counts = range(config["num_hidden_layers"] + 1)
            config = {**config, "num_hidden_layers": counts[layer]}
        self.embeddings = _Embeddings(config)
        self.encoder = _Encoder(config)
        size, eps = config["hidden_size"], config.get("layer_norm_eps", _EPS)
        self.pre_layrnorm = nn.LayerNorm(size, eps) if has_class_token(config) else None
        self.post_layernorm = nn.LayerNorm(size, eps) if layer is None else None

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Returns the states [N, patches, hidden_size] of pictures [N, 3, height, width], behind
        the class token's if there is one."""
        x = self.embeddings(pixels)
        x = self.encoder(x if self.pre_layrnorm is None else self.pre_layrnorm(x))
        return x if self.post_layernorm is None else self.post_layernorm(x)
