"""Registry of model families: from the name of an architecture, as `config.json` has it, to a
family's configuration and model, or to transformers' modules where there is no file for it
(`fallback`)."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from aioinfer.errors import ConfigError
from aioinfer.layers.backend import Backend
from aioinfer.layers.maker import LayerMaker
from aioinfer.models.config import DecoderConfig, read_json
from aioinfer.models.decoder import CausalLM
from aioinfer.models.quantization import read_quantization


class Family(NamedTuple):
    """The definition of a family: a module of this package, and in it the class of the
    configuration and the class of the model, which is made of a configuration and a
    `LayerMaker`."""

    module: str
    config: str
    model: str


FAMILIES = {
    "DeepseekV2ForCausalLM": Family("deepseek", "DeepseekV2Config", "DeepseekModel"),
    "DeepseekV3ForCausalLM": Family("deepseek", "DeepseekV3Config", "DeepseekModel"),
    "Gemma2ForCausalLM": Family("gemma2", "Gemma2Config", "Gemma2Model"),
    "Gemma3ForCausalLM": Family("gemma3", "Gemma3Config", "Gemma3Model"),
    "Glm4ForCausalLM": Family("glm4", "Glm4Config", "Glm4Model"),
    "Glm4MoeForCausalLM": Family("glm4_moe", "Glm4MoeConfig", "Glm4MoeModel"),
    "GptOssForCausalLM": Family("gpt_oss", "GptOssConfig", "GptOssModel"),
    "GraniteForCausalLM": Family("granite", "GraniteConfig", "GraniteModel"),
    "LlamaForCausalLM": Family("llama", "LlamaConfig", "LlamaModel"),
    "MistralForCausalLM": Family("llama", "MistralConfig", "LlamaModel"),
    "MixtralForCausalLM": Family("mixtral", "MixtralConfig", "MixtralModel"),
    "Olmo2ForCausalLM": Family("olmo2", "Olmo2Config", "Olmo2Model"),
    "OlmoeForCausalLM": Family("olmoe", "OlmoeConfig", "OlmoeModel"),
    "Phi3ForCausalLM": Family("phi3", "Phi3Config", "Phi3Model"),
    "Qwen2ForCausalLM": Family("qwen", "Qwen2Config", "QwenModel"),
    "Qwen2MoeForCausalLM": Family("qwen_moe", "Qwen2MoeConfig", "QwenMoeModel"),
    "Qwen3ForCausalLM": Family("qwen", "Qwen3Config", "QwenModel"),
    "Qwen3MoeForCausalLM": Family("qwen_moe", "Qwen3MoeConfig", "QwenMoeModel"),
}


class CausalLMConfig(Protocol):
    """Fields of a model's configuration that the engine and the worker read; see
    `DecoderConfig`."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def max_len(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def check_tensor_parallel(self, size: int, *, expert_parallel: bool = False) -> None: ...

    def check_pipeline_parallel(self, size: int) -> None: ...


def load_model_config(
    folder: Path, *, trust_remote_code: bool = False, quantization: str = "auto"
) -> CausalLMConfig:
    """Reads `config.json` of a model folder.

    Args:
        trust_remote_code: whether code that the checkpoint brings may run.
        quantization: `model.quantization`; see `read_quantization`.

    Raises:
        ConfigError: it is missing, lacks a field, or the model is not supported.
    """
    config = _read_decoder(folder)
    quantized = read_quantization(config, quantization)
    family = _find_family(config)
    if family is None:
        if quantized is not None:
            raise ConfigError(
                f"{config.get('architectures')}: quantized weights are supported for "
                f"{', '.join(FAMILIES)} alone"
            )
        from aioinfer.models.fallback import FallbackConfig

        try:
            return FallbackConfig.load(folder, trust_remote_code=trust_remote_code)
        except ConfigError as error:
            own = ", ".join(FAMILIES)
            named = config.get("architectures")
            raise ConfigError(f"{named} is none of {own}; {error}") from error
    return _read_own(family, folder, config)


def _read_own(family: Family, folder: Path, config: Mapping[str, Any]) -> DecoderConfig:
    """Reads the configuration of a family that has a file here."""
    file = folder / "config.json"
    try:
        return _load_class(family.module, family.config).read(config)
    except KeyError as error:
        raise ConfigError(f"{file} lacks {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error


def build_model(
    folder: Path,
    backend: Backend,
    *,
    served_len: int | None = None,
    trust_remote_code: bool = False,
    quantization: str = "auto",
) -> CausalLM:
    """Returns this rank's part of the model in a folder, its weights unset.

    Args:
        folder: of the model.
        backend: of the rank.
        served_len: the longest sequence that is served, if that is not the model's own limit; some
            variants of RoPE depend on it.
        trust_remote_code: whether code that the checkpoint brings may run.
        quantization: `model.quantization`; see `read_quantization`.

    Raises:
        ConfigError: as `load_model_config`, or the ranks do not divide the model.
    """
    json = _read_decoder(folder)
    family = _find_family(json)
    if family is None:
        from aioinfer.models.fallback import FallbackConfig, FallbackModel

        own = FallbackConfig.load(folder, trust_remote_code=trust_remote_code)
        return FallbackModel(own, backend, trust_remote_code=trust_remote_code)
    config = _read_own(family, folder, json)
    config.check_tensor_parallel(backend.group.size, expert_parallel=backend.expert_parallel)
    config.check_pipeline_parallel(backend.num_stages)
    make = LayerMaker(
        backend,
        config.hidden_size,
        config.max_len,
        config.norm_eps,
        served_len,
        read_quantization(json, quantization),
    )
    return _load_class(family.module, family.model)(config, make)


def _read_decoder(folder: Path) -> dict[str, Any]:
    """Returns the decoded `config.json`. The `config.json` of a decoder with a classification head
    reads as the decoder's own, with its embedding in the place of the head that it does not
    have."""
    config = read_json(folder)
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        return config
    decoder = names[0].replace("ForSequenceClassification", "ForCausalLM")
    if decoder == names[0] or decoder not in FAMILIES:
        return config
    return config | {"architectures": [decoder], "tie_word_embeddings": True}


def _find_family(config: Mapping[str, Any]) -> Family | None:
    """Returns the family of the first known architecture of a decoded `config.json`, or None if
    there is no file for any."""
    names = config.get("architectures")
    if not isinstance(names, list):
        return None
    return next((FAMILIES[n] for n in names if isinstance(n, str) and n in FAMILIES), None)


def _load_class(module: str, name: str) -> Any:
    return getattr(import_module(f"aioinfer.models.{module}"), name)
