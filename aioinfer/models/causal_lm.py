"""A model as the worker knows it: loaded, bound to a KV cache, and computed step by step.

`DecoderModel`, `EncoderModel` and `FallbackModel` implement `CausalLM`; the worker calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch

from aioinfer.ipc.kv_spec import KVGroup, KVSpec
from aioinfer.layers.backend import Backend
from aioinfer.layers.embedding import Vocabulary
from aioinfer.layers.kv_cache import KVScales
from aioinfer.layers.mixture import ExpertCounter
from aioinfer.layers.residual import ResidualStream
from aioinfer.layers.step import Step
from aioinfer.models.vision.tower import Tower


class CausalLM(Protocol):
    """One rank's part of a model, as the worker sees it.

    Attributes:
        backend: of the rank.
        vocabulary: which token ids this rank scores.
        hidden_size: of the residual stream.
        stream_size: channels of a token that a pipeline stage gets from the stage before: of the
            residual stream, and of its side (see `ResidualStream`).
        weights_bytes: of this rank's parameters, a tied one counted once: as they are stored until
            they are loaded, and then as the device holds them.
        kv_specs: what each layer of the whole model keeps in the KV cache; known once the model is
            loaded.
        layer_numbers: which of these layers this rank's pipeline stage has.
        kv_scales: for a KV cache in float8, of the layers of the stage that keep keys and values,
            by number; made when the model is loaded, and 1.
        finishes_with_hidden_states: whether `finish` returns hidden states, and not values that
            only `logits` can read.
        has_rotary_sections: whether the rotary positions of a step are three a token.
        has_token_types: whether `StepInputs.token_types` are read.
        scores_tokens: whether there are logits; a model without a head has hidden states alone.
        expert_counters: of the layers with experts, if their tokens are counted; before them the
            counters of the layers of earlier pipeline stages, to which the counts of these stages
            are added.
        tower: what computes the embeddings of pictures, in the first stage of a pipeline; None for
            models that read none.
        tapped_layers: the numbers of layers before which the stream is copied to `Step.taps`, in
            steps that have it; none, unless a drafter that reads them sets it.
    """

    backend: Backend
    vocabulary: Vocabulary
    hidden_size: int
    stream_size: int
    finishes_with_hidden_states: bool
    has_rotary_sections: bool
    has_token_types: bool
    scores_tokens: bool
    weights_bytes: int
    kv_specs: Sequence[Sequence[KVSpec]]
    layer_numbers: range
    kv_scales: Mapping[int, KVScales]
    expert_counters: Sequence[ExpertCounter]
    tower: Tower | None
    tapped_layers: Sequence[int]

    def load(
        self, folder: Path, load_format: str, seed: int, on_progress: Callable[[int, int], None]
    ) -> None:
        """Loads the weights and prepares them for the device.

        Args:
            folder: of the model.
            load_format: "dummy" or "dummy_skewed" for random weights, else safetensors.
            seed: of random weights.
            on_progress: called with the bytes that are done and the total.

        Raises:
            ConfigError: the weights cannot be read, or do not match the model.
        """
        ...

    def bind(
        self,
        groups: Sequence[KVGroup],
        kv: Sequence[torch.Tensor],
        block_size: int,
        rows: int,
        tokens: int,
    ) -> None:
        """Gives the layers their KV cache; the last call holds.

        Args:
            groups: the layers of this rank's stage that share block tables, numbered from the
                stage's first layer on.
            kv: of each group its memory (see `KVTensors`); keys and values in the dtype of the
                arithmetic or in float8, to which `kv_scales` belong.
            block_size: tokens a block.
            rows, tokens: the maximum of a step.
        """
        ...

    @property
    def supports_graphs(self) -> bool:
        """Whether steps without `Step.host` can be computed, as CUDA graphs need it; known once the
        model is bound."""
        ...

    @property
    def supports_prefill_graphs(self) -> bool:
        """Whether `supports_graphs` holds for steps with prompts, too, not for decodes alone."""
        ...

    def looks_ahead(self, block_size: int) -> bool:
        """Whether steps with KV blocks of `block_size` tokens may have lookahead rows."""
        ...

    def describe(self, block_size: int) -> str:
        """Returns the implementation that computes the model with KV blocks of `block_size` tokens,
        for the start-up table."""
        ...

    def warm_up(self) -> None:
        """Launches the kernels that the number of a step's tokens selects among."""
        ...

    def plan(self, step: Step) -> None:
        """Computes the data of a step that all layers need, once its inputs are prepared; before
        `begin`, and never inside a graph that is replayed for other numbers of rows."""
        ...

    def connect_experts(self, max_tokens: int) -> None:
        """Connects the layers with experts to the same layers of other engines' ranks, which do it
        at the same time, for steps of up to `max_tokens` tokens; after `load`, and on GPUs alone.

        Raises:
            ConfigError: the layers or the GPUs cannot be connected.
        """
        ...

    def take_part(self) -> None:
        """Computes the part of a step that other engines' ranks wait for when this rank has no
        rows."""
        ...

    def begin(
        self,
        step: Step,
        out: torch.Tensor | None = None,
        received: torch.Tensor | None = None,
        num_layers: int | None = None,
    ) -> ResidualStream:
        """Computes all layers but the model's last, and writes the KV cache.

        With `num_decodes` None this depends on the number of tokens only.

        Args:
            out: [T, stream_size] to write the stream to; by default a new tensor.
            received: [T, stream_size], for all stages of a pipeline but the first, the stream of
                the stage before, which may be written to.
            num_layers: compute only the first so many of these layers.
        """
        ...

    def finish(self, step: Step, stream: ResidualStream) -> torch.Tensor:
        """Computes the model's last layer. Returns hidden states before the last norm: [S,
        hidden_size] of the sampled rows, or [T, hidden_size] of a step without. A stage that does
        not have the last layer returns the stream [T, stream_size]."""
        ...

    def logits(
        self, hidden: torch.Tensor, out: torch.Tensor | None = None,
        tokens: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Returns [S, local_size] for hidden states [S, hidden_size]: the logits of the token ids
        that this rank has, in the model's dtype or in float32.

        Args:
            out: [S, shard_size] in the model's dtype that may be written to.
            tokens: integers [S], which tokens of the planned step these are; by default the last of
                each sampled row.
        """
        ...

    def finish_all(self, step: Step, stream: ResidualStream) -> torch.Tensor:
        """Computes the last layer for all tokens of a step without sampled rows, where prompt rows
        have outputs. Returns hidden states [T, hidden_size], which `logits_of` and `normed`
        take."""
        ...

    def logits_of(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the logits, as `logits` does, for hidden states of `finish_all`."""
        ...

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns hidden states of `finish_all` after the model's last norm."""
        ...
