"""The model as the server's process sees it: tokenizer, format of messages, defaults, sizes, and
how its hidden states become embeddings, scores and classes (`Pooling`).

`PromptMaker` loads it in a thread while the workers load the weights.

The workers return the pooled hidden state of a prompt, float32 and as it is; the rest is a few
operations on one vector, done here: dense modules, truncation, normalisation, the classification
head (`pooling_head`).

Which pooling a model was trained for stands in its folder, in the files that sentence-transformers
writes: `modules.json`, the configuration of its pooling module (usually `1_Pooling/config.json`)
and `config_sentence_transformers.json`. The section `[pooling]` of the configuration goes over
them. Without any: the last token's state, of encoders the mean of all, normalised.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from aioinfer.checkpoint.source import resolve_model
from aioinfer.config import Config, ModelConfig, PoolingConfig
from aioinfer.engine.pooling_head import (
    ClassificationHead,
    DenseLayer,
    read_dense_modules,
    read_head,
)
from aioinfer.errors import ConfigError, RequestError
from aioinfer.ipc.sections import F32
from aioinfer.kernels.cpu_compilation import compile_ahead
from aioinfer.models.drafters.registry import (
    check_drafter,
    drafter_method,
    drafter_options,
    select_method,
)
from aioinfer.models.encoder_decoder import check_cache, read_source
from aioinfer.models.json_file import read_json
from aioinfer.models.registry import load_model_config
from aioinfer.models.source import SourceFormat
from aioinfer.models.vision.format import PictureFormat
from aioinfer.models.vision.registry import read_vision
from aioinfer.sampling_params import ALL_TOKENS, SamplingParams
from aioinfer.text.formats.registry import message_format
from aioinfer.text.generation_defaults import GenerationDefaults
from aioinfer.text.message_parser import MessageFormat
from aioinfer.text.tokenizer import Tokenizer

#: The modes of sentence-transformers' pooling that are known here, by its configuration's names.
_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
_NAMES = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
#: Modules that stand before pooling, or whose operations are done here.
_KNOWN_MODULES = ("Transformer", "Pooling", "Dense", "Normalize")


@dataclass(frozen=True, slots=True)
class Pooling:
    """How a model pools.

    Attributes:
        kind: one of `sampling_params.POOLINGS`, or "all": a vector for each token.
        normalize: whether embeddings have the length 1.
        prompts: texts that are put before the embedded text, by name.
        default_prompt: the name of the prompt that is used where none is named, or None.
        obstacle: why the model cannot embed, or None.
        head: the classification head, if the checkpoint has one.
        dense: applied to pooled states, one after the other, before all else.
    """

    kind: str = "last"
    normalize: bool = True
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    obstacle: str | None = None
    head: ClassificationHead | None = None
    dense: tuple[DenseLayer, ...] = ()

    @classmethod
    def load(cls, folder: Path, config: PoolingConfig, default: str = "last") -> Pooling:
        """Reads a model's folder. Raises `ConfigError` if a file of it cannot be read.

        Args:
            folder: of the model.
            config: the section `[pooling]`.
            default: the kind where neither says one.
        """
        modules = _read_modules(folder)
        kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
        kind, obstacle = _read_kind(folder, modules)
        kind = kind or default
        dense: tuple[DenseLayer, ...] = ()
        try:
            dense = read_dense_modules(folder, modules)
        except ConfigError as error:
            obstacle = str(error)
        if unknown := [name for name in kinds if name not in _KNOWN_MODULES]:
            obstacle = f"modules.json has modules that are not supported: {', '.join(unknown)}"
        normalize = "Normalize" in kinds if modules else True
        own = read_json(folder / "config_sentence_transformers.json", missing_ok=True)
        prompts = own.get("prompts") or {}
        return cls(
            config.type or kind,
            normalize,
            {str(name): str(text) for name, text in prompts.items()},
            own.get("default_prompt_name"),
            obstacle if config.type is None else None,
            read_head(folder),
            dense,
        )

    def params(self, kind: str | None = None, *, takes_all: bool = False) -> SamplingParams:
        """Returns the parameters of a request that pools, in the model's way or in another.

        Raises `RequestError` if the model cannot, or if there would be a vector for each token and
        not `takes_all`.
        """
        if (kind or self.kind) == ALL_TOKENS and not takes_all:
            raise RequestError(
                "this would be a vector for each token (pooling all), which only /pooling and "
                "/embedding return",
                param="pooling",
            )
        if self.obstacle is not None and kind is None:
            raise RequestError(
                f"this model cannot embed: {self.obstacle}; pooling.type in the server's "
                "configuration would set another way"
            )
        return SamplingParams(temperature=0, pooling=kind or self.kind)

    def prompt(self, name: str | None) -> str:
        """Returns the text that is put before the embedded text.

        Raises `RequestError` for a name that the model does not have.
        """
        if name is None:
            return self.prompts.get(self.default_prompt or "", "")
        if name not in self.prompts:
            known = ", ".join(self.prompts) or "none"
            raise RequestError(
                f"prompt_name is {name!r}; this model has {known}", param="prompt_name"
            )
        return self.prompts[name]

    def prompt_of(self, *names: str) -> str:
        """Returns the first prompt of these names that the model has, or its default."""
        found = next((name for name in names if name in self.prompts), None)
        return self.prompt(found)

    def embedding_size(self, hidden_size: int) -> int:
        """Returns how many values an embedding has, of hidden states of `hidden_size`."""
        return len(self.dense[-1].weight) if self.dense else hidden_size

    def check_dimensions(self, dimensions: int | None, hidden_size: int) -> None:
        """Raises `RequestError` for a number of values that an embedding cannot have."""
        most = self.embedding_size(hidden_size)
        if dimensions is not None and not 1 <= dimensions <= most:
            raise RequestError(
                f"dimensions must be in [1, {most}], not {dimensions}", param="dimensions"
            )

    @property
    def cross_encoder(self) -> ClassificationHead | None:
        """The head that scores pairs of texts: one with a single class; None for none."""
        return self.head if self.head is not None and len(self.head.labels) == 1 else None

    def embedding(
        self, state: F32, dimensions: int | None = None, normalize: bool | None = None
    ) -> F32:
        """Returns the embedding of a pooled state, or of each of several [P, hidden_size]: its
        first `dimensions` values, normalised."""
        for layer in self.dense:
            state = layer(state)
        found = state if dimensions is None else state[..., :dimensions]
        if self.normalize if normalize is None else normalize:
            if found.ndim > 1:
                lengths = np.linalg.norm(found, axis=1, keepdims=True)
                return found / np.maximum(lengths, np.float32(1e-12))
            return found / np.float32(max(float(np.linalg.norm(found)), 1e-12))
        return found


def cosine_similarity(one: F32, other: F32) -> float:
    """Returns the cosine of the angle between two vectors."""
    lengths = float(np.linalg.norm(one)) * float(np.linalg.norm(other))
    return float(one @ other) / max(lengths, 1e-12)


def _read_modules(folder: Path) -> Sequence[Mapping[str, Any]]:
    """Returns the list in `modules.json`; none without that file."""
    file = folder / "modules.json"
    if not file.is_file():
        return ()
    try:
        modules = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    if not isinstance(modules, list) or not all(isinstance(each, dict) for each in modules):
        raise ConfigError(f"{file} must hold a list of modules")
    return modules


def _read_kind(folder: Path, modules: Sequence[Mapping[str, Any]]) -> tuple[str, str | None]:
    """Returns how the model's pooling module pools, "" if it does not say, and why that cannot be
    done here, or None."""
    path = next(
        (str(m.get("path")) for m in modules if str(m.get("type")).endswith("Pooling")), "1_Pooling"
    )
    config = read_json(folder / path / "config.json", missing_ok=True)
    wanted = [name for name, value in config.items() if name.startswith("pooling_mode_") and value]
    if isinstance(mode := config.get("pooling_mode"), str):
        wanted = [mode]
    found = [_MODES.get(name) or _NAMES.get(name) for name in wanted]
    if config.get("include_prompt") is False:
        return "last", "its pooling leaves the prompt out (include_prompt)"
    if len(found) > 1 or None in found:
        return "last", f"its pooling is {' and '.join(wanted)}"
    return (found[0] if found else None) or "", None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model as the server's process sees it.

    Attributes:
        tokenizer: None where only token ids go in and out.
        message_format: how the model writes thoughts and tool calls.
        defaults: end tokens and sampling parameters of requests that bring none.
        vocab_size: of the logits.
        hidden_size: of the hidden states.
        pooling: how the model pools hidden states.
        is_encoder: whether it keeps nothing of a prompt, computes it in one step, and has no head
            that scores tokens.
        pictures: how it reads pictures; None if it reads none.
        source: how the encoder before its decoder reads what it reads; None without one.
    """

    tokenizer: Tokenizer | None
    message_format: MessageFormat
    defaults: GenerationDefaults
    vocab_size: int
    hidden_size: int
    pooling: Pooling
    is_encoder: bool = False
    pictures: PictureFormat | None = None
    source: SourceFormat | None = None

    @property
    def generates(self) -> bool:
        """Whether it can generate: encoders, and decoders with a classification head, cannot."""
        return not self.is_encoder and self.pooling.head is None

    def check_generates(self) -> None:
        """Raises `RequestError` if it cannot generate."""
        if not self.generates:
            is_a = "has a classification head" if self.pooling.head else "is an encoder"
            raise RequestError(
                f"this model {is_a} and cannot generate: use /v1/embeddings, /score, /rerank or "
                "/classify"
            )

    @classmethod
    def load(cls, folder: Path, config: Config) -> ServedModel:
        """Reads a model's folder. Raises `ConfigError`."""
        tokenizer = _load_tokenizer(folder, config.model)
        model = load_model_config(folder, config.model)
        form = message_format(
            tokenizer.chat_template_text if tokenizer is not None else "",
            tokenizer.marker_ids if tokenizer is not None else {},
            config.chat.tool_format,
            config.chat.reasoning_format,
        )
        return cls(
            tokenizer=tokenizer,
            message_format=form,
            defaults=GenerationDefaults.load(
                folder, tokenizer, config.model.sampling, form.end_ids, config.model.hf_overrides
            ),
            vocab_size=model.vocab_size,
            hidden_size=model.hidden_size,
            pooling=Pooling.load(folder, config.pooling, "last" if model.generates else "mean"),
            is_encoder=not model.generates,
            pictures=_picture_format(folder, config),
            source=read_source(folder, model, config.model),
        )


def _picture_format(folder: Path, config: Config) -> PictureFormat | None:
    vision = read_vision(folder, config.model, config.media)
    return None if vision is None else vision.format


def _load_tokenizer(folder: Path, model: ModelConfig) -> Tokenizer | None:
    if not model.has_tokenizer:
        return None
    if model.tokenizer is not None:
        source = replace(model, path=model.tokenizer, load_format="dummy")
        folder = resolve_model(source)
    try:
        return Tokenizer.load(folder, model.chat_template)
    except ConfigError:
        raise
    except Exception as error:  # the error of a file with wrong contents depends on the file
        raise ConfigError(f"the tokenizer in {folder} cannot be used: {error!r}") from error


def find_model(config: Config) -> Path:
    """Returns the model's folder, after a check that costs nothing yet: whether the workers can
    share the model. Raises `ConfigError`."""
    _compile_ahead(config)
    folder = resolve_model(config.model)
    model = load_model_config(folder, config.model)
    parallel = config.parallel
    model.check_tensor_parallel(
        parallel.tensor_parallel_size, expert_parallel=bool(parallel.expert_parallel)
    )
    model.check_pipeline_parallel(parallel.pipeline_parallel_size)
    check_cache(model, config.cache)
    return folder


def with_speculation(config: Config, folder: Path) -> Config:
    """Returns the configuration with the method that `speculation.method = "auto"` means for the
    model in `folder`, and with the folder of the model that drafts as `speculation.model`, where
    the method needs one. Raises `ConfigError` if that cannot be used."""
    method, drafter = config.speculation.method, None
    if method in ("draft", "eagle3") or (method == "auto" and config.speculation.model):
        drafter = resolve_model(drafter_options(config), "speculation.model")
        if method == "auto":
            method = drafter_method(drafter)
    elif method == "auto":
        method = select_method(config, folder)
    speculation = replace(
        config.speculation,
        method=method,
        model=config.speculation.model if drafter is None else str(drafter),
    )
    config = replace(config, speculation=speculation)
    if drafter is not None:
        check_drafter(config, drafter)
    return config


def _compile_ahead(config: Config) -> None:
    """Starts to compile the kernels for a GGUF file on a CPU while the file is converted."""
    model = config.model
    if not model.path.endswith(".gguf") or model.quantization != "auto":
        return
    import torch

    if config.parallel.device_type == "cpu" or not torch.cuda.is_available():
        compile_ahead()
