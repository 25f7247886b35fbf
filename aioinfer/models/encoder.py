"""An encoder: embedding, layers in which each token attends to all tokens of its text, and no head.
Families differ in their layers.

What it computes are hidden states, which are pooled (`features.pooled_states`); a classification
head is applied to the pooled states (`engine.pooling_head`). It keeps nothing of a text from step
to step: prompts of a model without KV groups are computed whole (`scheduler.step_planner`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from aioinfer.errors import ConfigError
from aioinfer.ipc.kv_spec import KVSpec
from aioinfer.layers.bidirectional_attention import SortedStep, by_length
from aioinfer.layers.embedding import Embedding, LearnedPositions
from aioinfer.layers.kv_cache import KVScales
from aioinfer.layers.layer import Layer
from aioinfer.layers.maker import LayerMaker
from aioinfer.layers.mixture import ExpertCounter
from aioinfer.layers.norm import Norm
from aioinfer.layers.residual import ResidualStream
from aioinfer.layers.step import Step
from aioinfer.models.built_model import BuiltModel
from aioinfer.models.config import DecoderConfig
from aioinfer.models.vision.tower import Tower

#: How the names of an encoder's tensors begin; those of heads and poolers begin otherwise.
_OWN = ("embeddings.", "encoder.", "transformer.", "layers.", "final_norm.")


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig(DecoderConfig):
    """An encoder's shape.

    Attributes:
        first_position: the row of the table of positions for the first token.
        num_token_types: rows of the table of token types; 0 for no such table.
    """

    generates: ClassVar[bool] = False

    first_position: int = 0
    num_token_types: int = 0

    def check_pipeline_parallel(self, size: int) -> None:
        """Raises `ConfigError` if there are several stages."""
        if size > 1:
            raise ConfigError(
                f"parallel.pipeline_parallel_size = {size} is not supported for encoders: set it "
                "to 1"
            )


class EncoderEmbedding:
    """The embeddings of tokens, positions and token types, summed and normed.

    Args:
        words: of tokens.
        norm: of the sum.
        positions: the table of positions, or none.
        types: the table of token types, which has a row for each, or none.
    """

    def __init__(
        self,
        words: Embedding,
        norm: Norm,
        positions: LearnedPositions | None = None,
        types: LearnedPositions | None = None,
    ):
        self.words, self._norm, self._positions, self.types = words, norm, positions, types

    def __call__(self, step: Step) -> ResidualStream:
        """Returns the residual stream of a step."""
        inputs = step.inputs
        stream = self.words(inputs.input_ids)
        if self._positions is not None:
            stream.hidden.add_(self._positions(inputs.positions))
        if self.types is not None:
            types = inputs.token_types
            # one text alone is of the first type
            stream.hidden.add_(self.types.weight[0] if types is None else self.types(types))
        stream.become_normed(self._norm)
        return stream


class EncoderModel(BuiltModel):
    """Implements `CausalLM` for an encoder: there are no logits.

    Args:
        config: of the model.
        make: makes the layers.
        layer: returns layer `number`, made by a maker.
        embedding: before the layers.
        norm: behind the layers, or none.
    """

    finishes_with_hidden_states = True
    has_rotary_sections = False
    scores_tokens = False
    expert_counters: Sequence[ExpertCounter] = ()

    def __init__(
        self,
        config: EncoderConfig,
        make: LayerMaker,
        layer: Callable[[int], Layer],
        embedding: EncoderEmbedding,
        norm: Norm | None = None,
    ):
        self._make, self.backend = make, make.backend
        self.hidden_size = self.stream_size = config.hidden_size
        self.vocabulary = embedding.words.vocabulary
        self.has_token_types = config.num_token_types > 1
        self.embedding, self.norm = embedding, norm
        self.layer_numbers = range(config.num_layers)
        self.layers = [layer(number) for number in self.layer_numbers]
        self.kv_specs: Sequence[Sequence[KVSpec]] = [() for _ in self.layers]
        self.kv_scales: Mapping[int, KVScales] = {}
        self.tower: Tower | None = None
        self.tapped_layers: Sequence[int] = ()
        self.weights_bytes = sum(shard.destination.nbytes for _, shard in self.weight_shards())

    def is_unused(self, name: str) -> bool:
        """See `BuiltModel`."""
        return name.endswith(".position_ids") or not name.startswith(_OWN)

    def bind(self, *arguments: Any, **options: Any) -> None:
        """See `CausalLM.bind`: there is no KV cache."""

    def looks_ahead(self, block_size: int) -> bool:
        """See `CausalLM.looks_ahead`."""
        return False

    def describe(self, block_size: int) -> str:
        """See `CausalLM.describe`."""
        computed = "Triton kernels" if self.backend.has_kernels else "plain torch"
        parts = ["an encoder, of whole prompts", computed, self._make.describe_weights()]
        return "; ".join(filter(None, parts))

    def plan(self, step: Step) -> None:
        """See `CausalLM.plan`: there is nothing to plan."""

    def connect_experts(self, max_tokens: int) -> None:
        """See `CausalLM.connect_experts`."""

    def take_part(self) -> None:
        """See `CausalLM.take_part`."""

    def begin(
        self,
        step: Step,
        out: torch.Tensor | None = None,
        received: torch.Tensor | None = None,
        num_layers: int | None = None,
    ) -> ResidualStream:
        """See `CausalLM.begin`. Without kernels the stream is in the order of `by_length`."""
        ordered = self._ordered(step)
        computed = step if ordered is None else ordered.step
        stream = self.embedding(computed)
        stream.is_normed_behind = self.norm is None
        for layer in self.layers[:-1][:num_layers]:
            layer(stream, computed)
        return stream

    def _ordered(self, step: Step) -> SortedStep | None:
        """Returns a step as it is computed, if its rows are in another order."""
        if self.backend.has_kernels:
            return None
        if EncoderModel not in step.memo:
            step.memo[EncoderModel] = by_length(step)
        ordered: SortedStep | None = step.memo[EncoderModel]
        return ordered

    def finish(self, step: Step, stream: ResidualStream) -> torch.Tensor:
        """See `CausalLM.finish`."""
        hidden = self.finish_all(step, stream)
        return hidden if step.sampled is None else hidden.index_select(0, step.sampled.last)

    def finish_all(self, step: Step, stream: ResidualStream) -> torch.Tensor:
        """See `CausalLM.finish_all`."""
        ordered = self._ordered(step)
        self.layers[-1](stream, step if ordered is None else ordered.step)
        hidden = stream.hidden
        return hidden if ordered is None else hidden.index_select(0, ordered.places)

    def logits(
        self, hidden: torch.Tensor, out: torch.Tensor | None = None,
        tokens: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """See `CausalLM.logits`. Raises TypeError: there are none."""
        raise TypeError("an encoder has no logits")

    def logits_of(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """See `CausalLM.logits_of`. Raises TypeError: there are none."""
        raise TypeError("an encoder has no logits")

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `CausalLM.normed`."""
        return hidden if self.norm is None else self.norm(hidden)
