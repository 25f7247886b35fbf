"""A kernel copies the pieces of KV blocks between their layers and places of the host."""

from __future__ import annotations

import numpy as np
import torch

from aioinfer.ipc.kv_spec import AttentionSpec, KVGroup, StateSpec
from aioinfer.worker.host_blocks import make_host_blocks
from aioinfer.worker.kv_tensors import KVTensors
from benchlib.block_crossings import KernelCrossing

GROUPS = (KVGroup(AttentionSpec(2, 8), (0, 1, 2)), KVGroup(StateSpec((3, 8), "bfloat16"), (0, 3)))


def test_blocks_come_back_as_they_were() -> None:
    kv = KVTensors(GROUPS, (6, 5), 4, torch.bfloat16, torch.device("cpu"))
    for tensor in kv.tensors:
        tensor.normal_()
    crossing = KernelCrossing(kv, make_host_blocks(kv, 2 * kv.nbytes), programs=3)
    saved = {(group, block): kv.block(group, block).clone() for group in (0, 1) for block in (1, 4)}
    kept = kv.block(0, 5).clone()
    moves = [(group, 7 - block, block) for group, block in saved]
    crossing.to_host(np.array(moves, np.int32))
    kv.zero(5)
    crossing.to_device(np.array([(*each[:2], each[2] - 1) for each in moves], np.int32))
    for (group, block), expected in saved.items():
        assert torch.equal(kv.block(group, block - 1), expected)
    assert torch.equal(kv.block(0, 5), kept)
    assert not kv.block(0, 2).any()
