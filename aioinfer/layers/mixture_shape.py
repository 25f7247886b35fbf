"""Shape and routing of a model's mixtures of experts, from its configuration; `experts` computes
them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol


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


@dataclass(frozen=True, slots=True)
class MixtureShape:
    """A mixture of experts.

    Attributes:
        routing: how experts are selected.
        expert_size: channels of each expert, of all ranks together.
        shared_size: channels of the expert that every token takes, 0 for none.
        is_shared_gated: whether the output of that expert is multiplied with a sigmoid of the
            token's own (Qwen2-MoE).
        dense_layers: numbers of the layers that have a dense MLP instead.
        is_stacked: a checkpoint tensor [experts, in, out] has a projection of all experts, and
            gates and ups are one projection.
    """

    routing: Routing
    expert_size: int
    shared_size: int = 0
    is_shared_gated: bool = False
    dense_layers: frozenset[int] = frozenset()
    is_stacked: bool = False

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
