"""KV caches in float8 as checkpoints describe them: `kv_cache_scheme` of `config.json`, and the
scales of keys and values among the tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from aioinfer.errors import ConfigError
from aioinfer.layers.kv_cache import KVScales
from aioinfer.models.loader import locate_tensors, read_tensors

#: Where the scales of an attention module are found, one pair of names after the other, in the
#: order in which they are looked for: of compressed-tensors and AutoFP8, of vLLM's modules, of
#: ModelOpt, of older compressed-tensors, and one scale for keys and values.
_NAMES = (
    ("k_scale", "v_scale"),
    ("attn.k_scale", "attn.v_scale"),
    ("k_proj.k_scale", "v_proj.v_scale"),
    ("k_proj.output_scale", "v_proj.output_scale"),
    ("kv_scale", "kv_scale"),
    ("attn.kv_scale", "attn.kv_scale"),
)
_STRATEGIES = ("tensor", "attn_head")


def has_float8_cache(config: Mapping[str, Any]) -> bool:
    """Returns whether a checkpoint is made for a KV cache in float8.

    Args:
        config: the decoded `config.json`.

    Raises:
        ConfigError: it is made for another kind of cache than float8 and its own dtype.
    """
    quantization = config.get("quantization_config")
    scheme = quantization.get("kv_cache_scheme") if isinstance(quantization, Mapping) else None
    if not scheme:
        return False
    if scheme == "static":  # AutoFP8
        return True
    if isinstance(scheme, Mapping):
        is_float8 = scheme.get("type") == "float" and scheme.get("num_bits") == 8
        is_static = scheme.get("symmetric", True) and not scheme.get("dynamic")
        if is_float8 and is_static and scheme.get("strategy", "tensor") in _STRATEGIES:
            return True
    raise ConfigError(
        f"quantization_config.kv_cache_scheme = {scheme!r} is not supported; these are: 8-bit "
        f"floats, symmetric and static, with the strategy {' or '.join(_STRATEGIES)}. With "
        "cache.dtype = 'model' or 'fp8' it is not read"
    )


def load_kv_scales(folder: Path, layers: Collection[KVScales]) -> bool:
    """Sets the scales of all layers to the checkpoint's.

    Args:
        folder: of the model.
        layers: the scales of each layer that keeps keys and values.

    Returns:
        Whether the checkpoint has any. Nothing is set otherwise.

    Raises:
        ConfigError: it has them for some of the layers alone, or they are no scales.
    """
    if not any(scales.module for scales in layers):  # modules of transformers
        return False
    stored = locate_tensors(folder)
    found = [_names_of(scales.module, stored) for scales in layers]
    named = [names for names in found if names is not None]
    if not named:
        return False
    if len(named) < len(layers):
        raise ConfigError(
            f"{folder} holds scales of the KV cache for {len(named)} of {len(layers)} layers: set "
            "cache.dtype to 'model'"
        )
    tensors = read_tensors(folder, [name for names in named for name in names])
    for scales, (keys, values) in zip(layers, named, strict=True):
        scales.set(_of_heads(keys, tensors, scales), _of_heads(values, tensors, scales))
    return True


def _names_of(module: str, stored: Collection[str]) -> tuple[str, str] | None:
    """Returns the names of the scales of keys and of values of an attention module."""
    for keys, values in _NAMES:
        names = f"{module}.{keys}", f"{module}.{values}"
        if all(name in stored for name in names):
            return names
    return None


def _of_heads(name: str, tensors: Mapping[str, torch.Tensor], scales: KVScales) -> torch.Tensor:
    """Returns the scales of this rank's heads, float32 [num_kv_heads], from a tensor that has one
    for each of the model's heads or one for all."""
    tensor, heads = tensors[name].float(), scales.heads
    if tensor.numel() not in (1, heads.total):
        raise ConfigError(
            f"the tensor {name} has the shape {list(tensor.shape)}; it should hold one scale, or "
            f"one for each of {heads.total} KV heads"
        )
    if not bool((torch.isfinite(tensor) & (tensor > 0)).all()):
        raise ConfigError(f"the tensor {name} should hold finite scales above 0, not {tensor}")
    of_all = tensor.flatten().expand(heads.total)
    return of_all[heads.start : heads.start + heads.size].to(scales.table.device)
