"""DeepSeek-V2 and V3 (DeepSeek-AI 2024): multi-head latent attention, and in all but the first
layers experts, some of which every token takes.

The two differ in how the others are selected. What a token costs in the KV cache is in
`layers/latent_attention.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from aioinfer.errors import ConfigError
from aioinfer.layers.kv_cache import LatentShape
from aioinfer.layers.layer import Layer
from aioinfer.layers.maker import LayerMaker
from aioinfer.layers.mixture import ExpertNames, MixtureShape, Routing
from aioinfer.layers.rotary import RopeConfig
from aioinfer.models.config import DecoderConfig, read_num_experts, read_rope
from aioinfer.models.decoder import DecoderModel
from aioinfer.models.mtp import MtpHead, MtpNames

#: Of the norms within attention, whatever `rms_norm_eps` is, as in DeepSeek's published code.
LATENT_NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekConfig(DecoderConfig):
    """The configuration that V2 and V3 share.

    Attributes:
        latent: the shape of attention.
        query_rank: channels between the two projections of the queries, or None for one (V2-Lite).
        attention_bias: of the first projections and the output's.
    """

    latent: LatentShape
    query_rank: int | None
    attention_bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekV2Config(DeepseekConfig):
    """DeepSeek-V2's configuration: experts by their softmax scores, among all or among the best
    groups."""

    DEFAULTS: ClassVar[Mapping[str, Any]] = {"scoring_func": "softmax"}

    @classmethod
    def own_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Reads attention and experts."""
        return {**_read_attention(config), "mixture": _read_v2_mixture(config)}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekV3Config(DeepseekConfig):
    """DeepSeek-V3's configuration: experts by their sigmoid scores and a bias, among the best
    groups. Checkpoints have a layer more than the model, which predicts further tokens (`mtp`)."""

    DEFAULTS: ClassVar[Mapping[str, Any]] = {"scoring_func": "sigmoid"}

    @classmethod
    def own_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Reads attention and experts."""
        return {
            **_read_attention(config),
            "mixture": read_v3_mixture(config),
            "unused_layers": config.get("num_nextn_predict_layers") or 0,
            "has_mtp": bool(config.get("num_nextn_predict_layers")),
        }


def _read_attention(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of attention. `head_size`: the rotated channels."""
    config = _without_nulls(config)
    rotary_size, plain_size = config["qk_rope_head_dim"], config["qk_nope_head_dim"]
    rope = read_rope({**config, "head_dim": rotary_size})
    bias, query_rank = bool(config.get("attention_bias", False)), config.get("q_lora_rank")
    if bias and query_rank is None:
        raise ConfigError("attention_bias without q_lora_rank is not supported")
    heads = config["num_attention_heads"]
    return {
        "num_kv_heads": heads,
        "head_size": rotary_size,
        "rope": replace(rope, interleaved=config.get("rope_interleave", True)),
        "query_rank": query_rank,
        "attention_bias": bias,
        "latent": LatentShape(
            num_heads=heads,
            latent_size=config["kv_lora_rank"],
            rotary_size=rotary_size,
            plain_size=plain_size,
            value_size=config["v_head_dim"],
            scale=(plain_size + rotary_size) ** -0.5 * _score_factor(rope),
        ),
    }


def _score_factor(rope: RopeConfig) -> float:
    """Returns by how much scores are multiplied where RoPE is stretched (YaRN's temperature, Peng
    et al. 2023), beside the factor in the table of angles."""
    scaling = rope.scaling or {}
    weight, factor = scaling.get("mscale_all_dim"), scaling.get("factor") or 1.0
    if rope.kind == "default" or not weight or factor <= 1:
        return 1.0
    return float((0.1 * weight * math.log(factor) + 1.0) ** 2)


def _read_v2_mixture(config: Mapping[str, Any]) -> MixtureShape:
    """Returns experts that are routed as in DeepSeek-V2: a group's score is the score of its best
    expert."""
    config = _without_nulls(config)
    method = config.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise ConfigError(
            f"topk_method = {method!r} is not supported; these are: greedy, group_limited_greedy"
        )
    has_groups = method == "group_limited_greedy"
    # published code scales those scores alone that are not normalised
    is_normalized = bool(config.get("norm_topk_prob")) and config["num_experts_per_tok"] > 1
    routing = Routing(
        read_num_experts(config),
        config["num_experts_per_tok"],
        is_normalized=is_normalized,
        scale=1.0 if is_normalized else config.get("routed_scaling_factor", 1.0),
        num_groups=config.get("n_group", 1) if has_groups else 1,
        top_groups=config.get("topk_group", 1) if has_groups else 1,
        group_best=1,
    )
    _check_scores(config, "softmax")
    return _with_shared(config, routing)


def read_v3_mixture(config: Mapping[str, Any]) -> MixtureShape:
    """Returns experts that are routed as in DeepSeek-V3: sigmoid scores with a bias for the
    selection; a group's score is the sum of its two best."""
    config = _without_nulls(config)
    routing = Routing(
        read_num_experts(config),
        config["num_experts_per_tok"],
        scores="sigmoid",
        is_normalized=bool(config.get("norm_topk_prob", True)),
        scale=config.get("routed_scaling_factor", 1.0),
        has_bias=True,
        num_groups=config.get("n_group", 1),
        top_groups=config.get("topk_group", 1),
    )
    _check_scores(config, "sigmoid")
    return _with_shared(config, routing)


def _without_nulls(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields that are not null, which means the same as left out."""
    return {name: value for name, value in config.items() if value is not None}


def _with_shared(config: Mapping[str, Any], routing: Routing) -> MixtureShape:
    """Returns the mixture with its shared experts, which are computed as one, and the layers that
    have no experts: the first ones, and where `moe_layer_freq` leaves layers out."""
    _check_groups(routing)
    size, shared = config["moe_intermediate_size"], config.get("n_shared_experts", 0)
    first, every = config.get("first_k_dense_replace", 0), config.get("moe_layer_freq", 1)
    layers = range(config["num_hidden_layers"])
    dense = frozenset(number for number in layers if number < first or number % every)
    return MixtureShape(routing, size, size * shared, dense_layers=dense)


def _check_scores(config: Mapping[str, Any], expected: str) -> None:
    scores = config.get("scoring_func", expected)
    if scores != expected:
        raise ConfigError(f"scoring_func must be {expected!r}, not {scores!r}")


def _check_groups(routing: Routing) -> None:
    """Raises `ConfigError` unless groups have enough experts for their scores, and the best groups
    enough for a token."""
    experts, groups = routing.num_experts, routing.num_groups
    if routing.top_groups >= groups:
        return
    size = experts // groups
    if experts % groups or size < routing.group_best or routing.top_groups * size < routing.top_k:
        raise ConfigError(
            f"{experts} experts in n_group = {groups} groups, of which topk_group = "
            f"{routing.top_groups} are taken: the groups must be equal, with at least "
            f"{routing.group_best} experts each and {routing.top_k} in those that are taken"
        )


class DeepseekModel(DecoderModel):
    """Pre-normed latent attention, and experts in the place of the MLP in all but the first
    layers."""

    def __init__(self, config: DeepseekConfig, make: LayerMaker):
        def layer(number: int) -> Layer:
            prefix = f"model.layers.{number}"
            attention = make.latent_attention(
                f"{prefix}.self_attn",
                shape=config.latent,
                query_rank=config.query_rank,
                rope=config.rope,
                norm=make.norm(f"{prefix}.input_layernorm"),
                norm_eps=LATENT_NORM_EPS,
                bias=config.attention_bias,
            )
            norm = make.norm(f"{prefix}.post_attention_layernorm")
            name = f"{prefix}.mlp"
            mlp = make.mixture_or_mlp(
                name, number, config, norm, ExpertNames(shared="shared_experts")
            )
            return Layer([attention, mlp])

        def mtp() -> MtpHead:
            number = config.num_layers
            return MtpHead(MtpNames.of_layer(number), partial(layer, number), make)

        super().__init__(config, make, layer, mtp=mtp if config.has_mtp else None)


FAMILIES = {
    "DeepseekV2ForCausalLM": (DeepseekV2Config, DeepseekModel),
    "DeepseekV3ForCausalLM": (DeepseekV3Config, DeepseekModel),
}
