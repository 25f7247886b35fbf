"""The text models of Gemma 3n (Gemma Team 2025): Gemma 4's small models (`gemma4`) with several
streams of a token (AltUp), a projection of low rank beside attention (LAuReL), and MLPs of which
few channels are active."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from aioinfer.errors import ConfigError
from aioinfer.layers.altup import (
    MergeStreams,
    SpreadStreams,
    StreamShape,
    make_laurel,
    make_stream_parts,
    make_stream_projections,
)
from aioinfer.layers.layer import Layer, Part
from aioinfer.layers.maker import LayerMaker
from aioinfer.models.config import DecoderConfig
from aioinfer.models.decoder import DecoderModel
from aioinfer.models.gemma4 import SharedKVConfig, make_shared_kv_attention


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3nConfig(SharedKVConfig):
    """Gemma 3n's configuration.

    Attributes:
        intermediate_sizes, sparsities: of each layer's MLP; the part of its channels that is not
            active, 0 for none.
        laurel_rank: of the projection beside attention.
        num_streams, active_stream: of a token.
        has_stream_scale: whether the active stream is scaled for the layer's own input.
    """

    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "hidden_activation": "gelu_pytorch_tanh", "head_dim": 256, "sliding_window": 512,
        "final_logit_softcapping": 30.0, "tie_word_embeddings": True, "num_kv_shared_layers": 15,
        "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262_144,
        "max_position_embeddings": 32_768, "vocab_size": 262_400, "num_key_value_heads": 2,
        "num_attention_heads": 8, "hidden_size": 2048, "num_hidden_layers": 35,
        "intermediate_size": 16_384, "laurel_rank": 64, "altup_num_inputs": 4,
        "altup_active_idx": 0, "altup_correct_scale": True,
    }  # fmt: skip
    EVERY: ClassVar[int] = 5

    intermediate_sizes: tuple[int, ...]
    sparsities: tuple[float, ...]
    laurel_rank: int
    num_streams: int
    active_stream: int
    has_stream_scale: bool

    @classmethod
    def standard_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Gives the size of the MLPs as one number, beside the list of the layers' sizes."""
        config = {**cls.DEFAULTS, **config}
        sizes = config["intermediate_size"]
        if isinstance(sizes, list):
            if not sizes or not all(type(size) is int and size > 0 for size in sizes):
                raise ConfigError("intermediate_size must be whole numbers of at least 1")
            config |= {"intermediate_size": max(sizes), "intermediate_sizes": sizes}
        return config

    @classmethod
    def own_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Reads the MLPs and the streams."""
        layers = config["num_hidden_layers"]
        sizes = config.get("intermediate_sizes") or [config["intermediate_size"]] * layers
        sparse = 10 if layers > 10 else 0
        pattern = config.get("activation_sparsity_pattern")
        if pattern is None:
            pattern = [0.95] * sparse + [0.0] * (layers - sparse)
        if not isinstance(pattern, list) or len(pattern) != layers or len(sizes) != layers:
            raise ConfigError(
                f"activation_sparsity_pattern and intermediate_size must have {layers} entries"
            )
        if not all(isinstance(part, int | float) and 0 <= part < 1 for part in pattern):
            raise ConfigError("activation_sparsity_pattern must be numbers from 0 to below 1")
        if config["altup_active_idx"] >= config["altup_num_inputs"]:
            raise ConfigError("altup_active_idx must be below altup_num_inputs")
        if not config["hidden_size_per_layer_input"]:
            raise ConfigError("hidden_size_per_layer_input must be at least 1")
        return {
            **SharedKVConfig.own_fields.__func__(cls, config),  # type: ignore[attr-defined]
            "intermediate_sizes": tuple(sizes),
            "sparsities": tuple(pattern),
            "laurel_rank": config["laurel_rank"],
            "num_streams": config["altup_num_inputs"],
            "active_stream": config["altup_active_idx"],
            "has_stream_scale": config["altup_correct_scale"],
        }

    def _divides(self, size: int, expert_parallel: bool) -> bool:
        is_divided = all(width % size == 0 for width in self.intermediate_sizes)
        return is_divided and DecoderConfig._divides(self, size, expert_parallel)


class Gemma3nModel(DecoderModel):
    """Predicted streams, attention and LAuReL, an MLP, and the correction of the streams."""

    def __init__(self, config: Gemma3nConfig, make: LayerMaker):
        last, size = config.num_layers - 1, config.per_layer_size
        shape = StreamShape(
            config.num_streams, config.active_stream, config.num_layers * size, config.hidden_size
        )

        def ends(number: int) -> tuple[list[Part], list[Part]]:
            """Returns the parts before the first layer and behind the last, if it is one."""
            before: list[Part] = []
            behind: list[Part] = []
            if number == 0:
                vocab = config.per_layer_vocab_size
                projections = make_stream_projections(make, "model.altup_projections", shape)
                inputs = make.per_layer_embedding("model", vocab, config.num_layers, size)
                before = [inputs, SpreadStreams(shape, projections)]
            if number == last:
                name = "model.altup_unembed_projections"
                behind = [MergeStreams(shape, make_stream_projections(make, name, shape))]
            return before, behind

        def layer(number: int) -> Layer:
            prefix, activation = f"model.layers.{number}", config.activation
            own = make.per_layer_input(prefix, number, size, activation=activation)
            predict, correct = make_stream_parts(
                make, f"{prefix}.altup", shape, own, scaled=config.has_stream_scale
            )
            input_norm = make.norm(f"{prefix}.input_layernorm")
            attention = make_shared_kv_attention(config, make, prefix, number, input_norm)
            laurel = make_laurel(make, f"{prefix}.laurel", shape, config.laurel_rank, input_norm)
            mlp = make.gated_mlp(
                f"{prefix}.mlp",
                config.intermediate_sizes[number],
                activation=activation,
                sparsity=config.sparsities[number],
                norm=make.norm(f"{prefix}.pre_feedforward_layernorm"),
                post_norm=make.norm(f"{prefix}.post_feedforward_layernorm"),
            )
            before, behind = ends(number)
            return Layer([*before, predict, attention, laurel, mlp, correct, *behind])

        scale = config.hidden_size**0.5
        embedding = make.embedding("model.embed_tokens", config.vocab_size, scale=scale)
        head = make.head(
            "lm_head", embedding, tied=config.tied_embeddings, soft_cap=config.logit_soft_cap
        )
        side_size = shape.first + shape.count * shape.size
        super().__init__(config, make, layer, embedding=embedding, head=head, side_size=side_size)


FAMILIES = {"Gemma3nForCausalLM": (Gemma3nConfig, Gemma3nModel)}
