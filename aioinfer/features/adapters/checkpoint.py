"""Adapters as `peft` saves them: a folder with `adapter_config.json` and
`adapter_model.safetensors`. Neither can run code; pickles (`adapter_model.bin`) are not read."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from aioinfer.errors import ConfigError
from aioinfer.features.adapters.layers.parts import PROMPT, AdapterWeights
from aioinfer.ipc.content_digest import digest_files
from aioinfer.models.text_model import own_name

CONFIG, WEIGHTS, _OTHER = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
#: The maximum of a configuration, and a group that is repeated, with which a search may take
#: exponential time.
_MAX_CONFIG_BYTES = 1 << 20
_REPEATED_GROUP = re.compile(r"\)[*+{]")
#: Types of numbers, as safetensors names them.
_DTYPES = ("F16", "BF16", "F32", "F64")
_TENSOR = re.compile(
    r"base_model\.model\.(?P<module>.+?)(?P<depth>(\.base_layer)*)"
    r"\.lora_((?P<side>[AB])(\.\w+)?\.weight|embedding_(?P<table>[AB])(\.\w+)?)"
)
#: Weights of the model outside its layers, which peft saves along with adapters of embeddings and
#: heads.
_BASE = re.compile(r"base_model\.model\.(?!.*\.\d+\.).+\.base_layer\.weight")
_T = TypeVar("_T")
_SIDES = {"A": "down", "B": "up"}
#: Kinds of peft whose saved tensor is a soft prompt.
_PROMPTS = ("PROMPT_TUNING", "P_TUNING")
#: Parameters of stacked experts, in the order in which peft nests what it adds to them.
_STACKS = ("gate_up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The part of `adapter_config.json` that is needed.

    Attributes:
        rank_of, alpha_of: of a module, by its name.
        is_rank_stabilized: whether the product is scaled by alpha / sqrt(rank) (rsLoRA,
            Kalajdzievski 2023), and not by alpha / rank.
        parameters: that it changes of modules, such as "mlp.experts.down_proj".
        prompt_tokens: virtual tokens of a soft prompt; 0 for matrices.
    """

    rank_of: Callable[[str], int]
    alpha_of: Callable[[str], float]
    is_rank_stabilized: bool
    parameters: Sequence[str]
    prompt_tokens: int

    @classmethod
    def read(cls, folder: Path) -> AdapterConfig:
        """Reads a folder. Raises `ConfigError` for what is not supported."""
        file = folder / CONFIG
        try:
            if file.stat().st_size > _MAX_CONFIG_BYTES:
                raise ValueError(f"it has more than {_MAX_CONFIG_BYTES} bytes")
            given = json.loads(file.read_text("utf-8"))
            if not isinstance(given, dict):
                raise ValueError("it does not hold an object")
            _refuse(given)
            is_prompt = given["peft_type"] in _PROMPTS
            return cls(
                _by_module(1 if is_prompt else given["r"], given.get("rank_pattern"), _rank),
                _by_module(given.get("lora_alpha", 8), given.get("alpha_pattern"), _alpha),
                bool(given.get("use_rslora")),
                [str(name) for name in given.get("target_parameters") or ()],
                int(given["num_virtual_tokens"]) if is_prompt else 0,
            )
        except (
            OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError, re.error,
        ) as error:  # fmt: skip
            text = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
            raise ConfigError(f"{file} cannot be read: {text}") from error

    def scale_of(self, module: str, rank: int) -> float:
        """Returns by what the product of a module is multiplied."""
        return self.alpha_of(module) / (math.sqrt(rank) if self.is_rank_stabilized else rank)

    def stacks_of(self, module: str) -> list[str]:
        """Returns the parameters that it changes of a module of stacked experts, in the order in
        which peft nests them, the innermost first."""
        found = []
        for name in self.parameters:
            owner, _, parameter = name.rpartition(".")
            if f".{module}".endswith(f".{owner or 'experts'}"):
                found.append(parameter)
        known = [name for name in _STACKS if name in found]
        return known + sorted(set(found).difference(known))


def write_adapter(
    folder: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]
) -> None:
    """Writes an adapter as peft saves it.

    Args:
        tensors: by the names of peft's state dict, on any device.
        config: the content of `adapter_config.json`, as peft's `LoraConfig.to_dict` has it.

    Raises:
        ConfigError: something in the configuration cannot be written.
    """

    def plain(value: Any) -> Any:
        if isinstance(value, (set, frozenset)):
            return sorted(value)
        raise TypeError(f"{value!r} cannot be written")

    try:
        text = json.dumps(dict(config), default=plain)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the adapter's configuration: {error}") from error
    (folder / CONFIG).write_text(text, "utf-8")
    # safetensors takes no tensors that share memory
    own = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    save_file(own, folder / WEIGHTS)


def digest_adapter(folder: Path, *, whole: bool) -> str:
    """Returns a digest of an adapter's files; unless `whole`, of parts of them. Raises OSError."""
    return "".join(digest_files(folder / name, whole=whole).hex() for name in (CONFIG, WEIGHTS))


def _refuse(given: Mapping[str, Any]) -> None:
    """Raises ValueError for an adapter of a kind that is not supported."""
    kind = given.get("peft_type")
    if kind not in ("LORA", *_PROMPTS):
        known = ", ".join(repr(each) for each in ("LORA", *_PROMPTS))
        raise ValueError(f"peft_type is {kind!r}, and only {known} are supported")
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


def _rank(given: Any) -> int:
    """Returns a rank. Raises ValueError for one that no matrix has."""
    if (rank := int(given)) < 1:
        raise ValueError(f"a rank is {rank}, and not positive")
    return rank


def _alpha(given: Any) -> float:
    """Returns an alpha. Raises ValueError for one that is not finite."""
    if not math.isfinite(alpha := float(given)):
        raise ValueError(f"lora_alpha is {alpha}, and not finite")
    return alpha


def _by_module(default: Any, patterns: Any, convert: Callable[[Any], _T]) -> Callable[[str], _T]:
    """Returns what gives the value of a module: of the first pattern that matches the end of its
    name, as in peft, or by default. Raises `re.error` for what is no pattern, and ValueError for
    one that might be searched for without end."""
    given, own = dict(patterns or {}), convert(default)
    for pattern in given:
        if _REPEATED_GROUP.search(pattern):
            raise ValueError(f"the pattern {pattern!r} repeats a group, which is not supported")
    found = [(re.compile(rf"(.*\.)?({each})"), convert(value)) for each, value in given.items()]
    return lambda module: next((value for p, value in found if p.fullmatch(module)), own)


def read_weights(folder: Path, *, on_meta: bool = False) -> dict[str, AdapterWeights]:
    """Returns an adapter's matrices by the module of the checkpoint, or its soft prompt (see
    `PROMPT`); `on_meta` their shapes alone.

    Raises:
        ConfigError: there are other tensors, matrices without their counterparts, or the files
            cannot be read.
    """
    config, path = AdapterConfig.read(folder), folder / WEIGHTS
    try:
        with safe_open(path, "pt") as file:
            names = [name for name in file.keys() if not _BASE.fullmatch(name)]  # noqa: SIM118
            if not config.prompt_tokens:
                places = _places(path, names, config)
            elif names == [PROMPT]:
                places = {(PROMPT, "up"): (PROMPT, False)}
            else:
                raise ConfigError(f"{path} is no soft prompt: it holds {', '.join(names)}")
            sides: dict[str, dict[str, torch.Tensor]] = {}
            for (module, side), (name, is_stack) in places.items():
                tensor = _read_tensor(file, name, on_meta=on_meta)
                if is_stack:
                    tensor = _unstacked(tensor, config.rank_of(module), side)
                sides.setdefault(module, {})[side] = tensor
    except (OSError, SafetensorError) as error:
        if not path.exists() and (other := path.with_name(_OTHER)).exists():
            raise ConfigError(f"{other} may run code: save the adapter as {WEIGHTS}") from error
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if config.prompt_tokens:
        vectors = sides[PROMPT]["up"]
        return {PROMPT: AdapterWeights(vectors.new_empty(0, vectors.shape[1]), vectors, 1.0)}
    found = {}
    for module, pair in sides.items():
        if len(pair) < len(_SIDES):
            raise ConfigError(f"{folder}: of {module} it has one matrix and not both")
        scale = config.scale_of(module, max(1, pair["down"].shape[-2]))
        merged = 2 if module.endswith(f".{_STACKS[0]}") else 1
        found[module] = AdapterWeights(**pair, scale=scale, merged=merged)
    return found


def _read_tensor(file: Any, name: str, *, on_meta: bool) -> torch.Tensor:
    """Returns a matrix of an open file of safetensors. Raises `ConfigError` for one that is not a
    matrix, or has other numbers."""
    part = file.get_slice(name)
    shape, dtype = part.get_shape(), part.get_dtype()
    if dtype not in _DTYPES:
        raise ConfigError(f"the adapter's {name} has {dtype}, and not {', '.join(_DTYPES)}")
    if len(shape) != 2:
        raise ConfigError(f"the adapter's {name} has the shape {tuple(shape)}, and is no matrix")
    return torch.empty(shape, device="meta") if on_meta else file.get_tensor(name)


def _unstacked(tensor: torch.Tensor, rank: int, side: str) -> torch.Tensor:
    """Returns [experts, rank, in] of [experts * rank, in], or [experts, out, rank] of [out, rank *
    experts]; the tensor itself if the rank does not divide it."""
    if tensor.shape[0 if side == "down" else 1] % rank:
        return tensor
    if side == "down":
        return tensor.unflatten(0, (-1, rank))
    return tensor.unflatten(1, (rank, -1)).permute(2, 0, 1)


def _places(
    path: Path, names: Sequence[str], config: AdapterConfig
) -> dict[tuple[str, str], tuple[str, bool]]:
    """Returns the names of a file's tensors, and whether each is of stacked experts, by (module,
    "down" or "up"). Raises `ConfigError` for tensors of something else."""
    matched = {name: match for name in names if (match := _TENSOR.fullmatch(name))}
    if len(matched) < len(names) or not names:
        unknown = next((name for name in names if name not in matched), "nothing")
        raise ConfigError(f"{path} is no LoRA: it holds {unknown}")
    depths: dict[str, int] = {}
    for match in matched.values():
        module, depth = match["module"], match["depth"].count(".")
        depths[module] = max(depth, depths.get(module, 0))
    found = {}
    for name, match in matched.items():
        module, side = match["module"], _SIDES[match["side"] or match["table"]]
        stacks = config.stacks_of(module)
        if stacks:
            number = depths[module] - match["depth"].count(".")
            module = f"{module}.{stacks[min(number, len(stacks) - 1)]}"
        found[own_name(module), side] = name, bool(stacks)
    return found
