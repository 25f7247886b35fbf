"""Safetensors files written in pieces are read by the format's own library."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from aioinfer.checkpoint.safetensors_writer import SafetensorsWriter, TensorSpec


def test_pieces_in_any_order_from_many_threads_make_the_tensors(tmp_path: Path):
    path = tmp_path / "model.safetensors"
    source = np.random.default_rng(1)
    tensors = {
        "half": source.standard_normal((7, 3)).astype(np.float16),
        "wide": source.standard_normal((50, 33)).astype(np.float32),
        "vector": source.standard_normal(9).astype(np.float32),
    }
    specs = {
        name: TensorSpec("F16" if values.dtype == np.float16 else "F32", values.shape)
        for name, values in tensors.items()
    }
    pieces = [
        (name, row * values[:1].nbytes, values[row : row + 2])
        for name, values in tensors.items()
        for row in range(0, len(values), 2)
    ]
    order = source.permutation(len(pieces))
    with SafetensorsWriter(path, specs) as writer, ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda index: writer.write(*pieces[index]), order))
    with safe_open(path, framework="np") as file:
        assert set(file.keys()) == set(tensors)
        for name, values in tensors.items():
            stored = file.get_tensor(name)
            assert stored.dtype == values.dtype
            assert np.array_equal(stored, values), name


def test_bfloat16_is_written_as_bytes_and_what_nobody_writes_is_zero(tmp_path: Path):
    path = tmp_path / "model.safetensors"
    values = torch.tensor([1.0, -2.5, 3.0], dtype=torch.bfloat16)
    with SafetensorsWriter(
        path, {"some": TensorSpec("BF16", (3,)), "none": TensorSpec("F32", (2, 2))}
    ) as writer:
        writer.write("some", 0, values.view(torch.uint8).numpy())
    with safe_open(path, framework="pt") as file:
        assert torch.equal(file.get_tensor("some"), values)
        assert torch.equal(file.get_tensor("none"), torch.zeros(2, 2))


def test_tensors_are_aligned_to_their_items(tmp_path: Path):
    """Mapped memory is read as it lies: an odd number of halves must not shift what follows."""
    path = tmp_path / "model.safetensors"
    specs = {"half": TensorSpec("F16", (3,)), "full": TensorSpec("F32", (1,))}
    with SafetensorsWriter(path, specs) as writer:
        writer.write("full", 0, np.float32([7]))
        writer.write("half", 0, np.float16([1, 2, 3]))
    content = path.read_bytes()
    assert int.from_bytes(content[:8], "little") % 8 == 0
    assert content.index(np.float32(7).tobytes()) % 4 == 0


def test_a_file_that_cannot_be_created(tmp_path: Path):
    with pytest.raises(OSError, match="no-such-folder"):
        SafetensorsWriter(tmp_path / "no-such-folder" / "model.safetensors", {})
