"""The fields of `config.json` that all decoder models have, and how they are read.

A family's file has a subclass of `DecoderConfig` with the fields that it alone has. The parent
process reads the configuration to check sizes before it spawns anything; the worker builds the
model from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self, cast

import torch

from aioinfer.errors import ConfigError
from aioinfer.layers.mixture import MixtureShape
from aioinfer.layers.mlp import ACTIVATIONS
from aioinfer.layers.rotary import RopeConfig, Sections
from aioinfer.models.fields import check_fields, check_shape
from aioinfer.models.json_file import read_json
from aioinfer.models.text_model import read_text_config

#: What each variant of RoPE needs in the configuration.
_ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "dynamic": ("factor",),
    "longrope": ("factor", "short_factor", "long_factor"),
    "proportional": (),
}
#: Other names of these variants.
_ROPE_ALIASES = {"su": "longrope", "mrope": "default"}


#: The cosines and sines of all positions are computed at the start.
_MAX_POSITIONS = 2**27


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """A model's shape.

    Attributes:
        DEFAULTS: the values of fields of a family's `config.json` that are left out.
        generates: whether the family has a head that scores tokens.
        windows: of each layer, the sliding window in tokens, or None.
        max_len: the longest sequence that the model was made for.
        dtype: of the checkpoint.
        mixture: the experts of layers that have them.
        unused_layers: how many layers behind the last one checkpoints have.
        has_mtp: whether checkpoints may have a head that predicts further tokens.
        state_heads: how many heads of layers with a state the ranks divide; 0 for no such layers.
        has_other_parts: whether checkpoints have parts beside the text model, which are not loaded.
        kv_sources: of each layer, the layer whose KV cache it reads, or None if it has one; empty
            where all have one.
    """

    DEFAULTS: ClassVar[Mapping[str, Any]] = {}
    generates: ClassVar[bool] = True

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    norm_eps: float
    max_len: int
    tied_embeddings: bool
    activation: str
    rope: RopeConfig
    windows: tuple[int | None, ...]
    dtype: torch.dtype
    mixture: MixtureShape | None = None
    unused_layers: int = 0
    has_mtp: bool = False
    state_heads: int = 0
    has_other_parts: bool = False
    kv_sources: tuple[int | None, ...] = ()

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Self:
        """Returns the configuration of a decoded `config.json`. A family reads its own fields in
        `own_fields`.

        Raises:
            KeyError: a field is missing. ConfigError: a value is wrong or not supported.
        """
        config = cls.standard_fields(config)
        check_fields(config)
        heads = config["num_attention_heads"]
        rope = read_rope(config)
        activation = config.get("hidden_activation") or config.get("hidden_act") or "silu"
        if activation not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise ConfigError(f"the activation {activation!r} is not supported; these are: {known}")
        fields: dict[str, Any] = {
            "vocab_size": config["vocab_size"],
            "hidden_size": config["hidden_size"],
            "intermediate_size": config["intermediate_size"],
            "num_layers": config["num_hidden_layers"],
            "num_heads": heads,
            "num_kv_heads": config.get("num_key_value_heads") or heads,
            "head_size": _head_size(config),
            "norm_eps": config.get("rms_norm_eps", config.get("layer_norm_eps", 1e-6)),
            "max_len": _stretched_len(config["max_position_embeddings"], rope),
            "tied_embeddings": bool(config.get("tie_word_embeddings", False)),
            "activation": activation,
            "rope": rope,
            "windows": (None,) * config["num_hidden_layers"],
            "dtype": read_dtype(config),
            "has_other_parts": bool(config.get("vision_config") or config.get("audio_config")),
        }
        read = cls(**{**fields, **cls.own_fields(config)})
        read._check()
        return read

    def _check(self) -> None:
        """Raises `ConfigError` unless the fields go together."""
        head_size = self.head_size
        for rope in (self.rope, getattr(self, "local_rope", self.rope)):
            rotary_size = rope.rotary_size if rope.rotary_size is not None else head_size
            check_shape(self.num_heads, self.num_kv_heads, head_size, rotary_size)
            rope.check(rotary_size)
        if self.max_len > _MAX_POSITIONS:
            raise ConfigError(
                f"max_position_embeddings, stretched by rope_parameters, gives {self.max_len} "
                f"positions; at most {_MAX_POSITIONS} are supported"
            )
        if len(self.windows) != self.num_layers:
            raise ConfigError(
                f"layer_types has {len(self.windows)} entries for num_hidden_layers = "
                f"{self.num_layers}"
            )

    @classmethod
    def standard_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a decoded `config.json` with the family's defaults, and with the names that most
        families have for their fields."""
        return {**cls.DEFAULTS, **config}

    @classmethod
    def own_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the fields that a family reads itself, with the fields above that differ."""
        return {}

    def attention_shape(self, number: int) -> dict[str, Any]:
        """Returns the arguments of `LayerMaker.attention` that nearly all families set alike, for
        layer `number`."""
        return {
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_size": self.head_size,
            "rope": self.rope,
            "window": self.windows[number],
        }

    def check_tensor_parallel(self, size: int, *, expert_parallel: bool = False) -> None:
        """Raises `ConfigError`, naming the sizes that would work, unless heads and MLP divide among
        `size` ranks, each expert, too, or with `expert_parallel` the experts."""
        mixture = self.mixture
        if expert_parallel and mixture is None:
            raise ConfigError("parallel.expert_parallel = true, but this model has no experts")
        if not self._divides(size, expert_parallel):
            sizes = range(1, self.num_heads + 1)
            fitting = ", ".join(str(n) for n in sizes if self._divides(n, expert_parallel))
            states = f"{self.state_heads} heads of states, " if self.state_heads else ""
            experts = "" if mixture is None else f", experts of {mixture.expert_size} channels"
            if mixture is not None and expert_parallel:
                experts = f", {mixture.routing.num_experts} experts"
            raise ConfigError(
                f"parallel.tensor_parallel_size = {size} does not divide this model "
                f"({self.num_heads} heads, {self.num_kv_heads} KV heads, {states}intermediate "
                f"size {self.intermediate_size}{experts}); these do: {fitting}"
            )

    def check_pipeline_parallel(self, size: int) -> None:
        """Raises `ConfigError` unless each of `size` stages gets a layer."""
        most = len(self.stage_starts) + 1
        if size > most:
            layers = f"{self.num_layers} layer{'s' if self.num_layers > 1 else ''}"
            if most < self.num_layers:
                layers += ", of which some read the KV cache of others and stay in their stage"
            raise ConfigError(
                f"parallel.pipeline_parallel_size = {size}, but this model has {layers}: set it to "
                f"{most} or less"
            )

    @property
    def stage_starts(self) -> tuple[int, ...]:
        """The layers with which a pipeline stage but the first may begin: no layer reads the KV
        cache of a layer of another stage."""
        inside = {
            number
            for reader, source in enumerate(self.kv_sources)
            if source is not None
            for number in range(source + 1, reader + 1)
        }
        return tuple(n for n in range(1, self.num_layers) if n not in inside)

    def _divides(self, size: int, expert_parallel: bool) -> bool:
        mixture = self.mixture
        if mixture is not None and not mixture.divides(size, expert_parallel=expert_parallel):
            return False
        kv_fit = self.num_kv_heads % size == 0 or size % self.num_kv_heads == 0
        is_divided = all(
            count % size == 0
            for count in (self.num_heads, self.intermediate_size, self.state_heads)
        )
        return is_divided and kv_fit


def read_config(folder: Path, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the configuration of a folder's text model (see `read_text_config`).

    Args:
        folder: of the model.
        overrides: `model.hf_overrides`, laid over `config.json`.

    Raises:
        ConfigError: `config.json` cannot be read.
    """
    return read_text_config(read_json(folder / "config.json"), overrides)


def read_rope(config: Mapping[str, Any], parameters: Mapping[str, Any] | None = None) -> RopeConfig:
    """Reads `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before).

    Args:
        config: the decoded `config.json`.
        parameters: instead of its `rope_parameters`, where layers of several kinds have their own.
    """
    given = parameters or config.get("rope_parameters") or config.get("rope_scaling") or {}
    scaling = dict(given)
    theta = scaling.pop("rope_theta", None) or config.get("rope_theta") or 10_000.0
    kinds = [scaling.pop(name, None) for name in ("rope_type", "type")]
    kind = kinds[0] or kinds[1] or "default"
    kind = _ROPE_ALIASES.get(kind, kind)
    if kind not in _ROPE_KEYS:
        known = ", ".join(_ROPE_KEYS)
        raise ConfigError(f"the RoPE variant {kind!r} is not supported; these are: {known}")
    rotated = config.get("partial_rotary_factor")
    if kind != "proportional":  # which has angles for all channels
        rotated = scaling.pop("partial_rotary_factor", None) or rotated
    max_len = config["max_position_embeddings"]
    original = (
        config.get("original_max_position_embeddings")
        or scaling.get("original_max_position_embeddings")
        or max_len
    )
    scaling["original_max_position_embeddings"] = original
    if kind in ("yarn", "longrope") and scaling.get("factor") is None:
        scaling["factor"] = max_len / original
    for key in _ROPE_KEYS[kind]:
        if scaling.get(key) is None:
            raise ConfigError(
                f"the RoPE variant {kind!r} lacks {key!r} in rope_parameters (or rope_scaling)"
            )
    rotary_size = int(_head_size(config) * rotated) if rotated and rotated != 1 else None
    return RopeConfig(float(theta), kind, scaling, rotary_size, sections=_pop_sections(scaling))


def _pop_sections(scaling: dict[str, Any]) -> Sections | None:
    """Takes the sections of pairs of channels out of the numbers of `rope_parameters`."""
    counts = scaling.pop("mrope_section", None)
    is_interleaved = bool(scaling.pop("mrope_interleaved", False))
    if counts is None:
        return None
    if not isinstance(counts, list) or [type(count) for count in counts] != [int] * 3:
        raise ConfigError(f"mrope_section must be three integers, not {counts!r}")
    time, height, width = counts
    return Sections(time, height, width, is_interleaved)


def read_ropes(
    config: Mapping[str, Any], theta: float, local_theta: float
) -> tuple[RopeConfig, RopeConfig]:
    """Returns the ropes of layers without a window and of layers with one. `rope_parameters` has
    them by kind of layer (transformers 5), or `rope_scaling` is of layers without a window alone.

    Args:
        config: the decoded `config.json`.
        theta, local_theta: the bases where it gives none.
    """
    by_kind = config.get("rope_parameters") or {}
    parameters = by_kind.get("full_attention") or config.get("rope_scaling") or {}
    local = by_kind.get("sliding_attention") or {}
    return (
        read_rope(config, {"rope_theta": theta, **parameters}),
        read_rope(config, {"rope_theta": local_theta, **local}),
    )


def read_num_experts(config: Mapping[str, Any]) -> int:
    """Returns how many experts a layer has, of which transformers 5 writes the number under another
    name than families' own. Raises KeyError if it is missing, `ConfigError` if a token would take
    more."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    count = next((config[name] for name in names if config.get(name) is not None), None)
    if count is None:
        raise KeyError(names[0])
    for name in ("num_experts_per_tok", "n_group"):
        if (config.get(name) or 1) > count:
            raise ConfigError(f"{name} = {config[name]} exceeds the {count} experts")
    return cast(int, count)


def renamed(config: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Returns a decoded `config.json` in which fields that are not null have new names, given by
    their old ones."""
    found = {new: config[old] for old, new in names.items() if config.get(old) is not None}
    return {**{name: config[name] for name in config if name not in names}, **found}


def read_attention_layers(
    config: Mapping[str, Any], default: Callable[[int], bool]
) -> tuple[bool, ...]:
    """Returns of each layer whether it has attention, and not a state: by `layer_types` where there
    are such, else as `default` says for its number. Raises `ConfigError` if there are more or fewer
    types than layers."""
    layers, kinds = config["num_hidden_layers"], config.get("layer_types")
    if not kinds:
        return tuple(map(default, range(layers)))
    if len(kinds) != layers:
        raise ConfigError(f"layer_types has {len(kinds)} entries for num_hidden_layers = {layers}")
    return tuple(kind in ("full_attention", "attention") for kind in kinds)


def read_windows(
    config: Mapping[str, Any], full_every: int | None = None
) -> tuple[int | None, ...]:
    """Returns the sliding window of each layer, by `layer_types` where there are such. Without
    them every `full_every`-th layer has none, and all others the same."""
    window, layers = config.get("sliding_window"), config["num_hidden_layers"]
    kinds = config.get("layer_types") or [
        "full_attention" if full_every and (number + 1) % full_every == 0 else "sliding_attention"
        for number in range(layers)
    ]
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown:
        raise ConfigError(f"layer_types holds {unknown.pop()!r}, which this family has not")
    return tuple(window or None if kind == "sliding_attention" else None for kind in kinds)


def _head_size(config: Mapping[str, Any]) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _stretched_len(max_position_embeddings: int, rope: RopeConfig) -> int:
    """Returns the longest text for which a model's RoPE was stretched; configurations with Llama
    3's variant or longrope give it as it is."""
    scaling = rope.scaling or {}
    if rope.kind in ("default", "llama3", "longrope", "proportional"):
        return max_position_embeddings
    stretched = int(scaling["original_max_position_embeddings"] * scaling["factor"])
    return max(max_position_embeddings, stretched)


def read_dtype(config: Mapping[str, Any]) -> torch.dtype:
    """Reads `dtype` (transformers 5) or `torch_dtype` (before)."""
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    name = name.removeprefix("torch.")
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigError(f"the dtype {name!r} is not supported")
    return dtype
