"""Decode attention over shared prefixes on a GPU: the kernels at real sizes, and an engine whose
greedy tokens do not depend on it, with and without CUDA graphs."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from aioinfer.kernels.cascade_attention import CascadeConfig, CascadeWorkspace, find_shared_prefix
from cascade_cases import CascadeCase, cascade_attention
from cases import error
from engine_settings import inline_llm, tokens_of
from random_models import random_model
from test_families import GREEDY, MODELS, SIZES, VOCAB

from aioinfer.layers.backend import Backend
from aioinfer.layers.kv_cache import FLOAT8
from aioinfer.worker import worker
from aioinfer.worker.selection import select_backend

LIMIT = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}


def random_rows(rng: random.Random, count: int, block_size: int) -> list[tuple[int, int, int]]:
    """Returns rows most of which share a prefix, some a part of it, some nothing, some padding."""
    longest = rng.randint(1, 3000 // block_size)
    rows = []
    for row in range(count):
        blocks = rng.choice([longest, longest, longest, rng.randint(1, longest), 0])
        keys = blocks * block_size + rng.randint(1, 700)
        rows.append((0, -1 - row, 0) if rng.random() < 0.05 else (keys, 0, blocks))
    return rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_size", [64, 96, 128, 256])
def test_random_rows(head_size: int, dtype: torch.dtype) -> None:
    rng = random.Random(head_size)
    for block_size, group, projected in ((128, 4, True), (64, 7, True), (16, 1, False)):
        rows = random_rows(rng, rng.choice([9, 40, 130]), block_size)
        element = dtype.itemsize
        tile = max(16, min(64, 16384 // (128 * -(-head_size // 128) * element)))
        case = CascadeCase(
            rows, 2 * group, 2, head_size, block_size, dtype, "cuda",
            CascadeConfig(tile=tile, min_rows=2, min_saved=1), projected=projected,
            normed=rng.random() < 0.5, rotary=head_size, soft_cap=rng.choice([0.0, 20.0]),
            has_sinks=rng.random() < 0.5,
        )  # fmt: skip
        assert max(map(error, cascade_attention(case))) < LIMIT[dtype], case


@pytest.mark.parametrize("head_size", [64, 128])
def test_a_float8_cache(head_size: int) -> None:
    rows = random_rows(random.Random(1), 100, 128)
    for projected in (True, False):
        case = CascadeCase(
            rows, 16, 4, head_size, 128, torch.bfloat16, "cuda",
            CascadeConfig(min_rows=2, min_saved=1), projected=projected, rotary=head_size,
            cache_dtype=FLOAT8,
        )  # fmt: skip
        assert error(cascade_attention(case)[0]) < 1e-2, case


def test_a_replayed_graph_finds_other_prefixes() -> None:
    """The search alone, in a graph: what is shared follows from the tables of each replay."""
    rows, cache = 96, torch.empty(1, 64, 2, 64, device="cuda", dtype=torch.bfloat16)
    workspace = CascadeWorkspace.create(8, cache, 128, 32)
    tables = torch.arange(rows * 40, dtype=torch.int32, device="cuda").view(rows, 40)
    lens = torch.full((rows,), 40 * 64 - 5, dtype=torch.int32, device="cuda")
    find_shared_prefix(workspace, tables, lens)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        find_shared_prefix(workspace, tables, lens)
    graph.replay()
    assert workspace.shared_len == 0
    for blocks in (7, 30, 3, 39):
        tables.copy_(torch.arange(rows * 40, device="cuda").view(rows, 40))
        tables[:, :blocks] = tables[0, :blocks].clone()
        graph.replay()
        assert workspace.shared_len == 64 * blocks
        assert int(workspace.rows[1]) == rows


def _without_cascade(*arguments: Any) -> Backend:
    backend = select_backend(*arguments)
    backend.cascade = False
    return backend


@pytest.mark.timeout(300)  # kernels are compiled
@pytest.mark.parametrize("graphs", [True, False])
def test_tokens_of_an_engine(graphs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thirty prompts share 600 tokens; others come beside them."""
    random_model(tmp_path, family="qwen3", vocab_size=VOCAB, **{**SIZES, **MODELS["qwen3"]})
    rng = random.Random(2)
    shared = [rng.randrange(3, VOCAB) for _ in range(600)]
    prompts = [[*shared, *[rng.randrange(3, VOCAB) for _ in range(n % 9 + 1)]] for n in range(30)]
    prompts += [[rng.randrange(3, VOCAB) for _ in range(200)] for _ in range(6)]
    outputs = []
    for cascade in (False, True):
        settings = {"cache__enable_prefix_caching": True, "parallel__cuda_graphs": graphs}
        with monkeypatch.context() as patch:
            if not cascade:
                patch.setattr(worker, "select_backend", _without_cascade)
            with inline_llm(tmp_path, **settings) as llm:
                outputs.append(tokens_of(llm.generate(prompts, GREEDY)))
    assert sum(a == b for a, b in zip(*outputs, strict=True)) >= len(prompts) - 1
