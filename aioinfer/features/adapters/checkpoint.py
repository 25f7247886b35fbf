"""Adapters as `peft` saves them: a folder with `adapter_config.json` and
`adapter_model.safetensors`. Neither can run code; pickles (`adapter_model.bin`) are not read.

Workers read adapters while they serve (`reading`). So an adapter's numbers are read in few `Run`s,
and its `AdapterLayout`, which takes thousands of operations, is the same for all with one header.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import torch
from safetensors.torch import save_file

from aioinfer.errors import ConfigError
from aioinfer.features.adapters.layers.parts import PROMPT, AdapterWeights
from aioinfer.ipc.content_digest import DIGEST_BYTES
from aioinfer.models.text_model import own_name

CONFIG, WEIGHTS, _OTHER = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
#: The maximum of a configuration, and a group that is repeated, with which a search may take
#: exponential time.
_MAX_CONFIG_BYTES = 1 << 20
_REPEATED_GROUP = re.compile(r"\)[*+{]")
#: Types of numbers, as safetensors names them.
_DTYPES = {
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64
}  # fmt: skip
#: A longer header takes many seconds of Python's lock, for which streams wait; experts of the
#: largest models have some 100 000 matrices of 150 bytes each.
_MAX_HEADER_BYTES = 32 << 20
#: Numbers that are read at once, unless a matrix has more: they stay in the caches of a core.
_RUN_BYTES = 16 << 20
#: Of each matrix so many bytes are compared at its beginning, and at equal distances: training that
#: has changed a matrix has changed it nearly everywhere.
_SAMPLE_BYTES, _SAMPLE_DISTANCE = 1024, 1 << 20
_TENSOR = re.compile(
    r"base_model\.model\.(?P<module>.+?)(?P<depth>(\.base_layer)*)"
    r"\.lora_((?P<side>[AB])(\.\w+)?\.weight|embedding_(?P<table>[AB])(\.\w+)?)"
)
#: Weights of the model outside its layers, which peft saves along with adapters of embeddings and
#: heads.
_BASE = re.compile(r"base_model\.model\.(?!.*\.\d+\.).+\.base_layer\.weight")
_T = TypeVar("_T")
_SIDES = {"A": "down", "B": "up"}
#: Kinds of peft whose saved tensor is a soft prompt.
_PROMPTS = ("PROMPT_TUNING", "P_TUNING")
#: Parameters of stacked experts, in the order in which peft nests what it adds to them.
_STACKS = ("gate_up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The part of `adapter_config.json` that is needed.

    Attributes:
        rank_of, alpha_of: of a module, by its name.
        is_rank_stabilized: whether the product is scaled by alpha / sqrt(rank) (rsLoRA,
            Kalajdzievski 2023), and not by alpha / rank.
        parameters: that it changes of modules, such as "mlp.experts.down_proj".
        prompt_tokens: virtual tokens of a soft prompt; 0 for matrices.
    """

    rank_of: Callable[[str], int]
    alpha_of: Callable[[str], float]
    is_rank_stabilized: bool
    parameters: Sequence[str]
    prompt_tokens: int

    @classmethod
    def parse(cls, text: bytes, file: Path) -> AdapterConfig:
        """Parses the content of a file. Raises `ConfigError` for what is not supported."""
        try:
            if len(text) > _MAX_CONFIG_BYTES:
                raise ValueError(f"it has more than {_MAX_CONFIG_BYTES} bytes")
            given = json.loads(text)
            if not isinstance(given, dict):
                raise ValueError("it does not hold an object")
            _refuse(given)
            is_prompt = given["peft_type"] in _PROMPTS
            return cls(
                _by_module(1 if is_prompt else given["r"], given.get("rank_pattern"), _rank),
                _by_module(given.get("lora_alpha", 8), given.get("alpha_pattern"), _alpha),
                bool(given.get("use_rslora")),
                [str(name) for name in given.get("target_parameters") or ()],
                int(given["num_virtual_tokens"]) if is_prompt else 0,
            )
        except (
            ValueError, KeyError, TypeError, OverflowError, RecursionError, re.error,
        ) as error:  # fmt: skip
            reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
            raise ConfigError(f"{file} cannot be read: {reason}") from error

    def scale_of(self, module: str, rank: int) -> float:
        """Returns by what the product of a module is multiplied."""
        return self.alpha_of(module) / (math.sqrt(rank) if self.is_rank_stabilized else rank)

    def stacks_of(self, module: str) -> list[str]:
        """Returns the parameters that it changes of a module of stacked experts, in the order in
        which peft nests them, the innermost first."""
        found = []
        for name in self.parameters:
            owner, _, parameter = name.rpartition(".")
            if f".{module}".endswith(f".{owner or 'experts'}"):
                found.append(parameter)
        known = [name for name in _STACKS if name in found]
        return known + sorted(set(found).difference(known))


def write_adapter(
    folder: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]
) -> None:
    """Writes an adapter as peft saves it.

    Args:
        tensors: by the names of peft's state dict, on any device.
        config: the content of `adapter_config.json`, as peft's `LoraConfig.to_dict` has it.

    Raises:
        ConfigError: something in the configuration cannot be written.
    """

    def plain(value: Any) -> Any:
        if isinstance(value, (set, frozenset)):
            return sorted(value)
        raise TypeError(f"{value!r} cannot be written")

    try:
        text = json.dumps(dict(config), default=plain)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the adapter's configuration: {error}") from error
    (folder / CONFIG).write_text(text, "utf-8")
    # safetensors takes no tensors that share memory
    own = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    save_file(own, folder / WEIGHTS)


def _refuse(given: Mapping[str, Any]) -> None:
    """Raises ValueError for an adapter of a kind that is not supported."""
    kind = given.get("peft_type")
    if kind not in ("LORA", *_PROMPTS):
        known = ", ".join(repr(each) for each in ("LORA", *_PROMPTS))
        raise ValueError(f"peft_type is {kind!r}, and only {known} are supported")
    for name in (
        "use_dora",
        "alora_invocation_tokens",
        "modules_to_save",
        "trainable_token_indices",
    ):
        if given.get(name):
            raise ValueError(f"{name} is not supported")
    if (bias := given.get("bias") or "none") != "none":
        raise ValueError(f"bias is {bias!r}, and only 'none' is supported")


def _rank(given: Any) -> int:
    """Returns a rank. Raises ValueError for one that no matrix has."""
    if (rank := int(given)) < 1:
        raise ValueError(f"a rank is {rank}, and not positive")
    return rank


def _alpha(given: Any) -> float:
    """Returns an alpha. Raises ValueError for one that is not finite."""
    if not math.isfinite(alpha := float(given)):
        raise ValueError(f"lora_alpha is {alpha}, and not finite")
    return alpha


def _by_module(default: Any, patterns: Any, convert: Callable[[Any], _T]) -> Callable[[str], _T]:
    """Returns what gives the value of a module: of the first pattern that matches the end of its
    name, as in peft, or by default. Raises `re.error` for what is no pattern, and ValueError for
    one that might be searched for without end."""
    given, own = dict(patterns or {}), convert(default)
    for pattern in given:
        if _REPEATED_GROUP.search(pattern):
            raise ValueError(f"the pattern {pattern!r} repeats a group, which is not supported")
    found = [(re.compile(rf"(.*\.)?({each})"), convert(value)) for each, value in given.items()]
    return lambda module: next((value for p, value in found if p.fullmatch(module)), own)


class Run(NamedTuple):
    """Matrices that lie one after the other in an adapter's file, with numbers of one type.

    Attributes:
        start, nbytes: where the numbers are in the file.
        dtype: of the numbers.
        first: how many numbers the runs before have.
        samples: the samples among the bytes.
    """

    start: int
    nbytes: int
    dtype: torch.dtype
    first: int
    samples: Sequence[slice]

    def sample(self, numbers: memoryview) -> bytes:
        """Returns the samples of the run's bytes."""
        return b"".join([numbers[each] for each in self.samples])


class AdapterLayout(NamedTuple):
    """What an adapter's files say beside numbers.

    Attributes:
        config: the configuration.
        weights: matrices by the module of the checkpoint, or the soft prompt (see `PROMPT`): on the
            meta device, views of the numbers of all runs.
        runs: where the numbers are in the file.
    """

    config: AdapterConfig
    weights: Mapping[str, AdapterWeights]
    runs: Sequence[Run]


class OpenAdapter:
    """The files of an adapter, of which the one with the matrices is open.

    Args:
        folder: of the adapter.
        config: the content of its configuration.
        file: with the matrices.

    Attributes:
        folder: the same.
        head: all that the files say beside numbers: adapters with one head have one layout.

    Raises:
        ConfigError: the header is too long.
    """

    def __init__(self, folder: Path, config: bytes, file: BinaryIO):
        self.folder, self._config, self._file = folder, config, file
        length = int.from_bytes(file.read(8), "little")
        if length > _MAX_HEADER_BYTES:
            path = folder / WEIGHTS
            raise ConfigError(f"{path} cannot be read: its header has {length} bytes")
        self._header = file.read(length)
        self._start = 8 + length
        self.head = config + b"\0" + self._header

    def layout(self) -> AdapterLayout:
        """Returns the layout. Raises `ConfigError` if there are other tensors, or matrices without
        their counterparts, or the files cannot be read."""
        config = AdapterConfig.parse(self._config, self.folder / CONFIG)
        path, entries = self.folder / WEIGHTS, self._entries()
        names = [name for name in entries if not _BASE.fullmatch(name)]
        if not config.prompt_tokens:
            places = _places(path, names, config)
        elif names == [PROMPT]:
            places = {(PROMPT, "up"): (PROMPT, False)}
        else:
            raise ConfigError(f"{path} is no soft prompt: it holds {', '.join(names)}")
        matrices, runs = _lay_out({name: entries[name] for name in names}, self._start)
        sides: dict[str, dict[str, torch.Tensor]] = {}
        for (module, side), (name, is_stack) in places.items():
            matrix = matrices[name]
            if is_stack:
                matrix = _unstacked(matrix, config.rank_of(module), side)
            sides.setdefault(module, {})[side] = matrix
        return AdapterLayout(config, _weights_of(sides, config, self.folder), runs)

    def _entries(self) -> dict[str, _Entry]:
        """Returns the tensors of the file by name. Raises `ConfigError`."""
        path, size = self.folder / WEIGHTS, self._file.seek(0, 2) - self._start
        try:
            given = json.loads(self._header)
            given.pop("__metadata__", None)
            found = {
                name: _Entry(
                    str(each["dtype"]),
                    tuple(map(int, each["shape"])),
                    *map(int, each["data_offsets"]),
                )
                for name, each in given.items()
            }
            if not all(0 <= each.begin <= each.end <= size for each in found.values()):
                raise ValueError("a tensor is not in the file")
        except (
            ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError,
        ) as error:  # fmt: skip
            raise ConfigError(f"{path} cannot be read: its header is broken: {error}") from error
        return found

    def read(self, run: Run, memory: memoryview) -> memoryview:
        """Reads the numbers of a run into memory, and returns the part that they take; threads may
        read at the same time. Raises `ConfigError`."""
        numbers, end = memory[: run.nbytes], 0
        while end < run.nbytes:
            count = os.preadv(self._file.fileno(), [numbers[end:]], run.start + end)
            if not count:
                raise ConfigError(f"{self.folder / WEIGHTS} cannot be read: it ends too early")
            end += count
        return numbers

    def digest_of(self, samples: Sequence[bytes]) -> str:
        """Returns the digest of the head and of the runs' samples."""
        return blake2b(b"".join([self.head, *samples]), digest_size=DIGEST_BYTES).hexdigest()

    def digests(self, runs: Sequence[Run]) -> tuple[str, str]:
        """Returns digests of the files: of all numbers, and of samples. Raises `ConfigError`."""
        whole, samples = blake2b(self.head, digest_size=DIGEST_BYTES), []
        memory = memoryview(bytearray(max(run.nbytes for run in runs)))
        for run in runs:
            numbers = self.read(run, memory)
            whole.update(numbers)
            samples.append(run.sample(numbers))
        return whole.hexdigest(), self.digest_of(samples)


@contextmanager
def open_adapter(folder: Path) -> Iterator[OpenAdapter]:
    """Opens an adapter's files. Raises `ConfigError` if they cannot be read."""
    path = folder / CONFIG
    try:
        with path.open("rb") as file:
            config = file.read(_MAX_CONFIG_BYTES + 1)
        path = folder / WEIGHTS
        with path.open("rb") as file:
            yield OpenAdapter(folder, config, file)
    except OSError as error:
        if not (folder / WEIGHTS).exists() and (other := folder / _OTHER).exists():
            raise ConfigError(f"{other} may run code: save the adapter as {WEIGHTS}") from error
        raise ConfigError(f"{path} cannot be read: {error}") from error


class _Entry(NamedTuple):
    """A tensor of a file of safetensors; bytes from `begin` to `end` behind the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def _lay_out(
    entries: Mapping[str, _Entry], start: int
) -> tuple[dict[str, torch.Tensor], list[Run]]:
    """Returns matrices by name, as in `AdapterLayout.weights`, and their runs. Raises `ConfigError`
    for tensors that are no matrices, or have other numbers.

    Args:
        start: the first byte behind the file's header.
    """
    groups: list[list[_Entry]] = []
    offsets, count = dict[str, int](), 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].begin):
        dtype, shape, begin, end = entry
        if dtype not in _DTYPES:
            raise ConfigError(f"the adapter's {name} has {dtype}, and not {', '.join(_DTYPES)}")
        if len(shape) != 2:
            raise ConfigError(f"the adapter's {name} has the shape {shape}, and is no matrix")
        if min(shape) < 1 or math.prod(shape) * _DTYPES[dtype].itemsize != end - begin:
            raise ConfigError(f"the adapter's {name} has {end - begin} bytes for the shape {shape}")
        last = groups[-1][-1] if groups else entry
        if (last.end, last.dtype) != (begin, dtype) or end - groups[-1][0].begin > _RUN_BYTES:
            groups.append([])
        groups[-1].append(entry)
        offsets[name], count = count, count + math.prod(shape)
    memory = torch.empty(count, device="meta")
    matrices = {
        name: memory.as_strided(entries[name].shape, (entries[name].shape[1], 1), offset)
        for name, offset in offsets.items()
    }
    runs, first = list[Run](), 0
    for group in groups:
        (dtype, _, begin, _), end = group[0], group[-1].end
        samples = [
            slice(place - begin, min(place + _SAMPLE_BYTES, each.end) - begin)
            for each in group
            for place in range(each.begin, each.end, _SAMPLE_DISTANCE)
        ]
        runs.append(Run(start + begin, end - begin, _DTYPES[dtype], first, samples))
        first += (end - begin) // _DTYPES[dtype].itemsize
    return matrices, runs


def _weights_of(
    sides: Mapping[str, Mapping[str, torch.Tensor]], config: AdapterConfig, folder: Path
) -> dict[str, AdapterWeights]:
    """Returns the weights of (module, side). Raises `ConfigError` for a matrix without another."""
    if config.prompt_tokens:
        vectors = sides[PROMPT]["up"]
        return {PROMPT: AdapterWeights(vectors.new_empty(0, vectors.shape[1]), vectors, 1.0)}
    found = {}
    for module, pair in sides.items():
        if len(pair) < len(_SIDES):
            raise ConfigError(f"{folder}: of {module} it has one matrix and not both")
        scale = config.scale_of(module, max(1, pair["down"].shape[-2]))
        merged = 2 if module.endswith(f".{_STACKS[0]}") else 1
        found[module] = AdapterWeights(**pair, scale=scale, merged=merged)
    return found


def _unstacked(tensor: torch.Tensor, rank: int, side: str) -> torch.Tensor:
    """Returns [experts, rank, in] of [experts * rank, in], or [experts, out, rank] of [out, rank *
    experts]; the tensor itself if the rank does not divide it."""
    if tensor.shape[0 if side == "down" else 1] % rank:
        return tensor
    if side == "down":
        return tensor.unflatten(0, (-1, rank))
    return tensor.unflatten(1, (rank, -1)).permute(2, 0, 1)


def _places(
    path: Path, names: Sequence[str], config: AdapterConfig
) -> dict[tuple[str, str], tuple[str, bool]]:
    """Returns the names of a file's tensors, and whether each is of stacked experts, by (module,
    "down" or "up"). Raises `ConfigError` for tensors of something else."""
    matched = {name: match for name in names if (match := _TENSOR.fullmatch(name))}
    if len(matched) < len(names) or not names:
        unknown = next((name for name in names if name not in matched), "nothing")
        raise ConfigError(f"{path} is no LoRA: it holds {unknown}")
    depths: dict[str, int] = {}
    for match in matched.values():
        module, depth = match["module"], match["depth"].count(".")
        depths[module] = max(depth, depths.get(module, 0))
    found = {}
    for name, match in matched.items():
        module, side = match["module"], _SIDES[match["side"] or match["table"]]
        stacks = config.stacks_of(module)
        if stacks:
            number = depths[module] - match["depth"].count(".")
            module = f"{module}.{stacks[min(number, len(stacks) - 1)]}"
        found[own_name(module), side] = name, bool(stacks)
    return found
