"""A transformer of an encoder and a decoder (Vaswani et al. 2017): the encoder's output is the
request's source, to which each layer of the decoder attends.

The decoder is one like all others, with `CrossAttention` among the parts of its layers. The encoder
is a `ReplicatedModule`: it computes a source once, in the first step that computes a token of the
request (`features.sources`), and all that is kept are the keys and values of the decoder's layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from aioinfer.config import CacheConfig, ModelConfig
from aioinfer.errors import ConfigError
from aioinfer.layers.cross_attention import CrossAttention, SourceLengths
from aioinfer.layers.formats.base import ACTIVATIONS
from aioinfer.layers.layer import Layer, Part
from aioinfer.layers.maker import LayerMaker
from aioinfer.layers.norm import Norm
from aioinfer.models.config import DecoderConfig, read_config, renamed
from aioinfer.models.decoder import DecoderModel
from aioinfer.models.replicated import ReplicatedModule
from aioinfer.models.source import SourceFormat, read_start

#: Fields as Whisper and BART name them.
_NAMES = {
    "d_model": "hidden_size",
    "decoder_layers": "num_hidden_layers",
    "decoder_attention_heads": "num_attention_heads",
    "decoder_ffn_dim": "intermediate_size",
    "max_target_positions": "max_position_embeddings",
    "activation_function": "hidden_act",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderDecoderConfig(DecoderConfig):
    """The shape of a decoder, and of the encoder before it.

    Attributes:
        encoder_layers, encoder_heads, encoder_size: of the encoder, and the channels of its MLPs.
        source_kind: "text" or "sound".
        max_values, max_source_len: as `max_values` and `max_tokens` of `SourceFormat`.
        source_rate: samples a second, of sound.
    """

    encoder_layers: int
    encoder_heads: int
    encoder_size: int
    source_kind: Any = "text"
    max_values: int
    max_source_len: int
    source_rate: int = 0

    @classmethod
    def standard_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Renames fields."""
        return renamed({**cls.DEFAULTS, **config}, _NAMES)

    def check_pipeline_parallel(self, size: int) -> None:
        """Raises `ConfigError` if there are several stages."""
        if size > 1:
            raise ConfigError(
                f"parallel.pipeline_parallel_size = {size} is not supported for models with an "
                "encoder before the decoder: set it to 1"
            )


def encoder_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the shape of an encoder as Whisper and BART name it, of a `config.json` with standard
    fields. Raises `ConfigError` unless its heads divide its channels."""
    heads, size = config["encoder_attention_heads"], config["hidden_size"]
    if size % heads:
        raise ConfigError(f"encoder_attention_heads = {heads} do not divide {size} channels")
    return {
        "encoder_layers": config["encoder_layers"],
        "encoder_heads": heads,
        "encoder_size": config["encoder_ffn_dim"],
    }


def decoder_parts(
    config: EncoderDecoderConfig, make: LayerMaker, number: int, lengths: SourceLengths, *,
    key_bias: bool = True, norms_before: bool = False,
) -> list[Part]:  # fmt: skip
    """Returns attention, cross attention and the MLP of a layer of a decoder, as Whisper's and
    BART's have them.

    Args:
        number: of the layer.
        lengths: of sources.
        key_bias: whether projections of keys have a bias.
        norms_before: whether each part has a norm before it.
    """
    prefix = f"model.decoder.layers.{number}"

    def norm(name: str) -> Norm | None:
        return make.layer_norm(f"{prefix}.{name}_layer_norm") if norms_before else None

    attention = make.attention(
        f"{prefix}.self_attn",
        **{**config.attention_shape(number), "rope": None},
        norm=norm("self_attn"),
        bias=True,
        key_bias=key_bias,
        output_bias=True,
        projections=("q_proj", "k_proj", "v_proj", "out_proj"),
    )
    cross = make.cross_attention(
        f"{prefix}.encoder_attn",
        num_heads=config.num_heads,
        head_size=config.head_size,
        source_size=config.hidden_size,
        max_len=config.max_source_len,
        norm=norm("encoder_attn"),
        lengths=lengths,
        bias=True,
        key_bias=key_bias,
    )
    mlp = make.mlp(
        f"{prefix}.fc1",
        f"{prefix}.fc2",
        config.intermediate_size,
        norm=norm("final"),
        activation=config.activation,
        bias=True,
    )
    return [attention, cross, mlp]


def read_source(folder: Path, config: Any, options: ModelConfig) -> SourceFormat | None:
    """Returns how the encoder of a model reads sources; None for models without one.

    Args:
        folder: of the model.
        config: of the model, as `load_model_config` returns it.
        options: the section `[model]`.

    Raises:
        ConfigError: the tokens with which the decoder begins are missing.
    """
    if not isinstance(config, EncoderDecoderConfig):
        return None
    start = read_start(folder, read_config(folder, options.hf_overrides))
    return SourceFormat(
        config.source_kind, config.max_values, config.max_source_len, start, config.source_rate
    )


def check_cache(config: Any, cache: CacheConfig) -> None:
    """Raises `ConfigError` if the KV cache of a model cannot be as the section `[cache]` says.
    `config`: of the model."""
    if isinstance(config, EncoderDecoderConfig):
        for key, is_set in (
            (f"dtype = '{cache.dtype}'", cache.dtype.startswith("fp8")),
            ("host_bytes", cache.host_bytes),
        ):
            if is_set:
                raise ConfigError(
                    f"cache.{key} is not supported for models with an encoder before the decoder"
                )


class SourceEncoder(ReplicatedModule):
    """Base class of encoders before a decoder.

    Attributes:
        is_sound: whether sources are float32 samples, and not int32 token ids.
        max_values, max_tokens: the maximum of a source's values, and of its output.
    """

    is_sound = False

    def __init__(self, config: EncoderDecoderConfig):
        super().__init__()
        self.max_values, self.max_tokens = config.max_values, config.max_source_len

    def encode(self, sources: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Returns the output [n, size] of each source, values [v] on the device."""
        raise NotImplementedError


class EncoderDecoderModel(DecoderModel):
    """Implements `CausalLM` for a decoder with an encoder before it.

    Args:
        config, make, layer, options: as in `DecoderModel`.
        encoder: made on the device "meta".
        lengths: of sources, those of the layers' cross attention.
    """

    def __init__(
        self,
        config: EncoderDecoderConfig,
        make: LayerMaker,
        layer: Callable[[int], Layer],
        *,
        encoder: SourceEncoder,
        lengths: SourceLengths,
        **options: Any,
    ):
        super().__init__(config, make, layer, **options)
        encoder.place(make.backend)
        self.encoder: SourceEncoder = make.keep(encoder)
        self._lengths = lengths
        self.weights_bytes += sum(shard.destination.nbytes for _, shard in encoder.weight_shards())

    def write_sources(self, sources: Sequence[torch.Tensor], blocks: Sequence[int]) -> None:
        """Encodes sources, values [v] each on the device, and keeps keys and values of each in its
        block."""
        mixers = [mixer for layer in self.layers for mixer in layer.mixers]
        cross = [mixer for mixer in mixers if isinstance(mixer, CrossAttention)]
        for source, block in zip(self.encoder.encode(sources), blocks, strict=True):
            self._lengths.of_blocks[block] = len(source)
            for mixer in cross:
                mixer.write(source, block)

    def is_unused(self, name: str) -> bool:
        """See `BuiltModel`: copies of tied embeddings may be there all the same, and the bias of
        BART's logits, which is zero."""
        copies = ("proj_out.weight", ".embed_tokens.weight", "final_logits_bias")
        return name.endswith(copies) or super().is_unused(name)

    def describe(self, block_size: int) -> str:
        """See `CausalLM.describe`."""
        return f"an encoder in plain torch, and a decoder: {super().describe(block_size)}"


class EncoderAttention(torch.nn.Module):
    """Attention of an encoder: each token attends to all of its source."""

    def __init__(self, size: int, num_heads: int, *, key_bias: bool = True):
        super().__init__()
        self.num_heads = num_heads
        self.q_proj, self.v_proj, self.out_proj = (torch.nn.Linear(size, size) for _ in range(3))
        self.k_proj = torch.nn.Linear(size, size, bias=key_bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns [B, T, size] for hidden states alike."""
        heads = (
            module(hidden).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for module in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.out_proj(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))


class EncoderLayer(torch.nn.Module):
    """A layer of an encoder: attention and an MLP, each with a norm before it, or with a norm of
    the sum behind it.

    Args:
        size, num_heads, mlp_size: of the layer.
        activation: of `layers.formats.base.ACTIVATIONS`.
        key_bias: whether the projection of keys has a bias.
        norms_before: where the norms are.
    """

    def __init__(
        self,
        size: int,
        num_heads: int,
        mlp_size: int,
        activation: str,
        *,
        key_bias: bool = True,
        norms_before: bool = True,
    ):
        super().__init__()
        self._activate, self._norms_before = ACTIVATIONS[activation], norms_before
        self.self_attn = EncoderAttention(size, num_heads, key_bias=key_bias)
        self.self_attn_layer_norm = torch.nn.LayerNorm(size)
        self.fc1, self.fc2 = torch.nn.Linear(size, mlp_size), torch.nn.Linear(mlp_size, size)
        self.final_layer_norm = torch.nn.LayerNorm(size)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns [B, T, size] for hidden states alike."""
        hidden = self._add(hidden, self.self_attn, self.self_attn_layer_norm)
        return self._add(hidden, self._mlp, self.final_layer_norm)

    def _mlp(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.fc2(self._activate(self.fc1(hidden)))

    def _add(
        self,
        hidden: torch.Tensor,
        part: Callable[[torch.Tensor], torch.Tensor],
        norm: torch.nn.LayerNorm,
    ) -> torch.Tensor:
        if self._norms_before:
            return hidden + part(norm(hidden))
        return norm(hidden + part(hidden))
