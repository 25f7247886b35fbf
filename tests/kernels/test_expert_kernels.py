"""Routing, products and sums of mixtures of experts at tiny sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from aioinfer.kernels.expert_configs import ExpertConfig, VectorConfig, expert_config
from aioinfer.kernels.expert_product import expert_product
from aioinfer.kernels.expert_routing import (
    CopyTable,
    RoutedTokens,
    RoutingConfig,
    RoutingRule,
    SharedRoute,
    make_counters,
    padded_experts,
    route,
    supports_rule,
)
from aioinfer.kernels.expert_selection import FewTokensConfig
from aioinfer.kernels.expert_sum import CONFIG, summed_product
from aioinfer.kernels.expert_weights import MAX_SCALE, PackedExperts, pack_floats
from cases import error
from expert_cases import ExpertCase, check_routing, one_token, packed_weight, whole
from references import dequantized, select_reference

from aioinfer.layers.formats.mxfp4 import dequantize

RULE = RoutingRule(6, 3)
#: Groups, sigmoids, and a number of experts that is no power of two.
GROUPED = RoutingRule(24, 3, True, False, 2.5, num_groups=3, top_groups=2)


def case(tokens: int, rule: RoutingRule = RULE, **options: object) -> ExpertCase:
    values = {"dtype": torch.float32, **options}
    return ExpertCase(tokens, 48, 24, rule, device="cpu", **values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "rule", [RULE, GROUPED, replace(GROUPED, group_best=1), RoutingRule(40, 1, is_normalized=False)]
)
@pytest.mark.parametrize("tokens", [1, 21])
def test_routing(rule: RoutingRule, tokens: int) -> None:
    assert check_routing(case(tokens, rule)) < 1e-5


def test_routing_with_biased_logits() -> None:
    assert check_routing(case(9, biased=True)) < 1e-5


@pytest.mark.parametrize("shared", ["gated", "plain"])
@pytest.mark.parametrize(
    ("tokens", "config"), [(1, None), (21, None), (19, RoutingConfig(16, 16, 32, 4, 2))]
)
def test_an_expert_that_all_tokens_take(
    tokens: int, config: RoutingConfig | None, shared: str
) -> None:
    """Routed by a program of its own, for few tokens and for tiles; and multiplied like others, up
    to the sum of one token."""
    assert check_routing(case(tokens, GROUPED, shared=shared), config) < 1e-5
    if config is None:
        assert error(whole(case(tokens, shared=shared))) < 1e-5
    if tokens == 1:
        assert error(one_token(case(1, shared=shared))) < 1e-5


def test_programs_share_the_experts_of_a_tile_of_tokens() -> None:
    rule = RoutingRule(64, 8)
    for part in (16, 64):
        assert check_routing(case(19, rule), RoutingConfig(16, part, 32, 4, 2)) < 1e-5


#: The variants of `expert_selection`.
VARIANTS = (
    RoutingConfig(16, 64, 32, 4, 2, by_keys=True),
    FewTokensConfig(1, 32),
    FewTokensConfig(4, 64, early_weights=False),
)


@pytest.mark.extended
@pytest.mark.parametrize("config", VARIANTS)
@pytest.mark.parametrize(
    "rule", [RULE, GROUPED, RoutingRule(40, 1, is_normalized=False), RoutingRule(6, 3, True)]
)
def test_variants_of_routing(config: RoutingConfig | FewTokensConfig, rule: RoutingRule) -> None:
    if isinstance(config, RoutingConfig):
        config = replace(config, experts=padded_experts(rule.num_experts))
    for tokens in (1, 5):
        one = case(tokens, rule, buckets=tokens > 1, biased=True)
        assert check_routing(one, config) < 1e-5


@pytest.mark.parametrize(
    "config", [None, RoutingConfig(16, 16, 32, 4, 2, by_keys=True), FewTokensConfig(2, 16)]
)
@pytest.mark.parametrize("rule", [RULE, GROUPED])
def test_equal_scores_go_to_the_first_experts(
    rule: RoutingRule, config: RoutingConfig | FewTokensConfig | None
) -> None:
    x, counters = torch.randn(2, 16), make_counters(rule.num_experts, torch.device("cpu"))
    found = route(x, torch.zeros(rule.num_experts, 16), rule, counters, config=config)
    assert found.experts.tolist() == [[0, 1, 2]] * 2
    _, expected = select_reference(torch.zeros(2, rule.num_experts), rule)
    assert torch.equal(found.experts.long(), expected)


@pytest.mark.parametrize(("tokens", "config"), [(1, None), (21, None), (1, FewTokensConfig(1, 16))])
def test_tokens_are_divided_among_copies_and_counted(
    tokens: int, config: FewTokensConfig | None
) -> None:
    """Padding, which has no slots, is routed like the rest and not counted."""
    places = [[3], [0, 8], [1], [2, 4, 7], [5], [6]]
    table = torch.tensor([[*some, *[some[0]] * (3 - len(some))] for some in places]).int()
    counts = torch.tensor([len(some) for some in places]).int()
    x, weight = torch.randn(tokens, 32), torch.randn(6, 32)
    totals, counters = torch.full((9,), 5).int(), make_counters(9, torch.device("cpu"))
    slots = torch.where(torch.arange(tokens) % 4 == 3, -1, torch.arange(tokens))
    copies = CopyTable(table, counts)
    found = route(
        x, weight, RULE, counters, copies=copies, totals=totals, slots=slots, config=config
    )
    plain = route(x, weight, RULE, make_counters(6, torch.device("cpu")), config=config)
    assert torch.equal(found.weights, plain.weights)
    expected = [
        [places[expert][token % len(places[expert])] for expert in experts]
        for token, experts in enumerate(plain.experts.tolist())
    ]
    assert found.experts.tolist() == expected
    assert found.counts is not None
    assert torch.equal(found.counts.long(), found.experts.flatten().bincount(minlength=9))
    real = found.experts[slots >= 0].flatten().bincount(minlength=9)
    assert torch.equal(totals.long() - 5, real)
    route(x, weight, RULE, make_counters(9, torch.device("cpu")), copies=copies, totals=totals)
    assert torch.equal(totals.long() - 5, real + found.counts)


@pytest.mark.parametrize(
    "config", [None, RoutingConfig(16, 16, 32, 4, 2, by_keys=True), FewTokensConfig(1, 16)]
)
def test_a_token_of_nan_spoils_no_other(config: RoutingConfig | FewTokensConfig | None) -> None:
    x = torch.randn(18, 16)
    x[3] = torch.nan
    counters = make_counters(6, torch.device("cpu"))
    found = route(x, torch.randn(6, 16), RULE, counters, config=config)
    assert found.weights[3].isnan().all()
    assert len(set(found.experts[3].tolist())) == 3
    assert found.experts.min() >= 0
    assert found.experts.max() < 6
    assert found.weights.isnan().any(1).sum() == 1


@pytest.mark.parametrize(
    ("tokens", "buckets", "config"),
    [
        (1, False, None),
        (2, False, ExpertConfig(16, 8, 32, 4, 2, tma=False)),
        (2, True, ExpertConfig(16, 8, 32, 4, 2, tma=False)),
        (18, True, ExpertConfig(32, 16, 16, 4, 2)),
        (18, True, ExpertConfig(32, 16, 32, 4, 2, programs=3, tail=8)),
    ],
)
def test_a_mixture(tokens: int, buckets: bool, config: ExpertConfig | None) -> None:
    """Tiles that divide neither features nor inputs; more rows than a tile has."""
    assert error(whole(case(tokens, buckets=buckets), config, added=tokens == 2)) < 1e-5


def test_a_mixture_in_float16() -> None:
    assert error(whole(case(3, RoutingRule(5, 1), dtype=torch.float16))) < 2e-3


def test_experts_that_get_every_token_and_those_that_get_none() -> None:
    config = ExpertConfig(32, 8, 32, 4, 2)
    for tokens, buckets in ((9, True), (8, False)):
        one = case(tokens, RoutingRule(6, 2), favoured=(1, 5), buckets=buckets)
        assert error(whole(one, config, residual=False)) < 1e-5


@pytest.mark.parametrize("local", [range(2), range(2, 6)])
def test_a_rank_with_some_of_the_experts(local: range) -> None:
    """For one token, for a few, and in buckets, with narrower last tiles and by single programs."""
    tiles = ExpertConfig(32, 16, 32, 4, 2, programs=3, tail=8)
    for tokens, buckets, config in ((1, False, None), (7, False, None), (18, True, tiles)):
        assert error(whole(case(tokens, local=local, buckets=buckets), config)) < 1e-5


@pytest.mark.parametrize("format", ["plain", "fp8"])
@pytest.mark.parametrize("local", [None, range(2, 5)])
def test_one_token_in_three_launches(format: str, local: range | None) -> None:
    options = {"format": format, "local": local, "buckets": False, "biased": local is not None}
    for config in (CONFIG,) if local is None else (VectorConfig(1, 16, 1), VectorConfig(4, 8, 1)):
        assert error(one_token(case(1, **options), config)) < 1e-5


def test_norms_of_other_products_are_refused() -> None:
    x, router = torch.randn(1, 48), torch.randn(6, 48)
    weight, norm = torch.randn(6, 48, 48), torch.ones(48)
    counters = make_counters(6, torch.device("cpu"))
    routed = route(x, router, RULE, counters, buckets=False)
    with pytest.raises(ValueError, match="if the routing did it"):
        expert_product(x, weight, routed, gated=True, norm_weight=norm)
    with pytest.raises(ValueError, match="does no norm"):
        route(x, router, RULE, counters, norm_weight=norm, config=RoutingConfig(16, 16, 32, 4, 2))
    with pytest.raises(ValueError, match="only one token without buckets"):
        summed_product(
            torch.randn(6, 48), weight, route(torch.randn(2, 48), router, RULE, counters)
        )


@pytest.mark.parametrize(("tokens", "buckets"), [(1, False), (8, False), (9, True)])
def test_a_rank_whose_experts_get_nothing_or_everything(tokens: int, buckets: bool) -> None:
    one = case(tokens, RoutingRule(6, 2), favoured=(1, 5), buckets=buckets)
    for local in (range(2, 5), range(1)):
        found, _ = whole(replace(one, local=local), residual=False)
        assert torch.equal(found, torch.zeros_like(found))
    found, expected = whole(replace(one, local=range(1, 6)), residual=False)
    assert expected.abs().min() > 0
    assert error((found, expected)) < 1e-5


FORMATS = ("fp8", "fp8 blocks", "int4", "int4 rows", "mxfp4")


def quantized_case(tokens: int, format: str, **options: object) -> ExpertCase:
    values = {"dtype": torch.float32, "format": format, **options}
    return ExpertCase(tokens, 160, 40, RULE, device="cpu", **values)  # type: ignore[arg-type]


@pytest.mark.extended
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("tokens", "config"),
    [(1, None), (3, None), (18, ExpertConfig(32, 16, 32, 4, 2, programs=3, tail=8))],
)
def test_quantized_weights(format: str, tokens: int, config: ExpertConfig | None) -> None:
    """Inputs that are no whole units, features that are no whole tiles."""
    assert error(whole(quantized_case(tokens, format), config)) < 1e-5


@pytest.mark.extended
@pytest.mark.parametrize("format", ["fp8", "fp8 blocks"])
@pytest.mark.parametrize("tokens", [2, 18])
def test_quantized_activations(format: str, tokens: int) -> None:
    config = ExpertConfig(32, 16, 64, 4, 2)
    assert error(whole(quantized_case(tokens, format, quantized=True), config)) < 1e-2


@pytest.mark.extended
@pytest.mark.parametrize("format", ["plain", "fp8", "mxfp4"])
@pytest.mark.parametrize("tokens", [1, 4])
def test_biases_and_the_clamped_activation(format: str, tokens: int) -> None:
    assert error(whole(quantized_case(tokens, format, biased=True))) < 1e-5


@pytest.mark.extended
@pytest.mark.parametrize("format", FORMATS)
def test_a_rank_with_some_of_the_quantized_experts(format: str) -> None:
    one = quantized_case(5, format, local=range(2, 5), buckets=format == "fp8")
    assert error(whole(one)) < 1e-5


def test_large_scales_of_blocks_are_shifted() -> None:
    weight = packed_weight(torch.empty(2, 16, 64), "mxfp4", gated=False)
    assert isinstance(weight, PackedExperts)
    shifted = replace(weight, shift=3)
    assert torch.equal(dequantized(shifted), 8 * dequantized(weight))
    x, chosen = torch.randn(2, 64), torch.tensor([[0], [1]], dtype=torch.int32)
    found = [
        expert_product(x, one, RoutedTokens(torch.ones(2, 1), chosen), gated=False)
        for one in (weight, shifted)
    ]
    assert torch.equal(found[1], 8 * found[0])


def test_numbers_in_four_bits_are_those_of_the_standard() -> None:
    blocks = torch.randint(0, 256, (20, 5, 16), dtype=torch.uint8)
    scales = torch.randint(0, MAX_SCALE + 1, (20, 5), dtype=torch.uint8)
    words, kept = pack_floats(blocks, scales)
    packed = PackedExperts(words[None], kept[None], 20, 160, 32, is_float=True)
    assert torch.equal(dequantized(packed)[0], dequantize(blocks, scales))


def test_every_number_of_tokens_has_a_configuration() -> None:
    rows = [expert_config(tokens, 8, 128).rows for tokens in (2, 8, 9, 17, 129, 1024, 9999)]
    assert rows == sorted(rows)
    assert rows[0] == 8
    assert rows[-1] == 128


def test_what_does_not_fit_is_refused() -> None:
    assert not supports_rule(RoutingRule(36, 2, num_groups=3, top_groups=1))
    counters = make_counters(6, torch.device("cpu"))
    with pytest.raises(ValueError, match="not supported"):
        route(torch.zeros(1, 8), torch.zeros(6, 8), RoutingRule(6, 7), counters)
    with pytest.raises(ValueError, match="x must be"):
        route(torch.zeros(1, 8), torch.zeros(6, 9), RULE, counters)
    given = torch.zeros(1, 8), torch.zeros(6, 8), RULE, counters
    with pytest.raises(ValueError, match="neither copies nor other ranks"):
        route(*given, local=range(3), shared=SharedRoute())
    routed = RoutedTokens(torch.zeros(17, 3), torch.zeros(17, 3, dtype=torch.int32))
    with pytest.raises(ValueError, match="need buckets"):
        expert_product(torch.zeros(17, 8), torch.zeros(6, 32, 8), routed, gated=True)
    few = RoutedTokens(torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.int32), local=range(2, 4))
    with pytest.raises(ValueError, match=r"of the experts range\(2, 4\), not of 6"):
        expert_product(torch.zeros(2, 8), torch.zeros(6, 32, 8), few, gated=True)
    with pytest.raises(ValueError, match="multiple of 8"):
        expert_product(torch.zeros(17, 8), torch.zeros(6, 24, 8), routed, gated=True)
