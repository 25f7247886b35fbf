"""The cases of `bench_kernels.py` for quantized experts: both products, and a whole layer, in
float8 and 4-bit groups at Qwen3-30B-A3B's shape, in MXFP4 at gpt-oss-20b's.

A floor holds the bytes of the experts that the routing touches. Inputs of runs lie in different
layers, so that no weights are in the L2 cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from aioinfer.kernels.expert_arguments import SILU, Activation
from aioinfer.kernels.expert_configs import (
    SCANNED_TOKENS,
    TABLES,
    ExpertConfig,
    VectorConfig,
    expert_config,
    vector_config,
)
from aioinfer.kernels.expert_product import expert_product, sum_pairs
from aioinfer.kernels.expert_routing import RoutedTokens, RoutingRule, make_counters, route
from aioinfer.kernels.expert_weights import (
    BLOCK,
    SCALE_OFFSET,
    ExpertWeights,
    PackedExperts,
    ScaledExperts,
    format_name,
    packed_shape,
)
from aioinfer.kernels.grouped_weight import MAX_RUN
from aioinfer.kernels.quantize import GROUP, InputFormat, ScaledInputs, quantize

from benchlib.expert_cases import label
from benchlib.kernel_cases import DEVICE, Case, random_tensor
from tests.kernels.references import dequantized, experts_reference

LAYERS = 3
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048, 8192)
CHECKED = 32
Config = ExpertConfig | VectorConfig


@dataclass(frozen=True, slots=True)
class Shape:
    """A mixture: its format of weights, hidden size, channels, routing and activation."""

    format: str
    hidden: int
    channels: int
    rule: RoutingRule
    activation: Activation = SILU

    @property
    def input_format(self) -> InputFormat | None:
        """How activations of more than one token are quantized."""
        is_scaled = self.format.startswith("fp8")
        grouped = self.format == "fp8 blocks"
        return InputFormat(torch.float8_e4m3fn, grouped) if is_scaled else None


QWEN = RoutingRule(128, 8)
SHAPES = (
    Shape("mxfp4", 2880, 2880, RoutingRule(32, 4), Activation(1.702, 7.0)),
    Shape("fp8", 2048, 768, QWEN),
    Shape("fp8 blocks", 2048, 768, QWEN),
    Shape("int4", 2048, 768, QWEN),
)


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one layer, and its counters."""

    router: torch.Tensor
    gate_up: ExpertWeights
    down: ExpertWeights
    biases: tuple[torch.Tensor, torch.Tensor] | None
    counters: torch.Tensor

    @classmethod
    def random(cls, shape: Shape) -> Layer:
        """Returns a layer whose router spreads random tokens evenly."""
        experts, hidden, channels = shape.rule.num_experts, shape.hidden, shape.channels
        biases = None
        if shape.activation.alpha:
            biases = random_tensor(experts, 2 * channels), random_tensor(experts, hidden)
        return cls(
            random_tensor(experts, hidden, scale=hidden**-0.5),
            random_weight(shape.format, experts, 2 * channels, hidden, 8),
            random_weight(shape.format, experts, hidden, channels, 128),
            biases,
            make_counters(experts, torch.device(DEVICE)),
        )


def random_weight(format: str, experts: int, rows: int, inputs: int, shared: int) -> ExpertWeights:
    """Returns random weights; of blocks, `shared` rows have the same scales."""
    if format.startswith("fp8"):
        values = torch.empty(experts, rows, inputs, dtype=torch.float8_e4m3fn, device=DEVICE)
        for one in values:
            one.copy_(torch.randn(rows, inputs, device=DEVICE) * 64)
        groups, shared = (-(-inputs // GROUP), shared) if "blocks" in format else (1, 1)
        scales = torch.rand(experts, -(-rows // shared), groups, device=DEVICE)
        return ScaledExperts(values, scales / 64 / inputs**0.5, shared)
    is_float = format == "mxfp4"
    run, group = (BLOCK, BLOCK) if is_float else (MAX_RUN, 128)
    place = packed_shape(rows, inputs, run)
    words = torch.randint(-(2**15), 2**15, (experts, *place), dtype=torch.int16, device=DEVICE)
    width = place[0] * place[2]
    if is_float:
        code = 120 + SCALE_OFFSET
        scales = torch.full((experts, place[1], width), code * 0x01010101 - 2**32, device=DEVICE)
        return PackedExperts(words, scales.int(), rows, inputs, group, is_float=True)
    groups = place[1] * 4 * run // group
    floats = torch.rand(experts, groups, width, device=DEVICE) / 5 / inputs**0.5
    return PackedExperts(words, floats.view(torch.int32), rows, inputs, group)


def quantized_expert_cases(tune: bool) -> Iterator[Case]:
    """Both products of every format by themselves, then layers."""
    for shape in SHAPES:
        layers = [Layer.random(shape) for _ in range(LAYERS)]
        for tokens in TOKENS:
            x = random_tensor(tokens, shape.hidden)
            yield from product_cases(shape, x, layers, tune)
            yield layer_case(shape, x, layers)


def taken(
    shape: Shape, x: torch.Tensor, tokens: int, *, pdl: bool = False
) -> torch.Tensor | ScaledInputs:
    """Returns the part of x that a product takes in a step of so many tokens."""
    format = shape.input_format
    return x if format is None or tokens == 1 else quantize(x, format, pdl=pdl)


def product_cases(shape: Shape, x: torch.Tensor, layers: list[Layer], tune: bool) -> Iterator[Case]:
    """Both products."""
    tokens, last, top_k = len(x), slice(max(0, len(x) - CHECKED), len(x)), shape.rule.top_k
    layer = layers[0]
    routed = route(x, layer.router, shape.rule, layer.counters, buckets=tokens > SCANNED_TOKENS)
    if routed.counts is not None:
        routed = replace(routed, counts=routed.counts.clone())
    layer.counters.zero_()
    first = product(shape, layer, taken(shape, x, tokens), routed, is_first=True)

    def error(gated: torch.Tensor, config: Config | None = None) -> float:
        inputs = taken(shape, gated, tokens)
        found = product(shape, layer, inputs, routed, is_first=False, config=config)
        total = found.view(tokens, top_k, -1)[last].double().sum(1)
        expected = reference(shape, layer, x[last], routed, last)
        return float((total - expected).norm() / expected.norm())

    touched, pairs = len(routed.experts.unique()), tokens * top_k
    for is_first in (True, False):
        weight = layer.gate_up if is_first else layer.down
        source = taken(shape, x if is_first else first, tokens)
        experts, rows, inputs = weight.shape
        size = weight.nbytes * touched // experts + pairs * rows * (1 if is_first else 2)
        for config in configs(weight, shape, tokens, tune, is_first=is_first):

            def run(one: Layer, config: Config = config, is_first=is_first, source=source):
                return product(shape, one, source, routed, is_first=is_first, config=config)

            def check(run=run, config=config, is_first=is_first) -> float:
                return error(run(layer)) if is_first else error(first, config)

            yield Case(
                "quantized experts",
                f"{shape.format} {'gate_up' if is_first else 'down'} x{tokens}", label(config),
                [lambda one=one, run=run: run(one) for one in layers], size,
                2.0 * pairs * rows * inputs, check,
            )  # fmt: skip


def product(
    shape: Shape, layer: Layer, x: torch.Tensor | ScaledInputs, routed: RoutedTokens, *,
    is_first: bool,
    config: Config | None = None, pdl: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Runs the first or the second product."""
    weight, biases = layer.gate_up if is_first else layer.down, layer.biases
    return expert_product(
        x, weight, routed, gated=is_first, bias=biases and biases[0 if is_first else 1],
        activation=shape.activation, dtype=torch.bfloat16, config=config, pdl=pdl,
    )  # fmt: skip


def reference(
    shape: Shape, layer: Layer, x: torch.Tensor, routed: RoutedTokens, some: slice
) -> torch.Tensor:
    """Returns the sums of some tokens, with weights that are dequantized an expert at a time."""
    total = torch.zeros(len(x), shape.hidden, dtype=torch.float64, device=DEVICE)
    experts, weights = routed.experts[some], routed.weights[some].double()
    for expert in experts.unique().tolist():
        pair = [one_of(weight, expert) for weight in (layer.gate_up, layer.down)]
        biases = None
        if layer.biases is not None:
            first, second = (bias[expert : expert + 1] for bias in layer.biases)
            biases = first, second
        is_here = experts == expert
        total += experts_reference(
            x.double(), pair[0], pair[1], (weights * is_here).sum(1, keepdim=True),
            torch.zeros(len(x), 1, dtype=torch.int64, device=DEVICE),
            biases=biases, activation=shape.activation,
        )  # fmt: skip
    return total


def one_of(weight: ExpertWeights, expert: int) -> torch.Tensor:
    """Returns the weight of one expert [1, N, K], dequantized."""
    some = slice(expert, expert + 1)
    if isinstance(weight, torch.Tensor):
        return weight[some]
    if isinstance(weight, ScaledExperts):
        one = replace(weight, values=weight.values[some], scales=weight.scales[some])
    else:
        one = replace(weight, words=weight.words[some], scales=weight.scales[some])
    return dequantized(one)


def configs(
    weight: ExpertWeights, shape: Shape, tokens: int, tune: bool, *, is_first: bool
) -> Iterator[Config]:
    """Yields the table's configuration and, to tune, others: all of the table, and variants."""
    name, rule = format_name(weight), shape.rule
    size = 1 if shape.input_format is not None and tokens > 1 else 2
    table: Config = expert_config(tokens, rule.top_k, rule.num_experts, size, name)
    is_vector = tokens == 1 and isinstance(weight, ScaledExperts)
    if is_vector:
        table = vector_config(gated=is_first, itemsize=1)
    yield table
    if not tune:
        return
    scanned, sorted_rows = TABLES[name]
    found = {config for _, config in (scanned if tokens <= SCANNED_TOKENS else sorted_rows)}
    for config in list(found):
        for stages, warps, lines in itertools.product((2, 3, 4, 6), (2, 4, 8), (32, 64, 128)):
            programs = {config.programs, 1, 2} if config.programs else {0}
            for count in programs:
                found.add(replace(config, lines=lines, num_warps=warps, num_stages=stages,
                                  programs=count))  # fmt: skip
    if is_vector:
        for features, step, warps in itertools.product((1, 2, 4, 8), (1024, 2048), (2, 4, 8)):
            yield VectorConfig(features, step, warps)
    is_scanned = tokens <= SCANNED_TOKENS
    for config in found - {table}:
        if not is_scanned or tokens <= config.rows:
            yield config


def layer_case(shape: Shape, x: torch.Tensor, layers: list[Layer]) -> Case:
    """All launches of a layer but the norm, as dependent launches."""
    tokens, residual = len(x), random_tensor(len(x), shape.hidden)
    buckets = tokens > SCANNED_TOKENS

    def run(layer: Layer) -> None:
        routed = route(x, layer.router, shape.rule, layer.counters, buckets=buckets, pdl=True)
        inputs = taken(shape, x, tokens, pdl=True)
        gated = product(shape, layer, inputs, routed, is_first=True, pdl=True)
        inputs = taken(shape, gated, tokens, pdl=True)
        pairs = product(shape, layer, inputs, routed, is_first=False, pdl=True)
        sum_pairs(pairs, routed, residual=residual, out=residual, pdl=True)

    layer = layers[0]
    experts = route(x, layer.router, shape.rule, layer.counters, buckets=False).experts
    share = len(experts.unique()) / shape.rule.num_experts
    size = int(share * (layer.gate_up.nbytes + layer.down.nbytes)) + 3 * x.nbytes
    flops = 2.0 * tokens * shape.hidden * shape.rule.top_k * 3 * shape.channels
    runs: list[Callable[[], object]] = [lambda one=one: run(one) for one in layers]
    return Case("quantized experts", f"{shape.format} layer x{tokens}", "pdl", runs, size, flops)
