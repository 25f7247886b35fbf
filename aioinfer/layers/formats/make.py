"""Makes the weight of a linear layer, in the format that its scheme asks for."""

from __future__ import annotations

from collections.abc import Sequence

from aioinfer.layers.backend import Backend
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
    scheme = None if quantization is None else quantization.scheme_of_all(names)
    match scheme:
        case ScaledScheme():
            return ScaledWeight(sources, columns, backend, scheme)
        case GroupScheme() if backend.has_kernels:
            from aioinfer.layers.formats.grouped_kernels import KernelGroupedWeight

            return KernelGroupedWeight(sources, columns, backend, scheme)
        case GroupScheme():
            return GroupedWeight(sources, columns, backend, scheme)
        case None:
            return make_dense(sources, columns, backend)
