"""A decoder-only transformer: embedding, layers, norm, head. Families differ in their layers.

`DecoderModel` implements `CausalLM` for all models that are built from our layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import torch

from aioinfer.errors import ConfigError
from aioinfer.layers.embedding import Embedding, LearnedPositions, LMHead
from aioinfer.layers.experts import MixtureMLP
from aioinfer.layers.layer import Layer, find_equal_layers
from aioinfer.layers.maker import LayerMaker
from aioinfer.layers.mixture import ExpertCounter
from aioinfer.layers.norm import Norm
from aioinfer.layers.part_maker import Loadable, describe_mixers
from aioinfer.layers.residual import ResidualStream
from aioinfer.layers.step import Step
from aioinfer.models.built_model import BuiltModel
from aioinfer.models.config import DecoderConfig
from aioinfer.models.mtp import MtpHead
from aioinfer.models.stages import layers_of_stage, make_layers, measure_layers, whole_bytes
from aioinfer.models.text_model import is_other_part
from aioinfer.models.vision.tower import Tower


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
        from aioinfer.layers.exchanged_experts import ExchangedMixtureMLP, connect

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
