"""BERT (Devlin et al. 2018) and the encoders that differ from it in names and positions: RoBERTa
(Liu et al. 2019), XLM-RoBERTa (Conneau et al. 2019), DistilBERT (Sanh et al. 2019) and MPNet (Song
et al. 2020), whose attention also has a bias by distance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from aioinfer.errors import ConfigError
from aioinfer.layers.distance_bias import DistanceBias
from aioinfer.layers.layer import Layer
from aioinfer.layers.maker import LayerMaker
from aioinfer.layers.norm_parts import StreamNorm
from aioinfer.models.config import renamed
from aioinfer.models.encoder import EncoderConfig, EncoderEmbedding, EncoderModel


class _Names(NamedTuple):
    """The checkpoint modules of a layer, below the layer's own."""

    layers: str
    attention: str
    projections: tuple[str, str, str, str]
    attention_norm: str
    up: str
    down: str
    norm: str


_BERT = _Names(
    "encoder.layer", "attention", ("self.query", "self.key", "self.value", "output.dense"),
    "attention.output.LayerNorm", "intermediate.dense", "output.dense", "output.LayerNorm",
)  # fmt: skip
_MPNET = _BERT._replace(
    projections=("attn.q", "attn.k", "attn.v", "attn.o"), attention_norm="attention.LayerNorm"
)
_DISTILBERT = _Names(
    "transformer.layer", "attention", ("q_lin", "k_lin", "v_lin", "out_lin"), "sa_layer_norm",
    "ffn.lin1", "ffn.lin2", "output_layer_norm",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class BertConfig(EncoderConfig):
    """BERT's configuration."""

    DEFAULTS: ClassVar[Mapping[str, Any]] = {"hidden_act": "gelu", "layer_norm_eps": 1e-12}

    @classmethod
    def own_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Reads the token types. Raises `ConfigError` for positions that are not a table."""
        kind = config.get("position_embedding_type") or "absolute"
        if kind != "absolute":
            raise ConfigError(f"position_embedding_type {kind!r} is not supported")
        if config.get("is_decoder"):
            raise ConfigError("is_decoder: a BERT that generates is not supported")
        return {"num_token_types": int(config.get("type_vocab_size", 2))}


@dataclass(frozen=True, slots=True, kw_only=True)
class RobertaConfig(BertConfig):
    """RoBERTa's configuration: the table of positions begins behind the padding token's id."""

    @classmethod
    def own_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Reads where positions begin."""
        padding = config.get("pad_token_id")
        first = 1 + (1 if padding is None else int(padding))
        fields = super(RobertaConfig, cls).own_fields(config)
        longest = config["max_position_embeddings"] - first
        if longest < 1:
            raise ConfigError("max_position_embeddings leaves no position behind pad_token_id")
        return {**fields, "first_position": first, "max_len": longest}


@dataclass(frozen=True, slots=True, kw_only=True)
class DistilBertConfig(BertConfig):
    """DistilBERT's configuration: there are no token types."""

    DEFAULTS: ClassVar[Mapping[str, Any]] = {"activation": "gelu", "layer_norm_eps": 1e-12}
    _NAMES: ClassVar[Mapping[str, str]] = {
        "dim": "hidden_size",
        "hidden_dim": "intermediate_size",
        "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads",
        "activation": "hidden_act",
    }

    @classmethod
    def standard_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Renames fields."""
        return renamed({**cls.DEFAULTS, **config}, cls._NAMES)

    @classmethod
    def own_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """There are none."""
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class MPNetConfig(RobertaConfig):
    """MPNet's configuration. `num_buckets`: of distances."""

    num_buckets: int

    @classmethod
    def own_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Reads the number of buckets; there are no token types."""
        fields = super(MPNetConfig, cls).own_fields(config)
        buckets = config.get("relative_attention_num_buckets", 32)
        if not isinstance(buckets, int) or buckets < 4:
            raise ConfigError(f"relative_attention_num_buckets {buckets!r} is not supported")
        return {**fields, "num_token_types": 0, "num_buckets": buckets}


class BertModel(EncoderModel):
    """Attention and an MLP, each with the norm of the stream behind it."""

    names = _BERT

    def __init__(self, config: BertConfig, make: LayerMaker):
        names, bias = self.names, self.make_bias(config, make)

        def layer(number: int) -> Layer:
            name = f"{names.layers}.{number}"
            attention = make.bidirectional_attention(
                f"{name}.{names.attention}", num_heads=config.num_heads,
                head_size=config.head_size, projections=names.projections, distance_bias=bias,
            )  # fmt: skip
            behind = StreamNorm(make.layer_norm(f"{name}.{names.attention_norm}"))
            up, down = f"{name}.{names.up}", f"{name}.{names.down}"
            size, activation = config.intermediate_size, config.activation
            mlp = make.mlp(up, down, size, norm=None, activation=activation, bias=True)
            norm = StreamNorm(make.layer_norm(f"{name}.{names.norm}"))
            return Layer([attention, behind, mlp, norm])

        words = make.embedding("embeddings.word_embeddings", config.vocab_size)
        norm = make.layer_norm("embeddings.LayerNorm")
        positions = make.positions(
            "embeddings.position_embeddings", config.max_len, offset=config.first_position
        )
        types = None
        if config.num_token_types:
            name = "embeddings.token_type_embeddings"
            types = make.positions(name, config.num_token_types)
        super().__init__(config, make, layer, EncoderEmbedding(words, norm, positions, types))

    def make_bias(self, config: Any, make: LayerMaker) -> DistanceBias | None:
        """Returns the bias of attention by distance, if the family has one."""
        return None


class MPNetModel(BertModel):
    """BERT with a bias of attention by distance."""

    names = _MPNET

    def make_bias(self, config: MPNetConfig, make: LayerMaker) -> DistanceBias:
        """See `BertModel.make_bias`."""
        return make.distance_bias(
            "encoder.relative_attention_bias", num_buckets=config.num_buckets,
            num_heads=config.num_heads, max_len=config.max_len,
        )  # fmt: skip


class DistilBertModel(BertModel):
    """BERT under other names."""

    names = _DISTILBERT


_HEADS = ("Model", "ForMaskedLM", "ForSequenceClassification")
_KINDS: Mapping[str, tuple[type[BertConfig], type[BertModel]]] = {
    "Bert": (BertConfig, BertModel),
    "Roberta": (RobertaConfig, BertModel),
    "XLMRoberta": (RobertaConfig, BertModel),
    "Camembert": (RobertaConfig, BertModel),
    "MPNet": (MPNetConfig, MPNetModel),
    "DistilBert": (DistilBertConfig, DistilBertModel),
}
FAMILIES = {f"{kind}{head}": classes for kind, classes in _KINDS.items() for head in _HEADS}
