"""Random mixtures of experts and loads for the kernels that compute them, and the results beside
those of the references: for the interpreter's tests and the tests on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from aioinfer.kernels.expert_linear import (
    SCANNED_TOKENS,
    ExpertConfig,
    VectorConfig,
    expert_product,
    experts_reference,
    sum_pairs,
)
from aioinfer.kernels.expert_routing import (
    MAX_SHARED_TILES,
    RoutedTokens,
    RoutingConfig,
    RoutingRule,
    make_counters,
    route,
    select_reference,
)
from cases import Pair, normal, poisoned


@dataclass(slots=True)
class ExpertCase:
    """A mixture of experts.

    Attributes:
        tokens, hidden, channels: of x, and of an expert.
        rule: how experts are selected.
        favoured: experts that get all tokens; by default the router is random.
        buckets: whether programs find their rows in buckets; by default for more than a few tokens.
        local: the experts that the rank has; by default all.
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


@dataclass(slots=True)
class Mixture:
    """The inputs of a case."""

    x: torch.Tensor
    router: torch.Tensor
    bias: torch.Tensor | None
    gate_up: torch.Tensor
    down: torch.Tensor
    counters: torch.Tensor


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
    gate_up = normal(rule.num_experts, 2 * channels, hidden, **like) / hidden**0.5
    down = normal(rule.num_experts, hidden, channels, **like) / channels**0.5
    counters = make_counters(rule.num_experts, torch.device(case.device))
    return Mixture(normal(case.tokens, hidden, **like), router, bias, gate_up, down, counters)


def routed(case: ExpertCase, given: Mixture, config: RoutingConfig | None = None) -> RoutedTokens:
    """Runs `route`."""
    buckets = case.tokens > SCANNED_TOKENS if case.buckets is None else case.buckets
    return route(
        given.x, given.router, case.rule, given.counters, bias=given.bias, buckets=buckets,
        local=case.local, config=config,
    )  # fmt: skip


def check_routing(case: ExpertCase, config: RoutingConfig | None = None) -> float:
    """Asserts that experts are those of the reference, and that every pair is in the bucket of its
    expert; returns the largest error of a weight. Two experts may change places whose logits
    float32 cannot tell apart."""
    given = mixture(case)
    found = routed(case, given, config)
    bias = None if given.bias is None else given.bias.double()
    logits = given.x.double() @ given.router.double().T
    weights, expected = select_reference(logits, case.rule, bias)
    experts = found.experts.long()
    assert (experts.sort().values.diff() > 0).all()
    if bias is None and case.rule.num_groups == 1:
        chosen, best = (logits.gather(1, each) for each in (experts, expected))
        torch.testing.assert_close(chosen, best, rtol=0.0, atol=1e-5 * float(logits.abs().max()))
        assert (experts == expected).float().mean() > 0.99
    else:
        assert torch.equal(experts, expected)
    if found.counts is not None:
        assert found.rows is not None
        counts = experts.flatten().bincount(minlength=case.rule.num_experts)
        assert torch.equal(found.counts.long(), counts)
        for expert, count in enumerate(counts.tolist()):
            pairs = (experts.flatten() == expert).nonzero().flatten()
            assert torch.equal(found.rows[expert, :count].sort().values.long(), pairs)
    assert not given.counters[:MAX_SHARED_TILES].any()
    return float((found.weights - weights).abs().max())


def whole(
    case: ExpertCase,
    config: ExpertConfig | VectorConfig | None = None,
    *,
    residual: bool = True,
    added: bool = False,
) -> Pair:
    """Runs all launches over poisoned outputs; the counters are 0 afterwards. Those of experts that
    the rank does not have are left out of the expected sum."""
    given, like = mixture(case), {"dtype": case.dtype, "device": case.device}
    found = routed(case, given)
    tokens, pairs = case.tokens, case.tokens * case.rule.top_k
    others = [
        normal(tokens, case.hidden, **like) if is_there else None for is_there in (residual, added)
    ]
    local = range(case.rule.num_experts) if case.local is None else case.local
    gate_up, down = (each[local.start : local.stop] for each in (given.gate_up, given.down))
    gated = expert_product(
        given.x, gate_up, found, gated=True, config=config,
        out=poisoned(pairs, case.channels, **like),
    )  # fmt: skip
    outputs = expert_product(
        gated, down, found, gated=False, config=config,
        out=poisoned(pairs, case.hidden, **like),
    )  # fmt: skip
    out = poisoned(tokens, case.hidden, **like)
    sum_pairs(outputs, found, residual=others[0], added=others[1], out=out)
    assert not given.counters.any()
    is_local = (found.experts >= local.start) & (found.experts < local.stop)
    weights = found.weights.double() * is_local
    expected = experts_reference(
        given.x.double(), given.gate_up, given.down, weights, found.experts.long()
    )
    for other in others:
        if other is not None:
            expected += other.double()
    return out, expected
