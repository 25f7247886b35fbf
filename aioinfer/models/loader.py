"""Fills a model with weights: from safetensors files, each rank reading its part alone, or at
random."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from aioinfer.errors import ConfigError
from aioinfer.layers.shards import WeightShard

#: Tensors that checkpoints carry and nobody needs: they are computed.
_COMPUTED = ("rotary_emb.inv_freq",)
#: Tensors that not every model needs which may have them: a head that is tied, and a classification
#: head (see `engine.pooling`).
_OTHERS = ("lm_head.weight", "score.weight")


def load_weights(
    shards: Sequence[tuple[str, WeightShard]],
    folder: Path,
    load_format: str,
    seed: int,
    on_progress: Callable[[int, int], None],
) -> None:
    """Fills every parameter.

    Args:
        shards: (checkpoint name, where this rank's part of it goes) of every tensor.
        folder: a local model folder; GGUF files have been converted to one by now.
        load_format: "dummy" for random weights, else safetensors.
        seed: of random weights.
        on_progress: called with the bytes that are done and that there are.

    Raises:
        ConfigError: files are missing or cannot be read, or the tensors are not those of the model.
    """
    total = sum(shard.destination.nbytes for _, shard in shards)
    if load_format == "dummy":
        _fill_at_random([shard.destination for _, shard in shards], seed, on_progress, total)
    else:
        _load_safetensors(shards, folder, on_progress, total)


def _fill_at_random(
    parameters: list[torch.Tensor], seed: int, on_progress: Callable[[int, int], None], total: int
) -> None:
    """Normal with a deviation of 0.02, as models are initialised; norms (one dimension) stay as
    they are."""
    done = 0
    generator = torch.Generator(parameters[0].device).manual_seed(seed)
    for parameter in parameters:
        if parameter.ndim > 1:
            parameter.normal_(0.0, 0.02, generator=generator)
        done += parameter.nbytes
        on_progress(done, total)


def _load_safetensors(
    shards: Sequence[tuple[str, WeightShard]],
    folder: Path,
    on_progress: Callable[[int, int], None],
    total: int,
) -> None:
    file_of = _locate_tensors(folder)
    missing = [name for name, _ in shards if name not in file_of]
    wanted = {name for name, _ in shards}
    unknown = [
        name
        for name in file_of
        if name not in wanted and not name.endswith(_COMPUTED) and name not in _OTHERS
    ]
    if missing or unknown:
        listed = [
            f"{len(names)} {kind} ({_first(names)})"
            for kind, names in (("missing", missing), ("unknown", unknown))
            if names
        ]
        raise ConfigError(f"{folder} does not hold this model's tensors: {'; '.join(listed)}")
    done = 0
    for file in sorted({file_of[name] for name in wanted}):
        with _open(file) as tensors:
            for name, shard in shards:
                if file_of[name] == file:
                    _copy_part(_slice_of(tensors, name, file), name, shard)
                    done += shard.destination.nbytes
                    on_progress(done, total)


def read_tensor(folder: Path, name: str) -> torch.Tensor:
    """Returns one tensor of a checkpoint, whole. Raises `ConfigError` if it is not there."""
    file = _locate_tensors(folder).get(name)
    if file is None:
        raise ConfigError(f"{folder} does not hold the tensor {name}")
    with _open(file) as tensors:
        return _slice_of(tensors, name, file)[:]


def _copy_part(stored: Any, name: str, shard: WeightShard) -> None:
    """Copies the part of a stored tensor that a shard needs, converting its dtype."""
    shape = list(stored.get_shape())
    if shape != shard.checkpoint_shape:
        raise ConfigError(
            f"the tensor {name} has the shape {shape}; by config.json it should be "
            f"{shard.checkpoint_shape}"
        )
    part = slice(shard.start, shard.start + shard.destination.shape[shard.dim])
    shard.destination.copy_(stored[part] if shard.dim == 0 else stored[:, part])


def _slice_of(tensors: Any, name: str, file: Path) -> Any:
    """Returns a tensor of an open file, to be read in part. Raises `ConfigError` if it is not there
    or holds no floating-point numbers."""
    try:
        stored = tensors.get_slice(name)
    except SafetensorError as error:
        raise ConfigError(f"{file} does not hold {name}, which the index locates there") from error
    if not stored.get_dtype().startswith(("F", "BF")):
        raise ConfigError(f"the tensor {name} of {file} is of the type {stored.get_dtype()}")
    return stored


def _locate_tensors(folder: Path) -> dict[str, Path]:
    """Returns the file of each tensor, from the index of a sharded checkpoint or from the files
    themselves."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            return {
                name: folder / file
                for name, file in json.loads(index.read_text("utf-8"))["weight_map"].items()
            }
        # a wrong content raises TypeError or AttributeError
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(f"{index} cannot be read: {error!r}") from error
    # others beside it hold the same weights under other names
    single = folder / "model.safetensors"
    files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(
            f"{folder} holds no safetensors files; model.load_format = 'dummy' "
            f"would make random weights"
        )
    located: dict[str, Path] = {}
    for file in files:
        with _open(file) as tensors:
            located.update(dict.fromkeys(tensors.keys(), file))
    return located


def _open(file: Path) -> Any:
    """Returns the file, mapped into memory, as a context manager.

    Raises `ConfigError` if it cannot be read.
    """
    try:
        return safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error


def _first(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
