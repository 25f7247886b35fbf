"""Mixtures of experts: an MLP of which each token takes a few of many (Shazeer et al. 2017).

The router scores the experts for each token; the outputs of the best are summed, weighted by their
scores. Tensor-parallel ranks have some channels of every expert each, and all of the router.

With `Backend.expert_parallel` each of these ranks has some of the experts instead, whole. All ranks
have all tokens, since attention is tensor-parallel: a rank computes its own experts for the tokens
that take them, and adds zero for the others. The sum over the ranks that a layer has anyway is then
the sum over the experts. Nothing is sent from rank to rank beforehand.

With `Backend.expert_group` the ranks belong to several engines, each with tokens of its own
(data-parallel attention): a rank sends its tokens to the ranks of their experts, which send the
outputs back, by an all-to-all each way (Lepikhin et al. 2021). All ranks take part in every step.

How experts are selected, and which experts a rank has: `mixture`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F

from aioinfer.layers.backend import Backend
from aioinfer.layers.formats.base import ACTIVATIONS, Epilogue, Weight
from aioinfer.layers.layer import Part
from aioinfer.layers.linear import ColumnParallelLinear
from aioinfer.layers.mixture import ExpertRouter, PlacedExperts
from aioinfer.layers.norm import Norm
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.layers.residual import ResidualStream
from aioinfer.layers.shards import NamedShards, Shard, Source, StackIndex, WeightShard
from aioinfer.layers.step import Step

if TYPE_CHECKING:
    from aioinfer.layers.extension import ExpertExtension, ProductExtension, Terms


class Expert:
    """An MLP without norms and sums: this rank's channels of one expert.

    Args:
        gate_up: the channels of the gate, then of up; or of up alone.
        down: the second projection, for these channels.
        activation: of `formats.base.ACTIVATIONS`.
        is_gated: whether there is a gate.
    """

    def __init__(self, gate_up: Weight, down: Weight, activation: str, *, is_gated: bool = True):
        self.gate_up, self.down = gate_up, down
        self._activation = activation
        self._is_gated = is_gated

    def weight_shards(self) -> NamedShards:
        """Yields where this rank's parts of the checkpoint's tensors go."""
        yield from self.gate_up.weight_shards()
        yield from self.down.weight_shards()

    def finalize(self) -> None:
        """Prepares the loaded weights for the device."""
        self.gate_up.finalize()
        self.down.finalize()

    def begin_reload(self) -> None:
        """See `Weight.begin_reload`."""
        self.gate_up.begin_reload()
        self.down.begin_reload()

    @property
    def kinds(self) -> tuple[Hashable, ...]:
        """The kinds of its weights."""
        return self.gate_up.kind, self.down.kind

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns this rank's part of the output [T, hidden_size], to be summed over the ranks, for
        x [T, hidden_size]."""
        if not self._is_gated:
            return self.down.multiply(ACTIVATIONS[self._activation](self.gate_up.multiply(x)))
        return self.down.multiply(self.gate_up.multiply(x, Epilogue(gate=self._activation)))

    def extended(
        self, x: torch.Tensor, extension: ExpertExtension, place: int, terms: Terms
    ) -> torch.Tensor:
        """Returns what `__call__` does, with an extension; `place` and `terms` as in
        `ExpertExtension.add`."""
        both = self._first(x)
        extension.add(place, x, both, terms, is_first=True)
        gated = self._activate(both)
        output = self._second(gated)
        extension.add(place, gated, output, terms, is_first=False)
        return output

    def _first(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the first product, before the activation."""
        return self.gate_up.multiply(x)

    def _activate(self, both: torch.Tensor) -> torch.Tensor:
        if not self._is_gated:
            return ACTIVATIONS[self._activation](both)
        gate, up = both.chunk(2, dim=-1)
        return ACTIVATIONS[self._activation](gate) * up

    def _second(self, gated: torch.Tensor) -> torch.Tensor:
        """Returns the second product."""
        return self.down.multiply(gated)


@dataclass(frozen=True, slots=True)
class ClampedSwiGLU:
    """gate * sigmoid(alpha * gate) * (up + 1), of a gate of at most `limit` and of up within
    -limit .. limit."""

    alpha: float
    limit: float

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Returns the channels [..., n] of gate and up [..., n]."""
        gate = gate.clamp(max=self.limit)
        up = up.clamp(-self.limit, self.limit)
        return torch.sigmoid(gate * self.alpha).mul_(gate).mul_(up + 1)


@dataclass(frozen=True, slots=True)
class ExpertPlaces:
    """The places of an expert's tensors in the checkpoint.

    Attributes:
        name: of the module of all experts.
        index: which of them.
        channels: this rank's, of each expert.
        hidden_size: of the tokens.
    """

    name: str
    index: StackIndex
    channels: Shard
    hidden_size: int

    @property
    def gate_up(self) -> Source:
        """Gate and up in turns: channel i is output features 2 i and 2 i + 1."""
        channels = self.channels
        rows = Shard(2 * channels.start, 2 * channels.size, 2 * channels.total)
        return Source(f"{self.name}.gate_up_proj", rows, self.index)

    @property
    def down(self) -> Source:
        """The second projection."""
        return Source(f"{self.name}.down_proj", Shard.whole(self.hidden_size), self.index)


class BiasedExpert(Expert):
    """This rank's channels of one expert.

    Args:
        places: of its tensors.
        gate_up: the weight of `places.gate_up`. down: the weight of `places.down`, for these
            channels.
        swiglu: the activation.
        backend: of the rank.
    """

    def __init__(
        self,
        places: ExpertPlaces,
        gate_up: Weight,
        down: Weight,
        swiglu: ClampedSwiGLU,
        backend: Backend,
    ):
        super().__init__(gate_up, down, "silu")  # in the place of which `swiglu` is computed
        self._places, self._swiglu = places, swiglu
        self._gate_up_bias, self._down_bias = (
            torch.zeros(source.rows.size, dtype=backend.dtype, device=backend.device)
            for source in (places.gate_up, places.down)
        )

    def weight_shards(self) -> NamedShards:
        """See `Expert.weight_shards`."""
        yield from super().weight_shards()
        places = self._places
        for source, bias in ((places.gate_up, self._gate_up_bias), (places.down, self._down_bias)):
            rows = source.rows
            shard = WeightShard(bias, 0, rows.start, rows.total, stack=source.stack)
            yield f"{source.name}_bias", shard

    def finalize(self) -> None:
        """Puts the channels of up behind the channels of the gate. The output's bias is added by
        the rank that has the first channels."""
        features = torch.arange(2 * self._places.channels.size)
        order = torch.cat((features[::2], features[1::2]))
        self.gate_up.row_order = order
        self._gate_up_bias.copy_(self._gate_up_bias[order.to(self._gate_up_bias.device)])
        if self._places.channels.start:
            self._down_bias.zero_()
        super().finalize()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See `Expert.__call__`."""
        return self._second(self._activate(self._first(x)))

    def _first(self, x: torch.Tensor) -> torch.Tensor:
        return self.gate_up.multiply(x, Epilogue(bias=self._gate_up_bias))

    def _activate(self, both: torch.Tensor) -> torch.Tensor:
        return self._swiglu(*both.chunk(2, dim=-1))

    def _second(self, gated: torch.Tensor) -> torch.Tensor:
        return self.down.multiply(gated, Epilogue(bias=self._down_bias))


class SharedGate:
    """The gate of the expert that every token takes: a sigmoid of the token.

    Args:
        name: of the checkpoint module.
        hidden_size: of the tokens.
        backend: of the rank.

    Attributes:
        weight: [1, hidden_size], which every rank has.
        extension: what is added to the product; None for nothing.
    """

    def __init__(self, name: str, hidden_size: int, backend: Backend):
        self._name = name
        self.weight = torch.zeros(1, hidden_size, dtype=backend.dtype, device=backend.device)
        self.extension: ProductExtension | None = None
        if backend.extension is not None:
            source = Source(name, Shard.whole(1))
            self.extension = backend.extension.extend([source], Shard.whole(hidden_size))

    def weight_shards(self) -> NamedShards:
        """Yields where the checkpoint's tensor goes."""
        yield f"{self._name}.weight", WeightShard(self.weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the factors [T, 1] of the expert's output for x [T, hidden_size]."""
        extension = self.extension
        if extension is None or not extension.is_active:
            return F.linear(x, self.weight).sigmoid()
        extension.begin(x)
        logits = F.linear(x, self.weight)
        extension.add(x, logits)
        return logits.sigmoid()


class SharedExpert:
    """The expert that every token takes.

    Args:
        expert: the MLP.
        gate: multiplied with its output, or None.
        scale: multiplied with its output.
    """

    def __init__(self, expert: Expert, gate: SharedGate | None, scale: float = 1.0):
        self._expert, self._gate, self._scale = expert, gate, scale

    def weight_shards(self) -> NamedShards:
        """Yields where this rank's parts of the checkpoint's tensors go."""
        yield from self._expert.weight_shards()
        if self._gate is not None:
            yield from self._gate.weight_shards()

    def finalize(self) -> None:
        """Prepares the loaded weights for the device."""
        self._expert.finalize()

    def begin_reload(self) -> None:
        """See `Weight.begin_reload`."""
        self._expert.begin_reload()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns this rank's part of the output [T, hidden_size] for x [T, hidden_size]."""
        output = self._expert(x)
        if self._scale != 1.0:
            output = output * self._scale
        return output if self._gate is None else output * self._gate(x)


class ExpertLatents(NamedTuple):
    """The projections of tokens to what experts take, and of the sum of their outputs back; every
    rank has both whole. Each rank projects its part of the sum: the parts are summed afterwards.

    Attributes:
        down: to the latents. up: back, without a bias.
    """

    down: ColumnParallelLinear
    up: ColumnParallelLinear


class MixtureMLP(Part):
    """The experts of one layer on one rank, with their norm and their sum into the residual stream.
    Made by `LayerMaker.mixture`.

    Each expert that has tokens is multiplied with in turn, which asks the device how many tokens
    each has: no graph can hold that. `kernel_experts` has the mixture for GPUs.

    Args:
        router: selects experts.
        experts: of this rank.
        placed: the places of these among all experts.
        shared: the expert of all tokens, or None.
        norm: of the residual stream before router and experts.
        backend: of the rank.
        latents: the projections around the experts, or None.
        extension: what is added to the experts; None for nothing.
    """

    supports_graphs = False

    def __init__(
        self,
        router: ExpertRouter,
        experts: Sequence[Expert],
        placed: PlacedExperts,
        shared: SharedExpert | None,
        norm: Norm,
        backend: Backend,
        latents: ExpertLatents | None = None,
        extension: ExpertExtension | None = None,
    ):
        self.router, self.experts, self._shared = router, experts, shared
        self._latents, self._extension = latents, extension
        self._placed, self._norm = placed, norm
        self.counter = placed.counter
        self.needs_all_ranks = backend.expert_group is not None
        self._backend = backend

    def weight_shards(self) -> NamedShards:
        """Yields where this rank's parts of the checkpoint's tensors go."""
        yield from self.router.weight_shards()
        for expert in self.experts:
            yield from expert.weight_shards()
        if self._shared is not None:
            yield from self._shared.weight_shards()

    def finalize(self) -> None:
        """Prepares the loaded weights for the device."""
        for expert in self.experts:
            expert.finalize()
        if self._shared is not None:
            self._shared.finalize()

    def begin_reload(self) -> None:
        """See `Weight.begin_reload`."""
        for expert in self.experts:
            expert.begin_reload()
        if self._shared is not None:
            self._shared.begin_reload()

    @property
    def kinds(self) -> tuple[Hashable, ...]:
        """The kinds of its weights, which are the same for all experts."""
        return "experts", *self.experts[0].kinds

    def warm_up(self, hidden_size: int) -> None:
        """See `Part.warm_up`: the products of an expert."""
        expert = self.experts[0]
        expert.gate_up.warm_up("plain")
        expert.down.warm_up("plain")

    def __call__(self, stream: ResidualStream, step: Step) -> None:
        """Adds the mixture of the stream's tokens to the stream."""
        extension = self._extension
        self.add_to(stream, None if extension is None else extension.terms_of(step, len(stream)))

    def add_to(self, stream: ResidualStream, terms: Terms | None = None) -> None:
        """Adds the mixture of the stream's tokens to the stream, which may have none.

        Args:
            terms: of the extension, for the tokens; None where none has one.
        """
        x, own = stream.normed(self._norm), self.router.norm
        output = self._mix(x, x if own is None else own(stream.inputs), terms)
        if self._shared is not None and len(x):
            output += self._shared(x)
        stream.add_over_ranks(output)

    def _mix(
        self,
        x: torch.Tensor,
        routed: torch.Tensor | None = None,
        terms: Terms | None = None,
    ) -> torch.Tensor:
        """Returns this rank's part of the weighted sum of the experts' outputs [T, hidden_size] for
        x [T, hidden_size]; in an `expert_group` the whole sum, of its own tokens. `routed` [T,
        hidden_size] are the router's inputs, by default x."""
        weights, chosen = self.router(x if routed is None else routed)
        if self._latents is not None:
            return self._latents.up(self._sum(self._latents.down(x), weights, chosen, terms))
        return self._sum(x, weights, chosen, terms)

    def _sum(
        self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor,
        terms: Terms | None,
    ) -> torch.Tensor:  # fmt: skip
        """Returns this rank's part of the weighted sum of the outputs of chosen experts (weights
        and places [T, top_k]), or in an `expert_group` the whole sum, like x [T, channels]."""
        if self._placed.copies is not None:
            chosen = self._placed.copies(chosen)
        order = chosen.flatten().argsort(stable=True)
        tokens = order // chosen.shape[1]
        weights = weights.flatten()[order].unsqueeze(1)
        local = self._placed.local
        tokens_of = chosen.flatten().bincount(minlength=local.total)
        self._placed.counter.tokens += tokens_of
        total = torch.zeros_like(x)
        if self._backend.expert_group is not None:
            outputs = self._exchange(x[tokens], tokens_of, self._backend.expert_group)
            return total.index_add_(0, tokens, outputs * weights.to(x.dtype))
        counts = tokens_of.tolist()
        first = sum(counts[: local.start])
        here = counts[local.start : local.start + local.size]
        for place, count in enumerate(here):
            if count:
                pairs = slice(first, first + count)
                output = self._compute(place, x, tokens[pairs], terms)
                total.index_add_(0, tokens[pairs], output * weights[pairs].to(x.dtype))
                first += count
        return total

    def _compute(
        self, place: int, x: torch.Tensor, tokens: torch.Tensor, terms: Terms | None
    ) -> torch.Tensor:
        """Returns the outputs of the expert at a place of this rank for some tokens of x."""
        expert = self.experts[place]
        if terms is None or self._extension is None:
            return expert(x[tokens])
        return expert.extended(x[tokens], self._extension, place, terms[tokens])

    def _multiply(self, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Returns the outputs of this rank's experts for rows [R, hidden_size], of which the first
        `counts[0]` are of the first expert, and so on."""
        outputs = torch.empty_like(rows)
        first = 0
        for expert, count in zip(self.experts, counts, strict=True):
            if count:
                outputs[first : first + count] = expert(rows[first : first + count])
                first += count
        return outputs

    def _exchange(
        self, rows: torch.Tensor, counts: torch.Tensor, group: ParallelGroup
    ) -> torch.Tensor:
        """Returns the experts' outputs for rows [R, hidden_size] by place, `counts` int64 [places]
        of each: sends them to the ranks of the places, computes those that come, and gets the
        outputs back."""
        by_rank, size = self._placed.by_rank, self._placed.local.size
        came = group.all_to_all(counts, by_rank, [size] * group.size).view(group.size, size)
        sent = [int(part.sum()) for part in counts.split(by_rank)]
        received = came.sum(1).tolist()
        rows = group.all_to_all(rows, sent, received)
        # they came by rank, and by place of each rank
        places = torch.arange(size, device=rows.device).repeat(group.size)
        order = places.repeat_interleave(came.flatten()).argsort(stable=True)
        outputs = torch.empty_like(rows)
        outputs[order] = self._multiply(rows[order], came.sum(0).tolist())
        return group.all_to_all(outputs, received, sent)
