"""scripts/bench_kv_copies.py: a short run on a CPU, and the addresses of the pieces of blocks."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path

import numpy as np
import pytest
import torch

import bench_kv_copies
from aioinfer.ipc.plan import I32
from aioinfer.worker.host_blocks import CpuCopies, make_host_blocks
from benchlib.block_crossings import pieces_of
from tests.test_host_blocks import make_kv

#: Blocks of groups that have layers, and of one that has none.
MOVES: I32 = np.array(
    [[0, 3, 1], [3, 0, 2], [0, 1, 5], [1, 4, 0], [2, 1, 1], [0, 0, 0]], np.int32
)  # fmt: skip


def test_a_short_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    sizes = "--device cpu --blocks 5 --block-size 4 --layers 2 --weights 0 --rounds 2"
    bench_kv_copies.main([*sizes.split(), "--json", str(file)])
    assert len(json.loads(file.read_text())["load"]["at once"]["GB/s"]) == 2
    assert "save  at once" in capsys.readouterr().out


def test_pieces_are_all_bytes_of_blocks() -> None:
    """What is copied to the addresses is what the product copies."""
    kv = make_kv(torch.bfloat16)
    hosts = [make_host_blocks(kv, 2 * kv.nbytes) for _ in range(2)]
    for host in hosts:
        for memory in host.groups:
            memory.zero_()
    CpuCopies(kv, hosts[0]).save(MOVES)
    for pieces in pieces_of(kv, hosts[1], MOVES):
        for target, source in zip(pieces.on_host, pieces.on_device, strict=True):
            ctypes.memmove(int(target), int(source), pieces.nbytes)
    assert all(map(torch.equal, hosts[0].groups, hosts[1].groups))
