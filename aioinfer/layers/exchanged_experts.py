"""Mixtures of experts on GPUs over the ranks of several engines.

Each rank has tokens of its own (data-parallel attention). A layer sends them to the ranks of their
experts and gets the sums back, through symmetric memory (`kernels.expert_exchange`). All launches
of a layer depend on the number of own tokens alone, so that a CUDA graph can hold them, and may be
replayed beside any other graph or launches of the other ranks. The host does not know how many
tokens come: the buffers have room for all tokens of all ranks, and each product is launched twice,
with tiles for few rows and for many, of which the device runs one. Float8 weights are multiplied
with activations that are not quantized: rows that came would have to be quantized without knowing
how many they are.

Made by `LayerMaker.mixture`; the model has `connect` make the buffers.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import torch

from aioinfer.errors import ConfigError
from aioinfer.kernels.expert_configs import TABLES, WIDE_CONFIG, ExpertConfig
from aioinfer.kernels.expert_exchange import NO_LIMIT, ExchangeLayout, ExpertExchange
from aioinfer.kernels.expert_product import expert_product
from aioinfer.kernels.expert_routing import (
    FEW_TOKENS,
    MAX_SHARED_TILES,
    RoutedTokens,
    routing_config,
)
from aioinfer.kernels.expert_weights import ExpertWeights, format_name
from aioinfer.layers.backend import Backend
from aioinfer.layers.extension import Terms
from aioinfer.layers.kernel_experts import KernelMixtureMLP
from aioinfer.layers.residual import ResidualStream
from aioinfer.layers.step import Step

#: By the average rows of a place that this rank's tokens let expect: the average up to which tiles
#: of few rows are, those tiles (rows of a tile in `expert_configs`), and up to which average there
#: are launches with them.
_EXPECTED = ((24.0, 24.0, 96.0), (192.0, 64.0, 192.0))
#: The minimum of tokens of a rank that buffers are made for: warming up takes so many.
_MIN_TOKENS = 64


@dataclass(frozen=True, slots=True)
class _Launches:
    """The configurations that a product is launched with.

    Attributes:
        few, many: the configuration for the pairs of `Arrived.few` and `Arrived.many`; None where
            there can be none.
    """

    few: ExpertConfig | None
    many: ExpertConfig | None


@dataclass(frozen=True, slots=True)
class _Buffers:
    """The exchange and the results of both products, which all layers use in turn.

    Attributes:
        exchange: of all layers.
        gated: [max_pairs, channels]. pairs: [max_pairs, hidden_size].
    """

    exchange: ExpertExchange
    gated: torch.Tensor
    pairs: torch.Tensor


class ExchangedMixtureMLP(KernelMixtureMLP):
    """The experts of one layer on one rank, with tokens from all ranks of `Backend.expert_group`.
    `connect` has to be called before the first use.

    Made by `LayerMaker.mixture`, as `KernelMixtureMLP` is.
    """

    _buffers: _Buffers | None = None
    _firsts: torch.Tensor

    @property
    def num_places(self) -> int:
        """Places of this rank."""
        return self._placed.local.size

    @property
    def channels(self) -> int:
        """Columns that the second product takes, of an expert; known once it is loaded."""
        return self.stacked.down.shape[2]

    @property
    def kinds(self) -> tuple[Hashable, ...]:
        """See `KernelMixtureMLP.kinds`."""
        return "exchanged", *super().kinds, self.num_places

    def use(self, buffers: _Buffers) -> None:
        """Takes the buffers through which all layers exchange tokens."""
        self._buffers = buffers
        self._firsts = buffers.exchange.first_places(self._placed.by_rank)

    def warm_up(self, hidden_size: int) -> None:
        """Launches routing, exchange and products in every configuration that the number of tokens
        selects, none included; launches that are run would be exchanges."""
        backend, experts = self._backend, self._rule.num_experts
        whole = torch.zeros(2, hidden_size, dtype=backend.dtype, device=backend.device)
        for tokens in (FEW_TOKENS + 1, 65, 129, 257, 16 * MAX_SHARED_TILES + 1):
            # few tokens may be launched with the configuration of many
            config = routing_config(tokens, experts, backend.dtype.itemsize)
            self._route(whole, buckets=False, config=config)
        averages = (*(bound for bound, *_ in _EXPECTED), float("inf"))
        for tokens, average in ((0, 0.0), (1, 0.0), *((2, average) for average in averages)):
            x = whole[:tokens]
            stream = ResidualStream(x.clone(), backend)
            self._exchange_tokens(stream, x, self._routed(x, None), average)

    def __call__(self, stream: ResidualStream, step: Step) -> None:
        """Adds the mixture of the stream's tokens to the stream, which may have none."""
        self._add_tokens(stream, step.inputs.token_places)

    def add_to(self, stream: ResidualStream, terms: Terms | None = None) -> None:
        """See `MixtureMLP.add_to`; without an extension."""
        self._add_tokens(stream, None)

    def _add_tokens(self, stream: ResidualStream, mapping: torch.Tensor | None) -> None:
        # norm and routing are not launched for no tokens
        x = stream.normed(self._norm) if len(stream) else stream.hidden
        slots = mapping if mapping is not None and len(mapping) == len(x) else None
        average = self._average_rows(len(x))
        self._exchange_tokens(stream, x, self._routed(x, slots), average)

    def _routed(self, x: torch.Tensor, slots: torch.Tensor | None) -> RoutedTokens:
        """Returns the places of the tokens' experts, of all ranks."""
        if len(x):
            return self._route(x, buckets=False, slots=slots)
        none = torch.empty(0, self._rule.top_k, device=x.device)
        return RoutedTokens(none, none.int())

    def _exchange_tokens(
        self, stream: ResidualStream, x: torch.Tensor, routed: RoutedTokens, average: float
    ) -> None:
        """Adds the weighted sum of the experts' outputs for x [T, hidden_size] to the stream.

        Args:
            average: rows of a place, if every rank has as many tokens as this one.
        """
        assert self._buffers is not None, "connect was not called"
        exchange, stacked = self._buffers.exchange, self.stacked
        firsts, places = self._firsts, self.num_places
        arrived = exchange.send(x, routed, firsts, places, self._max_few(average))
        added = self._shared(x) if self._shared is not None and len(x) else None
        for weight, rows, out, is_first in (
            (stacked.gate_up, exchange.rows, self._buffers.gated, True),
            (stacked.down, self._buffers.gated, self._buffers.pairs, False),
        ):
            launches = _launches(weight, average, self._backend.dtype)
            for config, came in ((launches.few, arrived.few), (launches.many, arrived.many)):
                if config is not None:
                    expert_product(
                        rows, weight, came, gated=is_first, bias=stacked.biases[not is_first],
                        activation=stacked.activation, out=out, pdl=self._backend.pdl,
                        config=config,
                    )  # fmt: skip
        hidden = stream.hidden
        exchange.combine(
            self._buffers.pairs, routed, firsts, places, residual=hidden, out=hidden, added=added
        )

    def _average_rows(self, tokens: int) -> float:
        """Returns the rows of a place on average, if every rank has so many tokens."""
        assert self._buffers is not None
        exchange = self._buffers.exchange
        return tokens * exchange.size * exchange.top_k / self._placed.local.total

    def _max_few(self, average: float) -> int:
        """Returns up to how many pairs on this rank tiles of few rows are used."""
        if self._backend.dtype.itemsize > 2:
            return NO_LIMIT
        limit = next((most for bound, _, most in _EXPECTED if average <= bound), None)
        return -1 if limit is None else int(limit * self.num_places)


def _launches(weight: ExpertWeights, average: float, dtype: torch.dtype) -> _Launches:
    """Returns the configurations of a product where places have so many rows on average, if other
    ranks have as many tokens as this one."""
    if dtype.itemsize > 2:  # for tests
        return _Launches(replace(WIDE_CONFIG, programs=4), None)
    _, table = TABLES[format_name(weight, quantized=False)]
    rows = next((rows for bound, rows, _ in _EXPECTED if average <= bound), None)
    few = None
    if rows is not None:
        few = next(config for bound, config in table if bound is None or rows <= bound)
    return _Launches(few, table[-1][1])


def connect(
    mixtures: Sequence[ExchangedMixtureMLP], backend: Backend, hidden_size: int, max_tokens: int
) -> None:
    """Gives the layers of a model, once their weights are loaded, the buffers through which they
    exchange tokens. All ranks of the `expert_group` call it at the same time.

    Args:
        mixtures: of one model, at least one.
        backend, hidden_size: of the model.
        max_tokens: the most tokens that a rank has in a step.

    Raises:
        ConfigError: the GPUs cannot reach each other's memory, or the model does not fit the
            kernels.
    """
    first, group = mixtures[0], backend.expert_group
    top_k, dtype = first.router.routing.top_k, backend.dtype
    assert group is not None
    if any((m.channels, m.router.routing.top_k) != (first.channels, top_k) for m in mixtures):
        raise ConfigError(_refusal("layers with other numbers or sizes of experts"))
    if hidden_size * dtype.itemsize % 16:
        raise ConfigError(_refusal(f"a hidden size of {hidden_size}"))
    tokens = max(max_tokens, _MIN_TOKENS)
    layout = ExchangeLayout.of(group.size, tokens, top_k, hidden_size, dtype)
    memory = group.symmetric_buffer(layout.nbytes)
    most = max(mixture.num_places for mixture in mixtures)
    exchange = ExpertExchange(memory, layout, most, top_k, hidden_size, dtype)
    gated, pairs = (
        torch.zeros(exchange.max_pairs, width, dtype=dtype, device=backend.device)
        for width in (first.channels, hidden_size)
    )
    buffers = _Buffers(exchange, gated, pairs)
    for mixture in mixtures:
        mixture.use(buffers)


def _refusal(what: str) -> str:
    return (
        f"parallel.expert_parallel between engines on GPUs does not support {what}: use "
        "parallel.tensor_parallel_size"
    )
