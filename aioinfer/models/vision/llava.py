"""Pictures of LLaVA 1.5 (Liu et al. 2023): scaled until the shorter side is that of a square, of
which the middle is read, or to the square; a fixed number of embeddings. CLIP's or SigLIP's tower,
of which the last layers may not be read, and a projector of two layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from PIL import Image
from torch import nn

from aioinfer.errors import ConfigError
from aioinfer.models.vision.format import (
    PictureError,
    PictureFormat,
    ProcessedPicture,
    as_pixels,
    read_channels,
    resized,
)
from aioinfer.models.vision.siglip import SiglipTransformer, has_class_token
from aioinfer.models.vision.tower import Tower, activation

_BICUBIC = 3
#: How many times as long as the other a side of a picture is that is cut, and pixels of the side of
#: one that is padded, at most.
_MAX_RATIO, _MAX_SIDE = 200, 4096
MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)


def read_sides(vision: Mapping[str, Any]) -> tuple[int, int]:
    """Returns the pixels of a tower's side, and its patches. Raises `ConfigError`."""
    side, patch = vision["image_size"], vision["patch_size"]
    if not all(isinstance(each, int) and 0 < patch <= each for each in (side, patch)):
        raise ConfigError(f"image_size and patch_size must be whole numbers, not {side}, {patch}")
    return side, side // patch


def read_placeholder(config: Mapping[str, Any]) -> int:
    """Returns the token that stands for an embedding."""
    found: int = config.get("image_token_index", config.get("image_token_id", 32_000))
    return found


def drops_first(config: Mapping[str, Any], default: str) -> bool:
    """Whether the first state of a tower is left out, which is CLIP's class token."""
    return bool(config.get("vision_feature_select_strategy", default) == "default")


def padded_to_square(picture: Image.Image, mean: tuple[float, float, float]) -> Image.Image:
    """Returns a picture in the middle of a square of the mean colour; scaled down first where the
    square would take much memory."""
    side = max(picture.size)
    if side > _MAX_SIDE:
        width, height = (max(1, each * _MAX_SIDE // side) for each in picture.size)
        picture, side = resized(picture, width, height, _BICUBIC), _MAX_SIDE
    width, height = picture.size
    red, green, blue = (int(each * 255) for each in mean)
    square = Image.new("RGB", (side, side), (red, green, blue))
    square.paste(picture, ((side - width) // 2, (side - height) // 2))
    return square


@dataclass(frozen=True, slots=True, kw_only=True)
class LlavaFormat(PictureFormat):
    """See the module.

    Attributes:
        side: pixels of the square's side.
        tokens: embeddings of a picture.
        crops: whether what is beyond the square is cut off, and not the shape distorted.
        pads: whether pictures are brought into a square first.
        resample: the filter, by Pillow's number.
    """

    side: int
    tokens: int
    crops: bool = True
    pads: bool = False
    resample: int = _BICUBIC

    @classmethod
    def read(cls, config: Mapping[str, Any], processor: Mapping[str, Any], max_pixels: int) -> Self:
        """Reads the decoded `config.json` of the model and the configuration of its processor;
        `max_pixels` has no effect. Raises `ConfigError` if a size is wrong."""
        vision = config["vision_config"]
        side, patches = read_sides(vision)
        square, shortest = {"height": side, "width": side}, {"shortest_edge": side}
        size, crop = processor.get("size") or shortest, processor.get("crop_size") or square
        if size not in (square, shortest, side) or crop not in (square, side):
            raise ConfigError(f"pictures of {size}, cut to {crop}, do not suit a tower for {side}")
        states = patches**2 + has_class_token(vision)
        return cls(
            marker_id=read_placeholder(config),
            placeholder_id=read_placeholder(config),
            mean=read_channels(processor, "image_mean", MEAN),
            std=read_channels(processor, "image_std", STD),
            side=side,
            tokens=states - drops_first(config, "default"),
            crops=size != square,
            pads=bool(processor.get("do_pad", False)),
            resample=int(processor.get("resample", _BICUBIC)),
        )

    def process(self, picture: Image.Image) -> ProcessedPicture:
        """See `PictureFormat.process`."""
        if self.pads:
            picture = padded_to_square(picture, self.mean)
        width = height = self.side
        shorter, longer = sorted(picture.size)
        if self.crops and longer > _MAX_RATIO * shorter:
            raise PictureError(f"one side is more than {_MAX_RATIO} times as long as the other")
        if self.crops:
            width, height = (int(self.side * each / shorter) for each in picture.size)
        whole = resized(picture, width, height, self.resample)
        left, top = (width - self.side) // 2, (height - self.side) // 2
        middle = whole.crop((left, top, left + self.side, top + self.side))
        return ProcessedPicture.of(as_pixels(middle)[None], (self.tokens,))

    def dummy(self, num_embeddings: int) -> ProcessedPicture:
        """See `PictureFormat.dummy`."""
        return ProcessedPicture.of(np.zeros((1, self.side, self.side, 3), np.uint8), (self.tokens,))


class LlavaProjector(nn.Module):
    """Two layers from the tower's states to the text model's size; `has_bias` where `config.json`
    does not say it."""

    def __init__(self, config: Mapping[str, Any], hidden_size: int, *, has_bias: bool = True):
        super().__init__()
        size = config["vision_config"]["hidden_size"]
        bias = bool(config.get("multimodal_projector_bias", has_bias))
        self.linear_1 = nn.Linear(size, hidden_size, bias=bias)
        self.linear_2 = nn.Linear(hidden_size, hidden_size, bias=bias)
        self._activation = activation(config.get("projector_hidden_act") or "gelu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear_2(self._activation(self.linear_1(x)))


class LlavaTower(Tower):
    """See the module.

    Args:
        config: the decoded `config.json`.
        format: of pictures.
        hidden_size: of the text model.

    Raises:
        ConfigError: states of several layers are read, or of one that is not there.
    """

    #: Where `config.json` does not say it: which layer's states are read, and which of them.
    LAYER, STATES = -2, "default"

    def __init__(self, config: Mapping[str, Any], format: PictureFormat, hidden_size: int):
        super().__init__(format, hidden_size)
        vision, layer = config["vision_config"], config.get("vision_feature_layer", self.LAYER)
        if not isinstance(layer, int) or abs(layer) > vision["num_hidden_layers"]:
            raise ConfigError(f"vision_feature_layer must be one of the tower's, not {layer}")
        self.vision_tower = SiglipTransformer(vision, layer)
        self.multi_modal_projector = LlavaProjector(config, hidden_size)
        self._first = int(drops_first(config, self.STATES))

    def states(self, tiles: torch.Tensor) -> torch.Tensor:
        """Returns [N, states, hidden_size] of pixels uint8 [N, height, width, 3]."""
        squares = self.normalised(tiles).permute(0, 3, 1, 2).contiguous()
        return self.multi_modal_projector(self.vision_tower(squares)[:, self._first :])

    def encode(
        self, pixels: Sequence[torch.Tensor], grids: Sequence[tuple[int, int]]
    ) -> torch.Tensor:
        """See `Tower.encode`."""
        return self.states(torch.cat(list(pixels))).flatten(0, 1)
