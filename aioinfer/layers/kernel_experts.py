"""Mixtures of experts on GPUs: the weights of all experts of a layer in two tensors, and every step
in five launches, which a CUDA graph can hold: norm, routing, two products, and the sum into the
residual stream.

Made by `LayerMaker.mixture` where the kernels take the mixture (`supports`); `experts.MixtureMLP`
computes all others.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial

import torch

from aioinfer.kernels.activation import GATE_RUN
from aioinfer.kernels.expert_linear import (
    CONFIGS,
    SCANNED_CONFIGS,
    SCANNED_TOKENS,
    WIDE_CONFIG,
    ExpertConfig,
    expert_product,
    sum_pairs,
)
from aioinfer.kernels.expert_routing import (
    MAX_SHARED_TILES,
    CopyTable,
    RoutedTokens,
    RoutingConfig,
    RoutingRule,
    make_counters,
    route,
    routing_config,
    supports_rule,
)
from aioinfer.layers.backend import Backend
from aioinfer.layers.experts import MixtureMLP, PlacedExperts, Router, Routing, SharedExpert
from aioinfer.layers.norm import RMSNorm
from aioinfer.layers.residual import ResidualStream
from aioinfer.layers.shards import NamedShards, Shard, WeightShard
from aioinfer.layers.step import Step

#: Experts whose rows are interleaved at a time: what needs memory for a moment.
_INTERLEAVED = 16


class StackedExperts:
    """The weights of all experts of a layer that this rank has, unquantized, each read from the
    checkpoint into its place.

    Args:
        names: the checkpoint modules of each of them: gate, up and down.
        channels: of each expert that this rank has; a multiple of 8.
        hidden_size: of the tokens.
        backend: of the rank.

    Attributes:
        gate_up: [E, 2 * channels, hidden_size]; interleaved by `finalize`.
        down: [E, hidden_size, channels].
    """

    def __init__(
        self,
        names: Sequence[tuple[str, str, str]],
        channels: Shard,
        hidden_size: int,
        backend: Backend,
    ):
        self._names, self._channels = names, channels
        empty = partial(torch.empty, dtype=backend.dtype, device=backend.device)
        self.gate_up = empty((len(names), 2 * channels.size, hidden_size))
        self.down = empty((len(names), hidden_size, channels.size))

    def weight_shards(self) -> NamedShards:
        """Yields where this rank's parts of the checkpoint's tensors go, before `finalize`."""
        channels = self._channels
        for number, (gate, up, down) in enumerate(self._names):
            for module, rows in zip((gate, up), self.gate_up[number].chunk(2), strict=True):
                yield f"{module}.weight", WeightShard(rows, 0, channels.start, channels.total)
            shard = WeightShard(self.down[number], 1, channels.start, channels.total)
            yield f"{down}.weight", shard

    def finalize(self) -> None:
        """Interleaves gate and up, a few experts at a time."""
        for some in self.gate_up.split(_INTERLEAVED):
            by_run = some.unflatten(1, (2, -1, GATE_RUN)).transpose(1, 2)
            some.copy_(by_run.reshape(some.shape))


class KernelMixtureMLP(MixtureMLP):
    """The experts of one layer on one rank over the kernels, with their norm and their sum into the
    residual stream.

    The expert that all tokens take is computed by itself, and added by the last launch.

    Args:
        router: selects experts; its weight in the backend's dtype.
        stacked: those that this rank has.
        placed: which of all they are.
        shared: the expert of all tokens, or None.
        norm: of the residual stream before router and experts.
        backend: of the rank.
    """

    supports_graphs = True

    def __init__(
        self,
        router: Router,
        stacked: StackedExperts,
        placed: PlacedExperts,
        shared: SharedExpert | None,
        norm: RMSNorm,
        backend: Backend,
    ):
        local = placed.local
        super().__init__(router, (), placed, shared, norm, backend)
        self.stacked = stacked
        is_partial = local.size < local.total
        self._experts = range(local.start, local.start + local.size) if is_partial else None
        self._rule = rule_of(router.routing)
        self._counters = make_counters(local.total, backend.device)
        copies = placed.copies
        self._copies = None if copies is None else CopyTable(copies.table, copies.counts)

    def weight_shards(self) -> NamedShards:
        """Yields where this rank's parts of the checkpoint's tensors go."""
        yield from self.router.weight_shards()
        yield from self.stacked.weight_shards()
        if self._shared is not None:
            yield from self._shared.weight_shards()

    def finalize(self) -> None:
        """Prepares the loaded weights for the device."""
        self.stacked.finalize()
        if self._shared is not None:
            self._shared.finalize()

    @property
    def kinds(self) -> tuple[Hashable, ...]:
        """Those of its weights."""
        return "stacked experts", self._rule, self.stacked.gate_up.shape

    def warm_up(self, hidden_size: int) -> None:
        """Launches routing and products in every configuration that the number of tokens
        selects."""
        backend = self._backend
        for tokens, scanned, routing, product in self._configurations():
            x = torch.zeros(tokens, hidden_size, dtype=backend.dtype, device=backend.device)
            routed = self._route(x, buckets=not scanned, config=routing)
            self._add(ResidualStream(x.clone(), backend), x, routed, product)

    def _configurations(
        self,
    ) -> list[tuple[int, bool, RoutingConfig | None, ExpertConfig | None]]:
        """Returns (tokens of a launch, whether without buckets, configurations) of each kind of
        launch; few tokens may be launched with the configuration of many."""
        itemsize, experts = self._backend.dtype.itemsize, self._rule.num_experts
        is_wide = itemsize > 2
        scanned = [(bound, WIDE_CONFIG if is_wide else config) for bound, config in SCANNED_CONFIGS]
        sizes = (SCANNED_TOKENS + 1, 65, 16 * MAX_SHARED_TILES + 1)
        routings = [routing_config(tokens, experts, itemsize) for tokens in sizes]
        products = [WIDE_CONFIG] if is_wide else [config for _, config in CONFIGS]
        few = [(2, False, config, products[0]) for config in routings]
        return [
            (1, True, None, None),
            *((bound, True, None, config) for bound, config in scanned),
            *few,
            *((2, False, routings[0], config) for config in products[1:]),
        ]

    def __call__(self, stream: ResidualStream, step: Step) -> None:
        """Adds the mixture of the stream's tokens to the stream."""
        x = stream.normed(self._norm)
        # padding has no slots; where the tokens are sampled ones alone there is none
        mapping = step.inputs.groups[0].slot_mapping
        slots = mapping if len(mapping) == len(x) else None
        self._add(stream, x, self._route(x, buckets=len(x) > SCANNED_TOKENS, slots=slots))

    def _route(
        self,
        x: torch.Tensor,
        *,
        buckets: bool,
        config: RoutingConfig | None = None,
        slots: torch.Tensor | None = None,
    ) -> RoutedTokens:
        router = self.router
        return route(
            x, router.weight, self._rule, self._counters, bias=router.bias, buckets=buckets,
            local=self._experts, copies=self._copies, totals=self.counter.tokens, slots=slots,
            pdl=self._backend.pdl, config=config,
        )  # fmt: skip

    def _add(
        self,
        stream: ResidualStream,
        x: torch.Tensor,
        routed: RoutedTokens,
        config: ExpertConfig | None = None,
    ) -> None:
        """Adds the weighted sum of the experts' outputs for x [T, hidden_size] to the stream."""
        backend, stacked = self._backend, self.stacked
        options = {"pdl": backend.pdl, "config": config}
        gated = expert_product(x, stacked.gate_up, routed, gated=True, **options)
        pairs = expert_product(gated, stacked.down, routed, gated=False, **options)
        added = None if self._shared is None else self._shared(x)
        given = {"added": added, "pdl": backend.pdl}
        if backend.all_reduce is not None:
            out = backend.all_reduce.partial[: len(x)]
            stream.add_partial(sum_pairs(pairs, routed, out=out, **given))
        elif backend.group.size > 1:
            stream.add_over_ranks(sum_pairs(pairs, routed, **given))
        else:
            hidden = stream.hidden
            sum_pairs(pairs, routed, residual=hidden, out=hidden, **given)


def rule_of(routing: Routing) -> RoutingRule:
    """Returns the rule by which the kernel selects."""
    return RoutingRule(
        routing.num_experts,
        routing.top_k,
        routing.scores == "sigmoid",
        routing.is_normalized,
        routing.scale,
        routing.num_groups,
        routing.top_groups,
        routing.group_best,
    )


def supports(routing: Routing, channels: int, activation: str) -> bool:
    """Whether the kernels take experts of so many channels on each rank, unquantized."""
    return activation == "silu" and channels % GATE_RUN == 0 and supports_rule(rule_of(routing))
