"""Weight formats, one a module: how a linear layer's weight is stored, loaded and multiplied."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from aioinfer.errors import ConfigError
from aioinfer.layers.backend import Backend
from aioinfer.layers.formats.affine import AffineWeight
from aioinfer.layers.formats.base import Weight
from aioinfer.layers.formats.grouped import GroupedWeight
from aioinfer.layers.formats.mxfp4 import make_mxfp4
from aioinfer.layers.formats.quantized import make_dense
from aioinfer.layers.formats.scaled import ScaledWeight
from aioinfer.layers.formats.schemes import (
    GroupScheme,
    MXFP4Scheme,
    Quantization,
    ScaledScheme,
    Scheme,
)
from aioinfer.layers.shards import Shard, Source


def _make_scaled(
    sources: Sequence[Source], columns: Shard, backend: Backend, scheme: ScaledScheme
) -> Weight:
    if backend.has_kernels:
        from aioinfer.layers.formats.kernel_scaled import KernelScaledWeight

        if KernelScaledWeight.supports(columns, backend, scheme):
            return KernelScaledWeight(sources, columns, backend, scheme)
    return ScaledWeight(sources, columns, backend, scheme)


def _make_grouped(
    sources: Sequence[Source], columns: Shard, backend: Backend, scheme: GroupScheme
) -> Weight:
    if backend.has_kernels:
        from aioinfer.layers.formats.kernel_grouped import KernelGroupedWeight

        return KernelGroupedWeight(sources, columns, backend, scheme)
    return GroupedWeight(sources, columns, backend, scheme)


#: Makes the weight of some modules (sources, columns, backend and scheme), by the type of the
#: scheme that all of them have.
FORMATS: dict[type[Scheme], Callable[..., Weight]] = {
    ScaledScheme: _make_scaled,
    GroupScheme: _make_grouped,
    MXFP4Scheme: make_mxfp4,
}


def make_weight(
    sources: Sequence[Source],
    columns: Shard,
    backend: Backend,
    quantization: Quantization | None = None,
) -> Weight:
    """Returns the weight of a linear layer, in the format that its scheme asks for.

    Args:
        sources: the checkpoint modules of its rows, one after the other.
        columns: the input features that this rank has.
        backend: of the rank.
        quantization: of the model, or None.

    Raises:
        ConfigError: the modules have different schemes, or their shards do not fall on the groups
            or blocks that share scales.
    """
    if quantization is None:
        return make_dense(sources, columns, backend)
    names, is_stacked = [source.name for source in sources], sources[0].stack is not None
    affine = quantization.affine_schemes_of(names)
    is_affine = any(affine) and not is_stacked
    scheme = None if is_affine else quantization.scheme_of_all(names)
    if any(source.scale != 1.0 for source in sources) and (
        is_affine or isinstance(scheme, MXFP4Scheme)
    ):
        raise ConfigError(
            f"{names[0]} is multiplied with a constant when it is loaded, which is not supported "
            f"for {quantization.name}"
        )
    if is_affine:  # GGUF files give the modules of a product different ones
        return AffineWeight(sources, columns, backend, affine)
    if scheme is None:
        return make_dense(sources, columns, backend)
    if is_stacked and not isinstance(scheme, MXFP4Scheme):
        raise ConfigError(
            f"{names[0]} holds the weights of all experts in one tensor: of these, MXFP4 is "
            f"supported, and {quantization.name} is not"
        )
    return FORMATS[type(scheme)](sources, columns, backend, scheme)
