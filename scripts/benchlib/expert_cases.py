"""The cases of `bench_kernels.py` for mixtures of experts: routing, the two products and the sum at
Qwen3-30B-A3B's shape, for tokens that are routed evenly and for a load in which a tenth of the
experts take half of the tokens.

A floor holds the bytes of the experts that the routing touches. Inputs of runs lie in different
layers, so that no weights are in the L2 cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from aioinfer.kernels.expert_configs import (
    SCANNED_TOKENS,
    ExpertConfig,
    PipelinedConfig,
    VectorConfig,
    expert_config,
    vector_config,
)
from aioinfer.kernels.expert_product import expert_product, sum_pairs
from aioinfer.kernels.expert_routing import (
    MAX_SHARED_TILES,
    RoutedTokens,
    RoutingConfig,
    RoutingRule,
    make_counters,
    padded_experts,
    route,
    routing_config,
    tile_config,
)
from aioinfer.kernels.expert_selection import FewTokensConfig
from aioinfer.kernels.expert_sum import CONFIG, summed_product
from aioinfer.kernels.launch import is_hopper
from aioinfer.kernels.norm import rms_norm

from benchlib.kernel_cases import DEVICE, Case, random_tensor
from tests.kernels.references import experts_reference, select_reference

HIDDEN, CHANNELS = 2048, 768
RULE = RoutingRule(128, 8)
LAYERS = 4  # 1.2 GB each
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048, 8192)
SKEWED_TOKENS = (32, 128, 256, 8192)
#: Products are checked on so many tokens, the last ones.
CHECKED = 32
SHARED_BYTES = 220_000  # of a program
Config = ExpertConfig | VectorConfig | PipelinedConfig


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one layer, and its counters."""

    router: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    counters: torch.Tensor

    @classmethod
    def random(cls) -> Layer:
        """Returns a layer whose router spreads random tokens evenly."""
        experts = RULE.num_experts
        return cls(
            random_tensor(experts, HIDDEN, scale=HIDDEN**-0.5),
            random_tensor(experts, 2 * CHANNELS, HIDDEN, scale=HIDDEN**-0.5),
            random_tensor(experts, HIDDEN, CHANNELS, scale=CHANNELS**-0.5),
            make_counters(experts, torch.device(DEVICE)),
        )

    def half(self, *, by_expert: bool) -> Layer:
        """Returns the first of two ranks' share: half of the experts, or half of the channels of
        each."""
        if by_expert:
            some = slice(RULE.num_experts // 2)
            return replace(self, gate_up=self.gate_up[some], down=self.down[some])
        down = self.down[..., : CHANNELS // 2].contiguous()
        return replace(self, gate_up=self.gate_up[:, :CHANNELS].contiguous(), down=down)


def expert_cases(tune: bool) -> Iterator[Case]:
    """Every launch of a layer by itself, then all of them."""
    layers = [Layer.random() for _ in range(LAYERS)]
    for tokens in TOKENS:
        x = random_tensor(tokens, HIDDEN)
        yield from routing_cases(f"routing x{tokens}", x, layers, tune)
        yield from product_cases(f"x{tokens}", x, layers, None, tune)
        yield layer_case(f"layer x{tokens}", x, layers)
    yield from one_token_cases(layers)
    for by_expert, kind in ((False, "channels"), (True, "experts")):
        halves = [layer.half(by_expert=by_expert) for layer in layers]
        for tokens in TOKENS:
            x = random_tensor(tokens, HIDDEN)
            yield layer_case(f"half of the {kind} x{tokens}", x, halves)
    for tokens in SKEWED_TOKENS:
        x = random_tensor(tokens, HIDDEN)
        yield from product_cases(f"skewed x{tokens}", x, layers, skewed(tokens), tune)


def skewed(tokens: int) -> RoutedTokens:
    """Returns a load in which a tenth of the experts take half of the tokens."""
    experts, top_k = RULE.num_experts, RULE.top_k
    likely = torch.ones(experts)
    hot = experts // 10
    likely[:hot] = (experts - hot) / hot
    chosen = torch.multinomial(likely.expand(tokens, -1), top_k).to(DEVICE)
    return with_buckets(torch.full((tokens, top_k), 1 / top_k, device=DEVICE), chosen)


def with_buckets(weights: torch.Tensor, chosen: torch.Tensor) -> RoutedTokens:
    """Returns the routing of tokens to `chosen` [T, top_k] as `route` would."""
    tokens, top_k = chosen.shape
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    counts = flat.bincount(minlength=RULE.num_experts)
    starts = counts.cumsum(0) - counts
    rows = torch.zeros(RULE.num_experts, tokens, dtype=torch.int32, device=DEVICE)
    place = torch.arange(tokens * top_k, device=DEVICE) - starts[flat[order]]
    rows[flat[order], place] = order.int()
    return RoutedTokens(weights, chosen.int(), counts.int(), rows)


def routing_cases(title: str, x: torch.Tensor, layers: list[Layer], tune: bool) -> Iterator[Case]:
    """Router, selection and buckets in one launch."""
    tokens, buckets = len(x), len(x) > SCANNED_TOKENS

    def run(layer: Layer, config: RoutingConfig | FewTokensConfig) -> RoutedTokens:
        routed = route(x, layer.router, RULE, layer.counters, buckets=buckets, config=config)
        layer.counters.zero_()  # as the sum does in a layer
        return routed

    def check(config: RoutingConfig | FewTokensConfig) -> float:
        layer = layers[0]
        weights, chosen = select_reference(x.double() @ layer.router.double().T, RULE)
        routed = run(layer, config)
        is_same = routed.experts == chosen
        assert is_same.float().mean() > 0.999  # scores that differ by less than a rounding
        return float((routed.weights - weights)[is_same].norm() / weights.norm())

    table = routing_config(tokens, RULE.num_experts)
    size = x.nbytes + layers[0].router.nbytes
    tuned = routing_variants(tokens) if tune else []
    tile = tile_config(tokens, RULE.num_experts)
    configs = dict.fromkeys([table, tile, *selection_variants(tokens, tile), *tuned])
    for config in configs:
        yield Case(
            "experts", title, f"{routing_label(config)} (with a memset)",
            [lambda layer=layer, c=config: run(layer, c) for layer in layers], size,
            check=lambda c=config: check(c),
        )  # fmt: skip


def routing_label(config: RoutingConfig | FewTokensConfig) -> str:
    name = f"e{config.experts} k{config.step} w{config.num_warps}"
    if isinstance(config, FewTokensConfig):
        return f"few {name}{' early' * config.early_weights}"
    return f"t{config.tokens} {name} s{config.num_stages}{' keys' * config.by_keys}"


def selection_variants(
    tokens: int, tile: RoutingConfig
) -> Iterator[RoutingConfig | FewTokensConfig]:
    """Yields the configurations of `kernels.expert_selection` to try."""
    if tile.tokens == 16:  # larger tiles take a minute to compile
        for experts, warps in itertools.product({tile.experts, 16, 32}, (2, 4)):
            yield replace(tile, experts=experts, num_warps=warps, by_keys=True)
    if tokens <= MAX_SHARED_TILES:
        for experts, warps in itertools.product((1, 2, 4), (1, 2)):
            yield FewTokensConfig(experts, num_warps=warps)


def routing_variants(tokens: int) -> Iterator[RoutingConfig]:
    padded = padded_experts(RULE.num_experts)
    for tile, part, step, warps, stages in itertools.product(
        (16, 32, 64), (16, 32, 64, padded), (64, 128, 256, 512), (1, 2, 4, 8), (3, 5)
    ):
        shares = part < padded
        few = tile == 16 or tokens > 16
        fits = (tile + part) * step * 2 * stages <= SHARED_BYTES
        config = RoutingConfig(tile, part, step, warps, stages)
        if fits and few:
            if shares and -(-tokens // tile) > MAX_SHARED_TILES:
                continue
            yield config


def product_cases(
    title: str, x: torch.Tensor, layers: list[Layer], given: RoutedTokens | None, tune: bool
) -> Iterator[Case]:
    """Both products and the sum, for the routing of a layer or a given one."""
    tokens, last = len(x), slice(max(0, len(x) - CHECKED), len(x))
    layer = layers[0]
    routed = given
    if routed is None:
        buckets = tokens > SCANNED_TOKENS
        routed = route(x, layer.router, RULE, layer.counters, buckets=buckets)
        if routed.counts is not None:
            routed = replace(routed, counts=routed.counts.clone())
        layer.counters.zero_()
    touched, pairs = len(routed.experts.unique()), tokens * RULE.top_k
    gated = expert_product(x, layer.gate_up, routed, gated=True)
    outputs = expert_product(gated, layer.down, routed, gated=False)
    expected = experts_reference(
        x[last].double(), layer.gate_up, layer.down, routed.weights[last].double(),
        routed.experts[last],
    )  # fmt: skip

    def error(first: Callable[[], torch.Tensor], second: Config | None = None) -> float:
        found = expert_product(first(), layer.down, routed, gated=False, config=second)
        total = found.view(tokens, RULE.top_k, HIDDEN)[last].double().sum(1)
        return float((total - expected).norm() / expected.norm())

    kept = replace(routed, counts=None, rows=None)  # counters are left as they are
    for is_first in (True, False):
        source = x if is_first else gated
        name = "gate_up" if is_first else "down"
        width, inputs = (2 * CHANNELS, HIDDEN) if is_first else (HIDDEN, CHANNELS)
        size = touched * width * inputs * 2 + source.nbytes + pairs * width * (1 if is_first else 2)
        for config in product_configs(tokens, routed, is_first, tune):

            def run(one: Layer, config: Config = config, is_first: bool = is_first, x=source):  # type: ignore[no-untyped-def]
                weight = one.gate_up if is_first else one.down
                return expert_product(x, weight, routed, gated=is_first, config=config)

            check = (
                (lambda run=run: error(lambda: run(layer)))
                if is_first
                else (lambda c=config: error(lambda: gated, c))
            )
            yield Case(
                "experts", f"{name} {title}", label(config),
                [lambda one=one, run=run: run(one) for one in layers], size,
                2.0 * pairs * width * inputs, check,
            )  # fmt: skip
    residual = random_tensor(tokens, HIDDEN)
    yield Case(
        "experts", f"sum {title}", "", [lambda: sum_pairs(outputs, kept, residual=residual)],
        outputs.nbytes + 2 * residual.nbytes,
    )  # fmt: skip


def product_configs(tokens: int, routed: RoutedTokens, gated: bool, tune: bool) -> Iterator[Config]:
    """Yields the table's configuration and, to tune, others."""
    scanned = routed.counts is None
    table: Config = expert_config(tokens, RULE.top_k, RULE.num_experts)
    if scanned and tokens == 1:
        table = vector_config(gated=gated)
    yield table
    if not gated and not scanned and is_hopper(torch.device(DEVICE)):
        yield PipelinedConfig()
    if not tune:
        return
    if scanned and tokens == 1:
        for features, step, warps in itertools.product((1, 2, 4, 8), (256, 1024, 2048), (2, 4, 8)):
            config: Config = VectorConfig(features, step, warps)
            if config != table and features * step >= warps * 256:
                yield config
    for config in tile_variants(tokens, scanned):
        if config != table:
            yield config


def tile_variants(tokens: int, scanned: bool) -> Iterator[ExpertConfig]:
    average = tokens * RULE.top_k / RULE.num_experts
    if average < 64:
        widths = [8, 16] if tokens <= 8 else [16] if scanned else [16, 32, 64]
        shapes = itertools.product((32, 64, 128), widths, (64, 128, 256), (4,), (3, 4, 6))
    else:
        shapes = itertools.product((128, 256), (64, 128, 256), (64,), (4, 8), (3, 4))
    for lines, rows, step, warps, stages in shapes:
        fits = (lines + rows) * step * 2 * stages <= SHARED_BYTES
        sums = lines * rows / (warps * 32)
        programs = min(3, SHARED_BYTES // ((lines + rows) * step * 2 * stages))
        if fits and sums <= 128:
            for tma in (True, False):
                for count in (0,) if scanned else (0, programs):
                    for tail in (0, 64) if rows >= 128 else (0,):
                        yield ExpertConfig(lines, rows, step, warps, stages, tma, count, tail)


def label(config: Config) -> str:
    if isinstance(config, VectorConfig):
        return f"vector n{config.features} k{config.step} w{config.num_warps}"
    if isinstance(config, PipelinedConfig):
        return f"pipelined s{config.stages}"
    name = f"n{config.lines} m{config.rows} k{config.step} w{config.num_warps}"
    return f"{name} s{config.num_stages}{' tma' * config.tma} p{config.programs} t{config.tail}"


def layer_case(title: str, x: torch.Tensor, layers: list[Layer]) -> Case:
    """All launches of a layer but the norm, as dependent launches."""
    residual = random_tensor(len(x), HIDDEN)
    buckets = len(x) > SCANNED_TOKENS
    count, _, channels = layers[0].down.shape
    local = None if count == RULE.num_experts else range(count)

    def run(layer: Layer) -> None:
        routed = route(
            x, layer.router, RULE, layer.counters, buckets=buckets, local=local, pdl=True
        )
        gated = expert_product(x, layer.gate_up, routed, gated=True, pdl=True)
        pairs = expert_product(gated, layer.down, routed, gated=False, pdl=True)
        sum_pairs(pairs, routed, residual=residual, out=residual, pdl=True)

    routed = route(x, layers[0].router, RULE, layers[0].counters, buckets=False)
    here = routed.experts[routed.experts < count]
    size = layers[0].router.nbytes + len(here.unique()) * 3 * channels * HIDDEN * 2 + 3 * x.nbytes
    flops = 2.0 * HIDDEN * (len(x) * RULE.num_experts + len(here) * 3 * channels)
    runs: list[Callable[[], object]] = [lambda layer=layer: run(layer) for layer in layers]
    return Case("experts", title, "pdl", runs, size, flops)


def one_token_cases(layers: list[Layer]) -> Iterator[Case]:
    """The norm and the launches of a layer for one token: five of them, and three, of which the
    first two do the norm and the last one sums. Sums by themselves with other tiles."""
    x, norm = random_tensor(1, HIDDEN), 1.0 + random_tensor(HIDDEN)
    residual = random_tensor(1, HIDDEN)

    def five(layer: Layer, *, pdl: bool = True) -> torch.Tensor:
        normed = rms_norm(x, norm, 1e-6, pdl=pdl)
        routed = route(normed, layer.router, RULE, layer.counters, buckets=False, pdl=pdl)
        gated = expert_product(normed, layer.gate_up, routed, gated=True, pdl=pdl)
        pairs = expert_product(gated, layer.down, routed, gated=False, pdl=pdl)
        return sum_pairs(pairs, routed, residual=residual, pdl=pdl)

    def three(layer: Layer, config: VectorConfig = CONFIG, *, pdl: bool = True) -> torch.Tensor:
        routed = route(
            x, layer.router, RULE, layer.counters, buckets=False, norm_weight=norm, pdl=pdl
        )
        gated = expert_product(x, layer.gate_up, routed, gated=True, norm_weight=norm, pdl=pdl)
        return summed_product(gated, layer.down, routed, residual=residual, pdl=pdl, config=config)

    def check(config: VectorConfig) -> float:
        expected = five(layers[0], pdl=False)
        found = three(layers[0], config, pdl=False)
        return float((found - expected).float().norm() / expected.float().norm())

    size = layers[0].router.nbytes + RULE.top_k * 3 * CHANNELS * HIDDEN * 2
    fives: list[Callable[[], object]] = [lambda layer=layer: five(layer) for layer in layers]
    yield Case("experts", "one token with its norm", "five launches", fives, size)
    for features, step, warps in itertools.product((1, 2, 4), (256, 512, 1024), (1, 2, 4)):
        if step != 256 * warps:
            continue
        config = VectorConfig(features, step, warps)
        yield Case(
            "experts", "one token with its norm", f"three launches, sum {label(config)}",
            [lambda layer=layer, c=config: three(layer, c) for layer in layers], size,
            check=lambda c=config: check(c),
        )  # fmt: skip
