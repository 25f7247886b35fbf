"""A decoder-only transformer: embedding, layers, norm, head. Families differ in their layers.

The worker's runner knows a model by the protocol `CausalLM`; `DecoderModel` implements it for all
models that are built from our layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch

from aioinfer.errors import ConfigError
from aioinfer.ipc.kv_spec import KVGroup, KVSpec
from aioinfer.layers.backend import Backend
from aioinfer.layers.embedding import Embedding, LearnedPositions, LMHead, Vocabulary
from aioinfer.layers.experts import MixtureMLP
from aioinfer.layers.kv_cache import KVScales
from aioinfer.layers.layer import Layer
from aioinfer.layers.maker import LayerMaker
from aioinfer.layers.mixture import ExpertCounter
from aioinfer.layers.norm import Norm
from aioinfer.layers.part_maker import Loadable, describe_mixers
from aioinfer.layers.residual import ResidualStream
from aioinfer.layers.step import Step
from aioinfer.models.built_model import BuiltModel
from aioinfer.models.config import DecoderConfig
from aioinfer.models.layer_forms import find_equal_layers
from aioinfer.models.mtp import MtpHead
from aioinfer.models.stages import layers_of_stage, make_layers, measure_layers, whole_bytes
from aioinfer.models.text_model import is_other_part
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


def _counters_of(layers: Sequence[Layer]) -> list[ExpertCounter]:
    counters = [leaf.counter for layer in layers for part in layer.parts for leaf in part.leaves]
    return [counter for counter in counters if counter is not None]


class DecoderModel(BuiltModel):
    """Implements `CausalLM` for a model built from layers.

    Args:
        config: of the model.
        make: makes the layers.
        layer: returns layer `number`, made by a maker.
        embedding, norm, head: by default of the names that most checkpoints have.
        positions: the table of models that learn an embedding of each position.
        layers_name: of the layers in the checkpoint.
        side_size: channels of a token that parts keep beside the stream; a part of the first layer
            makes them.
        mtp: returns the head that predicts further tokens, of families that have one; it is made
            where `Backend.wants_mtp`, on the last pipeline stage.

    Raises:
        ConfigError: a head is wanted and there is none.
    """

    layer_numbers: range
    has_token_types = False
    scores_tokens = True

    def __init__(
        self,
        config: DecoderConfig,
        make: LayerMaker,
        layer: Callable[[int], Layer],
        *,
        embedding: Embedding | None = None,
        norm: Norm | None = None,
        head: LMHead | None = None,
        positions: LearnedPositions | None = None,
        layers_name: str = "model.layers",
        side_size: int = 0,
        mtp: Callable[[], MtpHead] | None = None,
    ):
        self._make = make
        self._num_layers, self._unused_layers = config.num_layers, config.unused_layers
        self._has_other_parts = config.has_other_parts
        self.finishes_with_hidden_states = True
        self.backend = make.backend
        self.hidden_size = config.hidden_size
        self.stream_size = config.hidden_size + side_size
        self._is_last = self.backend.is_last_stage
        embedding = embedding or make.embedding("model.embed_tokens", config.vocab_size)
        self.embedding: Embedding | None = embedding
        self.vocabulary = embedding.vocabulary
        #: Tensors of the checkpoint that this rank need not load, since other stages do.
        self._elsewhere: set[str] = set()
        self._select_layers(config, layer, embedding)
        made = make_layers(make, layer, self.layer_numbers, config.num_layers)
        self.layers, self.offloaded = made
        self._connect_readers()
        self.has_rotary_sections = make.has_rotary_sections
        # all layers but the model's last
        self._first_layers = self.layers[:-1] if self._is_last else self.layers
        self.norm: Norm | None = norm or make.norm("model.norm")
        self._positions, self._layers_name = positions, layers_name
        tied = config.tied_embeddings
        self.head: LMHead | None = head or make.head("lm_head", embedding, tied=tied)
        self._forget_ends(tied=tied)
        self._extend_ends()
        if self.backend.num_stages == 1:
            self.kv_specs = [layer.kv_specs for layer in self.layers]
        self.mtp: MtpHead | None = None
        if self.backend.wants_mtp:
            self._add_mtp(mtp)
        self.kv_scales = self._find_scales()
        self.expert_counters = [*self._earlier_counters, *_counters_of(self.layers)]
        self.weights_bytes = sum(shard.destination.nbytes for _, shard in self.weight_shards())
        self.tower: Tower | None = None
        self.tapped_layers: Sequence[int] = ()

    def add_tower(self, tower: Tower) -> None:
        """Adds what computes the embeddings of pictures; before the weights are loaded. Raises
        `ConfigError` if its embeddings go into more layers than the first stage has."""
        if tower.num_deep > len(self._first_layers):
            raise ConfigError(
                f"pictures go into {tower.num_deep} layers, which must be in the first pipeline "
                "stage and not the model's last: set parallel.pipeline_parallel_size lower, or "
                "media.max_pictures to 0 for texts alone"
            )
        self.tower = self._make.keep(tower)
        self.weights_bytes += sum(shard.destination.nbytes for _, shard in tower.weight_shards())

    def _add_mtp(self, mtp: Callable[[], MtpHead] | None) -> None:
        """Makes the head that predicts further tokens. Its layer counts as one behind the last one,
        of the last stage."""
        if mtp is None:
            raise ConfigError(
                'speculation.method = "mtp" needs a model with a head that predicts further tokens'
            )
        # made without extension, which knows the tokens of a step: the head's passes hold others
        extension, self.backend.extension = self.backend.extension, None
        if self.backend.num_stages > 1:
            with self._make.measuring():
                specs = mtp().layer.kv_specs
        if self._is_last:
            self.mtp = mtp()
            specs = self.mtp.layer.kv_specs
            self.layer_numbers = range(self.layer_numbers.start, self.layer_numbers.stop + 1)
        self.backend.extension = extension
        self.kv_specs = [*self.kv_specs, specs]

    @property
    def _layers_with_cache(self) -> Sequence[Layer]:
        """The layers of `layer_numbers`: those of the model, and the head that predicts further
        tokens."""
        return self.layers if self.mtp is None else [*self.layers, self.mtp.layer]

    def _select_layers(
        self, config: DecoderConfig, layer: Callable[[int], Layer], embedding: Embedding
    ) -> None:
        """Finds out which layers this rank's stage has: stages that read about as many bytes in a
        step, with the embedding in the first and the head in the last."""
        self.layer_numbers = range(config.num_layers)
        self._earlier_counters: list[ExpertCounter] = []
        if self.backend.num_stages == 1:
            return
        measured = measure_layers(self._make, layer, config.num_layers)
        self.kv_specs = [each.layer.kv_specs for each in measured]
        # the head is as large as the embedding, tied or not
        head = whole_bytes(embedding.weight_shards()) // self.backend.group.size
        self.layer_numbers = layers_of_stage(measured, self.backend, head, config.stage_starts)
        self._elsewhere.update(name for each in measured for name in each.tensors)
        before = [each.layer for each in measured[: self.layer_numbers.start]]
        earlier = _counters_of(before)
        self._earlier_counters = [counter.on(self.backend.device) for counter in earlier]

    def _forget_ends(self, *, tied: bool) -> None:
        """Forgets embedding, norm and head where another stage has them; all have been made, since
        families make them in ways of their own."""
        parts: list[Loadable | None] = []
        if self.backend.stage > 0:
            if self._positions is not None:
                parts.append(self._positions)
                self._positions = None
            if not (self._is_last and (tied or self.backend.wants_embedding)):
                parts.append(self.embedding)
                self.embedding = None
        if not self._is_last:
            parts += [self.norm, self.head]
            self.norm = self.head = None
        for part in parts:
            assert part is not None
            self._elsewhere.update(name for name, _ in part.weight_shards())
            self._make.forget(part)

    def _extend_ends(self) -> None:
        """Lets an extension add to the embedding and the head."""
        if self.backend.extension is not None:
            embedding = self.embedding if self.backend.stage == 0 else None
            self.backend.extension.extend_ends(self.hidden_size, embedding, self.head)

    def is_unused(self, name: str) -> bool:
        """See `BuiltModel`."""
        if self._make.is_elsewhere(name) or (self._has_other_parts and is_other_part(name)):
            return True
        quantization, own = self._make.quantization, self.layer_numbers
        if name.endswith(() if quantization is None else tuple(quantization.unused)):
            return True
        others = *range(own.start), *range(own.stop, self._num_layers + self._unused_layers)
        # heads that predict further tokens may not be needed, and share embedding and head
        unused = (
            "mtp.",
            "model.mtp_layers.",
            *(f"{self._layers_name}.{number}." for number in others),
        )
        return name in self._elsewhere or name.startswith(unused)

    def looks_ahead(self, block_size: int) -> bool:
        """See `CausalLM.looks_ahead`."""
        on_kernels = self.backend.has_kernels and not self._lacking(block_size)
        mixers = (mixer for layer in self._layers_with_cache for mixer in layer.mixers)
        return all(mixer.looks_ahead(on_kernels=on_kernels) for mixer in mixers)

    def describe(self, block_size: int) -> str:
        """See `CausalLM.describe`."""
        computed = "plain torch"
        if self.backend.has_kernels:
            computed = describe_mixers(self._lacking(block_size), block_size)
        parts = [computed, self._make.describe_weights()]
        if self._has_other_parts:
            parts.append("pictures are not read" if self.tower is None else "pictures are read")
        if self.offloaded is not None:
            parts.append(self.offloaded.describe())
        return "; ".join(filter(None, parts))

    def plan(self, step: Step) -> None:
        """See `CausalLM.plan`."""
        super().plan(step)
        if self.backend.extension is not None:
            self.backend.extension.plan(step)

    def connect_experts(self, max_tokens: int) -> None:
        """See `CausalLM.connect_experts`."""
        from aioinfer.layers.kernel_experts import ExchangedMixtureMLP, connect

        mixtures = [part for part in self._parts if isinstance(part, ExchangedMixtureMLP)]
        if mixtures:
            connect(mixtures, self.backend, self.hidden_size, max_tokens)

    def take_part(self) -> None:
        """See `CausalLM.take_part`."""
        backend = self.backend
        none = torch.empty(0, self.hidden_size, dtype=backend.dtype, device=backend.device)
        for part in self._parts:
            if isinstance(part, MixtureMLP) and part.needs_all_ranks:
                part.add_to(ResidualStream(none, backend))

    def begin(
        self,
        step: Step,
        out: torch.Tensor | None = None,
        received: torch.Tensor | None = None,
        num_layers: int | None = None,
    ) -> ResidualStream:
        """See `CausalLM.begin`."""
        has_side = self.stream_size > self.hidden_size
        if received is None:
            assert self.embedding is not None
            extension, ids = self.backend.extension, step.inputs.input_ids
            terms = None if extension is None else extension.terms_of(step)
            stream = self.embedding(ids, None if has_side else out, terms)
            if step.prompts is not None:
                step.prompts.enter(stream.hidden)
            if self._positions is not None:
                stream.hidden.add_(self._positions(step.inputs.positions))
            if step.pictures is not None:
                step.pictures.enter(stream.hidden)
        else:
            given = received if out is None or has_side else out.copy_(received)
            stream = ResidualStream.unpacked(given, self.hidden_size, self.backend)
        first = self._first_layers[:num_layers]
        layers = first if self.offloaded is None else self.offloaded.passed(first)
        omitted = self._equal_layers if self.backend.omits_equal_layers else ()
        for layer, number in zip(layers, self.layer_numbers, strict=False):
            if number in omitted:
                continue
            self._tap(number, stream, step)
            layer(stream, step)
            if step.pictures is not None:
                step.pictures.deepen(stream.hidden, number)
        if has_side and out is not None:
            stream.packed(out)
        return stream

    @cached_property
    def _equal_layers(self) -> frozenset[int]:
        return find_equal_layers(self.layers, self.layer_numbers)

    def finish(self, step: Step, stream: ResidualStream) -> torch.Tensor:
        """See `CausalLM.finish`."""
        if not self._is_last:
            return stream.packed()
        self._tap(self._num_layers - 1, stream, step)
        self.layers[-1](stream, step, is_last=True)
        return stream.hidden

    def _tap(self, number: int, stream: ResidualStream, step: Step) -> None:
        """Copies the stream before layer `number` to `Step.taps`, if a drafter reads it."""
        if step.taps is not None and number in self.tapped_layers:
            step.taps[:, self.tapped_layers.index(number)].copy_(stream.hidden)

    def logits(
        self, hidden: torch.Tensor, out: torch.Tensor | None = None,
        tokens: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """See `CausalLM.logits`."""
        assert self.head is not None
        assert self.norm is not None
        extension = self.backend.extension
        terms = None if extension is None else extension.terms_at(tokens)
        return self.head(hidden, self.norm, out, terms)

    def finish_all(self, step: Step, stream: ResidualStream) -> torch.Tensor:
        """See `CausalLM.finish_all`."""
        return self.finish(step, stream)

    def logits_of(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """See `CausalLM.logits_of`."""
        return self.logits(hidden, tokens=tokens)

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `CausalLM.normed`."""
        assert self.norm is not None
        return self.norm(hidden)
