"""Adapters as `peft` saves them: a folder with `adapter_config.json` and
`adapter_model.safetensors`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from aioinfer.errors import ConfigError
from aioinfer.layers.adapters import AdapterWeights
from aioinfer.models.text_model import own_name

_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])(\.\w+)?\.weight")
_SIDES = {"A": "down", "B": "up"}
MAX_RANK = 256


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The part of `adapter_config.json` that is needed.

    Attributes:
        rank, alpha: of modules that have none of their own.
        ranks, alphas: of modules, by patterns of the ends of their names.
        is_rank_stabilized: whether the product is scaled by alpha / sqrt(rank) (rsLoRA,
            Kalajdzievski 2023), and not by alpha / rank.
    """

    rank: int
    alpha: float
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    is_rank_stabilized: bool

    @classmethod
    def read(cls, folder: Path) -> AdapterConfig:
        """Reads a folder. Raises `ConfigError` for what is not supported."""
        file = folder / "adapter_config.json"
        try:
            given = json.loads(file.read_text("utf-8"))
            if not isinstance(given, dict):
                raise ValueError("it does not hold an object")
            _refuse(given)
            return cls(
                int(given["r"]),
                float(given.get("lora_alpha", 8)),
                dict(given.get("rank_pattern") or {}),
                dict(given.get("alpha_pattern") or {}),
                bool(given.get("use_rslora")),
            )
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            text = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
            raise ConfigError(f"{file} cannot be read: {text}") from error

    def scale_of(self, module: str, rank: int) -> float:
        """Returns by what the product of a module is multiplied."""
        alpha = float(_find(self.alphas, module, self.alpha))
        return alpha / (math.sqrt(rank) if self.is_rank_stabilized else rank)

    def rank_of(self, module: str) -> int:
        """Returns the rank of a module."""
        return int(_find(self.ranks, module, self.rank))


def _refuse(given: Mapping[str, Any]) -> None:
    """Raises ValueError for an adapter of a kind that is not supported."""
    kind = given.get("peft_type")
    if kind != "LORA":
        raise ValueError(f"peft_type is {kind!r}, and only 'LORA' is supported")
    for name in (
        "use_dora",
        "alora_invocation_tokens",
        "modules_to_save",
        "trainable_token_indices",
    ):
        if given.get(name):
            raise ValueError(f"{name} is not supported")
    if (bias := given.get("bias") or "none") != "none":
        raise ValueError(f"bias is {bias!r}, and only 'none' is supported")


def _find(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """Returns the value of the first pattern that matches the end of a module's name, as peft does
    it."""
    for pattern, value in patterns.items():
        if re.fullmatch(rf"(.*\.)?({pattern})", module):
            return value
    return default


def read_shapes(folder: Path) -> dict[str, dict[str, tuple[int, ...]]]:
    """Returns the shapes of an adapter's matrices, "down" and "up", by the module of the
    checkpoint. Raises `ConfigError` if there are other tensors, or the file cannot be read."""
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    with _Tensors(folder) as tensors:
        for (module, side), name in tensors.names.items():
            found.setdefault(module, {})[side] = tuple(tensors.file.get_slice(name).get_shape())
    return found


def read_weights(folder: Path) -> dict[str, AdapterWeights]:
    """Returns an adapter's matrices by the module of the checkpoint. Raises `ConfigError`."""
    config = AdapterConfig.read(folder)
    sides: dict[str, dict[str, torch.Tensor]] = {}
    with _Tensors(folder) as tensors:
        for (module, side), name in tensors.names.items():
            sides.setdefault(module, {})[side] = tensors.file.get_tensor(name)
    return {
        module: AdapterWeights(pair["down"], pair["up"], config.scale_of(module, len(pair["down"])))
        for module, pair in sides.items()
    }


class _Tensors:
    """The tensors of a folder while they are read.

    Attributes:
        names: of the tensors, by (module, "down" or "up").
        file: of safetensors.
    """

    names: dict[tuple[str, str], str]

    def __init__(self, folder: Path):
        self._path = folder / "adapter_model.safetensors"

    def __enter__(self) -> _Tensors:
        try:
            self.file: Any = safe_open(self._path, "pt")
            names = list(self.file.keys())
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{self._path} cannot be read: {error}") from error
        matched = {name: _TENSOR.fullmatch(name) for name in names}
        unknown = [name for name, match in matched.items() if match is None]
        if unknown or not names:
            what = f"it holds {unknown[0]}" if unknown else "it holds nothing"
            raise ConfigError(f"{self._path} is no LoRA of linear layers: {what}")
        self.names = {
            (own_name(match["module"]), _SIDES[match["side"]]): name
            for name, match in matched.items()
            if match is not None
        }
        return self

    def __exit__(self, *error: object) -> None:
        del self.file
