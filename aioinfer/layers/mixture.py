"""The mixture of experts of a layer: its shape and routing, from the model's configuration, the
router, which selects the experts of each token in plain torch (`kernels.expert_routing` does it on
GPUs), and the places of experts on ranks. `experts` computes them.

An expert may have copies on several ranks (`ipc.expert_placement`), as DeepSeek-AI's load balancer
for expert parallelism (EPLB, 2025) places them: token t takes copy t modulo their number, on every
rank alike. A place is one copy on one rank. The tokens of each place are counted (`ExpertCounter`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal, Protocol

import torch
import torch.nn.functional as F

from aioinfer.ipc.expert_placement import LayerPlacement
from aioinfer.layers.backend import Backend
from aioinfer.layers.norm import RMSNorm
from aioinfer.layers.shards import NamedShards, Shard, WeightShard

#: Keeps the sum of scores from being zero, as DeepSeek-V3's published code does.
_SMALLEST = 1e-20


@dataclass(frozen=True, slots=True)
class Routing:
    """The rule by which the experts of a token are selected.

    Attributes:
        num_experts: how many there are.
        top_k: how many a token takes.
        scores: "softmax" over all experts, or "sigmoid" of each.
        is_normalized: whether the scores of a token's experts are divided by their sum.
        scale: multiplied with the scores that remain.
        has_logit_bias: the router's product has a bias (gpt-oss).
        has_bias: a bias is added to the scores for the selection alone (DeepSeek-V3, DeepSeek-AI
            2024).
        num_groups, top_groups: how many groups of experts there are, and how many of them a token's
            experts may come from.
        group_best: a group's score is the sum of so many of its best experts': 2 in DeepSeek-V3, 1
            in V2.
        has_own_norm: the router norms the residual stream itself, and the score of each expert that
            is taken is multiplied with a number of the expert (Gemma 4).
    """

    num_experts: int
    top_k: int
    scores: Literal["softmax", "sigmoid"] = "softmax"
    is_normalized: bool = True
    scale: float = 1.0
    has_logit_bias: bool = False
    has_bias: bool = False
    num_groups: int = 1
    top_groups: int = 1
    group_best: int = 2
    has_own_norm: bool = False


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names in the checkpoint below a mixture's own.

    Attributes:
        projections: the modules of an expert: gate, up and down. Without a gate its name is "".
        experts: the module of all experts, below which each has its number.
        stacked: the tensors of stacked experts: gates and ups, and downs.
        shared: the module of the expert that all tokens take; with `_gate` behind it, the module of
            its gate.
        shared_projections: its modules, where these have other names than an expert's. One name for
            gate and up is a module that has the rows of the gate first.
        latents: the modules that project tokens to what experts take, and their outputs back.
        router: the module of the router.
        router_bias: the tensor of its bias for the selection.
    """

    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    experts: str = "experts"
    stacked: tuple[str, str] = ("gate_up_proj", "down_proj")
    shared: str = "shared_expert"
    shared_projections: tuple[str, str, str] | None = None
    latents: tuple[str, str] = ("fc1_latent_proj", "fc2_latent_proj")
    router: str = "gate"
    router_bias: str = "gate.e_score_correction_bias"


@dataclass(frozen=True, slots=True)
class MixtureShape:
    """A mixture of experts.

    Attributes:
        routing: how experts are selected.
        expert_size: channels of each expert, of all ranks together.
        shared_size: channels of the expert that every token takes, 0 for none.
        is_shared_gated: whether the output of that expert is multiplied with a sigmoid of the
            token's own (Qwen2-MoE).
        shared_scale: multiplied with the output of that expert.
        dense_layers: numbers of the layers that have a dense MLP instead.
        is_stacked: a checkpoint tensor [experts, in, out] has a projection of all experts, and
            gates and ups are one projection.
        is_out_first: these tensors are [experts, out, in].
        latent_size: channels of what experts take and give, between projections of the hidden
            states and back (Nemotron-3); 0 for the hidden states themselves.
    """

    routing: Routing
    expert_size: int
    shared_size: int = 0
    is_shared_gated: bool = False
    shared_scale: float = 1.0
    dense_layers: frozenset[int] = frozenset()
    is_stacked: bool = False
    is_out_first: bool = False
    latent_size: int = 0

    def divides(self, size: int, *, expert_parallel: bool = False) -> bool:
        """Whether `size` tensor-parallel ranks can have equal parts of each expert; or, with
        `expert_parallel`, experts of their own, and equal parts of the one that all tokens
        take."""
        if self.shared_size % size:
            return False
        if expert_parallel:
            return size <= self.routing.num_experts
        return self.expert_size % size == 0


class MixtureConfig(Protocol):
    """Fields of a model's configuration that `LayerMaker.mixture_or_mlp` reads."""

    @property
    def mixture(self) -> MixtureShape | None: ...

    @property
    def intermediate_size(self) -> int: ...

    @property
    def activation(self) -> str: ...


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


class RouterNorm(RMSNorm):
    """The norm of a router, whose weight is a checkpoint tensor divided by the square root of its
    size.

    Args:
        name: of the tensor.
        size, eps, backend: as in `RMSNorm`.
    """

    def weight_shards(self) -> NamedShards:
        """Yields the tensor, which every rank has whole."""
        yield self._name, WeightShard(self.weight)

    def finalize(self) -> None:
        """Divides the weight."""
        self.weight.mul_(len(self.weight) ** -0.5)


class ExpertRouter:
    """Selects the experts of each token, in float32; the same on every rank. Of equal scores the
    expert with the lower number is taken.

    Args:
        name: of the checkpoint module.
        routing: how.
        hidden_size: of the tokens.
        backend: of the rank.
        dtype: of the weight, where kernels multiply it by activations of the same dtype.
        bias_name: of the checkpoint tensor of the bias for the selection, if there is one.
        norm: of the residual stream, if it has one of its own.

    Attributes:
        expert_scales: float32 [num_experts], with such a norm; else None.
    """

    def __init__(
        self,
        name: str,
        routing: Routing,
        hidden_size: int,
        backend: Backend,
        dtype: torch.dtype = torch.float32,
        bias_name: str = "",
        norm: RouterNorm | None = None,
    ):
        self.routing, self.norm = routing, norm
        self._name, self._bias_name = name, bias_name
        self._skew = router_skew(routing)
        shape = routing.num_experts, hidden_size
        self.weight = torch.zeros(shape, dtype=dtype, device=backend.device)
        self.bias: torch.Tensor | None = None
        if routing.has_bias:
            self.bias = torch.zeros(routing.num_experts, device=backend.device)
        self.logit_bias: torch.Tensor | None = None
        if routing.has_logit_bias:
            self.logit_bias = torch.zeros(routing.num_experts, device=backend.device)
        self.expert_scales: torch.Tensor | None = None
        if norm is not None:
            self.expert_scales = torch.ones(routing.num_experts, device=backend.device)

    def weight_shards(self) -> NamedShards:
        """Yields where the checkpoint's tensors go."""
        if self.expert_scales is not None:
            name = f"{self._name.rpartition('.')[0]}.per_expert_scale"
            yield name, WeightShard(self.expert_scales)
        yield f"{self._name}.weight", WeightShard(self.weight, skew=self._skew)
        if self.bias is not None:
            # ERNIE's has a dimension of length 1 more
            yield self._bias_name, WeightShard(self.bias, is_scale=True)
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
        if self.expert_scales is not None:
            weights = weights * self.expert_scales[experts]
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


class ExpertCopies:
    """Divides the tokens of experts among their places.

    Attributes:
        table: int32 [num_experts, most], the places of each expert, from the left.
        counts: int32 [num_experts], how many each has.
    """

    def __init__(self, places: Sequence[Sequence[int]], device: torch.device):
        """`places`: of each expert."""
        most = max(map(len, places))
        rows = [[*some, *[some[0]] * (most - len(some))] for some in places]
        self.table = torch.tensor(rows, dtype=torch.int32, device=device)
        self.counts = torch.tensor([len(s) for s in places], dtype=torch.int32, device=device)

    def __call__(self, experts: torch.Tensor) -> torch.Tensor:
        """Returns the places, int64, for the experts of each token, int64 [T, top_k]."""
        token = torch.arange(len(experts), device=experts.device).unsqueeze(1)
        return self.table[experts, token % self.counts[experts]].long()


class ExpertCounter:
    """Counts the tokens that the experts of one layer are given, on the device.

    Attributes:
        layer: the number of the layer in the model.
        experts, ranks: of each place; see `features.expert_load.sections.ExpertTokens`.
        tokens: int32 [places], since they were last reported; modulo 2 ** 32.
    """

    def __init__(self, layer: int, placement: LayerPlacement, backend: Backend):
        self.layer = layer
        self.experts = placement.experts
        is_divided = backend.expert_parallel
        self.ranks = placement.ranks if is_divided else (-1,) * len(self.experts)
        self.tokens = torch.zeros(len(self.experts), dtype=torch.int32, device=backend.device)

    def on(self, device: torch.device) -> ExpertCounter:
        """Returns a counter of the same layer on another device, at zero."""
        made = copy(self)
        made.tokens = torch.zeros(len(self.experts), dtype=torch.int32, device=device)
        return made


class PlacedExperts:
    """The experts of one layer, and the places that a rank has of them.

    Args:
        name: of the checkpoint module of the mixture, which holds the number of its layer.
        shape: of all ranks together.
        backend: of the rank.

    Attributes:
        local: the rank's places, of all.
        by_rank: how many places each rank has.
        channels: of each expert that the rank has.
        experts: the expert of each place.
        counter: of the tokens.
        copies: divides tokens among places; None where places are experts.

    Raises:
        ConfigError: the placement does not fit the model.
    """

    def __init__(self, name: str, shape: MixtureShape, backend: Backend):
        group = backend.expert_group or backend.group
        rank, size = group.rank, group.size
        layer, count = _layer_of(name), shape.routing.num_experts
        if backend.expert_parallel:
            placement = backend.expert_placement.of(layer, count, size)
            self.by_rank = [len(experts) for experts in placement.by_rank]
            here = self.by_rank[rank]
            self.local = Shard(placement.first_place(rank), here, len(placement.experts))
            self.channels = Shard.whole(shape.expert_size)
        else:
            placement = LayerPlacement.near_equal(count, 1)
            self.by_rank = [count]
            self.local = Shard.whole(count)
            self.channels = Shard.of_rank(shape.expert_size, rank, size)
        self.experts = placement.experts
        self.counter = ExpertCounter(layer, placement, backend)
        self.copies: ExpertCopies | None = None
        if not placement.is_in_order:
            self.copies = ExpertCopies(placement.places_of(count), backend.device)

    @property
    def local_experts(self) -> tuple[int, ...]:
        """The experts that the rank has, by its places."""
        return self.experts[self.local.start : self.local.start + self.local.size]


def _layer_of(name: str) -> int:
    """Returns the number of the layer in a module's name; 0 for a name without."""
    found = re.search(r"\blayers\.(\d+)\b", name)
    return int(found[1]) if found else 0
