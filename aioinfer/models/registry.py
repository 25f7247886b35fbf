"""Registry of model families: from the name of an architecture, as `config.json` has it, to a
family's configuration and model, or to transformers' modules where there is no file for it
(`fallback`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from aioinfer.config import MediaConfig, ModelConfig
from aioinfer.errors import ConfigError
from aioinfer.layers.backend import Backend
from aioinfer.layers.maker import LayerMaker
from aioinfer.models.causal_lm import CausalLM
from aioinfer.models.config import DecoderConfig, read_config
from aioinfer.models.decoder import DecoderModel
from aioinfer.models.json_file import read_json
from aioinfer.models.loader import locate_tensors
from aioinfer.models.quantization import read_quantization
from aioinfer.models.vision.registry import read_vision

#: The modules of this package that define families. Each names its architectures in `FAMILIES`.
MODULES = [
    "bamba",
    "bart",
    "bert",
    "cohere2",
    "deepseek",
    "ernie",
    "falcon",
    "falcon_h1",
    "gemma2",
    "gemma3",
    "gemma3n",
    "gemma4",
    "glm4",
    "glm4_moe",
    "gpt2",
    "gpt_oss",
    "granite",
    "hunyuan",
    "kimi_linear",
    "lfm2",
    "llama",
    "minimax_m2",
    "mixtral",
    "modernbert",
    "nemotron_h",
    "olmo2",
    "olmo3",
    "olmoe",
    "opt",
    "phi",
    "phi3",
    "qwen",
    "qwen3_next",
    "qwen_moe",
    "seed_oss",
    "stablelm",
    "t5",
    "whisper",
]

_DEFAULTS = ModelConfig(path="")
#: Of models that read text alone.
NO_MEDIA = MediaConfig(max_pictures=0)


class Family(NamedTuple):
    """The definition of a family.

    Attributes:
        config: the class of the configuration.
        model: makes the model of a configuration, with the maker of its layers.
    """

    config: type[DecoderConfig]
    model: Callable[[Any, LayerMaker], CausalLM]


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

    @property
    def generates(self) -> bool: ...

    def check_tensor_parallel(self, size: int, *, expert_parallel: bool = False) -> None: ...

    def check_pipeline_parallel(self, size: int) -> None: ...


def families() -> dict[str, Family]:
    """Returns all families by the names of their architectures."""
    return {
        architecture: Family(*classes)
        for name in MODULES
        for architecture, classes in _families_of(name).items()
    }


def find_family(architecture: str) -> Family | None:
    """Returns the family of an architecture, or None if there is no file for it. Imports no more
    than it takes to find it."""
    found = (_families_of(name).get(architecture) for name in MODULES)
    classes = next(filter(None, found), None)
    return None if classes is None else Family(*classes)


def _families_of(module: str) -> Mapping[str, tuple[Any, Any]]:
    """Returns the configuration and the model of each architecture that a module defines."""
    return import_module(f"aioinfer.models.{module}").FAMILIES


def load_model_config(folder: Path, options: ModelConfig = _DEFAULTS) -> CausalLMConfig:
    """Reads `config.json` of a model folder.

    Args:
        folder: of the model.
        options: the section `[model]`.

    Raises:
        ConfigError: it is missing, lacks a field, or the model is not supported.
    """
    config = _read_decoder(folder, options)
    quantized = read_quantization(config, options.quantization)
    family = _first_family(config)
    if family is None:
        if quantized is not None:
            raise ConfigError(
                f"{config.get('architectures')}: quantized weights are supported for "
                f"{', '.join(families())} alone"
            )
        from aioinfer.models.fallback import FallbackConfig

        try:
            return FallbackConfig.load(folder, options)
        except ConfigError as error:
            own = ", ".join(families())
            named = config.get("architectures")
            raise ConfigError(f"{named} is none of {own}; {error}") from error
    return _as_served(_read_own(family, folder, config), folder, options)


def _as_served(config: DecoderConfig, folder: Path, options: ModelConfig) -> DecoderConfig:
    """Returns a configuration whose `max_len` is that of `sentence_bert_config.json`, if an encoder
    has such a file and `model.max_model_len` does not name another length."""
    file = folder / "sentence_bert_config.json"
    if config.generates or options.max_model_len is not None or not file.is_file():
        return config
    found = read_json(file).get("max_seq_length")
    if not isinstance(found, int) or found < 1:
        return config
    return replace(config, max_len=min(found, config.max_len))


def _read_own(family: Family, folder: Path, config: Mapping[str, Any]) -> DecoderConfig:
    """Reads the configuration of a family that has a file here."""
    file = folder / "config.json"
    try:
        return family.config.read(config)
    except KeyError as error:
        raise ConfigError(f"{file} lacks {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error


def build_model(
    folder: Path,
    backend: Backend,
    options: ModelConfig = _DEFAULTS,
    media: MediaConfig = NO_MEDIA,
) -> CausalLM:
    """Returns this rank's part of the model in a folder, its weights unset.

    Args:
        folder: of the model.
        backend: of the rank.
        options: the section `[model]`. Some variants of RoPE depend on `max_model_len`.
        media: the section `[media]`; by default the model reads no pictures.

    Raises:
        ConfigError: as `load_model_config`, or the ranks do not divide the model.
    """
    json = _read_decoder(folder, options)
    family = _first_family(json)
    if family is None:
        from aioinfer.models.fallback import FallbackConfig, FallbackModel

        return FallbackModel(FallbackConfig.load(folder, options), backend, options)
    config = _read_own(family, folder, json)
    config.check_tensor_parallel(backend.group.size, expert_parallel=backend.expert_parallel)
    config.check_pipeline_parallel(backend.num_stages)
    vision = read_vision(folder, options, media)
    if vision is not None and (sections := vision.rope_sections()) is not None:
        rope = replace(config.rope, sections=sections)
        rope.check(rope.rotary_size or config.head_size)
        config = replace(config, rope=rope)
    make = LayerMaker(
        backend,
        config.hidden_size,
        config.max_len,
        config.norm_eps,
        options.max_model_len,
        read_quantization(json, options.quantization),
    )
    model = family.model(config, make)
    if vision is not None and isinstance(model, DecoderModel):
        model.add_tower(vision.tower(backend, config.hidden_size))
    return model


def _read_decoder(folder: Path, options: ModelConfig) -> dict[str, Any]:
    """Returns the configuration of a folder's text model. The `config.json` of a decoder with a
    classification head reads as the decoder's own, with its embedding in the place of the head that
    it does not have. So does one that does not say whether it has a head, and has none: the default
    of `tie_word_embeddings` is a class's of transformers, and wrappers' differ from their text
    models'."""
    config = read_config(folder, options.hf_overrides)
    if config.get("tie_word_embeddings") is None and _lacks_head(folder, options):
        config = config | {"tie_word_embeddings": True}
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        return config
    decoder = names[0].replace("ForSequenceClassification", "ForCausalLM")
    if decoder == names[0] or find_family(decoder) is None:
        return config
    return config | {"architectures": [decoder], "tie_word_embeddings": True}


def _lacks_head(folder: Path, options: ModelConfig) -> bool:
    """Whether a folder has weights, and among them an embedding and no head."""
    if options.load_format.startswith("dummy"):
        return False
    try:
        names = locate_tensors(folder)
    except ConfigError:  # which loading will raise, or there are none yet
        return False
    return "model.embed_tokens.weight" in names and not any(
        name.startswith("lm_head.") for name in names
    )


def _first_family(config: Mapping[str, Any]) -> Family | None:
    """Returns the family of the first known architecture of a decoded `config.json`, or None if
    there is no file for any."""
    names = config.get("architectures")
    named = names if isinstance(names, list) else []
    found = (find_family(name) for name in named if isinstance(name, str))
    return next(filter(None, found), None)
