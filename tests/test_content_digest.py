"""Digests of files: equal where contents are, whatever path and time."""

from __future__ import annotations

import os
import random
from pathlib import Path

import torch
from safetensors.torch import save_file

from aioinfer.ipc.content_digest import digest_files

CONTENT = random.Random(1).randbytes(3 << 20)
SIZES = (("matrix", 90_000), ("norm", 100))


def write(folder: Path, content: bytes, name: str = "weights") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(content)
    return folder


def test_names_and_contents_count_alone(tmp_path: Path) -> None:
    first, second = (write(tmp_path / name, CONTENT) for name in ("a", "b"))
    os.utime(second / "weights", (1, 1))
    (second / "sub").mkdir()
    digest = digest_files(first)
    assert digest_files(second) == digest
    assert digest_files(write(tmp_path / "c", CONTENT, "other")) != digest
    changed = bytes(value ^ 1 for value in CONTENT)
    assert digest_files(write(tmp_path / "d", changed)) != digest


def test_both_ends_of_samples_count(tmp_path: Path) -> None:
    digest = digest_files(write(tmp_path / "a", CONTENT))
    for place in (0, len(CONTENT) - 1):
        changed = bytearray(CONTENT)
        changed[place] ^= 1
        assert digest_files(write(tmp_path / "b", bytes(changed))) != digest


def test_a_tensor_that_alone_has_changed_counts(tmp_path: Path) -> None:
    tensors = {f"layers.{n}.{kind}": torch.zeros(size) for n in range(9) for kind, size in SIZES}
    digests = set()
    for name in (None, "layers.4.norm", "layers.7.matrix"):
        changed = {each: tensor + (each == name) for each, tensor in tensors.items()}
        save_file(changed, tmp_path / "model.safetensors")
        digests.add(digest_files(tmp_path))
    assert len(digests) == 3
