"""New values for the weights of a model that serves: from a checkpoint, or tensors that a trainer
sends.

A model loads again layer by layer: `begin_reload`, the copies of all of its tensors, `finalize`, in
the memory that it has, so that CUDA graphs stay valid. Names, shapes and types are checked before
anything is written: a model has all of a layer's new weights or none. Tensors that come one by one
are kept until their layer is complete (a merged projection has several). Weights that are quantized
while they are loaded take the same tensors as at the start, and are quantized again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from aioinfer.errors import ConfigError
from aioinfer.layers.altup import SmallMatrix
from aioinfer.layers.backend import Backend
from aioinfer.layers.convolution import Convolution
from aioinfer.layers.distance_bias import DistanceBias
from aioinfer.layers.embedding import Embedding, LearnedPositions
from aioinfer.layers.formats.base import Droppable
from aioinfer.layers.norm import GroupRMSNorm, HeadLayerNorms, LayerNorm, RMSNorm
from aioinfer.layers.part_maker import Loadable
from aioinfer.layers.per_layer import StreamScale
from aioinfer.layers.recurrence import HeadDecay
from aioinfer.layers.shards import HeadVector, WeightShard
from aioinfer.layers.tensor_memory import find_all
from aioinfer.models.loader import (
    as_stored,
    check_names,
    check_shape,
    copy_part,
    is_needless,
    locate_tensors,
    open_file,
    reading_threads,
    slice_of,
)
from aioinfer.models.replicated import ReplicatedModule
from aioinfer.models.text_model import own_name

#: Layers whose `weight_shards` and `finalize` may be called again as they are. Others have a
#: `begin_reload`, or cannot be loaded again.
_READY = (
    Convolution, DistanceBias, Embedding, GroupRMSNorm, HeadDecay, HeadLayerNorms, HeadVector,
    LayerNorm, LearnedPositions, ReplicatedModule, RMSNorm, SmallMatrix, StreamScale,
)  # fmt: skip
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_META = torch.device("meta")


@dataclass(frozen=True, slots=True)
class LayerForm:
    """A layer with parameters, and the tensors that it takes.

    Attributes:
        layer: the layer.
        shards: (checkpoint name, where a part of it goes), with destinations without memory.
    """

    layer: Loadable
    shards: Sequence[tuple[str, WeightShard]]

    @classmethod
    def of_layers(
        cls, layers: Sequence[Loadable], folder: Path, load_format: str
    ) -> list[LayerForm]:
        """Returns the forms of layers that have not been finalized, with the names of the
        checkpoint in `folder`, if they are read from there."""
        located: Mapping[str, Any] = {}
        if not load_format.startswith("dummy"):
            located = locate_tensors(folder)
        return [
            cls(layer, [_without_memory(*as_stored(*each, located)) for each in shards])
            for layer in layers
            for shards in (layer.weight_shards(),)
        ]

    @property
    def names(self) -> set[str]:
        """The names of its tensors."""
        return {name for name, _ in self.shards}

    def begin(self) -> list[tuple[str, WeightShard]]:
        """Returns where its tensors go, which are to be loaded again."""
        if not isinstance(self.layer, _READY):
            self.layer.begin_reload()  # type: ignore[attr-defined]
        known = self.names
        return [as_stored(name, shard, known) for name, shard in self.layer.weight_shards()]

    def drop(self) -> list[torch.Tensor]:
        """Gives up the weights, which are to be loaded again; see `Droppable.drop`. Small tensors
        beside a weight, such as biases and scales, stay."""
        if isinstance(self.layer, _READY):
            return [shard.destination for _, shard in self.layer.weight_shards()]
        return [tensor for weight in find_all([self.layer], Droppable) for tensor in weight.drop()]


class LoadedModel(Protocol):
    """A model whose weights have been loaded, as an update sees it.

    Attributes:
        forms: of its layers with parameters.
        is_stored_quantized: whether the checkpoint has quantized weights.
        backend: of the rank.
    """

    forms: Sequence[LayerForm]
    backend: Backend

    @property
    def is_stored_quantized(self) -> bool: ...

    def is_unused(self, name: str) -> bool:
        """Whether a checkpoint may have a tensor that this rank does not need."""
        ...

    def rewriting(self, layer: Loadable) -> AbstractContextManager[None]:
        """Context in which a layer is loaded again."""
        ...


def _without_memory(name: str, shard: WeightShard) -> tuple[str, WeightShard]:
    destination = torch.empty_like(shard.destination, device=_META)
    return name, replace(shard, destination=destination, store=shard.store and _store_nothing)


def _store_nothing(part: torch.Tensor) -> None:
    """Stands for a shard's `store`."""


class _GivenTensor:
    """A tensor as `loader.copy_part` takes it: like a slice of a safetensors file."""

    def __init__(self, tensor: torch.Tensor):
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def __getitem__(self, place: Any) -> torch.Tensor:
        return self._tensor[place]


def _given(tensors: Mapping[str, torch.Tensor], name: str, shard: WeightShard) -> _GivenTensor:
    return _GivenTensor(tensors[name])


class WeightUpdate:
    """An update of one model. Its methods are called while no step is in flight.

    Args:
        model: whose weights have been loaded.

    Raises:
        ConfigError: some of its layers cannot be loaded again. Nothing has changed then.
    """

    def __init__(self, model: LoadedModel):
        self._model, self._forms = model, model.forms
        if model.is_stored_quantized:
            raise ConfigError("weights of a quantized checkpoint cannot be loaded again")
        on_gpu = model.backend.device.type != "cpu"
        for form in self._forms:
            kind = type(form.layer)
            is_ready = issubclass(kind, _READY) or hasattr(kind, "begin_reload")
            if not is_ready or (
                on_gpu and issubclass(kind, StreamScale)
            ):  # whose number graphs have
                raise ConfigError(f"a {kind.__name__} cannot be loaded again")
        self._of = {name: index for index, form in enumerate(self._forms) for name in form.names}
        self._waiting: dict[int, dict[str, torch.Tensor]] = {}

    def release(self) -> list[torch.Tensor]:
        """Gives up all weights, which are to be loaded next. Returns the memory that they are in
        then, and takes none; what a CPU has repacked is freed."""
        return [tensor for form in self._forms for tensor in form.drop()]

    def read(self, folder: Path) -> None:
        """Loads all weights from a checkpoint. Raises as `check_folder`, and changes nothing."""
        stored = self.check_folder(folder)
        self._waiting.clear()
        mode = torch.is_inference_mode_enabled()

        def load(form: LayerForm) -> None:
            with torch.inference_mode(mode):
                self._load(form, stored)

        threads = reading_threads(self._model.backend.device)
        try:
            with ThreadPoolExecutor(threads, "weights") as pool:
                for _ in pool.map(load, self._forms):
                    pass
        except ConfigError as error:  # a file has changed meanwhile
            raise RuntimeError(f"the weights are incomplete: {error}") from error
        self._finish_tied()

    def check_folder(self, folder: Path) -> Callable[[str, WeightShard], Any]:
        """Returns what finds the tensors of a checkpoint. Raises `ConfigError` if it is not one of
        this model."""
        located = locate_tensors(folder)
        check_names(list(self._of), folder, located, self._model.is_unused)
        files = _OpenFiles()

        def stored(name: str, shard: WeightShard) -> Any:
            place = located[name]
            return slice_of(files.of(place.file), place.name, place.file, shard)

        for form in self._forms:
            for name, shard in form.shards:
                check_shape(list(stored(name, shard).get_shape()), name, shard)
        return stored

    def take(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Loads tensors, whole, by the names of a checkpoint; those of layers that lack others are
        copied, and loaded when the layer has all of them. Names that this rank does not need are
        passed over.

        Raises:
            ConfigError: an unknown name, a wrong shape or type. None of the tensors is loaded then.
        """
        taken = self.check(tensors)
        for index, found in taken.items():
            have = self._waiting.pop(index, {}) | found
            if len(have) < len(self._forms[index].names):
                kept = {name: tensor.clone() for name, tensor in found.items()}
                self._waiting[index] = have | kept
                continue
            self._load(self._forms[index], partial(_given, have))

    def check(
        self, tensors: Sequence[tuple[str, torch.Tensor]]
    ) -> dict[int, dict[str, torch.Tensor]]:
        """Returns tensors, which may be without memory, by the number of their layer. Raises as
        `take` does."""
        taken: dict[int, dict[str, torch.Tensor]] = {}
        for stored, tensor in tensors:
            name = own_name(stored)
            index = self._of.get(name)
            if index is not None:
                _check_tensor(name, tensor, self._forms[index])
                taken.setdefault(index, {})[name] = tensor
            elif not is_needless(name, self._model.is_unused):
                raise ConfigError(f"the model has no tensor {stored}")
        return taken

    def finish(self) -> None:
        """Ends the update. Raises `ConfigError` if tensors of layers are missing, whose weights are
        what they were; the others are new."""
        missing = [
            name
            for index, have in self._waiting.items()
            for name in sorted(self._forms[index].names - have.keys())
        ]
        self._waiting.clear()
        self._finish_tied()
        if missing:
            few = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
            raise ConfigError(f"the update lacks {len(missing)} tensors of layers: {few}")

    def _load(self, form: LayerForm, stored: Callable[[str, WeightShard], Any]) -> None:
        if form.shards:
            with self._model.rewriting(form.layer):
                for name, shard in form.begin():
                    copy_part(stored(name, shard), name, shard)
                form.layer.finalize()

    def _finish_tied(self) -> None:
        """Finalizes layers that have no tensors of their own, a head that is tied to the
        embedding."""
        for form in self._forms:
            if not form.shards:
                form.begin()
                form.layer.finalize()


def _check_tensor(name: str, tensor: torch.Tensor, form: LayerForm) -> None:
    if tensor.dtype not in _FLOATS:
        raise ConfigError(f"the tensor {name} is of the type {tensor.dtype}")
    for known, shard in form.shards:
        if known == name:
            check_shape(list(tensor.shape), name, shard)


class _OpenFiles(threading.local):
    """The files of a checkpoint that a thread has open."""

    def __init__(self) -> None:
        self._files: dict[Path, Any] = {}

    def of(self, file: Path) -> Any:
        """Returns an open file. Raises `ConfigError`."""
        if file not in self._files:
            self._files[file] = open_file(file)
        return self._files[file]
