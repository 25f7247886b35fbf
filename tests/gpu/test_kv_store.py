"""The store of KV on a GPU: blocks cross to pinned memory and back beside the steps, and texts are
those without it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from aioinfer.ipc.kv_spec import AttentionSpec, KVGroup, StateSpec
from aioinfer.ipc.plan import StepPlan
from aioinfer.worker.host_blocks import GpuCopies, make_copies, make_host_blocks
from aioinfer.worker.kv_tensors import KVTensors
from tests.functional import test_kv_store as on_cpu

GPU = torch.device("cuda")
GROUPS = (
    KVGroup(AttentionSpec(4, 128), tuple(range(8))),
    KVGroup(StateSpec((64, 64), "float32"), (0, 1)),
)


def empty_plan(**fields: np.ndarray) -> StepPlan:
    none = np.empty(0, np.int32)
    arrays = dict.fromkeys(
        ("slots", "starts", "lengths", "samples", "table_rows", "table_indices", "table_blocks",
         "copy_sources", "copy_targets"), none,
    )  # fmt: skip
    return StepPlan(0, **arrays | fields)


def test_blocks_come_back_while_others_take_their_memory() -> None:
    """A block that is being saved is written to by a step that names it, and by no step before."""
    kv = KVTensors(GROUPS, (32, 32), 128, torch.bfloat16, GPU)
    copies = make_copies(kv, make_host_blocks(kv, 4 * kv.nbytes))
    assert isinstance(copies, GpuCopies)
    for round_ in range(20):
        for tensor in kv.tensors:
            tensor.normal_()
        expected = [kv.block(group, block).clone() for group in (0, 1) for block in range(32)]
        moves = [
            [group, 32 * (round_ % 4) + block, block] for group in (0, 1) for block in range(32)
        ]
        copies.keep_order(empty_plan(), 8)
        copies.save(np.array(moves, np.int32))
        every = np.arange(32, dtype=np.int32)
        named = empty_plan(
            table_rows=np.repeat(np.array([0, 8], np.int32), 32), table_indices=np.tile(every, 2),
            table_blocks=np.tile(every, 2),
        )  # fmt: skip
        copies.keep_order(named, 8)
        kv.zero(32)
        copies.load(np.array([[*move, round_] for move in moves], np.int32))
        copies.keep_order(named, 8)
        found = [kv.block(group, block).clone() for group in (0, 1) for block in range(32)]
        assert all(map(torch.equal, found, expected))
        assert copies.await_ended() == [round_]


def test_memory_is_not_pinned_any_more_once_it_is_freed() -> None:
    kv = KVTensors(GROUPS, (32, 32), 128, torch.bfloat16, GPU)
    host = make_host_blocks(kv, 4 * kv.nbytes)
    kept = list(host.groups)
    assert all(memory.is_pinned() for memory in kept)
    del host
    assert not any(memory.is_pinned() for memory in kept)


@pytest.mark.parametrize("kind", ["all tokens", "windows", "states"])
@pytest.mark.parametrize("executor", ["inline", "multiprocess"])
def test_texts_are_the_same_with_the_store(kind: str, executor: str, tmp_path: Path) -> None:
    settings = {"parallel.device": "cuda", "parallel.executor": executor, "cache.block_size": 16}
    folder = on_cpu.model_of(kind, tmp_path)
    expected, _ = on_cpu.converse(
        folder, on_cpu.params_of(0.0), **settings | {"cache.num_blocks": 14}
    )
    answers, llm = on_cpu.converse(
        folder, on_cpu.params_of(0.0), **settings | on_cpu.STORE | {"cache.num_blocks": 14}
    )
    assert answers == expected
    assert llm.frontend.engines[0].scheduler.stats.loads > 0
