"""Mixtures of experts on GPUs: the weights of all experts of a layer in two tensors
(`expert_stacks`), and every step in five launches, which a CUDA graph can hold: norm, routing, two
products, and the sum into the residual stream; with float8 weights, and more than one token, in two
more, which quantize the inputs of the products. One token takes three: routing and the first
product do the norm, and the second product sums over the experts.

Made by `LayerMaker.mixture` where the kernels take the mixture (`supports`); `experts.MixtureMLP`
computes all others.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from itertools import zip_longest
from typing import TypeAlias

import torch

from aioinfer.kernels.activation import GATE_RUN, gated_activation
from aioinfer.kernels.expert_arguments import GELU, LINEAR, SILU, SQUARED_RELU, Activation
from aioinfer.kernels.expert_configs import (
    SCANNED_TOKENS,
    TABLES,
    WIDE_CONFIG,
    ExpertConfig,
    PipelinedConfig,
)
from aioinfer.kernels.expert_hopper import supports_weight
from aioinfer.kernels.expert_product import expert_product, sum_pairs
from aioinfer.kernels.expert_routing import (
    FEW_TOKENS,
    MAX_SHARED_TILES,
    CopyTable,
    RoutedTokens,
    RoutingConfig,
    RoutingRule,
    SharedRoute,
    make_counters,
    route,
    routing_config,
    supports_rule,
)
from aioinfer.kernels.expert_selection import FewTokensConfig
from aioinfer.kernels.expert_sum import summed_product
from aioinfer.kernels.expert_sum import supports as supports_sum
from aioinfer.kernels.expert_weights import PackedExperts, format_name
from aioinfer.kernels.quantize import InputFormat, ScaledInputs, quantize
from aioinfer.layers.backend import Backend
from aioinfer.layers.expert_stacks import StackedExperts
from aioinfer.layers.experts import (
    ClampedSwiGLU,
    ExpertLatents,
    MixtureMLP,
    SharedExpert,
    SharedGate,
)
from aioinfer.layers.extension import ExpertExtension, Terms
from aioinfer.layers.mixture import ExpertRouter, PlacedExperts, Routing
from aioinfer.layers.norm import Norm, RMSNorm
from aioinfer.layers.residual import ResidualStream
from aioinfer.layers.shards import NamedShards
from aioinfer.layers.step import Step

#: The activations of the kernels, by their names and by whether there is a gate.
ACTIVATIONS = {
    ("silu", True): SILU, ("gelu_pytorch_tanh", True): GELU, ("relu2", False): SQUARED_RELU,
}  # fmt: skip
#: The configurations of both products; None for a configuration that the number of tokens selects.
_Configs = tuple[ExpertConfig | PipelinedConfig | None, ExpertConfig | PipelinedConfig | None]
_RoutingConfigs: TypeAlias = RoutingConfig | FewTokensConfig | None


class KernelMixtureMLP(MixtureMLP):
    """The experts of one layer on one rank over the kernels, with their norm and their sum into the
    residual stream.

    An expert that all tokens take is one more of each token's, where it has the others' size and
    format; another one is computed by itself, and added by the last launch.

    Args:
        router: selects experts; its weight in the backend's dtype.
        stacked: the experts of this rank, and behind them the expert of all tokens, if
            `stacks_shared`.
        placed: the places of these among all experts.
        shared: the expert of all tokens that is computed by itself, or None.
        norm: of the residual stream before router and experts.
        backend: of the rank.
        stacks_shared: as above.
        shared_gate: of the expert of all tokens among the stacked ones, or None.
        latents, extension: as in `MixtureMLP`.
    """

    supports_graphs = True

    def __init__(
        self,
        router: ExpertRouter,
        stacked: StackedExperts,
        placed: PlacedExperts,
        shared: SharedExpert | None,
        norm: Norm,
        backend: Backend,
        *,
        stacks_shared: bool = False,
        shared_gate: SharedGate | None = None,
        latents: ExpertLatents | None = None,
        extension: ExpertExtension | None = None,
    ):
        local = placed.local
        super().__init__(router, (), placed, shared, norm, backend, latents, extension)
        self.stacked = stacked
        self._shared_gate = shared_gate
        self._shared_route: SharedRoute | None = None
        if stacks_shared:
            gate = None if shared_gate is None else shared_gate.weight[0]
            self._shared_route = SharedRoute(gate)
        is_partial = local.size < local.total
        self._experts = range(local.start, local.start + local.size) if is_partial else None
        self._rule = rule_of(router.routing)
        self._counters = make_counters(local.total + stacks_shared, backend.device)
        copies = placed.copies
        self._copies = None if copies is None else CopyTable(copies.table, copies.counts)

    def weight_shards(self) -> NamedShards:
        """Yields where this rank's parts of the checkpoint's tensors go."""
        yield from self.router.weight_shards()
        yield from self.stacked.weight_shards()
        for each in (self._shared, self._shared_gate):
            if each is not None:
                yield from each.weight_shards()

    def finalize(self) -> None:
        """Prepares the loaded weights for the device."""
        self.stacked.finalize()
        if self._shared is not None:
            self._shared.finalize()

    def begin_reload(self) -> None:
        """See `Weight.begin_reload`."""
        self.stacked.begin_reload()
        if self._shared is not None:
            self._shared.begin_reload()

    @property
    def kinds(self) -> tuple[Hashable, ...]:
        """The kinds of its weights."""
        weights = self.stacked.gate_up, self.stacked.down
        has_shared = self._shared_route is not None
        return (
            "stacked experts",
            self._rule,
            self.stacked.activation,
            has_shared,
            *((format_name(w), *w.shape) for w in weights),
        )

    def warm_up(self, hidden_size: int) -> None:
        """See `Part.warm_up`: routing and products."""
        backend = self._backend
        for tokens, scanned, routing, products in self._configurations():
            x = torch.zeros(tokens, hidden_size, dtype=backend.dtype, device=backend.device)
            fused = self._fused_norm(tokens)
            terms = None
            if self._extension is not None and self._extension.is_active:
                fused = None  # with terms the routing never norms
                terms = torch.full((tokens,), -1, dtype=torch.int32, device=backend.device)
            for norm in (None,) if fused is None else (None, fused):
                routed = self._route(x, buckets=not scanned, config=routing, norm=norm)
                self._add(ResidualStream(x.clone(), backend), x, routed, products, terms)

    def _configurations(self) -> list[tuple[int, bool, _RoutingConfigs, _Configs]]:
        """Returns (tokens of a launch, whether without buckets, configurations) of each kind of
        launch; few tokens may be launched with the configuration of many."""
        itemsize, experts = self._backend.dtype.itemsize, self._rule.num_experts
        sizes = (SCANNED_TOKENS + 1, FEW_TOKENS + 1, 65, 129, 257, 16 * MAX_SHARED_TILES + 1)
        routings = [routing_config(tokens, experts, itemsize) for tokens in sizes]
        tables = [self._sorted_configs(first) for first in (True, False)]
        products = list(zip_longest(*tables))
        scanned = sorted({
            int(bound or SCANNED_TOKENS)
            for weight in (self.stacked.gate_up, self.stacked.down)
            for quantized in (True, False)
            for bound, _ in TABLES[format_name(weight, quantized=quantized)][0]
        })  # fmt: skip
        none: _Configs = (None, None)
        return [
            *((tokens, True, None, none) for tokens in (1, 2, *scanned)),
            *((2, False, config, products[0]) for config in routings),
            *((2, False, routings[0], pair) for pair in products[1:]),
        ]

    def _sorted_configs(self, is_first: bool) -> list[ExpertConfig | PipelinedConfig]:
        """Returns the configurations of a product with buckets."""
        stacked = self.stacked
        stack = stacked.first if is_first else stacked.second
        if self._backend.dtype.itemsize > 2 and stack.input_format is None:
            return [WIDE_CONFIG]
        name = format_name(stack.weight, quantized=stack.input_format is not None)
        configs: list[ExpertConfig | PipelinedConfig] = [each for _, each in TABLES[name][1]]
        if not is_first and supports_weight(stack.weight, stacked.biases[1]):
            configs.append(PipelinedConfig())
        return configs

    def __call__(self, stream: ResidualStream, step: Step) -> None:
        """Adds the mixture of the stream's tokens to the stream."""
        extension = self._extension
        terms = None if extension is None else extension.terms_of(step, len(stream))
        may_fuse = stream.is_reduced and terms is None
        norm = self._fused_norm(len(stream)) if may_fuse else None
        x = stream.normed(self._norm) if norm is None else stream.inputs
        own = self.router.norm
        of_router = x if own is None else own(stream.inputs)
        # where the tokens are sampled ones alone there is no padding
        places = step.inputs.token_places
        slots = places if len(places) == len(x) else None
        routed = self._route(of_router, buckets=len(x) > SCANNED_TOKENS, slots=slots, norm=norm)
        self._add(stream, x, routed, terms=terms)

    def _fused_norm(self, tokens: int) -> RMSNorm | None:
        """Returns the norm if routing and first product compute it: for one token, if nothing else
        takes its normed values."""
        is_packed = isinstance(self.stacked.gate_up, PackedExperts)
        others = any(each is not None for each in (self._shared, self._latents, self.router.norm))
        fuses = tokens == 1 and not others and not is_packed
        return self._norm if fuses and isinstance(self._norm, RMSNorm) else None

    def _route(
        self,
        x: torch.Tensor,
        *,
        buckets: bool,
        config: _RoutingConfigs = None,
        slots: torch.Tensor | None = None,
        norm: RMSNorm | None = None,
    ) -> RoutedTokens:
        router = self.router
        normed = {} if norm is None else {"norm_weight": norm.weight, "eps": norm.eps}
        return route(
            x, router.weight, self._rule, self._counters, bias=router.bias,
            logit_bias=router.logit_bias, scales=router.expert_scales, buckets=buckets,
            local=self._experts,
            copies=self._copies, totals=self._placed.counter.tokens, slots=slots,
            shared=self._shared_route, pdl=self._backend.pdl, config=config, **normed,
        )  # fmt: skip

    def _add(
        self,
        stream: ResidualStream,
        x: torch.Tensor,
        routed: RoutedTokens,
        configs: _Configs = (None, None),
        terms: Terms | None = None,
    ) -> None:
        """Adds the weighted sum of the experts' outputs for x [T, hidden_size] to the stream; x is
        normed by now, or the routing did it. `terms` as in `MixtureMLP.add_to`."""
        rows = x if self._latents is None else self._latents.down(x)
        if terms is None:
            sums = self._products(x, rows, routed, configs)
        else:
            sums = partial(sum_pairs, self._extended_pairs(rows, routed, configs, terms), routed)
        self._add_sums(stream, x, sums)

    def _products(
        self, x: torch.Tensor, rows: torch.Tensor, routed: RoutedTokens, configs: _Configs
    ) -> Callable[..., torch.Tensor]:
        """Returns what sums the experts' outputs for `rows`, the projected x."""
        backend, stacked = self._backend, self.stacked
        options = {"dtype": x.dtype, "pdl": backend.pdl}
        inputs = self._quantized(rows, len(x), stacked.first.input_format)
        norm = None
        if routed.norm_factors is not None and isinstance(self._norm, RMSNorm):
            norm = self._norm.weight
        gated = expert_product(
            inputs, stacked.gate_up, routed, gated=True, bias=stacked.biases[0],
            activation=stacked.activation, norm_weight=norm, config=configs[0], **options,
        )  # fmt: skip
        if len(x) == 1 and routed.counts is None and supports_sum(stacked.down):
            return partial(summed_product, gated, stacked.down, routed, bias=stacked.biases[1])
        inputs = self._quantized(gated, len(x), stacked.second.input_format)
        pairs = expert_product(
            inputs, stacked.down, routed, gated=False, bias=stacked.biases[1],
            config=configs[1], **options,
        )  # fmt: skip
        return partial(sum_pairs, pairs, routed)

    def _extended_pairs(
        self, rows: torch.Tensor, routed: RoutedTokens, configs: _Configs, terms: Terms
    ) -> torch.Tensor:
        """Returns the weighted outputs of all pairs [T * top_k, channels] for `rows` [T, channels]
        with the extension, which is added behind both products: the first one's activation is a
        launch of its own."""
        extension, stacked, pdl = self._extension, self.stacked, self._backend.pdl
        assert extension is not None
        tokens = len(rows)
        options = {"dtype": rows.dtype, "pdl": pdl}
        sorted_pairs = extension.sort(terms, routed)
        both = expert_product(
            self._quantized(rows, tokens, stacked.first.input_format), stacked.gate_up, routed,
            gated=True, bias=stacked.biases[0], activation=LINEAR, config=configs[0], **options,
        )  # fmt: skip
        extension.add_to_pairs(rows, both, sorted_pairs, is_first=True)
        gated = _activated(both, stacked.activation, pdl=pdl)
        pairs = expert_product(
            self._quantized(gated, tokens, stacked.second.input_format), stacked.down, routed,
            gated=False, bias=stacked.biases[1], config=configs[1], **options,
        )  # fmt: skip
        extension.add_to_pairs(gated, pairs, sorted_pairs, is_first=False)
        return pairs

    def _add_sums(
        self, stream: ResidualStream, x: torch.Tensor, sums: Callable[..., torch.Tensor]
    ) -> None:
        """Adds to the stream what `sums` sums over each token's experts, and the expert that all
        tokens take of x."""
        backend = self._backend
        added = None if self._shared is None else self._shared(x)
        given = {"added": added, "pdl": backend.pdl}
        if self._latents is not None:
            total = self._latents.up(sums(pdl=backend.pdl))
            stream.add_over_ranks(total if added is None else total.add_(added))
        elif backend.all_reduce is not None:
            out = backend.all_reduce.partial[: len(x)]
            stream.add_partial(sums(out=out, **given))
        elif backend.group.size > 1:
            stream.add_over_ranks(sums(**given))
        else:
            hidden = stream.hidden
            sums(residual=hidden, out=hidden, **given)

    def _quantized(
        self, x: torch.Tensor, tokens: int, format: InputFormat | None
    ) -> torch.Tensor | ScaledInputs:
        """Returns x as a product takes it for a step of so many tokens. Rows that no expert here
        has are quantized like others, and not read."""
        return x if format is None or tokens == 1 else quantize(x, format, pdl=self._backend.pdl)


def _activated(both: torch.Tensor, activation: Activation, *, pdl: bool) -> torch.Tensor:
    """Returns the activation of first products [P, N], gate and up interleaved."""
    if not activation.is_gated:
        return both.relu().square()
    if activation in (SILU, GELU):
        kind = "silu" if activation == SILU else "gelu_pytorch_tanh"
        return gated_activation(both, kind=kind, pdl=pdl)
    gate, up = both.unflatten(1, (-1, 2, GATE_RUN)).float().unbind(2)
    swiglu = ClampedSwiGLU(activation.alpha, activation.limit)
    return swiglu(gate, up).flatten(1).to(both.dtype)


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


def supports(routing: Routing, channels: int, activation: str, *, is_gated: bool) -> bool:
    """Whether the kernels take experts of so many channels on each rank."""
    is_known = (activation, is_gated) in ACTIVATIONS
    return is_known and channels % GATE_RUN == 0 and supports_rule(rule_of(routing))
