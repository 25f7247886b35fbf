"""The dtypes of a rank: of weights and arithmetic, and of the KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from aioinfer.config import Config
from aioinfer.errors import ConfigError
from aioinfer.ipc.kv_spec import AttentionSpec
from aioinfer.layers.kv_cache import FLOAT8
from aioinfer.models.config import read_json
from aioinfer.models.decoder import CausalLM
from aioinfer.models.kv_scales import has_float8_cache, load_kv_scales

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def select_dtype(wanted: str, stored: torch.dtype, device: torch.device) -> tuple[torch.dtype, str]:
    """Returns the dtype of weights and arithmetic, and how to call it in the start-up table.

    Few CPUs multiply bfloat16 or float16 faster than float32, and others take a hundred times as
    long: on a CPU it is float32, unless the configuration names another.

    Args:
        wanted: the configured dtype, or "auto".
        stored: the checkpoint's.
    """
    name = str(stored).removeprefix("torch.")
    if wanted != "auto":
        return _DTYPES[wanted], wanted
    if device.type == "cpu" and name != "float32":
        return torch.float32, f"float32 (the weights are {name}, in which few CPUs compute fast)"
    if name not in _DTYPES:
        return torch.bfloat16, f"bfloat16 (the weights are {name})"
    return stored, name


@dataclass(frozen=True, slots=True)
class CacheDtype:
    """The dtype of a KV cache.

    Attributes:
        dtype: of keys and values.
        text: how to call it in the start-up table.
        is_calibrated: whether it is float8 and its scales are measured at the start.
    """

    dtype: torch.dtype
    text: str
    is_calibrated: bool = False


def select_cache_dtype(
    config: Config, folder: Path, model: CausalLM, dtype: torch.dtype
) -> CacheDtype:
    """Selects the dtype of the KV cache, and loads its scales if the checkpoint has them.

    Args:
        config: the whole configuration.
        folder: the folder of the model.
        model: with its weights loaded.
        dtype: of the arithmetic.

    Raises:
        ConfigError: the model has no cache that can be in float8, and it should be.
    """
    wanted, scales = config.cache.dtype, config.cache.scales
    if wanted == "auto":
        wanted = "fp8" if has_float8_cache(read_json(folder)) else "model"
    if wanted != "fp8":
        return CacheDtype(dtype, str(dtype).removeprefix("torch."))
    if not model.kv_scales:
        raise ConfigError(
            "a KV cache in float8 is not supported for latent vectors: set cache.dtype to 'model'"
        )
    if scales == "one":
        return CacheDtype(FLOAT8, "float8 (e4m3; scales: 1)")
    is_stored = not config.model.has_random_weights
    if scales == "auto" and is_stored and load_kv_scales(folder, model.kv_scales):
        return CacheDtype(FLOAT8, "float8 (e4m3; scales: the checkpoint's)")
    numbers = model.layer_numbers
    own_specs = model.kv_specs[numbers.start : numbers.stop]
    for layer, spec in zip(model.kv_scales, own_specs, strict=True):
        if isinstance(spec, AttentionSpec):
            layer.allow_key_shifts(spec.head_size)
    return CacheDtype(FLOAT8, "float8 (e4m3; scales: calibrated)", is_calibrated=True)
