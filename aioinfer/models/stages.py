"""How the layers of a model are divided among the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import prod
from typing import TypeVar

from aioinfer.layers.maker import LayerMaker
from aioinfer.layers.shards import NamedShards

L = TypeVar("L")


def divide_layers(
    sizes: Sequence[int], num_stages: int, *, before: int = 0, behind: int = 0
) -> list[range]:
    """Returns the layers of each stage, contiguous and at least one, so that the stage with the
    most bytes has as few as possible; of several such divisions the one whose last stages are
    smallest.

    Args:
        sizes: bytes of each layer.
        num_stages: at most the number of layers.
        before: bytes that the first stage has beside its layers. behind: the same of the last.
    """
    count = len(sizes)
    sums = [0, *accumulate(sizes)]
    # of the first layers divided among the stages so far: (largest stage, its ends)
    best: list[tuple[int, tuple[int, ...]]] = [(before + total, ()) for total in sums]
    for stage in range(1, num_stages):
        extra = behind if stage == num_stages - 1 else 0
        best = [
            min(
                (max(best[cut][0], sums[end] - sums[cut] + extra), (*best[cut][1], cut))
                for cut in range(stage, end)
            )
            if end > stage
            else (0, ())
            for end in range(count + 1)
        ]
    ends = *best[count][1], count
    return [range(start, end) for start, end in zip((0, *ends), ends, strict=False)]


def whole_bytes(shards: NamedShards) -> int:
    """Returns the bytes of checkpoint tensors as they will be held, those of all ranks together."""
    return sum(
        prod(shard.checkpoint_shape) * shard.destination.element_size() for _, shard in shards
    )


def measure_layers(
    make: LayerMaker, layer: Callable[[int], L], num_layers: int
) -> tuple[list[L], list[int]]:
    """Returns the layers of a model, made without memory, and the bytes that each takes on the
    first tensor-parallel rank: the same on every rank."""
    layers, sizes = [], []
    for number in range(num_layers):
        with make.measuring() as measured:
            layers.append(layer(number))
        sizes.append(sum(shard.destination.nbytes for _, shard in measured))
    return layers, sizes
