"""Weights are read through pinned memory on a stream of each thread: all that is loaded is right,
whatever the part, the dtype and the number of pieces."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from aioinfer.layers.shards import WeightShard
from aioinfer.models import loader, staged_file
from aioinfer.models.loader import load_weights


def test_parts_of_tensors_reach_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "_PART_BYTES", 1 << 20)
    monkeypatch.setattr(staged_file, "_PIECE_BYTES", 300_000)
    torch.manual_seed(0)
    names = [f"layer {number}" for number in range(24)]
    stored = {name: torch.randn(700, 512).bfloat16() for name in names}
    half = len(names) // 2
    for number, part in enumerate((names[:half], names[half:])):
        save_file({name: stored[name] for name in part}, tmp_path / f"{number}.safetensors")
    kept: dict[str, torch.Tensor] = {}
    shards, expected = list[tuple[str, WeightShard]](), dict[str, torch.Tensor]()
    for number, name in enumerate(names):
        whole = stored[name]
        if number % 4 == 0:  # of another dtype
            shard = WeightShard(torch.empty(700, 512, device="cuda"))
            expected[name] = whole.float()
        elif number % 4 == 1:  # rows
            shard = WeightShard(torch.empty(300, 512, dtype=whole.dtype, device="cuda"), 0, 55, 700)
            expected[name] = whole[55:355]
        elif number % 4 == 2:  # columns, into a part of a larger parameter
            both = torch.empty(1400, 128, dtype=whole.dtype, device="cuda")
            shard = WeightShard(both[700:], 1, 384, 512)
            expected[name] = whole[:, 384:]
        else:

            def store(part: torch.Tensor, name: str = name) -> None:
                kept[name].copy_(part * 2)

            kept[name] = torch.empty(700, 512, dtype=whole.dtype, device="cuda")
            shard = WeightShard(kept[name], store=store)
            expected[name] = whole * 2
        shards.append((name, shard))
    reports: list[int] = []
    for _ in range(3):
        for _, shard in shards:
            shard.destination.fill_(torch.nan)
        load_weights(shards, tmp_path, "auto", 0, lambda done, total: reports.append(done))
        for name, shard in shards:
            assert torch.equal(shard.destination.cpu(), expected[name]), name
    assert reports[-1] == sum(shard.destination.nbytes for _, shard in shards)
