"""Tensors of safetensors files, read piece by piece: on a CPU, to which copies are the same but for
streams and pinned memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from aioinfer.errors import ConfigError
from aioinfer.models import loader, staged_file
from aioinfer.models.loader import open_file
from aioinfer.models.staged_file import StagedFile, stage_file, tensor_positions

SHAPES = {"scalar": (), "none": (0, 3), "vector": (131,), "matrix": (40, 24), "stack": (6, 8, 10)}
DTYPES = [
    torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int32, torch.int8, torch.uint8,
    torch.bool,
]  # fmt: skip


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Tensors of several shapes and types, of which most take many pieces."""
    monkeypatch.setattr(staged_file, "_PIECE_BYTES", 100)
    path = tmp_path / "model.safetensors"
    torch.manual_seed(0)
    tensors = {
        f"{name} {dtype}": (torch.randn(shape) * 3).to(dtype)
        for name, shape in SHAPES.items()
        for dtype in DTYPES
    }
    save_file(tensors, path)
    return path


@pytest.fixture
def staged(file: Path) -> Iterator[StagedFile]:
    with (
        open_file(file) as mapped,
        stage_file(mapped, file, tensor_positions(file), torch.device("cpu")) as opened,
    ):
        yield opened


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_are_those_of_safetensors(staged: StagedFile, file: Path, dtype: torch.dtype) -> None:
    with open_file(file) as mapped:
        for name, shape in SHAPES.items():
            key = f"{name} {dtype}"
            tensor, expected = staged.get_slice(key), mapped.get_slice(key)
            assert tensor.get_shape() == list(shape)
            assert tensor.get_dtype() == expected.get_dtype()
            places: list[Any] = [...] if not shape else [slice(None), (slice(None),)]
            if len(shape) == 2 and shape[0]:
                places += [slice(3, 17), (slice(38, 50), slice(2, 9)), (slice(None), slice(20, 24))]
            if len(shape) == 3:
                places += [(slice(4, 5), slice(None), slice(1, 3)), (slice(2, 2), slice(0, 8))]
            for place in places:
                found = tensor[place]
                assert found.dtype == dtype
                assert torch.equal(found, expected[place])


def test_a_tensor_that_is_not_there(staged: StagedFile) -> None:
    with pytest.raises(SafetensorError):
        staged.get_slice("other")


def test_a_file_that_has_become_shorter(staged: StagedFile, file: Path) -> None:
    last = max(tensor_positions(file).items(), key=lambda each: each[1])[0]
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(ConfigError, match="cannot be read: the file ends at"):
        staged.get_slice(last)[:]


def test_threads_read_ranges_of_files(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tensors, each once, in the order of the file."""
    monkeypatch.setattr(loader, "_PART_BYTES", 3000)
    positions = tensor_positions(file)
    shards = [
        (f"{name} {dtype}", loader.WeightShard(torch.empty(shape, dtype=dtype)))
        for name, shape in SHAPES.items()
        for dtype in DTYPES
    ]
    parts = list(loader._divide({file: shards}, {file: positions}))
    assert len(parts) > 3
    names = [name for _, part in parts for name, _ in part]
    assert sorted(names) == sorted(positions)
    assert names == sorted(names, key=lambda name: positions[name])
    assert [(file, shards)] == list(loader._divide({file: shards}, {}))
