"""Selects the experts of each token, in plain torch; `kernels.expert_routing` does it on GPUs."""

from __future__ import annotations

from statistics import NormalDist

import torch
import torch.nn.functional as F

from aioinfer.layers.backend import Backend
from aioinfer.layers.mixture_shape import Routing
from aioinfer.layers.shards import NamedShards, WeightShard

#: Keeps the sum of scores from being zero, as DeepSeek-V3's published code does.
_SMALLEST = 1e-20


def router_skew(routing: Routing) -> tuple[int, float] | None:
    """Returns (number, factor) such that a tenth of the experts take half of the tokens' choices,
    if so many first rows of a random router are multiplied with the factor; None where no factor
    does that.

    The logits of normed tokens are normal and independent. A token with the threshold t takes of C
    other experts C (1 - F(t)), and of P preferred ones with the deviation s P (1 - F(t / s)), F
    being the normal distribution; both are to be k / 2. s grows without bounds as P approaches k:
    an expert's logit is above 0 for half of the tokens only.
    """
    preferred, half = round(routing.num_experts / 10), routing.top_k / 2
    if preferred <= routing.top_k or routing.top_groups < routing.num_groups:
        return None
    normal = NormalDist()
    others = routing.num_experts - preferred
    return preferred, normal.inv_cdf(half / others) / normal.inv_cdf(half / preferred)


class ExpertRouter:
    """Selects the experts of each token, in float32; the same on every rank. Of equal scores the
    expert with the lower number is taken.

    Args:
        name: of the checkpoint module.
        routing: how.
        hidden_size: of the tokens.
        backend: of the rank.
        dtype: of the weight, where kernels multiply it by activations of the same dtype.
    """

    def __init__(
        self,
        name: str,
        routing: Routing,
        hidden_size: int,
        backend: Backend,
        dtype: torch.dtype = torch.float32,
    ):
        self.routing = routing
        self._name = name
        self._skew = router_skew(routing)
        shape = routing.num_experts, hidden_size
        self.weight = torch.zeros(shape, dtype=dtype, device=backend.device)
        self.bias: torch.Tensor | None = None
        if routing.has_bias:
            self.bias = torch.zeros(routing.num_experts, device=backend.device)
        self.logit_bias: torch.Tensor | None = None
        if routing.has_logit_bias:
            self.logit_bias = torch.zeros(routing.num_experts, device=backend.device)

    def weight_shards(self) -> NamedShards:
        """Yields where the checkpoint's tensors go."""
        yield f"{self._name}.weight", WeightShard(self.weight, skew=self._skew)
        if self.bias is not None:
            yield f"{self._name}.e_score_correction_bias", WeightShard(self.bias)
        if self.logit_bias is not None:
            yield f"{self._name}.bias", WeightShard(self.logit_bias)

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (weights float32 [T, top_k], experts int64 [T, top_k]) for x [T, hidden_size]."""
        routing = self.routing
        logits = F.linear(x.float(), self.weight.float(), self.logit_bias)
        scores = logits.softmax(-1) if routing.scores == "softmax" else logits.sigmoid()
        preferred = scores if self.bias is None else scores + self.bias
        if routing.top_groups < routing.num_groups:
            preferred = self._of_best_groups(preferred)
        # unlike topk, which takes any of equal ones
        experts = preferred.sort(dim=-1, descending=True, stable=True).indices[:, : routing.top_k]
        weights = scores.gather(1, experts)
        if routing.is_normalized:
            weights = weights / (weights.sum(-1, keepdim=True) + _SMALLEST)
        return weights * routing.scale, experts

    def _of_best_groups(self, scores: torch.Tensor) -> torch.Tensor:
        """Returns scores [T, num_experts] with the scores of experts out of the best groups
        -inf."""
        groups = scores.unflatten(1, (self.routing.num_groups, -1))
        totals = groups.topk(self.routing.group_best, dim=-1).values.sum(-1)
        best = totals.sort(dim=-1, descending=True, stable=True).indices
        best = best[:, : self.routing.top_groups]
        is_out = torch.ones(groups.shape[:2], dtype=torch.bool, device=scores.device)
        is_out.scatter_(1, best, False)
        return groups.masked_fill(is_out.unsqueeze(-1), -torch.inf).flatten(1)
