"""Host-side arguments shared by the kernels of `expert_product`'s products: their checks, and the
compile-time constants that follow from them.

Called by `expert_product`, `expert_vector`, `expert_matrix` and `expert_sum`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from aioinfer.kernels.activation import GATE_RUN
from aioinfer.kernels.expert_configs import SCANNED_TOKENS, ExpertConfig, VectorConfig
from aioinfer.kernels.expert_routing import RoutedTokens
from aioinfer.kernels.expert_weights import (
    ExpertWeights,
    PackedExperts,
    ScaledExperts,
    values_and_scales,
)
from aioinfer.kernels.quantize import GROUP, ScaledInputs


@dataclass(frozen=True, slots=True)
class Activation:
    """The activation of the first product: silu(gate) * up, or, with `alpha`, gate * sigmoid(alpha
    * gate) * (up + 1) of a gate of at most `limit` and of up within -limit .. limit (gpt-oss)."""

    alpha: float = 0.0
    limit: float = 0.0


SILU = Activation()


@dataclass(frozen=True, slots=True)
class ExpertArguments:
    """The arguments of `expert_product` that both kernels take."""

    weight: ExpertWeights
    routed: RoutedTokens
    gated: bool
    bias: torch.Tensor | None
    activation: Activation
    norm_weight: torch.Tensor | None
    pdl: bool

    def constants(self) -> dict[str, Any]:
        """Returns the compile-time constants of both kernels."""
        experts, lines, inputs = self.weight.shape
        weight, activation = self.weight, self.activation
        return {
            "FEATURES": lines, "INPUTS": inputs, "EXPERTS": experts, "GATED": self.gated,
            "RUN": GATE_RUN, "HAS_BIAS": self.bias is not None, "ALPHA": activation.alpha,
            "LIMIT": activation.limit, "PARTIAL": self.routed.local is not None, "GROUP": GROUP,
            "ROWS_PER_SCALE": weight.rows_per_scale if isinstance(weight, ScaledExperts) else 1,
            "PDL": self.pdl,
        }  # fmt: skip


def scaling(x: torch.Tensor | ScaledInputs) -> int:
    """Returns X_SCALES of `expert_tiles.multiply`: 0 for activations that are not quantized, 1 for
    a scale for each row, 2 for scales of groups."""
    if isinstance(x, torch.Tensor):
        return 0
    return 2 if x.scales.shape[1] > 1 else 1


def first_expert(routed: RoutedTokens) -> int:
    """Returns the number of the first expert that has weights on this rank."""
    return 0 if routed.local is None else routed.local.start


def check_arguments(
    x: torch.Tensor | ScaledInputs, weight: ExpertWeights, routed: RoutedTokens, gated: bool,
    config: ExpertConfig | VectorConfig | None,
) -> None:  # fmt: skip
    """Raises ValueError where the arguments of `expert_product.expert_product` do not fit."""
    tokens, top_k = routed.experts.shape
    num_local, lines, inputs = weight.shape
    rows = tokens if gated else tokens * top_k
    values = x if isinstance(x, torch.Tensor) else x.values
    tensors = (values, *values_and_scales(weight))
    is_contiguous = all(t.is_contiguous() for t in tensors)
    if values.shape != (rows, inputs) or not is_contiguous:
        raise ValueError(
            f"x must be [{rows}, K] and weight [E, N, K], contiguous, not {tuple(values.shape)} "
            f"and {tuple(weight.shape)}"
        )
    if routed.local is not None and len(routed.local) != num_local:
        raise ValueError(f"weight must be of the experts {routed.local}, not of {num_local}")
    if gated and lines % (2 * GATE_RUN):
        raise ValueError(
            f"a gated weight must have 2 * N rows, N a multiple of {GATE_RUN}, not {lines}"
        )
    if not isinstance(x, torch.Tensor) and not isinstance(weight, ScaledExperts):
        raise ValueError("quantized activations are for float8 weights")
    if isinstance(weight, ScaledExperts) and scaling(x) == 2 and not weight.is_grouped:
        raise ValueError("x has scales of groups, and the weight has none")
    if isinstance(config, VectorConfig) and (tokens > 1 or isinstance(weight, PackedExperts)):
        raise ValueError(f"{config} is for one token, and not for weights in four bits")
    if routed.counts is None and tokens > SCANNED_TOKENS:
        raise ValueError(f"{tokens} tokens need buckets")
    if routed.counts is None and isinstance(config, ExpertConfig) and tokens > config.rows:
        raise ValueError(f"{tokens} tokens need a tile of as many rows, or buckets")
