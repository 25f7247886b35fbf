"""The layers that a `LayerMaker` has made: where their weights are to be loaded, and the
preparation of these for the device afterwards."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from aioinfer.layers.shards import NamedShards


class Loadable(Protocol):
    """A layer with parameters."""

    def weight_shards(self) -> NamedShards: ...

    def finalize(self) -> None: ...


class Preparable(Protocol):
    """A layer that reorders the weights of its parts before these are finalized."""

    def finalize(self) -> None: ...


class Converted(Protocol):
    """A part that may be held in another form than it is stored in: weights, heads and stacks of
    experts."""

    def weight_shards(self) -> NamedShards: ...

    @property
    def held_bytes(self) -> int: ...


_Loadable = TypeVar("_Loadable", bound=Loadable)
_Preparable = TypeVar("_Preparable", bound=Preparable)
_Converted = TypeVar("_Converted", bound=Converted)


class MadeLayers:
    """Layers in the order in which they were made. `keep`, `prepare` and `count` return their
    argument."""

    def __init__(self) -> None:
        self._layers: list[Loadable] = []
        self._to_prepare: list[Preparable] = []
        #: The layer that uses a weight may drop it.
        self._converted: list[weakref.ref[Any]] = []
        self._elsewhere: set[str] = set()

    def keep(self, layer: _Loadable) -> _Loadable:
        """Keeps a layer with parameters."""
        self._layers.append(layer)
        return layer

    def prepare(self, layer: _Preparable) -> _Preparable:
        """Enters a layer to be finalized before all layers that have parameters."""
        self._to_prepare.append(layer)
        return layer

    def count(self, part: _Converted) -> _Converted:
        """Makes `finalize` count by how many bytes a part has grown."""
        self._converted.append(weakref.ref(part))
        return part

    def forget(self, layer: Loadable) -> None:
        """Forgets a layer that this rank does not need."""
        self._layers = [kept for kept in self._layers if kept is not layer]

    def add_elsewhere(self, modules: Iterable[str]) -> None:
        """Enters checkpoint modules of experts that other ranks have."""
        self._elsewhere.update(modules)

    def is_elsewhere(self, name: str) -> bool:
        """Whether a checkpoint's tensor is of an expert that other ranks have."""
        return name.rpartition(".")[0] in self._elsewhere

    def weight_shards(self) -> NamedShards:
        """Yields (checkpoint name, where this rank's part of it goes) of every tensor."""
        for layer in self._layers:
            yield from layer.weight_shards()

    def finalize(self, threads: int) -> int:
        """Prepares all loaded weights for the device, in so many threads. Returns by how many bytes
        they grew: dequantized weights take more than before, or less in float16."""
        stored = [_stored_bytes(one) for one in self._converted]
        for layer in self._to_prepare:
            layer.finalize()
        if threads == 1:
            for layer in self._layers:
                layer.finalize()
        else:
            with ThreadPoolExecutor(threads, "weights") as pool:
                for _ in pool.map(lambda layer: layer.finalize(), self._layers):
                    pass
        return sum(map(_growth, self._converted, stored))


def _stored_bytes(reference: weakref.ref[Any]) -> int:
    part = reference()
    shards = () if part is None else part.weight_shards()
    return sum(shard.destination.nbytes for _, shard in shards)


def _growth(reference: weakref.ref[Any], stored: int) -> int:
    part = reference()
    return 0 if part is None else part.held_bytes - stored
