"""Pictures of Gemma 4 (Google 2026): in nearly their own shape, scaled down or up until they have
about the maximum of embeddings. A tower with positions of rows and of columns, learned and in
RoPE, whose squares of patches are averaged. In the larger models the tokens of a picture attend to
each other both ways, in layers with a window."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
from PIL import Image
from torch import nn

from aioinfer.errors import ConfigError
from aioinfer.layers.backend import Backend
from aioinfer.models.vision.format import (
    PictureFormat,
    ProcessedPicture,
    TextOf,
    as_pixels,
    resized,
)
from aioinfer.models.vision.tower import Tower, activation, attend, axial_angles, rotated, rotation

_BICUBIC = 3
_TOWER: Mapping[str, Any] = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 16,
    "num_attention_heads": 12, "num_key_value_heads": 12, "head_dim": 64, "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh", "pooling_kernel_size": 3, "patch_size": 16,
    "position_embedding_size": 10_240, "use_clipped_linears": False, "standardize": False,
}  # fmt: skip


def _tower_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `vision_config` of a decoded `config.json`, with defaults."""
    return {**_TOWER, **config["vision_config"]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4Format(PictureFormat):
    """See the module.

    Attributes:
        begin_id, end_id: the tokens before and behind the embeddings.
        side: pixels of the side of the square of patches that has one embedding.
        max_tokens: embeddings of a picture, at most.
        resample: the filter, by Pillow's number.
    """

    keeps_windows: ClassVar[bool] = True

    begin_id: int
    end_id: int
    side: int
    max_tokens: int = 280
    resample: int = _BICUBIC

    @classmethod
    def read(cls, config: Mapping[str, Any], processor: Mapping[str, Any], max_pixels: int) -> Self:
        """Reads the decoded `config.json` of the model and the configuration of its processor;
        `max_pixels` has no effect. Raises `ConfigError` if a size is wrong."""
        vision = _tower_config(config)
        names = ("patch_size", "pooling_kernel_size")
        sizes = tuple(vision[name] for name in names)
        max_tokens = processor.get("max_soft_tokens", 280)
        numbers = (*sizes, max_tokens)
        if not all(isinstance(each, int) and each > 0 for each in numbers):
            raise ConfigError(f"sizes of pictures must be positive whole numbers, not {numbers}")
        if any(processor.get(name, vision[name]) != vision[name] for name in names):
            raise ConfigError(f"{' and '.join(names)} of processor and tower must be the same")
        positions = vision["position_embedding_size"]
        if positions < max_tokens * vision["pooling_kernel_size"]:
            raise ConfigError(
                f"a picture may be {max_tokens} embeddings long, for which {positions} positions "
                "(position_embedding_size) are too few"
            )
        token = config.get("image_token_id", 258_880)
        text = config.get("text_config") or {}
        return cls(
            is_bidirectional=text.get("use_bidirectional_attention") == "vision",
            marker_id=token,
            placeholder_id=token,
            begin_id=config.get("boi_token_id", 255_999),
            end_id=config.get("eoi_token_id", 258_882),
            mean=(0.5, 0.5, 0.5),
            std=(0.5, 0.5, 0.5),
            side=math.prod(sizes),
            max_tokens=max_tokens,
            resample=int(processor.get("resample", _BICUBIC)),
        )

    def process(self, picture: Image.Image) -> ProcessedPicture:
        """See `PictureFormat.process`."""
        width, height = picture.size
        scale = math.sqrt(self.max_tokens * self.side**2 / (width * height))
        columns, rows = (math.floor(scale * each / self.side) for each in (width, height))
        if not rows:  # a ribbon
            rows, columns = 1, min(width // height, self.max_tokens)
        elif not columns:
            rows, columns = min(height // width, self.max_tokens), 1
        size = columns * self.side, rows * self.side
        return self._of(as_pixels(resized(picture, *size, self.resample)))

    def text(self, picture: ProcessedPicture, text_of: TextOf) -> str:
        """See `PictureFormat.text`."""
        return "".join(map(text_of, (self.begin_id, self.placeholder_id, self.end_id)))

    def dummy(self, num_embeddings: int) -> ProcessedPicture:
        """See `PictureFormat.dummy`."""
        count = max(1, min(num_embeddings, self.max_tokens))
        columns = math.isqrt(count)
        return self._of(np.zeros((count // columns * self.side, columns * self.side, 3), np.uint8))

    def _of(self, pixels: Any) -> ProcessedPicture:
        rows, columns = pixels.shape[0] // self.side, pixels.shape[1] // self.side
        return ProcessedPicture.of(pixels[None], (rows * columns,), (rows, columns))


#: Bounds of a projection's inputs and outputs, and what they are until they are loaded.
_BOUNDS = {"input_min": -torch.inf, "input_max": torch.inf,
           "output_min": -torch.inf, "output_max": torch.inf}  # fmt: skip


class _Linear(nn.Module):
    """A projection, whose inputs and outputs may be clipped to bounds of the checkpoint."""

    input_min: nn.Parameter
    input_max: nn.Parameter
    output_min: nn.Parameter
    output_max: nn.Parameter

    def __init__(self, inputs: int, outputs: int, clips: bool):
        super().__init__()
        self.linear = nn.Linear(inputs, outputs, bias=False)
        self._clips = clips
        for name in _BOUNDS if clips else ():
            self.register_parameter(name, nn.Parameter(torch.empty(1)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self._clips:
            return self.linear(x)
        found = self.linear(x.clamp(self.input_min, self.input_max))
        return found.clamp(self.output_min, self.output_max)


class _Attention(nn.Module):
    def __init__(self, config: Mapping[str, Any]):
        super().__init__()
        size, head, clips = config["hidden_size"], config["head_dim"], config["use_clipped_linears"]
        inner, kv = (config[name] * head for name in ("num_attention_heads", "num_key_value_heads"))
        self.q_proj, self.o_proj = _Linear(size, inner, clips), _Linear(inner, size, clips)
        self.k_proj, self.v_proj = _Linear(size, kv, clips), _Linear(size, kv, clips)
        self._eps, self._head_size = config["rms_norm_eps"], head
        self.q_norm, self.k_norm = nn.RMSNorm(head, self._eps), nn.RMSNorm(head, self._eps)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, lengths: Sequence[int]
    ) -> torch.Tensor:
        q, k, v = (
            projection(x).unflatten(1, (-1, self._head_size))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        # the halves of a head are rotated by themselves
        q, k = (
            rotated(each.unflatten(2, (2, -1)), cos, sin).flatten(2)
            for each in (self.q_norm(q), self.k_norm(k))
        )
        v = nn.functional.rms_norm(v, (self._head_size,), eps=self._eps)
        return self.o_proj(attend(q, k, v, lengths, 1.0))


class _MLP(nn.Module):
    def __init__(self, config: Mapping[str, Any]):
        super().__init__()
        size, inner = config["hidden_size"], config["intermediate_size"]
        clips = config["use_clipped_linears"]
        self.gate_proj, self.up_proj = (_Linear(size, inner, clips) for _ in range(2))
        self.down_proj = _Linear(inner, size, clips)
        self._activation = activation(config["hidden_activation"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self._activation(self.gate_proj(x)) * self.up_proj(x))


class _Layer(nn.Module):
    def __init__(self, config: Mapping[str, Any]):
        super().__init__()
        self.self_attn, self.mlp = _Attention(config), _MLP(config)
        size, eps = config["hidden_size"], config["rms_norm_eps"]
        self.input_layernorm = nn.RMSNorm(size, eps)
        self.post_attention_layernorm = nn.RMSNorm(size, eps)
        self.pre_feedforward_layernorm = nn.RMSNorm(size, eps)
        self.post_feedforward_layernorm = nn.RMSNorm(size, eps)

    def forward(self, x: torch.Tensor, *places: Any) -> torch.Tensor:
        attended = self.self_attn(self.input_layernorm(x), *places)
        x = x + self.post_attention_layernorm(attended)
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class _Encoder(nn.Module):
    def __init__(self, config: Mapping[str, Any]):
        super().__init__()
        count = config["num_hidden_layers"]
        self.layers = nn.ModuleList(_Layer(config) for _ in range(count))


class _Patches(nn.Module):
    def __init__(self, config: Mapping[str, Any]):
        super().__init__()
        size = config["hidden_size"]
        self.input_proj = nn.Linear(3 * config["patch_size"] ** 2, size, bias=False)
        self.position_embedding_table = nn.Parameter(
            torch.empty(2, config["position_embedding_size"], size)
        )


class _VisionTower(nn.Module):
    def __init__(self, config: Mapping[str, Any]):
        super().__init__()
        self._config = config
        self.patch_embedder, self.encoder = _Patches(config), _Encoder(config)
        if config["standardize"]:
            self.std_bias = nn.Parameter(torch.empty(config["hidden_size"]))
            self.std_scale = nn.Parameter(torch.empty(config["hidden_size"]))

    def patches(self, picture: torch.Tensor) -> torch.Tensor:
        """Returns the patches [rows, columns, patch * patch * 3] of a picture [height, width,
        3]."""
        patch = self._config["patch_size"]
        cut = picture.unflatten(1, (-1, patch)).unflatten(0, (-1, patch))
        return cut.transpose(1, 2).flatten(2)

    def forward(self, pictures: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns the states [T, size] of all squares of patches of pictures [height, width, 3]."""
        grids = [self.patches(picture) for picture in pictures]
        shapes = [grid.shape[:2] for grid in grids]
        rows, columns = torch.cat([
            torch.cartesian_prod(*(torch.arange(length, device=grid.device) for length in shape))
            for grid, shape in zip(grids, shapes, strict=True)
        ]).t()  # fmt: skip
        embedder = self.patch_embedder
        by_column, by_row = embedder.position_embedding_table
        x = embedder.input_proj(torch.cat([grid.flatten(0, 1) for grid in grids]))
        x = x + by_column[columns] + by_row[rows]
        theta = (self._config.get("rope_parameters") or {}).get("rope_theta") or 100.0
        angles = axial_angles(columns, rows, self._config["head_dim"], theta)
        cos, sin = rotation(angles.unflatten(1, (2, -1)))
        lengths = [math.prod(shape) for shape in shapes]
        for layer in self.encoder.layers:
            x = layer(x, cos, sin, lengths)
        return torch.cat([
            self._averaged(states.view(*shape, -1))
            for states, shape in zip(x.split(lengths), shapes, strict=True)
        ])  # fmt: skip

    def _averaged(self, grid: torch.Tensor) -> torch.Tensor:
        """Returns [squares, size] of states [rows, columns, size]."""
        side = self._config["pooling_kernel_size"]
        squares = grid.unflatten(1, (-1, side)).unflatten(0, (-1, side))
        found = squares.float().mean((1, 3)).flatten(0, 1) * grid.shape[2] ** 0.5
        if self._config["standardize"]:
            found = (found - self.std_bias.float()) * self.std_scale.float()
        return found.to(grid.dtype)


class _Projector(nn.Module):
    def __init__(self, config: Mapping[str, Any], hidden_size: int):
        super().__init__()
        self._eps = config["rms_norm_eps"]
        self.embedding_projection = nn.Linear(config["hidden_size"], hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.embedding_projection(nn.functional.rms_norm(x, x.shape[1:], eps=self._eps))


class Gemma4Tower(Tower):
    """See the module.

    Args:
        config: the decoded `config.json`.
        format: of pictures.
        hidden_size: of the text model.
    """

    def __init__(self, config: Mapping[str, Any], format: Gemma4Format, hidden_size: int):
        super().__init__(format, hidden_size)
        vision = _tower_config(config)
        self.vision_tower = _VisionTower(vision)
        self.embed_vision = _Projector(vision, hidden_size)

    def place(self, backend: Backend) -> None:
        """See `ReplicatedModule.place`; bounds clip nothing until they are loaded."""
        super().place(backend)
        for name, parameter in self.named_parameters():
            if (bound := _BOUNDS.get(name.rpartition(".")[2])) is not None:
                parameter.fill_(bound)

    def as_reference(self, normed: torch.Tensor) -> torch.Tensor:
        """See `Tower.as_reference`; the processor leaves pixels from 0 to 1."""
        return self.vision_tower.patches(normed[0]).flatten(0, 1).add(1).div(2)

    def encode(
        self, pixels: Sequence[torch.Tensor], grids: Sequence[tuple[int, int]]
    ) -> torch.Tensor:
        """See `Tower.encode`."""
        return self.embed_vision(self.vision_tower([self.normalised(each[0]) for each in pixels]))
