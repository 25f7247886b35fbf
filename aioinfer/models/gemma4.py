"""The text models of Gemma 4 (Google 2026): norms before and after attention and MLP, windows in
most layers; in the others wider heads, RoPE on a part of the channels, and keys as values. The last
layers may read the keys and values of earlier ones; layers may have inputs of their own for each
token (`layers.per_layer`), and experts beside the dense MLP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from aioinfer.errors import ConfigError
from aioinfer.layers.attention import Attention, QKNorms
from aioinfer.layers.layer import Layer, Part
from aioinfer.layers.maker import LayerMaker
from aioinfer.layers.mixture import ExpertNames, MixtureShape, Routing
from aioinfer.layers.norm import Norm
from aioinfer.layers.norm_parts import NormedSum
from aioinfer.layers.rotary import RopeConfig
from aioinfer.models.config import DecoderConfig, read_ropes, read_windows
from aioinfer.models.decoder import DecoderModel
from aioinfer.models.fields import check_shape


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedKVConfig(DecoderConfig):
    """The fields that Gemma 3n and Gemma 4 have in common.

    Attributes:
        local_rope: of layers with a window.
        logit_soft_cap: of the logits; 0 for none.
        bias: whether the projections of attention have one.
        per_layer_size, per_layer_vocab_size: channels of the input that a token has for each layer,
            0 for none, and how many tokens have one.
    """

    EVERY: ClassVar[int] = 6  # layers, of which the last has no window

    local_rope: RopeConfig
    logit_soft_cap: float
    bias: bool
    per_layer_size: int
    per_layer_vocab_size: int

    @classmethod
    def own_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Reads the windows, the ropes, and which layers read the keys and values of others."""
        windows = read_windows(config, cls.EVERY)
        theta = config.get("rope_theta") or 1_000_000.0
        rope, local_rope = read_ropes(config, theta, config.get("rope_local_base_freq") or 10_000.0)
        return {
            "windows": windows,
            "kv_sources": read_kv_sources(windows, config["num_kv_shared_layers"] or 0),
            "rope": rope,
            "local_rope": local_rope,
            "max_len": config["max_position_embeddings"],
            "logit_soft_cap": config["final_logit_softcapping"] or 0.0,
            "bias": bool(config.get("attention_bias", False)),
            "per_layer_size": config["hidden_size_per_layer_input"] or 0,
            "per_layer_vocab_size": config["vocab_size_per_layer_input"],
        }

    def attention_shape(self, number: int) -> dict[str, Any]:
        """Layers with a window have a RoPE of their own."""
        shape = DecoderConfig.attention_shape(self, number)
        return shape if self.windows[number] is None else {**shape, "rope": self.local_rope}


def read_kv_sources(windows: Sequence[int | None], num_readers: int) -> tuple[int | None, ...]:
    """Returns of each layer the layer whose keys and values it reads: of the last `num_readers`
    layers the last one before these of the same kind. Raises `ConfigError` if there is none."""
    first = len(windows) - num_readers
    sources: list[int | None] = [None] * len(windows)
    for number in range(max(first, 0), len(windows)):
        same = [layer for layer in range(first) if windows[layer] == windows[number]]
        if not same:
            raise ConfigError(
                f"num_kv_shared_layers = {num_readers} leaves layer {number} no earlier layer of "
                "its kind to read from"
            )
        sources[number] = same[-1]
    return tuple(sources)


def make_shared_kv_attention(
    config: SharedKVConfig, make: LayerMaker, prefix: str, number: int, norm: Norm, **options: Any
) -> Attention:
    """Returns the attention of layer `number`: over its own keys and values, or those of another
    layer; `norm` and `options` as in `LayerMaker.attention`."""
    name, source = f"{prefix}.self_attn", config.kv_sources[number]
    given = {
        **config.attention_shape(number),
        "norm": norm,
        "post_norm": make.norm(f"{prefix}.post_attention_layernorm"),
        "bias": config.bias,
        "output_bias": config.bias,
        "scale": 1.0,
    }
    if source is not None:
        return make.shared_attention(name, source, **given)
    return make.attention(name, **given, qk_norms=QKNorms(), value_norm=True, **options)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4Config(SharedKVConfig):
    """Gemma 4's configuration.

    Attributes:
        global_head_size, global_kv_heads: of layers without a window.
        keys_as_values: whether these have no projection of values.
        has_wide_readers: whether the MLP of layers that read others' keys and values is twice as
            wide.
    """

    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "hidden_activation": "gelu_pytorch_tanh", "head_dim": 256, "global_head_dim": 512,
        "sliding_window": 512, "final_logit_softcapping": None, "tie_word_embeddings": True,
        "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262_144, "max_position_embeddings": 131_072,
        "vocab_size": 262_144, "num_key_value_heads": 4,
    }  # fmt: skip

    global_head_size: int
    global_kv_heads: int
    keys_as_values: bool
    has_wide_readers: bool

    @classmethod
    def standard_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Reads the shape of layers without a window where transformers has written it by layer.
        With "vision" tokens of pictures alone attend in both directions, which is up to the format
        of pictures."""
        if config.get("use_bidirectional_attention") == "all":
            raise ConfigError("use_bidirectional_attention: only causal models are supported")
        given = {name: value for name, value in config.items() if value is not None}
        config = {**cls.DEFAULTS, **given, "use_bidirectional_attention": None}
        by_layer = config.pop("per_layer_config", None)
        if isinstance(by_layer, Mapping) and by_layer:
            shape, *others = by_layer.values()
            if not isinstance(shape, Mapping) or any(other != shape for other in others):
                raise ConfigError("per_layer_config must give all of its layers the same shape")
            names = ("global_head_dim", "head_dim"), (
                "num_global_key_value_heads", "num_key_value_heads",
            )  # fmt: skip
            config |= {name: shape.get(key, config[key]) for name, key in names}
        if isinstance(kinds := config.get("layer_types"), list):
            config["layer_types"] = [*kinds[:-1], "full_attention"]
        return config

    @classmethod
    def own_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Reads the shape of layers without a window, and the experts."""
        keys_as_values = bool(config.get("attention_k_eq_v", False))
        kv_heads = config.get("num_global_key_value_heads") if keys_as_values else None
        fields = SharedKVConfig.own_fields.__func__(cls, config)  # type: ignore[attr-defined]
        windows = (*fields["windows"][:-1], None)
        return {
            **fields,
            "windows": windows,
            "kv_sources": read_kv_sources(windows, config["num_kv_shared_layers"] or 0),
            "global_head_size": config["global_head_dim"],
            "global_kv_heads": kv_heads or config["num_key_value_heads"],
            "keys_as_values": keys_as_values,
            "has_wide_readers": bool(config.get("use_double_wide_mlp", False)),
            "mixture": _read_mixture(config) if config.get("enable_moe_block") else None,
        }

    def _check(self) -> None:
        """Checks the shape of layers without a window, too."""
        size = self.global_head_size
        check_shape(self.num_heads, self.global_kv_heads, size, size)
        self.rope.check(size)
        DecoderConfig._check(self)

    def _divides(self, size: int, expert_parallel: bool) -> bool:
        shared = self.global_kv_heads % size == 0 or size % self.global_kv_heads == 0
        return shared and DecoderConfig._divides(self, size, expert_parallel)

    def attention_shape(self, number: int) -> dict[str, Any]:
        """Layers without a window have heads of their own."""
        shape = SharedKVConfig.attention_shape(self, number)
        if self.windows[number] is not None:
            return shape
        return {**shape, "num_kv_heads": self.global_kv_heads, "head_size": self.global_head_size}


def _read_mixture(config: Mapping[str, Any]) -> MixtureShape:
    """Reads the experts."""
    names = "num_experts", "top_k_experts", "moe_intermediate_size"
    experts, top_k, size = map(config.get, names)
    if experts is None or top_k is None or size is None:
        raise ConfigError(f"enable_moe_block needs {', '.join(names)}")
    if top_k > experts:
        raise ConfigError(f"top_k_experts = {top_k} exceeds the {experts} experts")
    routing = Routing(experts, top_k, has_own_norm=True)
    return MixtureShape(routing, size, is_stacked=True, is_out_first=True)


class Gemma4Model(DecoderModel):
    """Attention, an MLP or MLP and experts, and the layer's own input."""

    def __init__(self, config: Gemma4Config, make: LayerMaker):
        def mlp(prefix: str, number: int) -> Part:
            is_wide = config.has_wide_readers and config.kv_sources[number] is not None
            name, shape = f"{prefix}.post_feedforward_layernorm", config.mixture
            dense = make.gated_mlp(
                f"{prefix}.mlp",
                config.intermediate_size * (2 if is_wide else 1),
                activation=config.activation,
                norm=make.norm(f"{prefix}.pre_feedforward_layernorm"),
                post_norm=make.norm(name if shape is None else f"{name}_1"),
            )
            if shape is None:
                return dense
            experts = make.mixture(
                prefix,
                shape,
                norm=make.norm(f"{prefix}.pre_feedforward_layernorm_2"),
                activation=config.activation,
                names=ExpertNames(router="router.proj"),
            )
            normed = NormedSum([experts], make.norm(f"{name}_2"))
            return NormedSum([dense, normed], make.norm(name))

        def layer(number: int) -> Layer:
            prefix, size = f"model.layers.{number}", config.per_layer_size
            projections = ("q_proj", "k_proj", "v_proj", "o_proj")
            if config.keys_as_values and config.windows[number] is None:
                projections = ("q_proj", "k_proj", "k_proj", "o_proj")
            norm = make.norm(f"{prefix}.input_layernorm")
            attention = make_shared_kv_attention(
                config, make, prefix, number, norm, projections=projections
            )
            parts: list[Part] = [attention, mlp(prefix, number)]
            if size and number == 0:
                count = config.num_layers
                first = make.per_layer_embedding("model", config.per_layer_vocab_size, count, size)
                parts.insert(0, first)
            if size:
                activation = config.activation
                parts.append(make.per_layer_input(prefix, number, size, activation=activation))
            return Layer([*parts, make.stream_scale(f"{prefix}.layer_scalar")])

        scale = config.hidden_size**0.5
        embedding = make.embedding("model.embed_tokens", config.vocab_size, scale=scale)
        head = make.head(
            "lm_head", embedding, tied=config.tied_embeddings, soft_cap=config.logit_soft_cap
        )
        side_size = config.num_layers * config.per_layer_size
        super().__init__(config, make, layer, embedding=embedding, head=head, side_size=side_size)


FAMILIES = {"Gemma4ForCausalLM": (Gemma4Config, Gemma4Model)}
