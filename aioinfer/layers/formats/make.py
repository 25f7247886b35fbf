"""Makes the weight of a linear layer, in the format that its scheme asks for."""

from __future__ import annotations

from collections.abc import Sequence

from aioinfer.errors import ConfigError
from aioinfer.layers.backend import Backend
from aioinfer.layers.formats.affine import AffineWeight
from aioinfer.layers.formats.base import WeightFormat
from aioinfer.layers.formats.dense import make_dense
from aioinfer.layers.formats.grouped import GroupedWeight
from aioinfer.layers.formats.mxfp4 import MXFP4Weight
from aioinfer.layers.formats.scaled import ScaledWeight
from aioinfer.layers.formats.schemes import GroupScheme, MXFP4Scheme, Quantization, ScaledScheme
from aioinfer.layers.shards import Shard, Source


def make_weight(
    sources: Sequence[Source],
    columns: Shard,
    backend: Backend,
    quantization: Quantization | None = None,
) -> WeightFormat:
    """Returns the weight of a linear layer.

    Args:
        sources: the checkpoint modules of its rows, one after the other.
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
    if sources[0].stack is not None:
        return _make_stacked(sources, columns, backend, quantization)
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
        case MXFP4Scheme():
            raise ConfigError(f"{names[0]}: MXFP4 is supported for gpt-oss's experts alone")
        case _:
            return make_dense(sources, columns, backend)


def _make_stacked(
    sources: Sequence[Source], columns: Shard, backend: Backend, quantization: Quantization
) -> WeightFormat:
    """Returns a weight of a stack of modules."""
    names = [source.name for source in sources]
    match quantization.scheme_of_all(names):
        case None:
            return make_dense(sources, columns, backend)
        case MXFP4Scheme():
            return MXFP4Weight(sources, columns, backend)
    raise ConfigError(
        f"{names[0]} holds the weights of all experts in one tensor: of these, MXFP4 is supported, "
        f"and {quantization.name} is not"
    )


def _make_scaled(
    sources: Sequence[Source], columns: Shard, backend: Backend, scheme: ScaledScheme
) -> WeightFormat:
    """Returns a weight of one byte; dequantized, where kernels are missing or do not take it."""
    if backend.has_kernels:
        from aioinfer.layers.formats.kernel_scaled import KernelScaledWeight

        if KernelScaledWeight.supports(columns, backend, scheme):
            return KernelScaledWeight(sources, columns, backend, scheme)
    return ScaledWeight(sources, columns, backend, scheme)
