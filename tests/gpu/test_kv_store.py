"""The store of KV on a GPU: blocks cross to pinned memory and back beside the steps, and texts are
those without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_settings import inline_llm, tokens_of
from random_models import random_model, random_prompts
from test_families import GREEDY, MODELS, SIZES, VOCAB

from aioinfer.ipc.kv_spec import AttentionSpec, KVGroup, StateSpec
from aioinfer.ipc.plan import StepPlan
from aioinfer.worker.block_crossings import BatchedCrossing, PlainCrossing, driver_copy
from aioinfer.worker.host_blocks import GpuCopies, make_copies, make_host_blocks
from aioinfer.worker.kv_tensors import KVTensors
from aioinfer.worker.rank_memory import VirtualRankMemory
from tests.functional import test_kv_store as on_cpu

GPU = torch.device("cuda")
GROUPS = (
    KVGroup(AttentionSpec(3, 128), tuple(range(8))),  # 300 MiB of 200 blocks
    KVGroup(StateSpec((64, 64), "float32"), (0, 1)),
)


def empty_plan(**fields: np.ndarray) -> StepPlan:
    none = np.empty(0, np.int32)
    arrays = dict.fromkeys(
        ("slots", "starts", "lengths", "samples", "table_rows", "table_indices", "table_blocks",
         "copy_sources", "copy_targets"), none,
    )  # fmt: skip
    return StepPlan(0, **arrays | fields)


def test_the_driver_copies_in_batches() -> None:
    kv = KVTensors(GROUPS, (32, 32), 128, torch.bfloat16, GPU)
    copies = make_copies(kv, make_host_blocks(kv, kv.nbytes))
    assert isinstance(copies, GpuCopies)
    if driver_copy() is None:
        pytest.skip("a driver before CUDA 12.8")
    assert isinstance(copies._crossing, BatchedCrossing)


@pytest.mark.parametrize("is_plain", [False, True], ids=["as served", "by torch"])
@pytest.mark.parametrize("sleeps", [False, True], ids=["torch's memory", "virtual memory"])
def test_blocks_come_back_while_others_take_their_memory(is_plain: bool, sleeps: bool) -> None:
    """A block that is being saved is written to by a step that names it, and by no step before.
    With virtual memory, a piece of a block lies in two chunks of physical memory."""
    count = 200
    memory = VirtualRankMemory(GPU)
    kv = KVTensors(
        GROUPS, (count, count), 128, torch.bfloat16, GPU, memory.make_kv if sleeps else None
    )
    host = make_host_blocks(kv, 2 * kv.nbytes)
    copies = GpuCopies(kv, PlainCrossing(kv, host.groups)) if is_plain else make_copies(kv, host)
    every = np.arange(count, dtype=np.int32)
    named = empty_plan(
        table_rows=np.repeat(np.array([0, 8], np.int32), count), table_indices=np.tile(every, 2),
        table_blocks=np.tile(every, 2),
    )  # fmt: skip
    for round_ in range(20):
        for tensor in kv.tensors:
            tensor.normal_()
        expected = [tensor.clone() for tensor in kv.tensors]
        first = count * (round_ % 2)
        moves = [[group, first + block, block] for group in (0, 1) for block in range(count)]
        copies.keep_order(empty_plan(), 8)
        copies.save(np.array(moves, np.int32))
        copies.keep_order(named, 8)
        kv.zero(count)
        copies.load(np.array([[*move, round_] for move in moves], np.int32))
        copies.keep_order(named, 8)
        found = [tensor.clone() for tensor in kv.tensors]
        assert all(map(torch.equal, found, expected))
        ((ticket, micros),) = copies.await_ended()
        assert ticket == round_
        assert micros > 0


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


#: Tokens that the prompts share: four blocks of 128 tokens, and part of one.
SHARED = 600


@pytest.mark.timeout(300)  # kernels are compiled
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen3", {"parallel__cuda_graphs": False}),
        ("qwen3", {"parallel__cuda_graphs": True}),
        ("qwen3", {"cache__dtype": "fp8"}),
        ("gemma3", {"parallel__cuda_graphs": True}),  # two groups, one with windows
    ],
    ids=["qwen3", "graphs", "fp8", "gemma3"],
)
def test_the_tokens_are_those_without_a_cache(
    family: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    random_model(tmp_path, family=family, vocab_size=VOCAB, **{**SIZES, **MODELS[family]})
    shared, first, *rest = random_prompts([SHARED, 150, *range(1, 13)], VOCAB)
    first, prompts = [*shared, *first], [[*shared, *own] for own in rest]
    outputs, cached = [], []
    for caching in (False, True):
        with inline_llm(tmp_path, cache__enable_prefix_caching=caching, **settings) as llm:
            llm.generate([first], GREEDY)
            found = llm.generate(prompts, GREEDY)
        outputs.append(tokens_of(found))
        cached.append([output.num_cached_tokens for output in found])
    assert cached == [[0] * len(prompts), [SHARED] * len(prompts)]
    assert sum(a == b for a, b in zip(*outputs, strict=True)) >= len(prompts) - 1
