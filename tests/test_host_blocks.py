"""Places for KV blocks in memory of the host, and the copies of a CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from aioinfer.errors import ConfigError
from aioinfer.ipc.kv_spec import AttentionSpec, KVGroup, LatentSpec, StateSpec
from aioinfer.layers.kv_cache import FLOAT8
from aioinfer.worker.host_blocks import (
    CpuCopies,
    HostBlocks,
    make_copies,
    make_host_blocks,
)
from aioinfer.worker.kv_tensors import KVTensors

GROUPS = (
    KVGroup(AttentionSpec(2, 8), (0, 1, 2)),
    KVGroup(LatentSpec(12), (1,)),
    KVGroup(AttentionSpec(1, 8, 4), ()),  # of another pipeline stage
    KVGroup(StateSpec((3, 5), "bfloat16"), (0, 3)),
)
CPU = torch.device("cpu")


def make_kv(dtype: torch.dtype = torch.float32) -> KVTensors:
    kv = KVTensors(GROUPS, (6, 6, 6, 5), 4, dtype, CPU)
    torch.manual_seed(0)
    for tensor in kv.tensors:
        tensor.copy_(torch.randn(tensor.shape).to(tensor.dtype))
    return kv


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FLOAT8])
def test_blocks_come_back_as_they_were(dtype: torch.dtype) -> None:
    kv = make_kv(dtype)
    copies = make_copies(kv, make_host_blocks(kv, 2 * kv.nbytes))
    assert isinstance(copies, CpuCopies)
    saved = [kv.block(group, group + 1).clone() for group in range(4)]
    copies.save(np.array([[group, 9 - group, group + 1] for group in range(4)], np.int32))
    kv.zero(5)
    loads = [[group, 9 - group, 0, 7 + group // 2] for group in range(4)]
    copies.load(np.array(loads, np.int32))
    for group in range(4):
        assert torch.equal(kv.block(group, 0), saved[group])
        assert not kv.block(group, 1).any() or not kv.block(group, 1).numel()
    assert copies.has_loads
    ended = copies.take_ended()
    assert [ticket for ticket, _ in ended] == [7, 8]
    assert all(micros >= 0 for _, micros in ended)
    assert not copies.has_loads


def test_places_take_no_more_than_the_memory_given() -> None:
    kv = make_kv()
    for memory in (kv.nbytes // 3, 5 * kv.nbytes):
        assert sum(group.nbytes for group in make_host_blocks(kv, memory).groups) <= memory


def test_too_little_memory_is_an_error_that_names_the_setting() -> None:
    with pytest.raises(ConfigError, match=r"lower cache\.host_bytes"):
        HostBlocks(make_kv(), (2**50,) * 4, pinned=False)
