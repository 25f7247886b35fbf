"""Rotary position embeddings (Su et al. 2021): the table of angles, and applying it to queries and
keys.

The variants that stretch a model to longer texts change the wavelengths once, when the table is
made: position interpolation ("linear", Chen et al. 2023), NTK-aware ("dynamic"), by parts ("yarn",
Peng et al. 2023), and Llama 3's. "dynamic" in transformers changes with the length of the text;
here its factor is that of the longest text from the start, since keys in the cache were rotated
when they were written, and are not rotated again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Which variant of rotary embeddings a layer has.

    Attributes:
        theta: the base of the wavelengths.
        kind: "default", "linear", "llama3", "yarn" or "dynamic".
        scaling: the other numbers of the configuration, by the names they have there.
        rotary_size: channels of a head that are rotated, its first ones; None for all.
        interleaved: whether neighbouring channels of the checkpoint's heads are a pair (GPT-J's
            order) instead of channel i and i + rotary_size / 2 (GPT-NeoX's order).
    """

    theta: float = 10_000.0
    kind: str = "default"
    scaling: Mapping[str, Any] | None = None
    rotary_size: int | None = None
    interleaved: bool = False

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells tables apart."""
        scaling = sorted((name, repr(value)) for name, value in (self.scaling or {}).items())
        return self.theta, self.kind, tuple(scaling), self.rotary_size


class RotaryTable:
    """The cosines and sines of all positions.

    Attributes:
        cos_sin: float32 [max_len, R], R the rotated channels of a head: R / 2 cosines, then R / 2
            sines.
    """

    def __init__(self, rope: RopeConfig, head_size: int, max_len: int, device: torch.device):
        inverse, scale = inverse_wavelengths(rope, rope.rotary_size or head_size)
        angles = torch.outer(torch.arange(max_len, dtype=torch.float32), inverse)
        self.cos_sin = torch.cat((angles.cos() * scale, angles.sin() * scale), dim=-1).to(device)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the cosines and sines that `apply_rope` takes for positions [T], each [T, 1, R].

        Both channels of a pair are rotated by the same angle; the sines of the first half are
        negative, so that `apply_rope` only adds.
        """
        cos, sin = self.cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Returns x [T, heads, head_size] with its first R channels rotated, computed in float32.

    Channel i and channel i + R / 2 are a pair (GPT-NeoX's order); cos and sin are [T, 1, R], of
    `RotaryTable.at`.
    """
    rotary_size = cos.shape[-1]
    wide = x[..., :rotary_size].float()
    rotated = torch.addcmul(wide * cos, wide.roll(rotary_size // 2, dims=-1), sin).to(x.dtype)
    if rotary_size == x.shape[-1]:
        return rotated
    return torch.cat((rotated, x[..., rotary_size:]), dim=-1)


def inverse_wavelengths(rope: RopeConfig, rotary_size: int) -> tuple[torch.Tensor, float]:
    """Returns the angle a position adds to each pair of channels, float32 [rotary_size / 2], and a
    factor for cos and sin."""
    exponents = torch.arange(0, rotary_size, 2, dtype=torch.float32) / rotary_size
    scaling = rope.scaling or {}
    if rope.kind == "dynamic":
        factor = scaling["factor"]
        # transformers' formula at the length of factor times the original
        longest = factor * factor - (factor - 1)
        return 1.0 / (rope.theta * longest ** (rotary_size / (rotary_size - 2))) ** exponents, 1.0
    inverse = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return inverse / scaling["factor"], 1.0
    if rope.kind == "llama3":
        return _llama3(inverse, scaling), 1.0
    if rope.kind == "yarn":
        return _yarn(inverse, rope.theta, rotary_size, scaling), _yarn_attention_factor(scaling)
    return inverse, 1.0


def _llama3(inverse: torch.Tensor, scaling: Mapping[str, Any]) -> torch.Tensor:
    """Stretches long wavelengths by the factor, keeps short ones, and blends between."""
    original, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    rotations = original * inverse / (2 * math.pi)  # full rotations within the original length
    kept = ((rotations - low) / (high - low)).clamp(0, 1)
    return kept * inverse + (1 - kept) * inverse / factor


def _yarn(
    inverse: torch.Tensor, theta: float, rotary_size: int, scaling: Mapping[str, Any]
) -> torch.Tensor:
    """Keeps the channels that turn often within the original length, stretches those that turn
    seldom, blends between."""
    original, factor = scaling["original_max_position_embeddings"], scaling["factor"]

    def channel(rotations: float) -> float:
        return rotary_size * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = channel(scaling.get("beta_fast") or 32), channel(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_size - 1)
    stretched = (
        (torch.arange(rotary_size // 2, dtype=torch.float32) - low) / (high - low or 0.001)
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
