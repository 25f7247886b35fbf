"""Random mixtures of experts and loads for the kernels that compute them, and the results beside
those of the references: for the interpreter's tests and the tests on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from aioinfer.kernels.expert_arguments import SILU, Activation
from aioinfer.kernels.expert_configs import (
    SCANNED_TOKENS,
    ExpertConfig,
    PipelinedConfig,
    VectorConfig,
)
from aioinfer.kernels.expert_product import expert_product, sum_pairs
from aioinfer.kernels.expert_routing import (
    MAX_SHARED_TILES,
    RoutedTokens,
    RoutingConfig,
    RoutingRule,
    SharedRoute,
    make_counters,
    route,
)
from aioinfer.kernels.expert_selection import FewTokensConfig
from aioinfer.kernels.expert_sum import CONFIG, summed_product
from aioinfer.kernels.expert_weights import (
    BLOCK,
    ExpertWeights,
    PackedExperts,
    ScaledExperts,
    pack_floats,
)
from aioinfer.kernels.grouped_weight import pack_groups
from aioinfer.kernels.quantize import GROUP, InputFormat, ScaledInputs, quantize
from cases import Pair, normal, poisoned
from references import dequantized, experts_reference, quantize_reference, select_reference


@dataclass(slots=True)
class ExpertCase:
    """A mixture of experts.

    Attributes:
        tokens, hidden, channels: of x, and of an expert.
        rule: how experts are selected.
        favoured: experts that get all tokens; by default the router is random.
        buckets: whether programs find their rows in buckets; by default for more than a few tokens.
        local: the experts that the rank has; by default all.
        format: of the weights: "plain", "fp8" (a scale for each row), "fp8 blocks", "int4" (groups
            of 64 with zero points), "int4 rows" (whole rows without), or "mxfp4".
        quantized: whether float8 weights take quantized activations.
        biased: whether products have biases, and the activation of gpt-oss.
        shared: the expert that all tokens take, behind the others: "gated" or "plain"; "" for none.
    """

    tokens: int
    hidden: int
    channels: int
    rule: RoutingRule
    dtype: torch.dtype
    device: str
    favoured: Sequence[int] = ()
    buckets: bool | None = None
    local: range | None = None
    format: str = "plain"
    quantized: bool = False
    biased: bool = False
    shared: str = ""

    @property
    def num_experts(self) -> int:
        """Of all, an expert that all tokens take included."""
        return self.rule.num_experts + bool(self.shared)

    @property
    def pairs(self) -> int:
        """Of all tokens."""
        return self.tokens * (self.rule.top_k + bool(self.shared))

    @property
    def activation(self) -> Activation:
        """Of the first product."""
        return Activation(1.702, 1.0) if self.biased else SILU

    @property
    def input_format(self) -> InputFormat:
        """Of quantized activations."""
        return InputFormat(torch.float8_e4m3fn, is_grouped="blocks" in self.format)


@dataclass(slots=True)
class Mixture:
    """The inputs of a case."""

    x: torch.Tensor
    router: torch.Tensor
    bias: torch.Tensor | None
    logit_bias: torch.Tensor | None
    gate_up: torch.Tensor
    down: torch.Tensor
    counters: torch.Tensor
    shared: SharedRoute | None


def mixture(case: ExpertCase) -> Mixture:
    """Returns random inputs. Sigmoids have a bias."""
    like = {"dtype": case.dtype, "device": case.device}
    rule, hidden, channels = case.rule, case.hidden, case.channels
    # scores that are not 0 in float32, as all but one would be at larger logits
    router = normal(rule.num_experts, hidden, **like) * (2 / hidden**0.5)
    bias = None
    if rule.is_sigmoid or case.favoured:
        bias = torch.rand(rule.num_experts, device=case.device)
        bias[list(case.favoured)] += 100.0
    count = case.num_experts
    gate_up = normal(count, 2 * channels, hidden, **like) / hidden**0.5
    down = normal(count, hidden, channels, **like) / channels**0.5
    counters = make_counters(count, torch.device(case.device))
    shared = None
    if case.shared:
        gate = normal(hidden, **like) * (2 / hidden**0.5)
        shared = SharedRoute(gate if case.shared == "gated" else None)
    logit_bias = normal(rule.num_experts, **like) if case.biased else None
    x = normal(case.tokens, hidden, **like)
    return Mixture(x, router, bias, logit_bias, gate_up, down, counters, shared)


def routed(
    case: ExpertCase, given: Mixture, config: RoutingConfig | FewTokensConfig | None = None
) -> RoutedTokens:
    """Runs `route`."""
    buckets = case.tokens > SCANNED_TOKENS if case.buckets is None else case.buckets
    return route(
        given.x, given.router, case.rule, given.counters, bias=given.bias,
        logit_bias=given.logit_bias, buckets=buckets, local=case.local, shared=given.shared,
        config=config,
    )  # fmt: skip


def _with_shared(
    given: Mixture, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the weights and experts of normed tokens x (float64), with the expert that all tokens
    take, if there is one."""
    if given.shared is None:
        return weights, experts
    gate, number = given.shared.gate, given.gate_up.shape[0] - 1
    share = x.new_ones(len(x), 1) if gate is None else (x @ gate.double()[:, None]).sigmoid()
    number = torch.full_like(experts[:, :1], number)
    return torch.cat((weights, share), 1), torch.cat((experts, number), 1)


def check_routing(case: ExpertCase, config: RoutingConfig | FewTokensConfig | None = None) -> float:
    """Asserts that experts are those of the reference, and that every pair is in the bucket of its
    expert; returns the largest error of a weight. Two experts may change places whose logits
    float32 cannot tell apart, which is rare: with a bias or groups, of one in a thousand tokens."""
    given = mixture(case)
    found = routed(case, given, config)
    bias = None if given.bias is None else given.bias.double()
    logits = given.x.double() @ given.router.double().T
    logits = logits if given.logit_bias is None else logits + given.logit_bias.double()
    weights, expected = select_reference(logits, case.rule, bias)
    weights, expected = _with_shared(given, given.x.double(), weights, expected)
    experts = found.experts.long()
    assert (experts.sort().values.diff() > 0).all()
    if bias is None and case.rule.num_groups == 1:
        top_k = case.rule.top_k
        assert torch.equal(experts[:, top_k:], expected[:, top_k:])
        chosen, best = (logits.gather(1, each[:, :top_k]) for each in (experts, expected))
        torch.testing.assert_close(chosen, best, rtol=0.0, atol=1e-5 * float(logits.abs().max()))
        assert (experts == expected).float().mean() > 0.99
        differing = torch.zeros(len(experts), dtype=torch.bool, device=experts.device)
    else:
        differing = (experts != expected).any(1)
        assert differing.sum() <= len(experts) // 1000
    if found.counts is not None:
        assert found.rows is not None
        counts = experts.flatten().bincount(minlength=case.num_experts)
        assert torch.equal(found.counts.long(), counts)
        for expert, count in enumerate(counts.tolist()):
            pairs = (experts.flatten() == expert).nonzero().flatten()
            assert torch.equal(found.rows[expert, :count].sort().values.long(), pairs)
    assert not given.counters[:MAX_SHARED_TILES].any()
    return float((found.weights - weights)[~differing].abs().max())


def packed_weight(weight: torch.Tensor, format: str, *, gated: bool) -> ExpertWeights:
    """Returns weights [E, N, K] in a format, random or rounded; of what `gated` blocks, runs of
    eight rows share scales."""
    experts, rows, inputs = weight.shape
    if format == "plain":
        return weight
    if format.startswith("fp8"):
        shared, groups = (1, 1) if format == "fp8" else (8 if gated else 128, -(-inputs // GROUP))
        shape = experts, -(-rows // shared), groups
        scales = 0.003 / inputs**0.5 * (1 + torch.rand(shape, device=weight.device))
        values = (weight.float() / weight.float().abs().amax() * 448).to(torch.float8_e4m3fn)
        return ScaledExperts(values, scales, shared)
    if format == "mxfp4":
        blocks = (experts, rows, -(-inputs // BLOCK))
        like = {"dtype": torch.uint8, "device": weight.device}
        codes = torch.randint(0, 256, (*blocks, BLOCK // 2), **like)
        scales = torch.randint(118, 124, blocks, **like)
        pairs = [pack_floats(*one) for one in zip(codes, scales, strict=True)]
        words, kept = (torch.stack(parts) for parts in zip(*pairs, strict=True))
        return PackedExperts(words, kept, rows, inputs, BLOCK, is_float=True)
    group, has_zeros = (64, True) if format == "int4" else (None, False)
    like = {"device": weight.device}
    packed = []
    for _ in range(experts):
        integers = torch.randint(0, 16, (rows, inputs), **like)
        shape = rows, 1 if group is None else -(-inputs // group)
        scales = (1 + torch.rand(shape, **like)).half() / (5 * inputs**0.5)
        zeros = torch.randint(0, 16, shape, **like) if has_zeros else None
        packed.append(pack_groups(integers, scales, zeros, 4, group))
    words, kept = (torch.stack([getattr(one, name) for one in packed])
                   for name in ("integers", "scales"))  # fmt: skip
    return PackedExperts(words, kept, rows, inputs, packed[0].group, has_zeros)


def _part(weight: ExpertWeights, local: range) -> ExpertWeights:
    some = slice(local.start, local.stop)
    if isinstance(weight, torch.Tensor):
        return weight[some]
    if isinstance(weight, ScaledExperts):
        return replace(weight, values=weight.values[some], scales=weight.scales[some])
    return replace(weight, words=weight.words[some], scales=weight.scales[some])


def _given(case: ExpertCase, x: torch.Tensor) -> torch.Tensor | ScaledInputs:
    return quantize(x, case.input_format) if case.quantized else x


def _weights_and_biases(
    case: ExpertCase, given: Mixture, like: dict[str, Any]
) -> tuple[list[Any], tuple[torch.Tensor, torch.Tensor] | None]:
    """Returns the weights of both products in the case's format, and their biases."""
    weights = [
        packed_weight(weight, case.format, gated=gated)
        for weight, gated in ((given.gate_up, True), (given.down, False))
    ]
    if not case.biased:
        return weights, None
    shapes = ((case.rule.num_experts, weight.shape[1]) for weight in weights)
    gate_up_bias, down_bias = (normal(*shape, **like) for shape in shapes)
    return weights, (gate_up_bias, down_bias)


def whole(
    case: ExpertCase,
    config: ExpertConfig | VectorConfig | PipelinedConfig | None = None,
    *,
    residual: bool = True,
    added: bool = False,
) -> Pair:
    """Runs all launches over poisoned outputs; the counters are 0 afterwards. Those of experts that
    the rank does not have are left out of the expected sum."""
    given, like = mixture(case), {"dtype": case.dtype, "device": case.device}
    found = routed(case, given)
    tokens, pairs = case.tokens, case.pairs
    others = [
        normal(tokens, case.hidden, **like) if is_there else None for is_there in (residual, added)
    ]
    local = range(case.num_experts) if case.local is None else case.local
    weights, biases = _weights_and_biases(case, given, like)
    bias = [None if biases is None else one[local.start : local.stop] for one in biases or (0, 0)]
    first = None if isinstance(config, PipelinedConfig) else config
    gated = expert_product(
        _given(case, given.x), _part(weights[0], local), found, gated=True, bias=bias[0],
        activation=case.activation, out=poisoned(pairs, case.channels, **like), config=first,
        dtype=case.dtype,
    )  # fmt: skip
    if case.quantized and case.local is not None:
        gated.nan_to_num_()  # rows that no expert here has; quantized, they are nobody's
    outputs = expert_product(
        _given(case, gated), _part(weights[1], local), found, gated=False, bias=bias[1],
        out=poisoned(pairs, case.hidden, **like), config=config, dtype=case.dtype,
    )  # fmt: skip
    out = poisoned(tokens, case.hidden, **like)
    sum_pairs(outputs, found, residual=others[0], added=others[1], out=out)
    assert not given.counters.any()
    is_local = (found.experts >= local.start) & (found.experts < local.stop)
    factors = found.weights.double() * is_local

    def rounded(values: torch.Tensor) -> torch.Tensor:
        return dequantized(quantize_reference(values, case.input_format)).double()

    expected = experts_reference(
        given.x.double(), *map(dequantized, weights), factors, found.experts.long(),
        biases=biases, activation=case.activation,
        **{"rounded": rounded} if case.quantized else {},
    )  # fmt: skip
    for other in others:
        if other is not None:
            expected += other.double()
    return out, expected


def one_token(case: ExpertCase, config: VectorConfig = CONFIG) -> Pair:
    """Runs the launches of one token, of which the first ones do its norm and the last one sums,
    over poisoned outputs."""
    given, like = mixture(case), {"dtype": case.dtype, "device": case.device}
    x, eps = 3.0 * given.x, 1e-3
    norm = (0.5 + torch.rand(case.hidden, device=case.device)).to(case.dtype)
    found = route(
        x, given.router, case.rule, given.counters, bias=given.bias, logit_bias=given.logit_bias,
        buckets=False, local=case.local, norm_weight=norm, eps=eps, shared=given.shared,
    )  # fmt: skip
    local = range(case.num_experts) if case.local is None else case.local
    some = slice(local.start, local.stop)
    weights, biases = _weights_and_biases(case, given, like)
    bias = [None if biases is None else one[some] for one in biases or (0, 0)]
    gated = expert_product(
        x, _part(weights[0], local), found, gated=True, bias=bias[0], activation=case.activation,
        norm_weight=norm, out=poisoned(case.pairs, case.channels, **like),
    )  # fmt: skip
    residual, added = (normal(1, case.hidden, **like) for _ in range(2))
    out = summed_product(
        gated, _part(weights[1], local), found, bias=bias[1], residual=residual, added=added,
        out=poisoned(1, case.hidden, **like), config=config,
    )  # fmt: skip
    normed = x.double() * torch.rsqrt(x.double().square().mean() + eps) * norm.double()
    logits = normed @ given.router.double().T
    logits = logits if given.logit_bias is None else logits + given.logit_bias.double()
    factors, experts = select_reference(
        logits, case.rule, None if given.bias is None else given.bias.double()
    )
    factors, experts = _with_shared(given, normed, factors, experts)
    assert torch.equal(found.experts.sort().values.long(), experts.sort().values)
    factors *= (experts >= local.start) & (experts < local.stop)
    expected = experts_reference(
        normed, *map(dequantized, weights), factors, experts, biases=biases,
        activation=case.activation,
    )  # fmt: skip
    return out, expected + residual.double() + added.double()
