"""The model as the server's process sees it: tokenizer, format of messages, defaults, sizes.

`Frontend` loads it in a thread while the workers load the weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from aioinfer.checkpoint.source import resolve_model
from aioinfer.config import Config, ModelConfig
from aioinfer.engine.pooling import Pooling
from aioinfer.errors import ConfigError
from aioinfer.kernels.cpu_cache import compile_ahead
from aioinfer.models.registry import load_model_config
from aioinfer.text.formats.registry import message_format
from aioinfer.text.generation_defaults import GenerationDefaults
from aioinfer.text.message_parser import MessageFormat
from aioinfer.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model as the server's process sees it.

    Attributes:
        tokenizer: None with `model.skip_tokenizer`, when only token ids go in and out.
        message_format: how the model writes thoughts and tool calls.
        defaults: end tokens and sampling parameters of requests that bring none.
        vocab_size: of the logits.
        hidden_size: of the hidden states.
        pooling: how the model pools hidden states.
    """

    tokenizer: Tokenizer | None
    message_format: MessageFormat
    defaults: GenerationDefaults
    vocab_size: int
    hidden_size: int
    pooling: Pooling

    @classmethod
    def load(cls, folder: Path, config: Config) -> ServedModel:
        """Reads a model's folder. Raises `ConfigError`."""
        tokenizer = _load_tokenizer(folder, config.model)
        model = load_model_config(
            folder,
            trust_remote_code=config.model.trust_remote_code,
            quantization=config.model.quantization,
        )
        form = message_format(
            tokenizer.chat_template_text if tokenizer is not None else "",
            tokenizer.marker_ids if tokenizer is not None else {},
            config.chat.tool_format,
            config.chat.reasoning_format,
        )
        given = config.sampling.given()
        return cls(
            tokenizer=tokenizer,
            message_format=form,
            defaults=GenerationDefaults.load(folder, tokenizer, given, form.end_ids),
            vocab_size=model.vocab_size,
            hidden_size=model.hidden_size,
            pooling=Pooling.load(folder, config.pooling),
        )


def _load_tokenizer(folder: Path, model: ModelConfig) -> Tokenizer | None:
    if model.skip_tokenizer:
        return None
    if model.tokenizer is not None:
        folder = resolve_model(ModelConfig(path=model.tokenizer, load_format="dummy"))
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
    model = load_model_config(
        folder,
        trust_remote_code=config.model.trust_remote_code,
        quantization=config.model.quantization,
    )
    parallel = config.parallel
    model.check_tensor_parallel(
        parallel.tensor_parallel_size, expert_parallel=parallel.expert_parallel
    )
    model.check_pipeline_parallel(parallel.pipeline_parallel_size)
    return folder


def _compile_ahead(config: Config) -> None:
    """Starts to compile the kernels for a GGUF file on a CPU while the file is converted."""
    model = config.model
    if not model.path.endswith(".gguf") or model.quantization != "auto":
        return
    import torch

    if config.parallel.device == "cpu" or not torch.cuda.is_available():
        compile_ahead()
