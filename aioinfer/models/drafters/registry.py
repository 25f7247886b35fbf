"""Makes the drafter that `speculation.method` names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from aioinfer.config import Config, ModelConfig
from aioinfer.errors import ConfigError
from aioinfer.models.decoder import CausalLM
from aioinfer.models.drafters.draft_model import DraftModel
from aioinfer.models.drafters.drafter import Drafter
from aioinfer.models.registry import build_model, load_model_config

#: The methods whose drafter has a checkpoint of its own, `speculation.model`.
WITH_CHECKPOINT = ("draft",)


def drafter_options(config: Config) -> ModelConfig:
    """Returns the section `[model]` of a drafter that has a checkpoint of its own. Raises
    `ConfigError` if none is named."""
    speculation = config.speculation
    if speculation.model is None:
        raise ConfigError(
            f"speculation.method = '{speculation.method}' needs speculation.model, the model that "
            f"drafts"
        )
    return replace(
        config.model, path=speculation.model, revision=None, hf_overrides={}, tokenizer=None
    )


def check_drafter(config: Config, folder: Path) -> None:
    """Checks the configuration of a drafter in a folder of its own. Raises `ConfigError` if it is
    not supported, or the ranks cannot share it."""
    model = load_model_config(folder, drafter_options(config))
    model.check_tensor_parallel(config.parallel.tensor_parallel_size)


def build_drafter(config: Config, folder: Path, target: CausalLM) -> tuple[Drafter, Path] | None:
    """Returns this rank's part of the drafter, its weights unset, and the folder of its checkpoint;
    None if the method has none.

    Args:
        config: the whole configuration; `speculation.model` is a folder.
        folder: of the target.
        target: this rank's part of the target, which may be unset, too.

    Raises:
        ConfigError: as `check_drafter`.
    """
    if config.speculation.method != "draft":
        return None
    # the sums over the ranks have buffers as wide as the stream of one model
    backend = replace(target.backend, all_reduce=None)
    if backend.expert_group is not None:
        raise ConfigError(
            "speculation: engines that share their experts cannot have a model that drafts"
        )
    options = drafter_options(config)
    own = Path(options.path)
    model = build_model(own, backend, options)
    return DraftModel(model, target.vocabulary.vocab_size), own
