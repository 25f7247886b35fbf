"""Makes the weight of a linear layer, in the format that its scheme asks for."""

from __future__ import annotations

from collections.abc import Sequence

from aioinfer.layers.backend import Backend
from aioinfer.layers.formats.affine import AffineWeight
from aioinfer.layers.formats.base import WeightFormat
from aioinfer.layers.formats.dense import make_dense
from aioinfer.layers.formats.grouped import GroupedWeight
from aioinfer.layers.formats.scaled import ScaledWeight
from aioinfer.layers.formats.schemes import GroupScheme, Quantization, ScaledScheme
from aioinfer.layers.shards import Shard, Source


def make_weight(
    sources: Sequence[Source],
    columns: Shard,
    backend: Backend,
    quantization: Quantization | None = None,
) -> WeightFormat:
    """Returns the weight of a linear layer.

    Args:
        sources: the checkpoint modules whose rows it holds, one after the other.
        columns: the input features that this rank has.
        backend: of the rank.
        quantization: of the model, or None.

    Raises:
        ConfigError: the modules have different schemes, or their shards do not fall on the groups
            or blocks that share scales.
    """
    names = [source.name for source in sources]
    if quantization is None:
        return make_dense(sources, columns, backend)
    affine = quantization.affine_schemes_of(names)
    if any(affine):
        return AffineWeight(sources, columns, backend, affine)
    scheme = quantization.scheme_of_all(names)
    match scheme:
        case ScaledScheme():
            return _make_scaled(sources, columns, backend, scheme)
        case GroupScheme() if backend.has_kernels:
            from aioinfer.layers.formats.kernel_grouped import KernelGroupedWeight

            return KernelGroupedWeight(sources, columns, backend, scheme)
        case GroupScheme():
            return GroupedWeight(sources, columns, backend, scheme)
        case _:
            return make_dense(sources, columns, backend)


def _make_scaled(
    sources: Sequence[Source], columns: Shard, backend: Backend, scheme: ScaledScheme
) -> WeightFormat:
    """Returns a weight of one byte; dequantized, where kernels are missing or do not take it."""
    if backend.has_kernels:
        from aioinfer.layers.formats.kernel_scaled import KernelScaledWeight

        if KernelScaledWeight.supports(columns, backend, scheme):
            return KernelScaledWeight(sources, columns, backend, scheme)
    return ScaledWeight(sources, columns, backend, scheme)
