"""Converts a GGUF file, once, into a model folder in Hugging Face's layout: config, weights,
tokenizer.

After that a GGUF model is a folder like any other, which loads in half a second where reading the
GGUF takes several. Tensors are converted in slices, several at a time, from the mapped file into
their place in `model.safetensors`, so that memory holds a few slices and not the model. F16 and
BF16 tensors keep their type. Quantized matrices stay quantized, as integers with a scale and an
offset for each group (`gguf_groups`), where that is asked for; others become float32, in which
alone their values are exact (a scale of 11 significant bits times an integer of 4 to 8).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from aioinfer.checkpoint.gguf_architectures import (
    ROPE_TENSORS,
    TENSORS,
    GgufArchitecture,
    architecture_of,
    read_config,
)
from aioinfer.checkpoint.gguf_file import GgufFile, GgufTensor
from aioinfer.checkpoint.gguf_groups import GROUPED_TYPES, GroupedType, pack_pairs
from aioinfer.checkpoint.safetensors_writer import SafetensorsWriter, TensorSpec
from aioinfer.errors import ConfigError
from aioinfer.text.gguf_tokenizer import write_tokenizer

#: Values converted at a time: few enough to stay in a core's cache, and enough that numpy computes,
#: without the GIL, for much longer than Python takes between its calls.
_SLICE_VALUES = 1 << 17
_STORED_AS_IS = {
    gguf.GGMLQuantizationType.F16: "F16",
    gguf.GGMLQuantizationType.BF16: "BF16",
}


@dataclass(frozen=True, slots=True)
class _Conversion:
    """The conversion of a tensor of the file into a tensor of the folder.

    Attributes:
        tensor: the source.
        name: the destination's.
        dtype: the destination's: "F32", or "F16" or "BF16" for a copy.
        grouped: how it stays quantized, in several tensors, or None.
        row_order: the source row of each row, or None for the same order.
        offset: subtracted from each value.
    """

    tensor: GgufTensor
    name: str
    dtype: str
    row_order: np.ndarray | None
    offset: float
    grouped: GroupedType | None = None

    def specs(self) -> dict[str, TensorSpec]:
        """Returns the tensors that it becomes."""
        shape, grouped = self.tensor.shape, self.grouped
        if grouped is None:
            return {self.name: TensorSpec(self.dtype, shape)}
        rows, columns = shape
        packed = (rows, columns // 2) if grouped.bits == 4 else (rows, columns)
        scales = TensorSpec(grouped.scale_dtype, (rows, columns // grouped.group_size))
        specs = {
            f"{self.name}_integers": TensorSpec("U8" if grouped.bits == 4 else "I8", packed),
            f"{self.name}_scales": scales,
        }
        return specs | ({f"{self.name}_offsets": scales} if grouped.has_offsets else {})

    def slices(self) -> Iterator[tuple[_Conversion, slice]]:
        """Yields this conversion with each of the ranges of rows to convert at a time."""
        num_rows, row_bytes = self.tensor.rows.shape
        block_values, block_bytes = gguf.GGML_QUANT_SIZES[self.tensor.type]
        count = max(1, _SLICE_VALUES * block_bytes // (block_values * max(1, row_bytes)))
        for begin in range(0, num_rows, count):
            yield self, slice(begin, min(begin + count, num_rows))

    def convert(self, rows: slice) -> dict[str, np.ndarray]:
        """Returns some rows of each destination: float32, the bytes of a copy, or the parts of
        quantized groups."""
        source = rows if self.row_order is None else self.row_order[rows]
        if self.grouped is not None:
            return self._take_apart(self.grouped, source)
        if self.dtype != "F32":
            return {self.name: np.ascontiguousarray(self.tensor.rows[source])}
        values = self.tensor.values(source)
        return {self.name: values - np.float32(self.offset) if self.offset else values}

    def _take_apart(self, grouped: GroupedType, rows: slice | np.ndarray) -> dict[str, np.ndarray]:
        """Returns rows of a quantized tensor as integers, scales and offsets."""
        block_bytes = gguf.GGML_QUANT_SIZES[self.tensor.type][1]
        parts = grouped.take_apart(self.tensor.rows[rows].reshape(-1, block_bytes))
        integers = pack_pairs(parts.integers) if grouped.bits == 4 else parts.integers
        named = {"integers": integers, "scales": parts.scales, "offsets": parts.offsets}
        return {
            f"{self.name}_{part}": np.ascontiguousarray(values)
            for part, values in named.items()
            if values is not None
        }


def convert_gguf(path: Path, folder: Path, *, keeps_quantized: bool = False) -> None:
    """Writes `config.json`, `generation_config.json`, `model.safetensors` and the tokenizer into
    `folder`, which must exist.

    Args:
        keeps_quantized: whether matrices of `GROUPED_TYPES` stay quantized, which
            `quantization_config` then says; no other program reads them.

    Raises:
        ConfigError: the file is not a GGUF file, or holds a model that is not supported.
        OSError: the folder cannot be written.
    """
    file = GgufFile(path)
    config = read_config(file)
    conversions = list(_conversions(file, architecture_of(file), config, keeps_quantized))
    if groups := _quantized_groups(conversions):
        config["quantization_config"] = {"quant_method": "gguf_groups", "groups": groups}
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", _generation_config(file, config))
    specs = {name: spec for each in conversions for name, spec in each.specs().items()}
    with (
        SafetensorsWriter(folder / "model.safetensors", specs) as writer,
        ThreadPoolExecutor(len(os.sched_getaffinity(0)), "gguf") as pool,
    ):

        def convert(work: tuple[_Conversion, slice]) -> None:
            conversion, rows = work
            for name, values in conversion.convert(rows).items():
                row_bytes = values.nbytes // (rows.stop - rows.start)
                writer.write(name, rows.start * row_bytes, values)

        done = pool.map(convert, (work for each in conversions for work in each.slices()))
        write_tokenizer(file.metadata, folder)
        for _ in done:  # raises a thread's exception, and cancels the remaining work
            pass


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2), "utf-8")


def _generation_config(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    """Returns the content of `generation_config.json`. Its end tokens include the end-of-turn token
    of a chat, where the file has a separate one."""
    generation: dict[str, Any] = {
        name: config[name] for name in ("bos_token_id", "eos_token_id") if name in config
    }
    end_of_turn = file.metadata.get("tokenizer.ggml.eot_token_id")
    if end_of_turn is not None and end_of_turn != generation.get("eos_token_id"):
        ends = [generation["eos_token_id"]] if "eos_token_id" in generation else []
        generation["eos_token_id"] = [*ends, end_of_turn]
    return generation


def _quantized_groups(conversions: list[_Conversion]) -> list[dict[str, Any]]:
    """Returns which modules are quantized in which way: `groups` of `quantization_config`."""
    modules: dict[tuple[int, int, bool], list[str]] = {}
    for each in conversions:
        if (grouped := each.grouped) is not None:
            key = grouped.bits, grouped.group_size, grouped.has_offsets
            modules.setdefault(key, []).append(each.name.removesuffix(".weight"))
    return [
        {"bits": bits, "group_size": size, "has_offsets": offsets, "modules": names}
        for (bits, size, offsets), names in modules.items()
    ]


def _conversions(
    file: GgufFile,
    architecture: GgufArchitecture,
    config: dict[str, Any],
    keeps_quantized: bool,
) -> Iterator[_Conversion]:
    """Yields how each tensor is converted.

    Raises:
        ConfigError: a tensor is none that a model of this architecture has.
    """
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for tensor in file.tensors.values():
        if tensor.name in ROPE_TENSORS:
            continue
        block, layer, stem, kind = _split_name(tensor.name)
        names = architecture.layer_tensors if block else TENSORS
        if stem not in names:
            raise ConfigError(f"the GGUF tensor {tensor.name} is not part of a supported model")
        prefix = f"model.layers.{layer}." if block else ""
        row_order = None
        if architecture.interleaved_rope and block and stem in heads:
            row_order = _halves_from_pairs(tensor.shape[0], heads[stem])
        offset = architecture.norm_offset if stem.endswith("norm") else 0.0
        dtype = "F32" if offset else _STORED_AS_IS.get(tensor.type, "F32")
        is_matrix = len(tensor.shape) == 2 and kind == "weight"
        grouped = GROUPED_TYPES.get(tensor.type) if keeps_quantized and is_matrix else None
        name = f"{prefix}{names[stem]}.{kind}"
        yield _Conversion(tensor, name, dtype, row_order, offset, grouped)


def _split_name(name: str) -> tuple[bool, str, str, str]:
    """Returns whether a tensor belongs to a layer, the layer's number, its name, and its kind:
    `blk.3.attn_q.weight` gives (True, "3", "attn_q", "weight")."""
    parts = name.split(".")
    if parts[0] == "blk" and len(parts) == 4:
        return True, parts[1], parts[2], parts[3]
    return False, "", ".".join(parts[:-1]), parts[-1]


def _halves_from_pairs(num_rows: int, heads: int) -> np.ndarray:
    """Returns the row that comes to each place when the rows of each head are reordered from
    neighbouring pairs, (0, 1), (2, 3) ..., to halves, (0, n / 2), (1, n / 2 + 1) ..."""
    return np.arange(num_rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
