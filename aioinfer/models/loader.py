"""Loading of a model's weights: from safetensors files, each rank reading its part alone, or at
random."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from aioinfer.errors import ConfigError
from aioinfer.layers.shards import WeightShard
from aioinfer.models.staged_file import stage_file, tensor_positions
from aioinfer.models.text_model import own_name

#: Tensors that checkpoints carry and no model needs: they are computed, GPT-2's masks too.
_COMPUTED = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
#: Scales of a KV cache in float8, which `kv_scales` reads where the cache is one, and of queries
#: and probabilities, which keep their dtype here.
_CACHE_SCALES = (
    ".k_scale", ".v_scale", ".kv_scale", ".q_scale", ".prob_scale", ".k_proj.output_scale",
    ".v_proj.output_scale", ".q_proj.output_scale", ".prob_output_scale",
)  # fmt: skip
#: Tensors that not every model needs which may have them: a head that is tied, and a classification
#: head (see `engine.served_model`).
_OTHERS = ("lm_head.weight", "score.weight")
_COMPUTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: The types of tensors that are taken as they are, by their names in safetensors files.
_STORED_DTYPES: dict[torch.dtype | None, Sequence[str]] = {
    torch.float8_e4m3fn: ("F8_E4M3",),
    torch.int8: ("I8",),
    torch.uint8: ("U8",),
    torch.int32: ("I32",),
    torch.int64: ("I64",),
}
#: Threads that read where weights go to a GPU: one copies out of the page cache more slowly than
#: disk and bus give and take.
READING_THREADS = 4
#: Bytes of weights that such a thread reads from a file before it takes another part.
_PART_BYTES = 256 * 2**20
#: Standard deviations of random weights, and of float8 values behind a scale.
WEIGHT_DEVIATION, FLOAT8_DEVIATION = 0.02, 64.0


class StoredTensor(NamedTuple):
    """A tensor of a checkpoint: its file, and its name in there."""

    file: Path
    name: str


def load_weights(
    shards: Sequence[tuple[str, WeightShard]],
    folder: Path,
    load_format: str,
    seed: int,
    on_progress: Callable[[int, int], None],
    is_unused: Callable[[str], bool] = lambda name: False,
    zero: Sequence[str] = (),
) -> None:
    """Fills every parameter.

    Args:
        shards: (checkpoint name, where this rank's part of it goes) of every tensor.
        folder: a local model folder; GGUF files have been converted to one by now.
        load_format: "dummy" for random weights, "dummy_skewed" for such with routers that prefer
            some experts (`layers.mixture.router_skew`), else safetensors.
        seed: of random weights.
        on_progress: called with the bytes that are done and the total.
        is_unused: whether a tensor of a name may be there that no parameter needs.
        zero: ends of the names of tensors that may be there if they are all zero.

    Raises:
        ConfigError: files are missing or cannot be read, or the tensors do not match the model.
    """
    total = sum(shard.destination.nbytes for _, shard in shards)
    if load_format in ("dummy", "dummy_skewed"):
        _fill_at_random([shard for _, shard in shards], seed, on_progress, total)
        if load_format == "dummy_skewed":
            _skew([shard for _, shard in shards])
    else:
        located = locate_tensors(folder)
        shards = [as_stored(name, shard, located) for name, shard in shards]
        known = {*(name for name, _ in shards), *_OTHERS}
        others = [
            name
            for name in located
            if name not in known and name.endswith(tuple(zero)) and not is_unused(name)
        ]
        zeros = frozenset(name for name in others if _is_zero(located[name]))
        _load_safetensors(
            shards, folder, located, on_progress, total, lambda n: n in zeros or is_unused(n)
        )


def as_stored(name: str, shard: WeightShard, located: Container[str]) -> tuple[str, WeightShard]:
    """Returns a shard of a stack of experts as a shard of one expert's tensor, if the checkpoint
    has such instead of the stack: of Qwen3.5-MoE there are both kinds. Gates and ups, which a stack
    has one after the other, then have tensors of their own."""
    stack, total = shard.stack, shard.total
    if stack is None or name in located:
        return name, shard
    experts, _, module = name.rpartition(".")
    start = shard.start
    if module == "gate_up_proj" and total is not None:
        total //= 2
        module = "up_proj" if start >= total else "gate_proj"
        start %= total
    found = f"{experts}.{stack.number}.{module}.weight"
    if found not in located:
        return name, shard
    one = replace(shard, start=start, total=total, stack=None)
    if not stack.is_out_first:  # an expert's tensor is [out, in]
        one = replace(one, destination=shard.destination.t(), dim=1 - shard.dim)
    return found, one


def _fill_at_random(
    shards: list[WeightShard], seed: int, on_progress: Callable[[int, int], None], total: int
) -> None:
    """Weights are normal with a deviation of 0.02, as models are initialised, and packed integers
    uniform; norms and orders (one dimension) stay as they are."""
    progress = _Progress(on_progress, total)
    generator = torch.Generator(shards[0].destination.device).manual_seed(seed)
    for shard in shards:
        destination = shard.destination
        if shard.dummy is not None:
            destination.fill_(shard.dummy)
        elif not destination.is_floating_point() and destination.ndim > 1:
            bounds = torch.iinfo(destination.dtype)
            destination.random_(bounds.min, bounds.max, generator=generator)
        elif destination.ndim > 1:
            _fill_normally(shard, generator)
        progress.add(destination.nbytes)


def _skew(shards: list[WeightShard]) -> None:
    """Multiplies the rows of routers that are to be preferred. Raises `ConfigError` if there are
    none: the model would be measured as if it were skewed."""
    skews = [(shard.destination, shard.skew) for shard in shards if shard.skew is not None]
    if not skews:
        raise ConfigError(
            "model.load_format = 'dummy_skewed' needs a mixture of experts of which a token takes "
            "fewer than a tenth, by a softmax or sigmoid without groups and biases"
        )
    for weight, (rows, factor) in skews:
        weight[:rows].mul_(factor)


def _fill_normally(shard: WeightShard, generator: torch.Generator) -> None:
    """Fills a shard with normal values; float8 values, which have a scale, with a deviation of
    `FLOAT8_DEVIATION`."""
    destination = shard.destination
    if destination.dtype in _COMPUTED_DTYPES and shard.store is None:
        destination.normal_(0.0, WEIGHT_DEVIATION, generator=generator)
        return
    like = destination.new_empty(destination.shape, dtype=torch.bfloat16)
    deviation = WEIGHT_DEVIATION if shard.store is not None else FLOAT8_DEVIATION
    like.normal_(0.0, deviation, generator=generator)
    if shard.store is None:
        destination.copy_(like)
    else:
        shard.store(like)


def _load_safetensors(
    shards: Sequence[tuple[str, WeightShard]],
    folder: Path,
    located: Mapping[str, StoredTensor],
    on_progress: Callable[[int, int], None],
    total: int,
    is_unused: Callable[[str], bool],
) -> None:
    check_names([name for name, _ in shards], folder, located, is_unused)
    by_file: dict[Path, list[tuple[str, WeightShard]]] = {}
    for name, shard in shards:
        by_file.setdefault(located[name].file, []).append((located[name].name, shard))
    progress = _Progress(on_progress, total)
    mode = torch.is_inference_mode_enabled()  # which each thread has for itself
    gpu = next((s.destination.device for _, s in shards if s.destination.is_cuda), None)

    def read(part: tuple[Path, Sequence[tuple[str, WeightShard]]]) -> None:
        file, wanted = part
        with torch.inference_mode(mode), open_file(file) as mapped:
            to_gpu = (
                nullcontext() if gpu is None else stage_file(mapped, file, positions[file], gpu)
            )
            with to_gpu as staged:
                for name, shard in wanted:
                    tensors = staged if shard.destination.is_cuda else mapped
                    copy_part(slice_of(tensors, name, file, shard), name, shard)
                    progress.add(shard.destination.nbytes)

    threads = reading_threads(gpu or torch.device("cpu"))
    positions = {file: _positions_of(file) for file in by_file} if threads > 1 else {}
    with ThreadPoolExecutor(threads, "weights") as pool:
        for _ in pool.map(read, list(_divide(by_file, positions))):
            pass


def _positions_of(file: Path) -> Mapping[str, int]:
    """Returns where a file's tensors begin. Raises `ConfigError` if it cannot be read."""
    with open_file(file):
        return tensor_positions(file)


def reading_threads(device: torch.device) -> int:
    """Returns how many threads read weights that go to a device."""
    return READING_THREADS if device.type == "cuda" else 1


def _divide(
    by_file: Mapping[Path, Sequence[tuple[str, WeightShard]]],
    positions: Mapping[Path, Mapping[str, int]],
) -> Iterator[tuple[Path, Sequence[tuple[str, WeightShard]]]]:
    """Yields the parts that threads read one after the other: ranges of files with known positions
    of tensors, and whole files."""
    for file in sorted(by_file):
        if file not in positions:
            yield file, by_file[file]
            continue
        known = positions[file]
        part: list[tuple[str, WeightShard]] = []
        size = 0
        for name, shard in sorted(by_file[file], key=lambda each: known.get(each[0], 0)):
            part.append((name, shard))
            size += shard.destination.nbytes
            if size >= _PART_BYTES:
                yield file, part
                part, size = [], 0
        if part:
            yield file, part


def check_names(
    names: Sequence[str],
    folder: Path,
    located: Mapping[str, StoredTensor],
    is_unused: Callable[[str], bool],
) -> None:
    """Raises `ConfigError` unless a checkpoint has tensors of all these names, and none that a
    model neither needs nor leaves out."""
    missing = list(dict.fromkeys(name for name in names if name not in located))
    wanted = set(names)
    unknown = [name for name in located if name not in wanted and not is_needless(name, is_unused)]
    if missing or unknown:
        listed = [
            f"{len(names)} {kind} ({_first(names)})"
            for kind, names in (("missing", missing), ("unknown", unknown))
            if names
        ]
        raise ConfigError(f"{folder} does not hold this model's tensors: {'; '.join(listed)}")


class _Progress:
    """Adds up the bytes that threads have read, and reports them, a hundred times or so: a model
    may have tens of thousands of tensors."""

    def __init__(self, report: Callable[[int, int], None], total: int):
        self._report, self._total = report, total
        self._done = self._reported = 0
        self._lock = threading.Lock()

    def add(self, size: int) -> None:
        with self._lock:
            self._done += size
            if self._done >= min(self._total, self._reported + self._total // 100):
                self._reported = self._done
                self._report(self._done, self._total)


def read_tensors(folder: Path, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Returns tensors of a checkpoint that are there, whole."""
    located, found = locate_tensors(folder), {}
    for file in sorted({located[name].file for name in names}):
        with open_file(file) as tensors:
            for name in names:
                if located[name].file == file:
                    found[name] = slice_of(tensors, located[name].name, file)[...]
    return found


def _is_zero(tensor: StoredTensor) -> bool:
    """Whether all of a tensor is zero."""
    with open_file(tensor.file) as tensors:
        return not bool(slice_of(tensors, tensor.name, tensor.file)[:].any())


def copy_part(stored: Any, name: str, shard: WeightShard) -> None:
    """Copies the part of a stored tensor that a shard needs, converting its dtype."""
    shape = list(stored.get_shape())
    expected = shard.checkpoint_shape
    is_swapped = check_shape(shape, name, shard)
    if shape != expected and not is_swapped:
        # scalars cannot be sliced; tensors that are squeezed here are small
        whole = stored[:] if shape else stored[...]
        stored = whole.reshape(()).expand(expected) if whole.numel() == 1 else whole.view(expected)
    part = slice(shard.start, shard.start + shard.destination.shape[shard.dim])
    dim = 1 - shard.dim if is_swapped else shard.dim
    place = (part,) if dim == 0 else (slice(None), part)
    if shard.stack is None:
        found = stored[place]
    else:
        number = shard.stack.number
        found = stored[(slice(number, number + 1), *place)][0]
        found = found.t() if is_swapped else found
    if shard.store is None:
        shard.destination.copy_(found)
    else:
        shard.store(found)


def check_shape(shape: list[int], name: str, shard: WeightShard) -> bool:
    """Returns whether a stored tensor has the matrices of a stack transposed, as transformers 5
    writes the experts of Qwen3-VL. Raises `ConfigError` for a shape that the shard does not
    take."""
    expected = shard.checkpoint_shape
    if shape == expected:
        return False
    if shard.stack is not None and _is_swapped(shape, expected):
        return True
    if not shard.is_scale or not _are_scales(shape, expected):
        raise ConfigError(
            f"the tensor {name} has the shape {shape}; by config.json it should be {expected}"
        )
    return False


def _is_swapped(shape: list[int], expected: list[int]) -> bool:
    """Whether two matrices of a stack have each other's shape, transposed."""
    return len(expected) == 3 and shape == [expected[0], expected[2], expected[1]]


def _are_scales(shape: list[int], expected: list[int]) -> bool:
    """Whether a tensor of a shape is one number, or differs from the expected one by dimensions of
    length 1."""
    squeezed = [length for length in shape if length != 1]
    return not squeezed or squeezed == [length for length in expected if length != 1]


def slice_of(tensors: Any, name: str, file: Path, shard: WeightShard | None = None) -> Any:
    """Returns a tensor of an open file, to be read in part.

    Raises `ConfigError` if it is not there, or of another type than the shard takes: floating-point
    numbers are converted to one another, float8 and integers must have the shard's type.
    """
    try:
        stored = tensors.get_slice(name)
    except SafetensorError as error:
        raise ConfigError(f"{file} does not hold {name}, which the index locates there") from error
    found = stored.get_dtype()
    expected = _stored_dtypes(shard)
    if found not in expected:
        raise ConfigError(
            f"the tensor {name} of {file} is of the type {found}; it should be one of "
            f"{', '.join(expected)}"
        )
    return stored


def is_needless(name: str, is_unused: Callable[[str], bool]) -> bool:
    """Whether a tensor that no parameter takes may be among a model's."""
    return name.endswith((*_COMPUTED, *_CACHE_SCALES)) or name in _OTHERS or is_unused(name)


def _stored_dtypes(shard: WeightShard | None) -> Sequence[str]:
    """Returns the types, by their names in safetensors files, that a shard takes."""
    dtype = None if shard is None or shard.store is not None else shard.destination.dtype
    return _STORED_DTYPES.get(dtype, ("F16", "BF16", "F32", "F64"))


def locate_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Returns where each tensor is stored, from the index of a sharded checkpoint or from the files
    themselves. Its key is the name in a checkpoint of the text model alone; see `own_name`."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            files = json.loads(index.read_text("utf-8"))["weight_map"]
            return {
                own_name(name): StoredTensor(folder / file, name) for name, file in files.items()
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
    located: dict[str, StoredTensor] = {}
    for file in files:
        with open_file(file) as tensors:
            names = list(tensors.keys())
        located |= {own_name(name): StoredTensor(file, name) for name in names}
    return located


def open_file(file: Path) -> Any:
    """Returns the file, mapped into memory, as a context manager.

    Raises `ConfigError` if it cannot be read.
    """
    try:
        return safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error


def _first(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
