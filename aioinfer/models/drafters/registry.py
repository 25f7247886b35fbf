"""Which method drafts, by `speculation.method`, and the drafter of a method that has one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from aioinfer.config import Config, ModelConfig
from aioinfer.config_sections import DraftMethod
from aioinfer.errors import ConfigError
from aioinfer.layers.backend import Backend
from aioinfer.layers.maker import LayerMaker
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.models.causal_lm import CausalLM
from aioinfer.models.config import DecoderConfig
from aioinfer.models.decoder import DecoderModel
from aioinfer.models.drafters.draft_model import DraftModel
from aioinfer.models.drafters.drafter import Drafter
from aioinfer.models.drafters.eagle3 import Eagle3Config, is_eagle3, make_eagle3
from aioinfer.models.drafters.mtp import MtpDrafter
from aioinfer.models.json_file import read_json
from aioinfer.models.mtp import find_projection
from aioinfer.models.quantization import read_quantization
from aioinfer.models.registry import CausalLMConfig, build_model, load_model_config


def select_method(config: Config, folder: Path) -> DraftMethod:
    """Returns the method that `speculation.method = "auto"` means for the model in a folder, where
    no model is named that drafts. Raises `ConfigError`."""
    parallel = config.parallel
    if parallel.data_parallel_attention:
        return "none"  # all engines would wait for the drafts of one
    if parallel.pipeline_parallel_size > 1:
        return "ngram"  # a head drafts in each step: not shown to pay where requests miss turns
    model = load_model_config(folder, config.model)
    may_have_head = isinstance(model, DecoderConfig) and model.has_mtp
    is_random = config.model.load_format.startswith("dummy")
    if not may_have_head or is_random:
        return "ngram"
    projection = find_projection(folder)
    if projection is None:
        return "ngram"
    quantized = read_quantization(read_json(folder / "config.json"))
    # some quantized checkpoints have the head as it was without saying so, and could not be loaded
    if quantized is None or quantized.name == "fp8" or quantized.scheme_of(projection) is None:
        return "mtp"
    return "ngram"


def drafter_options(config: Config) -> ModelConfig:
    """Returns the section `[model]` of a drafter that has a checkpoint of its own. Raises
    `ConfigError` if none is named."""
    speculation = config.speculation
    if speculation.model is None:
        raise ConfigError(
            f"speculation.method = '{speculation.method}' needs speculation.model, the model that "
            f"drafts"
        )
    return replace(config.model, path=speculation.model, hf_overrides={}, tokenizer=None)


def drafter_method(folder: Path) -> DraftMethod:
    """Returns the method that the checkpoint in a folder of its own is for. Raises
    `ConfigError`."""
    return "eagle3" if is_eagle3(folder) else "draft"


def check_drafter(config: Config, folder: Path) -> None:
    """Checks the configuration of a drafter in a folder of its own. Raises `ConfigError` if it is
    not supported, or the ranks cannot share it."""
    if config.speculation.method == "eagle3":
        model: CausalLMConfig = Eagle3Config.load(folder).layer
    else:
        model = load_model_config(folder, drafter_options(config))
    model.check_tensor_parallel(config.parallel.tensor_parallel_size)


def build_drafter(config: Config, target: CausalLM, served_len: int) -> tuple[Drafter, Path] | None:
    """Returns this rank's part of the drafter, its weights unset, and the folder of its checkpoint;
    None if the method has none. The stages of a pipeline before the last one have it without
    memory, since they have to know what it keeps (`kv_specs`) and reads (`tapped_layers`); the head
    of the model is the last stage's alone.

    Args:
        config: the whole configuration; `speculation.model` is a folder.
        target: this rank's part of the target, which may be unset, too.
        served_len: the longest sequence that may be served.

    Raises:
        ConfigError: as `check_drafter`.
    """
    method = config.speculation.method
    if not config.speculation.has_drafter:
        return None
    # the sums over the ranks have buffers as wide as the stream of one model
    backend = replace(target.backend, all_reduce=None, stage=0, num_stages=1)
    is_here = target.backend.is_last_stage
    if not is_here:
        backend.device, backend.group = torch.device("meta"), ParallelGroup(0, backend.group.size)
    if backend.expert_group is not None:
        raise ConfigError(
            "speculation: engines that share their experts cannot have a model that drafts"
        )
    if method == "mtp":
        if not is_here:
            return None
        if not isinstance(target, DecoderModel) or target.mtp is None:
            raise ConfigError("speculation.method = 'mtp' needs a model with such a head")
        return MtpDrafter(target), Path(config.model.path)
    options = drafter_options(config)
    folder = Path(options.path)
    if method == "eagle3":
        return _build_eagle3(folder, target, backend, options, served_len), folder
    longest = load_model_config(folder, options).max_len
    if longest < served_len:
        raise ConfigError(
            f"speculation.model was made for {longest} tokens: set model.max_model_len to at most "
            f"that, not {served_len}"
        )
    model = build_model(folder, backend, options)
    if not (is_here or isinstance(model, DecoderModel)):
        raise ConfigError("speculation.model: pipelines need a family of models that has a file")
    return DraftModel(model, target.vocabulary.vocab_size), folder


def _build_eagle3(
    folder: Path, target: CausalLM, backend: Backend, options: ModelConfig, served_len: int
) -> Drafter:
    if not isinstance(target, DecoderModel):
        raise ConfigError("speculation.method = 'eagle3' needs a family of models that has a file")
    config = Eagle3Config.load(folder).layer
    if config.hidden_size == target.hidden_size and target.backend.is_last_stage:
        backend = target.backend
    max_len = max(config.max_len, served_len)
    make = LayerMaker(backend, config.hidden_size, max_len, config.norm_eps, served_len)
    return make_eagle3(folder, target, make, options.load_format)
