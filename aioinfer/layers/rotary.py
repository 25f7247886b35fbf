"""Rotary position embeddings (Su et al. 2021): the table of cosines and sines, and applying it to
queries and keys.

The variants that stretch a model to longer texts change the wavelengths once, when the table is
made: position interpolation ("linear", Chen et al. 2023), NTK-aware ("dynamic"), by parts ("yarn",
Peng et al. 2023), a factor for each pair of channels ("longrope", Ding et al. 2024), and Llama 3's.
"proportional" (Gemma 4) leaves the pairs with the longest wavelengths as they are.

In transformers "dynamic" and "longrope" depend on the length of each text. Here they are settled
for all texts at the start, since keys in the cache were rotated when they were written, and are not
rotated again: "dynamic" has the factor of the longest text, and "longrope" its long factors where
longer texts are served than the model was first trained for, else its short ones (as in vLLM).

Models that read pictures may give a token three positions, in time, height and width, and rotate
some pairs of channels by each ("M-RoPE", Qwen2-VL, Wang et al. 2024); see `Sections`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from aioinfer.errors import ConfigError
from aioinfer.layers.step import Step

#: Longer than any text.
_ANY_LEN = 2**31


class Sections(NamedTuple):
    """How many pairs of channels are rotated by a token's position in time, in height and in width,
    one after the other (Qwen2-VL), or interleaved (Qwen3-VL): pair i by the time, height or width
    for i mod 3 = 0, 1 or 2, as long as there are such pairs, and all further pairs by the time."""

    time: int
    height: int
    width: int
    is_interleaved: bool = False

    def axes(self) -> torch.Tensor:
        """Returns which position rotates each pair of channels, 0, 1 or 2: int64 [pairs]."""
        counts = torch.tensor(self[:3])
        if not self.is_interleaved:
            return torch.arange(3).repeat_interleave(counts)
        pairs = torch.arange(sum(self[:3]))
        return torch.where(pairs < 3 * counts[pairs % 3], pairs % 3, 0)


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The variant of rotary embeddings of a layer.

    Attributes:
        theta: the base of the wavelengths.
        kind: "default", "linear", "llama3", "yarn", "dynamic", "longrope" or "proportional"; "none"
            for no rotation, where a layer cannot leave it out.
        scaling: the other numbers of the configuration, by the names they have there.
        rotary_size: how many channels of a head are rotated, its first ones; None for all.
        interleaved: whether channels 2 i and 2 i + 1 of the checkpoint's heads are a pair (GPT-J's
            order) instead of i and i + rotary_size / 2 (GPT-NeoX's order). Such heads are brought
            into GPT-NeoX's order when the weights are loaded; see `half_split_order`.
        sections: of the pairs of channels, where tokens have three positions; else None.
    """

    theta: float = 10_000.0
    kind: str = "default"
    scaling: Mapping[str, Any] | None = None
    rotary_size: int | None = None
    interleaved: bool = False
    sections: Sections | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for variants that have the same table."""
        scaling = sorted((name, repr(value)) for name, value in (self.scaling or {}).items())
        return (
            self.theta, self.kind, tuple(scaling), self.rotary_size, self.interleaved, self.sections
        )  # fmt: skip

    def check(self, rotary_size: int) -> None:
        """Raises `ConfigError` unless `rotary_size` channels have finite angles at every length."""
        if self.sections is not None and sum(self.sections[:3]) != rotary_size // 2:
            raise ConfigError(
                f"mrope_section {list(self.sections[:3])} does not divide {rotary_size // 2} pairs "
                f"of channels"
            )
        for served_len in (0, _ANY_LEN):  # "longrope" has two sets of factors
            try:
                inverse, scale = inverse_wavelengths(self, rotary_size, served_len)
                is_right = len(inverse) == rotary_size // 2 and bool(inverse.isfinite().all())
            except (ArithmeticError, RuntimeError, ValueError, TypeError) as error:
                raise ConfigError(f"rope_parameters cannot be computed: {error}") from error
            if not is_right or not math.isfinite(scale):
                raise ConfigError("rope_parameters give no finite angle for every pair of channels")


class RotaryTable:
    """The cosines and sines of all positions.

    Attributes:
        cos_sin: float32 [max_len, R], R the rotated channels of a head: R / 2 cosines, then R / 2
            sines.
        interleaved, sections: as in `RopeConfig`.
        query_scales: float32 [max_len, 1], multiplied with the queries of each position; None for
            none.
    """

    def __init__(
        self,
        rope: RopeConfig,
        head_size: int,
        max_len: int,
        device: torch.device,
        served_len: int | None = None,
    ):
        """
        Args:
            rope, head_size: of the layer.
            max_len: how many positions.
            device: of the table.
            served_len: the longest sequence that is served; `max_len` by default.
        """
        self.interleaved, self.sections = rope.interleaved, rope.sections
        scales = _query_scales(rope.scaling or {}, max_len)
        self.query_scales = None if scales is None else scales.to(device)
        size = rope.rotary_size or head_size
        inverse, scale = inverse_wavelengths(rope, size, served_len or max_len)
        if rope.kind == "none":  # one line for all positions
            line = torch.cat((torch.ones_like(inverse), torch.zeros_like(inverse)))
            self.cos_sin = line.to(device).expand(max_len, -1)
            return
        angles = torch.outer(torch.arange(max_len, dtype=torch.float32), inverse)
        self.cos_sin = torch.cat((angles.cos() * scale, angles.sin() * scale), dim=-1).to(device)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the cosines and sines that `apply_rope` takes for positions [T], or [3, T] with
        sections, each [T, 1, R].

        Both channels of a pair are rotated by the same angle; the sines of the first half are
        negative, so that `apply_rope` only adds.
        """
        if positions.ndim == 1:
            return _of_both(self.cos_sin[positions])
        assert self.sections is not None
        axes = self.sections.axes().to(positions.device)
        by_pair = self.cos_sin.unflatten(1, (2, -1)).transpose(1, 2)
        pairs = torch.arange(len(axes), device=positions.device)
        return _of_both(by_pair[positions[axes].t(), pairs].transpose(1, 2).flatten(1))

    def at_step(self, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns `at` of a step's rotary positions, computed once for all layers."""
        angles = step.memo.get(self)
        if angles is None:
            angles = step.memo[self] = self.at(step.inputs.rotary_positions)
        return angles

    def mean(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the means of cosines and sines over the first `length` positions, each [1, 1, R]
        as `apply_rope` takes them: it gives the mean of a vector rotated to all of them."""
        return _of_both(self.cos_sin[:length].mean(0, keepdim=True))


def _query_scales(scaling: Mapping[str, Any], max_len: int) -> torch.Tensor | None:
    """Returns `RotaryTable.query_scales` of Llama 4 and Ministral 3: they grow with the logarithm
    of how often a position exceeds the length of the first training, so that the softmax over more
    keys stays as sharp (after "scalable softmax", Nakanishi 2025)."""
    beta = scaling.get("llama_4_scaling_beta")
    if not beta:
        return None
    times = torch.arange(max_len) // int(scaling["original_max_position_embeddings"])
    return (1 + beta * torch.log1p(times.float()))[:, None]


def _of_both(cos_sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns lines of the table [T, R] as cosines and sines of all channels, each [T, 1, R]."""
    cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)
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


def half_split_order(num_heads: int, head_size: int, rotary_size: int) -> torch.Tensor:
    """Returns where the channels of heads in GPT-NeoX's order are found in GPT-J's order: int64
    [num_heads * head_size]."""
    head = torch.arange(head_size)
    rotated = head[:rotary_size]
    order = torch.cat((rotated[::2], rotated[1::2], head[rotary_size:]))
    return (torch.arange(num_heads)[:, None] * head_size + order).flatten()


def inverse_wavelengths(
    rope: RopeConfig, rotary_size: int, served_len: int = 0
) -> tuple[torch.Tensor, float]:
    """Returns the angle in radians by which a position rotates each pair of channels, float32
    [rotary_size / 2], and a factor for cos and sin.

    Args:
        rope: the variant.
        rotary_size: how many channels are rotated.
        served_len: the longest sequence that is served; "longrope" depends on it.
    """
    exponents = torch.arange(0, rotary_size, 2, dtype=torch.float32) / rotary_size
    scaling = rope.scaling or {}
    if rope.kind == "dynamic":
        factor = scaling["factor"]
        # transformers' formula at the length of factor times the original
        longest = factor * factor - (factor - 1)
        return 1.0 / (rope.theta * longest ** (rotary_size / (rotary_size - 2))) ** exponents, 1.0
    if rope.kind == "none":
        return torch.zeros_like(exponents), 1.0
    inverse = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return inverse / scaling["factor"], 1.0
    if rope.kind == "proportional":
        rotated = int(scaling.get("partial_rotary_factor", 1.0) * rotary_size // 2)
        inverse[rotated:] = 0
        return inverse / scaling.get("factor", 1.0), 1.0
    if rope.kind == "llama3":
        return _llama3(inverse, scaling), 1.0
    if rope.kind == "yarn":
        return _yarn(inverse, rope.theta, rotary_size, scaling), _yarn_attention_factor(scaling)
    if rope.kind == "longrope":
        is_long = served_len > scaling["original_max_position_embeddings"]
        factors = scaling["long_factor" if is_long else "short_factor"]
        return inverse / torch.tensor(factors), _longrope_attention_factor(scaling)
    return inverse, 1.0


def _llama3(inverse: torch.Tensor, scaling: Mapping[str, Any]) -> torch.Tensor:
    """Stretches long wavelengths by the factor, keeps short ones, and blends between."""
    original, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    periods = original * inverse / (2 * math.pi)  # full periods within the original length
    kept = ((periods - low) / (high - low)).clamp(0, 1)
    return kept * inverse + (1 - kept) * inverse / factor


def _yarn(
    inverse: torch.Tensor, theta: float, rotary_size: int, scaling: Mapping[str, Any]
) -> torch.Tensor:
    """Keeps wavelengths of which many fit into the original length, stretches wavelengths of which
    few fit by the factor, and blends between."""
    original, factor = scaling["original_max_position_embeddings"], scaling["factor"]

    def pair_with(periods: float) -> float:
        """Returns which pair of channels has so many periods within the original length."""
        return rotary_size * math.log(original / (periods * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_with(scaling.get("beta_fast") or 32), pair_with(scaling.get("beta_slow") or 1)
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


def _longrope_attention_factor(scaling: Mapping[str, Any]) -> float:
    """Returns by how much longrope scales cos and sin."""
    given = scaling.get("attention_factor")
    if given is not None:
        return float(given)
    factor = scaling["factor"]
    if factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(factor) / math.log(scaling["original_max_position_embeddings"]))
