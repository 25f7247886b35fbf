"""What an engine has its workers do between steps: sleep and wake up, take new weights, and call
methods of `parallel.worker_extension`.

`Worker` is a `CalledWorker`; `Executor.call` brings the calls.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import orjson
import torch

from aioinfer.config import Config
from aioinfer.errors import AioinferError, ConfigError, WorkerCallError
from aioinfer.ipc.content_digest import digest_files
from aioinfer.models.built_model import BuiltModel
from aioinfer.models.causal_lm import CausalLM
from aioinfer.models.weight_update import WeightUpdate
from aioinfer.worker.rank_memory import RankMemory
from aioinfer.worker.tensor_handles import open_tensor
from aioinfer.worker.update_group import UpdateGroup


class CalledWorker:
    """A worker, once it is loaded. Methods without an underscore may be called by the engine.

    Attributes:
        device: the device that it computes on.
        rank: the number of the rank in its engine.
        model: the rank's part of the model.
        memory: of weights and KV cache; None where it cannot sleep.
    """

    device: torch.device
    rank: int
    model: CausalLM
    memory: RankMemory | None
    _config: Config
    _engine: int
    _world_size: int
    #: Names of the methods of the extension.
    _extended: frozenset[str] = frozenset()
    _update: WeightUpdate | None = None
    #: Stands for the weights; empty for those of the folder, before it is asked for.
    _weights_digest = b""
    _has_new_weights = False
    _group: UpdateGroup | None = None

    @torch.inference_mode()
    def call(self, method: str, arguments: Mapping[str, Any]) -> tuple[bool, Any]:
        """Calls one of the methods below, while no step is in flight. Returns whether it succeeded,
        and its result or the error as text. After another error than aioinfer's own, which it
        raises, the worker's state is unknown."""
        try:
            return True, getattr(self, method)(**arguments)
        except AioinferError as error:
            return False, str(error)

    # ---------------------------------------------------------------- sleep

    def sleep(self, level: int) -> None:
        """Gives the memory of weights and KV cache back; on level 1 the weights are kept on the
        host, on level 2 they have to be loaded again. Raises `WorkerCallError`, and `ConfigError`
        where they cannot be loaded again; nothing has changed then."""
        memory = self._rank_memory()
        if level == 1:
            memory.sleep()
            return
        if self._config.model.has_random_weights:
            raise ConfigError("random weights cannot be loaded again: sleep at level 1")
        memory.sleep(self._make_update().release())
        memory.note_update()

    def wake_up(self, tags: Sequence[str]) -> None:
        """Takes memory again for `rank_memory.TAGS`. Raises `WorkerCallError`."""
        self._rank_memory().wake_up(tags)

    def _rank_memory(self) -> RankMemory:
        if self.memory is None:
            raise WorkerCallError("on a GPU a model sleeps only with model.sleep_mode = true")
        return self.memory

    # ---------------------------------------------------------------- weights

    def check_folder(self, folder: str) -> bool:
        """Whether the weights can be loaded again from a checkpoint; otherwise new workers have to
        load them. Raises `ConfigError` for a checkpoint that is not one of this model."""
        try:
            update = self._make_update()
        except ConfigError:
            return False
        update.check_folder(Path(folder))
        return True

    def update_from_disk(self, folder: str) -> None:
        """Loads the weights again, from a checkpoint, once all ranks have checked it."""
        self._update = None
        self._make_update().read(Path(folder))
        self.note_update(digest_files(Path(folder)))

    def begin_update(self) -> None:
        """Begins an update, tensor by tensor. Raises `ConfigError` if weights cannot be loaded
        again."""
        self._update = self._make_update()

    def load_weights(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Loads tensors, whole, by the names of a checkpoint; see `WeightUpdate.take`, which says
        what is checked. Extensions may call it, also without `begin_update`."""
        update = self._update = self._update or self._make_update()
        update.take(tensors)
        self.note_update()

    def open_weights(
        self, names: Sequence[str], dtype_names: Sequence[str], shapes: Sequence[Sequence[int]],
        handles: Sequence[Mapping[str, Any]],
    ) -> None:  # fmt: skip
        """Loads tensors of another process on this GPU, by the handles of its memory; see
        `tensor_handles`. Raises `WorkerCallError` for handles that cannot be used."""
        self._check_tensors(names, dtype_names, shapes)
        dtypes = map(_dtype_of, dtype_names)
        every = zip(names, dtypes, shapes, handles, strict=True)
        self.load_weights(
            [
                (name, open_tensor(handle, dtype, shape, self.device))
                for name, dtype, shape, handle in every
            ]
        )
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # before the other process writes there again

    def join_update_group(self, rank_offset: int, options: Mapping[str, Any]) -> None:
        """Joins a process group with a trainer; see `UpdateGroup` for `options`. The workers are
        the ranks from `rank_offset` on. Raises `WorkerCallError`."""
        self._group = None
        rank = rank_offset + self._engine * self._world_size + self.rank
        self._group = UpdateGroup(rank, device=self.device, **options)

    def receive_weights(
        self, names: Sequence[str], dtype_names: Sequence[str], shapes: Sequence[Sequence[int]],
        source: int = 0,
    ) -> None:  # fmt: skip
        """Loads tensors that rank `source` of the group broadcasts, in this order. Raises
        `WorkerCallError` if one does not come in time; those before it are loaded."""
        if self._group is None:
            raise WorkerCallError("no group was joined: /init_weight_transfer_engine comes first")
        self._check_tensors(names, dtype_names, shapes)
        for name, dtype_name, shape in zip(names, dtype_names, shapes, strict=True):
            received = self._group.receive(shape, _dtype_of(dtype_name), source, name)
            self.load_weights([(name, received)])

    def end_update(self) -> None:
        """Ends an update. Raises `ConfigError` if tensors of layers are missing."""
        update, self._update = self._update, None
        if update is None:
            raise WorkerCallError("no update was begun")
        update.finish()

    def _check_tensors(
        self, names: Sequence[str], dtype_names: Sequence[str], shapes: Sequence[Sequence[int]]
    ) -> None:
        """Checks tensors that are about to come, before anything is changed."""
        self._update = self._update or self._make_update()
        every = zip(names, dtype_names, shapes, strict=True)
        self._update.check(
            [
                (name, torch.empty(tuple(shape), dtype=_dtype_of(dtype), device="meta"))
                for name, dtype, shape in every
            ]
        )

    def _make_update(self) -> WeightUpdate:
        """Returns an update of the weights. Raises `ConfigError` if they cannot be loaded again."""
        if not isinstance(self.model, BuiltModel):
            raise ConfigError("transformers' modules cannot be loaded again")
        return WeightUpdate(self.model)

    def note_update(self, digest: bytes | None = None) -> None:
        """Notes that the weights have changed; `digest` stands for them, and by default a name that
        no other weights have. Extensions that change them without `load_weights` call it."""
        self._weights_digest = digest or uuid4().bytes
        self._has_new_weights = True
        if self.memory is not None:
            self.memory.note_update()

    def has_new_weights(self) -> bool:
        """Whether the last method of an extension, or function, has changed the weights."""
        return self._has_new_weights

    # ---------------------------------------------------------------- extensions

    def call_extension(
        self, method: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Calls a method of `parallel.worker_extension`. Returns its result, as text unless JSON
        has its like. Raises `WorkerCallError`, also if the method raises."""
        if method not in self._extended:
            known = ", ".join(sorted(self._extended)) or "none"
            raise WorkerCallError(
                f"parallel.worker_extension has no method {method!r}; it has: {known}"
            )
        return self._call_safely(method, getattr(self, method), args, kwargs)

    def call_function(
        self, function: Callable[..., Any], args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        """Calls a function with this worker as its first argument, as `call_extension` does."""
        return self._call_safely(repr(function), function, (self, *args), kwargs)

    def _call_safely(
        self, name: str, function: Callable[..., Any], args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
    ) -> Any:  # fmt: skip
        self._has_new_weights = False
        try:
            result = function(*args, **kwargs or {})
        except Exception as error:
            raise WorkerCallError(f"{name}: {type(error).__name__}: {error}") from error
        try:
            return orjson.loads(orjson.dumps(result, option=orjson.OPT_SERIALIZE_NUMPY))
        except (TypeError, ValueError):
            return str(result)


def _dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise WorkerCallError(f"there is no type {name!r} of tensors")
    return dtype


def extended(worker: type[Any], name: str | None) -> type[Any]:
    """Returns a class of workers with the methods of the class `name` ("package.module.Class"),
    which is made for this and whose methods have the worker as `self`; without a name the class
    itself. Raises `ConfigError` if it cannot be imported, or would replace something."""
    if name is None:
        return worker
    module, _, attribute = name.rpartition(".")
    try:
        extension = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"parallel.worker_extension = {name!r}: {error}") from error
    if not isinstance(extension, type):
        raise ConfigError(f"parallel.worker_extension = {name!r} is no class")
    methods = [each for each in dir(extension) if not each.startswith("__")]
    if clashes := [each for each in methods if hasattr(worker, each)]:
        raise ConfigError(f"parallel.worker_extension: workers have {', '.join(clashes)} already")
    public = frozenset(each for each in methods if not each.startswith("_"))
    return type(worker.__name__, (extension, worker), {"_extended": public})
