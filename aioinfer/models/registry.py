"""From the name of an architecture, as `config.json` has it, to a family's configuration and
model."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from aioinfer.errors import ConfigError
from aioinfer.layers.backend import Backend
from aioinfer.layers.maker import LayerMaker
from aioinfer.models.config import DecoderConfig, read_json
from aioinfer.models.decoder import CausalLM


class Family(NamedTuple):
    """Where a family is defined: a module of this package, and in it the class of the
    configuration and that of the model, which is made of one and a `LayerMaker`."""

    module: str
    config: str
    model: str


FAMILIES = {
    "LlamaForCausalLM": Family("llama", "LlamaConfig", "LlamaModel"),
    "MistralForCausalLM": Family("llama", "MistralConfig", "LlamaModel"),
    "Qwen2ForCausalLM": Family("qwen", "Qwen2Config", "QwenModel"),
    "Qwen3ForCausalLM": Family("qwen", "Qwen3Config", "QwenModel"),
}


def load_model_config(folder: Path) -> DecoderConfig:
    """Reads `config.json` of a model folder.

    Raises:
        ConfigError: it is missing, lacks a field, or the model is not supported.
    """
    config = read_json(folder)
    family = FAMILIES[find_architecture(config)]
    if config.get("quantization_config"):
        raise ConfigError(
            "quantized safetensors are not supported: use the model's bfloat16 or "
            "float16 weights, or a GGUF file"
        )
    try:
        return _load_class(family.module, family.config).read(config)
    except KeyError as error:
        raise ConfigError(f"{folder / 'config.json'} lacks {error}") from error


def find_architecture(config: Mapping[str, Any]) -> str:
    """Returns the name of the first supported architecture of a decoded `config.json`.

    Raises:
        ConfigError: there is none.
    """
    named = config.get("architectures") or []
    for name in named:
        if name in FAMILIES:
            return name
    supported = ", ".join(FAMILIES)
    raise ConfigError(f"the architecture {named} is not supported; these are: {supported}")


def build_model(folder: Path, backend: Backend) -> CausalLM:
    """Returns this rank's part of the model in a folder, its weights unset.

    Raises:
        ConfigError: as `load_model_config`, or the ranks do not divide the model.
    """
    config = load_model_config(folder)
    config.check_tensor_parallel(backend.group.size)
    family = FAMILIES[find_architecture(read_json(folder))]
    make = LayerMaker(backend, config.hidden_size, config.max_len, config.norm_eps)
    return _load_class(family.module, family.model)(config, make)


def _load_class(module: str, name: str) -> Any:
    return getattr(import_module(f"aioinfer.models.{module}"), name)
