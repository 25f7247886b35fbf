"""Reading GGUF files, against those that the `gguf` package writes and its own reader."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from aioinfer.checkpoint.gguf_file import GgufFile
from aioinfer.errors import ConfigError
from tests.gguf_models import random_model, write_gguf
from tests.real_tokenizers import smollm2_gguf

QUANTIZED = [
    kind
    for kind, (block_values, _) in gguf.GGML_QUANT_SIZES.items()
    if block_values > 1 and kind.name not in ("Q8_1", "Q8_K", "Q1_0", "Q2_0", "NVFP4")
]


def write(path: Path, writer: gguf.GGUFWriter) -> GgufFile:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufFile(path)


@pytest.mark.slow
def test_smollm2_is_as_the_gguf_package_reads_it():
    file, theirs = GgufFile(smollm2_gguf()), gguf.GGUFReader(smollm2_gguf())
    fields = {
        name: field.contents()
        for name, field in theirs.fields.items()
        if not name.startswith("GGUF.")
    }
    assert file.metadata.keys() == fields.keys()
    for name, value in fields.items():
        if isinstance(value, float):
            assert np.float32(file.metadata[name]) == np.float32(value), name
        else:
            assert file.metadata[name] == value, name
    assert list(file.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        ours = file.tensors[tensor.name]
        assert (list(ours.shape), ours.type) == (tensor.shape.tolist()[::-1], tensor.tensor_type)
        assert np.array_equal(ours.rows.reshape(-1), tensor.data.reshape(-1).view(np.uint8))


def test_metadata_of_every_type(tmp_path: Path):
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -100)
    writer.add_uint16("u16", 60_000)
    writer.add_int16("i16", -30_000)
    writer.add_uint32("u32", 4_000_000_000)
    writer.add_int32("i32", -2_000_000_000)
    writer.add_uint64("u64", 2**63)
    writer.add_int64("i64", -(2**62))
    writer.add_float32("f32", 1e-6)
    writer.add_float64("f64", 1e-300)
    writer.add_bool("yes", True)
    writer.add_string("text", "▁世界")
    writer.add_array("texts", ["a", "", "é"])
    writer.add_array("numbers", [1, -2, 3])
    writer.add_array("flags", [True, False])
    file = write(path, writer)
    assert file.metadata == {
        "general.architecture": "llama", "u8": 200, "i8": -100, "u16": 60_000, "i16": -30_000,
        "u32": 4_000_000_000, "i32": -2_000_000_000, "u64": 2**63, "i64": -(2**62), "f32": 1e-6,
        "f64": 1e-300, "yes": True, "text": "▁世界", "texts": ["a", "", "é"], "numbers": [1, -2, 3],
        "flags": [True, False],
    }  # fmt: skip


def test_a_file_with_an_alignment_of_its_own(tmp_path: Path):
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(256)
    first, second = np.arange(6, dtype=np.float32).reshape(2, 3), np.ones(5, np.float32)
    writer.add_tensor("first", first)
    writer.add_tensor("second", second)
    file = write(path, writer)
    assert np.array_equal(file.tensors["first"].values().reshape(2, 3), first)
    assert np.array_equal(file.tensors["second"].values(), second)


@pytest.mark.parametrize("kind", QUANTIZED, ids=lambda kind: kind.name)
def test_values_of_any_rows_are_those_of_the_gguf_package(
    tmp_path: Path, kind: gguf.GGMLQuantizationType
):
    """Of random bytes; exponents of scales are cleared of infinities by taking what is finite."""
    path = tmp_path / "model.gguf"
    block_values, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    stored = np.random.default_rng(3).integers(0, 256, (40, 2 * block_bytes), np.uint8)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("weight", stored, raw_dtype=kind)
    tensor = write(path, writer).tensors["weight"]
    assert tensor.shape == (40, 2 * block_values)
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(stored, kind)
        for rows in (slice(None), slice(3, 20), np.array([7, 0, 39])):
            values = tensor.values(rows)
            assert values.dtype == np.float32
            np.testing.assert_array_equal(values.reshape(expected[rows].shape), expected[rows])


@pytest.mark.parametrize(
    "content",
    [
        b"", b"GGUF", b"not a model at all", b"GGUF" + bytes(range(60)),
        b"GGUF" + (99).to_bytes(4, "little") + bytes(16),
        b"GGUF" + (3).to_bytes(4, "little") + bytes(8) + (2**60).to_bytes(8, "little"), None,
    ],
    ids=["empty", "magic", "text", "noise", "version", "2**60 fields", "cut off"],
)  # fmt: skip
def test_files_that_are_not_gguf(tmp_path: Path, content: bytes | None):
    if content is None:  # a download that was cut off
        source = random_model("llama", tmp_path / "source")
        content = write_gguf(tmp_path / "whole.gguf", source, "llama").read_bytes()[:-1000]
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"model\.gguf cannot be read as GGUF"):
        GgufFile(path)


def test_a_header_that_is_cut_anywhere_is_reported(tmp_path: Path):
    source = random_model("llama", tmp_path / "source")
    whole = write_gguf(tmp_path / "whole.gguf", source, "llama").read_bytes()
    path = tmp_path / "model.gguf"
    for size in range(1, 6000, 37):
        path.write_bytes(whole[:size])
        with pytest.raises(ConfigError, match="cannot be read as GGUF"):
            GgufFile(path)
