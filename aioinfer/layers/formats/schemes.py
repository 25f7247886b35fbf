"""Storage schemes of linear layers' weights in quantized checkpoints, as data.

`models.quantization` reads these from `config.json`; the weight formats beside this module load and
multiply the weights that they describe (`formats.make_weight` picks the format).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from aioinfer.errors import ConfigError


class Scheme:
    """How the weights of some modules are stored: a frozen dataclass, equal for weights that are
    stored alike. `formats.FORMATS` has the weight format of each."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class ScaledScheme(Scheme):
    """Weights of one byte with float32 scales: weight = stored value * scale.

    Attributes:
        kind: "fp8" (e4m3fn) or "int8".
        block: output and input features that share a scale, or None for a scale per output feature.
            (A scale per tensor is read as the same for each of its output features.)
        scales: the name that the scales have in the checkpoint: "weight_scale" or
            "weight_scale_inv". Weights are multiplied with either.
        inputs: how activations are quantized: "dynamic", with a scale per token that is computed
            from them (with `block`, per token and `block[1]` input features); "static", with the
            scale `input_scale` of the checkpoint; or "none": they keep their dtype.
        is_online: the checkpoint holds weights of 16 or 32 bits, which are quantized while they are
            loaded.
    """

    kind: Literal["fp8", "int8"]
    block: tuple[int, int] | None = None
    scales: str = "weight_scale"
    inputs: Literal["dynamic", "static", "none"] = "dynamic"
    is_online: bool = False


@dataclass(frozen=True, slots=True)
class GroupScheme(Scheme):
    """Weights in 4 or 8 bits, of which neighbouring inputs share a scale; activations keep their
    dtype. weight = (stored integer - zero point) * scale.

    Attributes:
        layout: how integers are packed: "gptq" (zero points are stored less 1), "gptq_v2" (as they
            are), "awq", or "packed" (compressed-tensors' pack-quantized).
        bits: of an integer, 4 or 8.
        group_size: inputs that share a scale, or None for all inputs of a row.
        has_zeros: each group has a zero point; otherwise it is 2 ** (bits - 1).
        has_order: groups are of inputs in another order, which the tensor `g_idx` (or
            `weight_g_idx`) gives: the order of falling activations (GPTQ's `desc_act`).
    """

    layout: Literal["gptq", "gptq_v2", "awq", "packed"]
    bits: int
    group_size: int | None
    has_zeros: bool
    has_order: bool = False


@dataclass(frozen=True, slots=True)
class AffineScheme(Scheme):
    """Weights in 4 or 8 bits, of which groups of neighbouring inputs share a scale and an offset:
    weight = stored integer * scale + offset. GGUF's quantized types, after conversion.

    Attributes:
        bits: of an integer: 4, unsigned, two to a byte, the first in the low bits; or 8, signed.
        group_size: inputs that share a scale.
        has_offsets: each group has an offset; otherwise it is 0, and 4-bit integers are stored plus
            8.
    """

    bits: int
    group_size: int
    has_offsets: bool


@dataclass(frozen=True, slots=True)
class MXFP4Scheme(Scheme):
    """Weights in 4-bit floating point (e2m1), of which 32 neighbouring inputs share a scale that is
    a power of two (e8m0): MXFP4 of the OCP Microscaling Formats 1.0, as gpt-oss stores the experts
    of a layer in one tensor."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """Quantization of a model: which linear layers are quantized, and how.

    Attributes:
        name: for people, such as "compressed-tensors" or "fp8".
        groups: pairs of patterns and the scheme of the modules that one of them matches, None for
            modules that are not quantized; the first group that matches holds.
        ignored: patterns of modules that are not quantized.
        unused: ends of the names of tensors that such checkpoints have and no format needs.
        zero: ends of the names of tensors that no format needs if they are all zero.
        names_of: returns all names that a module may have in the checkpoint, and so in patterns.
    """

    name: str
    groups: Sequence[tuple[Sequence[str], Scheme | None]]
    ignored: Sequence[str] = ()
    unused: Sequence[str] = ()
    zero: Sequence[str] = ()
    names_of: Callable[[str], Sequence[str]] = lambda module: (module,)

    @property
    def summary(self) -> str:
        """For the start-up table, such as "gguf: 4 bits in groups of 32"."""
        kinds = [scheme for _, scheme in self.groups if isinstance(scheme, AffineScheme)]
        widths = sorted({(scheme.bits, scheme.group_size) for scheme in kinds})
        texts = [f"{bits} bits in groups of {size}" for bits, size in widths]
        return f"{self.name}: {', '.join(texts)}" if texts else self.name

    @property
    def is_online(self) -> bool:
        """Whether the checkpoint has no quantized weights: those that are, are so by loading."""
        schemes = [scheme for _, scheme in self.groups]
        return all(isinstance(each, ScaledScheme) and each.is_online for each in schemes)

    @property
    def has_affine(self) -> bool:
        """Whether some modules have an `AffineScheme`."""
        return any(isinstance(scheme, AffineScheme) for _, scheme in self.groups)

    @property
    def has_mxfp4(self) -> bool:
        """Whether some modules have an `MXFP4Scheme`."""
        return any(isinstance(scheme, MXFP4Scheme) for _, scheme in self.groups)

    def scheme_of(self, module: str) -> Scheme | None:
        """Returns the scheme of a linear layer, by its name in the checkpoint, such as
        "model.layers.0.mlp.down_proj"; None if it is not quantized."""
        names = self.names_of(module)
        if any(_matches(pattern, name) for pattern in self.ignored for name in names):
            return None
        for patterns, scheme in self.groups:
            is_meant = (_matches(pattern, name) for pattern in patterns for name in names)
            if "Linear" in patterns or any(is_meant):
                return scheme
        return None

    def affine_schemes_of(self, modules: Sequence[str]) -> list[AffineScheme | None]:
        """Returns the affine scheme of each module, None for one that has none: of these, one
        product may take several."""
        schemes = [self.scheme_of(module) for module in modules]
        return [scheme if isinstance(scheme, AffineScheme) else None for scheme in schemes]

    def scheme_of_all(self, modules: Sequence[str]) -> Scheme | None:
        """Returns the scheme of modules that are computed as one.

        Raises:
            ConfigError: they have different ones.
        """
        schemes = [self.scheme_of(module) for module in modules]
        if any(scheme != schemes[0] for scheme in schemes):
            raise ConfigError(
                f"{', '.join(modules)} are computed as one product, but quantization_config gives "
                "them different schemes"
            )
        return schemes[0]


def _matches(pattern: str, module: str) -> bool:
    """Whether a pattern names a module, or one that it lies in: "re:" and a regular expression, or
    consecutive parts of its name, such as "lm_head", "model.layers.0" or "mlp.gate"."""
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), module) is not None
    return f".{pattern}." in f".{module}."
