"""Host-side arguments shared by the kernels of `expert_product`'s products: their checks, and the
compile-time constants that follow from them.

Called by `expert_product`, `expert_vector`, `expert_matrix` and `expert_sum`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

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
from aioinfer.kernels.grouped_weight import TILE
from aioinfer.kernels.quantize import GROUP, ScaledInputs


@dataclass(frozen=True, slots=True)
class Activation:
    """The activation of the first product: silu(gate) * up; with `is_gelu` gelu(gate) * up, GELU
    being that by tanh (Gemma 4); or, with `alpha`, gate * sigmoid(alpha * gate) * (up + 1) of a
    gate of at most `limit` and of up within -limit .. limit (gpt-oss). Without a gate it is
    relu(up) ** 2 (Nemotron-3), or nothing (`is_linear`)."""

    alpha: float = 0.0
    limit: float = 0.0
    is_gated: bool = True
    is_linear: bool = False
    is_gelu: bool = False


SILU = Activation()
GELU = Activation(is_gelu=True)
SQUARED_RELU = Activation(is_gated=False)
LINEAR = Activation(is_gated=False, is_linear=True)


#: Formats of weights, as `ExpertSpec.format` has them.
PLAIN, SCALED, INTEGERS, FLOATS = 0, 1, 2, 3


class ExpertSpec(NamedTuple):
    """What the kernels of a product of experts are compiled for.

    Attributes:
        features, inputs: weight rows of an expert, and their length.
        experts, top_k: experts that there are weights of; experts of a token.
        lines, step: weight rows of a tile or program; inputs of a stage.
        gated: whether this is the first product; `alpha`, `limit`, `has_gate`, `is_linear` and
            `is_gelu` are its activation's.
        partial: whether there are other experts than those that there are weights of.
        has_bias: whether a bias is added.
        format: of weights: `PLAIN`, `SCALED`, `INTEGERS` or `FLOATS`.
        grouped, rows_per_scale: of scales of weights in one byte; see `ScaledExperts`.
        x_scales: 0 for activations of 16 or 32 bits, 1 for scales of rows, 2 of rows and groups.
        words, group, has_zeros, has_factor: of weights in four bits: inputs of a run and of a
            scale, whether there are zero points, and whether sums are multiplied by a factor.
        tma: whether weights are loaded by TMA.
        run, tile: rows of a run of the gate, and of a tile of packed weights.
    """

    features: int
    inputs: int
    experts: int
    top_k: int
    lines: int
    step: int
    gated: bool
    partial: bool = False
    has_bias: bool = False
    alpha: float = 0.0
    limit: float = 0.0
    format: int = PLAIN
    grouped: bool = False
    rows_per_scale: int = 1
    x_scales: int = 0
    words: int = 1
    group: int = GROUP
    has_zeros: bool = False
    has_factor: bool = False
    tma: bool = False
    run: int = GATE_RUN
    tile: int = TILE
    has_gate: bool = True
    is_linear: bool = False
    is_gelu: bool = False


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

    def spec(self, lines: int, step: int, *, tma: bool = False, x_scales: int = 0) -> ExpertSpec:
        """Returns what a kernel is compiled for whose tiles have `lines` weight rows."""
        weight, (experts, features, inputs) = self.weight, self.weight.shape
        packed: dict[str, Any] = {}
        if isinstance(weight, PackedExperts):
            packed = {
                "format": FLOATS if weight.is_float else INTEGERS, "words": weight.run,
                "group": weight.group, "has_zeros": weight.has_zeros,
                "has_factor": weight.shift != 0,
            }  # fmt: skip
        elif isinstance(weight, ScaledExperts):
            packed = {
                "format": SCALED, "grouped": weight.is_grouped,
                "rows_per_scale": weight.rows_per_scale,
            }  # fmt: skip
        return ExpertSpec(
            features, inputs, experts, self.routed.experts.shape[1], lines, step, self.gated,
            self.routed.local is not None, self.bias is not None, self.activation.alpha,
            self.activation.limit, tma=tma, x_scales=x_scales, has_gate=self.activation.is_gated,
            is_linear=self.activation.is_linear, is_gelu=self.activation.is_gelu, **packed,
        )  # fmt: skip


def scaling(x: torch.Tensor | ScaledInputs) -> int:
    """Returns `ExpertSpec.x_scales`: 0 for activations that are not quantized, 1 for
    a scale for each row, 2 for scales of groups."""
    if isinstance(x, torch.Tensor):
        return 0
    return 2 if x.scales.shape[1] > 1 else 1


def first_expert(routed: RoutedTokens) -> int:
    """Returns the number of the first expert that has weights on this rank."""
    return 0 if routed.local is None else routed.local.start


def check_arguments(
    x: torch.Tensor | ScaledInputs, weight: ExpertWeights, routed: RoutedTokens, gated: bool,
    activation: Activation, config: ExpertConfig | VectorConfig | None,
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
    if gated and activation.is_gated and lines % (2 * GATE_RUN):
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
