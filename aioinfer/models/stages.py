"""Division of a model's layers among the stages of a pipeline, so that a decode step takes each
stage about as long; and the making of a stage's layers, of which some may be offloaded.

The cost of a layer is the bytes that it reads in a step of many requests (`step_bytes`): its
weights, and the keys and values of `STEP_KEYS` tokens. The head reads its weight alone, and the
embedding next to nothing. By weights alone the head of a small model would count too much: on one
H200, in a step of 128 rows of Qwen3-8B, it takes as long as 1.7 layers, and has the bytes of 3.2.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import accumulate
from math import inf, prod
from typing import Generic, NamedTuple, TypeVar

from aioinfer.ipc.kv_spec import KVSpec, StateSpec
from aioinfer.layers.backend import Backend
from aioinfer.layers.layer import Layer
from aioinfer.layers.maker import LayerMaker
from aioinfer.layers.offload import OffloadedLayers, choose_layers
from aioinfer.layers.shards import NamedShards

L = TypeVar("L")

#: Requests in a step of many requests, of 512 tokens each, for the bytes that it reads of the KV
#: cache.
STEP_ROWS = 128
STEP_KEYS = STEP_ROWS * 512


def divide_layers(
    sizes: Sequence[int],
    num_stages: int,
    *,
    behind: int = 0,
    starts: Collection[int] | None = None,
) -> list[range]:
    """Returns the layers of each stage, contiguous and at least one, so that the stage with the
    most bytes has as few as possible; of several such divisions the one whose last stages are
    smallest.

    Args:
        sizes: bytes of each layer.
        num_stages: at most the number of layers.
        behind: bytes that the last stage has beside its layers.
        starts: the layers with which a stage but the first may begin, at least one less than
            stages; by default all.
    """
    count = len(sizes)
    cuts = frozenset(range(1, count) if starts is None else starts)
    sums = [0, *accumulate(sizes)]
    # of the first layers divided among the stages so far: (largest stage, its ends)
    best: list[tuple[float, tuple[int, ...]]] = [(total, ()) for total in sums]
    for stage in range(1, num_stages):
        extra = behind if stage == num_stages - 1 else 0
        best = [
            min(
                (
                    (max(best[cut][0], sums[end] - sums[cut] + extra), (*best[cut][1], cut))
                    for cut in range(stage, end)
                    if cut in cuts
                ),
                default=(inf, ()),
            )
            for end in range(count + 1)
        ]
    ends = *best[count][1], count
    return [range(start, end) for start, end in zip((0, *ends), ends, strict=False)]


def whole_bytes(shards: NamedShards) -> int:
    """Returns the bytes of checkpoint tensors as all ranks together will hold them."""
    return sum(
        prod(shard.checkpoint_shape) * shard.destination.element_size() for _, shard in shards
    )


def step_bytes(weights: int, specs: Sequence[KVSpec], itemsize: int) -> int:
    """Returns the bytes that a layer reads in a decode step of many requests.

    Args:
        weights: bytes of its weights.
        specs: of what it keeps in the KV cache.
        itemsize: bytes of an element there.
    """

    def bytes_of(spec: KVSpec) -> int:
        if isinstance(spec, StateSpec):  # read and written
            return 2 * STEP_ROWS * spec.nbytes
        keys = STEP_KEYS if spec.window is None else min(STEP_KEYS, STEP_ROWS * spec.window)
        return keys * spec.bytes_per_block(1, itemsize)

    return weights + sum(map(bytes_of, specs))


class MeasuredLayer(NamedTuple, Generic[L]):
    """A layer that is made without memory.

    Attributes:
        layer: itself.
        nbytes: bytes of its weights on the first tensor-parallel rank: the same on every rank.
        tensors: the names of its weights in the checkpoint.
    """

    layer: L
    nbytes: int
    tensors: tuple[str, ...]


def measure_layers(
    make: LayerMaker, layer: Callable[[int], L], num_layers: int
) -> list[MeasuredLayer[L]]:
    """Returns the layers of a model, made without memory."""
    layers = []
    for number in range(num_layers):
        with make.measuring() as measured:
            made = layer(number)
        nbytes = sum(shard.destination.nbytes for _, shard in measured)
        layers.append(MeasuredLayer(made, nbytes, tuple(name for name, _ in measured)))
    return layers


def layers_of_stage(
    measured: Sequence[MeasuredLayer[Layer]], backend: Backend, behind: int,
    starts: Collection[int] | None,
) -> range:  # fmt: skip
    """Returns the layers of a rank's stage; `behind` and `starts` as for `divide_layers`."""
    itemsize = backend.dtype.itemsize
    costs = [step_bytes(each.nbytes, each.layer.kv_specs, itemsize) for each in measured]
    divided = divide_layers(costs, backend.num_stages, behind=behind, starts=starts)
    return divided[backend.stage]


def make_layers(
    make: LayerMaker, layer: Callable[[int], Layer], numbers: range, num_layers: int
) -> tuple[list[Layer], OffloadedLayers | None]:
    """Makes the layers `numbers` of a model. Returns them, and those that are offloaded, which have
    no memory of their own until they are loaded. Raises `ConfigError` if there are too few."""
    offload = make.backend.offload
    if offload is None:
        return [layer(number) for number in numbers], None
    measured = measure_layers(make, layer, num_layers)
    chosen = choose_layers([measured[number].nbytes for number in numbers], offload.nbytes)
    offloaded, layers = OffloadedLayers(offload.transfers), []
    for index, number in enumerate(numbers):
        with make.apart() as made:
            layers.append(layer(number))
        if index in chosen:
            offloaded.release(layers[-1], made)
    return layers, offloaded
