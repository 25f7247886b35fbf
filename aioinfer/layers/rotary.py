"""Rotary position embeddings: the table of angles, and turning queries and keys by them.

The variants that stretch a model to longer texts change the wavelengths once, when the table is
made: position interpolation ("linear", Chen et al. 2023), NTK-aware ("dynamic"), by parts ("yarn",
Peng et al. 2023), and Llama 3's. "dynamic" in transformers changes with the length of the text;
here its factor is that of the longest text from the start, since keys in the cache were turned when
they were written, and cannot be turned again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from aioinfer.models.architecture import Rope


class RotaryTable:
    """The cosines and sines of all positions, float32 [max_len, head_size / 2]."""

    def __init__(self, rope: Rope, head_size: int, max_len: int, device: torch.device):
        inverse, scale = inverse_wavelengths(rope, head_size)
        angles = torch.outer(torch.arange(max_len, dtype=torch.float32), inverse)
        self._cos = (angles.cos() * scale).to(device)
        self._sin = (angles.sin() * scale).to(device)

    def cos_sin(self) -> torch.Tensor:
        """Returns the whole table as the kernels read it, float32 [max_len, head_size]: cosines,
        then sines."""
        return torch.cat((self._cos, self._sin), dim=-1)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns what `apply_rope` takes for positions int64 [T], each [T, 1, head_size]; once a
        step, for all layers.

        Both halves of a head turn by the same angles; the sines of the first are negative, so that
        `apply_rope` only adds.
        """
        cos, sin = self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Returns x [T, heads, head_size] turned: channel i and channel i + head_size / 2 are a pair
    (GPT-NeoX's order)."""
    wide = x.float()
    return torch.addcmul(wide * cos, wide.roll(x.shape[-1] // 2, dims=-1), sin).to(x.dtype)


def inverse_wavelengths(rope: Rope, head_size: int) -> tuple[torch.Tensor, float]:
    """Returns the angle a position adds to each pair of channels, float32 [head_size / 2], and a
    factor for cos and sin."""
    exponents = torch.arange(0, head_size, 2, dtype=torch.float32) / head_size
    scaling = rope.scaling or {}
    if rope.kind == "dynamic":
        factor = scaling["factor"]
        # transformers' formula at the length of factor times the original
        longest = factor * factor - (factor - 1)
        return 1.0 / (rope.theta * longest ** (head_size / (head_size - 2))) ** exponents, 1.0
    inverse = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return inverse / scaling["factor"], 1.0
    if rope.kind == "llama3":
        return _llama3(inverse, scaling), 1.0
    if rope.kind == "yarn":
        return _yarn(inverse, rope.theta, head_size, scaling), _yarn_attention_factor(scaling)
    return inverse, 1.0


def _llama3(inverse: torch.Tensor, scaling: Mapping[str, Any]) -> torch.Tensor:
    """Stretches long wavelengths by the factor, keeps short ones, and blends between."""
    original, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = original * inverse / (2 * math.pi)  # full turns within the original length
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return kept * inverse + (1 - kept) * inverse / factor


def _yarn(
    inverse: torch.Tensor, theta: float, head_size: int, scaling: Mapping[str, Any]
) -> torch.Tensor:
    """Keeps the channels that turn often within the original length, stretches those that turn
    seldom, blends between."""
    original, factor = scaling["original_max_position_embeddings"], scaling["factor"]

    def channel(turns: float) -> float:
        return head_size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = channel(scaling.get("beta_fast") or 32), channel(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_size - 1)
    stretched = (
        (torch.arange(head_size // 2, dtype=torch.float32) - low) / (high - low or 0.001)
    ).clamp(0, 1)
    return (1 - stretched) * inverse + stretched * inverse / factor


def _yarn_attention_factor(scaling: Mapping[str, Any]) -> float:
    """Returns by how much yarn scales cos and sin, which sharpens attention over long texts."""
    given = scaling.get("attention_factor")
    if given is not None:
        return float(given)

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(scaling["factor"]) + 1.0 if scaling["factor"] > 1 else 1.0

    numerator, denominator = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if numerator and denominator:
        return magnitude(numerator) / magnitude(denominator)
    return magnitude(1.0)
