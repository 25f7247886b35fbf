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

Which experts a rank has, and copies of experts: `placed_experts`. How experts are selected:
`router`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
import torch.nn.functional as F

from aioinfer.layers.backend import Backend
from aioinfer.layers.formats.base import Epilogue, Weight
from aioinfer.layers.layer import Part
from aioinfer.layers.norm import Norm
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.layers.placed_experts import PlacedExperts
from aioinfer.layers.residual import ResidualStream
from aioinfer.layers.router import ExpertRouter
from aioinfer.layers.shards import NamedShards, WeightShard
from aioinfer.layers.step import Step


class Expert:
    """A gated MLP without norms and sums: this rank's channels of one expert.

    Args:
        gate_up: the channels of the gate, then of up.
        down: the second projection, for these channels.
        activation: of `formats.base.ACTIVATIONS`.
    """

    def __init__(self, gate_up: Weight, down: Weight, activation: str):
        self.gate_up, self.down = gate_up, down
        self._activation = activation

    def weight_shards(self) -> NamedShards:
        """Yields where this rank's parts of the checkpoint's tensors go."""
        yield from self.gate_up.weight_shards()
        yield from self.down.weight_shards()

    def finalize(self) -> None:
        """Prepares the loaded weights for the device."""
        self.gate_up.finalize()
        self.down.finalize()

    @property
    def kinds(self) -> tuple[Hashable, ...]:
        """The kinds of its weights."""
        return self.gate_up.kind, self.down.kind

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns this rank's part of the output [T, hidden_size], to be summed over the ranks, for
        x [T, hidden_size]."""
        return self.down.multiply(self.gate_up.multiply(x, Epilogue(gate=self._activation)))


class SharedExpert:
    """The expert that every token takes.

    Args:
        expert: the MLP.
        gate: name of the checkpoint module of the sigmoid that is multiplied with its output, or
            None.
        hidden_size: of the tokens.
        backend: of the rank.
    """

    def __init__(self, expert: Expert, gate: str | None, hidden_size: int, backend: Backend):
        self._expert = expert
        self._gate_name = gate
        self._gate: torch.Tensor | None = None
        if gate is not None:
            self._gate = torch.zeros(1, hidden_size, dtype=backend.dtype, device=backend.device)

    def weight_shards(self) -> NamedShards:
        """Yields where this rank's parts of the checkpoint's tensors go."""
        yield from self._expert.weight_shards()
        if self._gate is not None:
            yield f"{self._gate_name}.weight", WeightShard(self._gate)

    def finalize(self) -> None:
        """Prepares the loaded weights for the device."""
        self._expert.finalize()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns this rank's part of the output [T, hidden_size] for x [T, hidden_size]."""
        output = self._expert(x)
        return output if self._gate is None else output * F.linear(x, self._gate).sigmoid()


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
    ):
        self.router, self.experts, self._shared = router, experts, shared
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

    @property
    def kinds(self) -> tuple[Hashable, ...]:
        """The kinds of its weights, which are the same for all experts."""
        return "experts", *self.experts[0].kinds

    def warm_up(self, hidden_size: int) -> None:
        """Launches the products of an expert in every configuration that the number of rows
        selects."""
        expert = self.experts[0]
        expert.gate_up.warm_up()
        expert.down.warm_up()

    def __call__(self, stream: ResidualStream, step: Step) -> None:
        """Adds the mixture of the stream's tokens to the stream."""
        self.add_to(stream)

    def add_to(self, stream: ResidualStream) -> None:
        """Adds the mixture of the stream's tokens to the stream, which may have none."""
        x = stream.normed(self._norm)
        output = self._mix(x)
        if self._shared is not None and len(x):
            output += self._shared(x)
        stream.add_over_ranks(output)

    def _mix(self, x: torch.Tensor) -> torch.Tensor:
        """Returns this rank's part of the weighted sum of the experts' outputs [T, hidden_size]; in
        an `expert_group` the whole sum, of its own tokens."""
        weights, chosen = self.router(x)
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
        for expert, count in zip(self.experts, here, strict=True):
            if count:
                pairs = slice(first, first + count)
                output = expert(x[tokens[pairs]]) * weights[pairs].to(x.dtype)
                total.index_add_(0, tokens[pairs], output)
                first += count
        return total

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
