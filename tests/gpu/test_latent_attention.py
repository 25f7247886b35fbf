"""Latent attention on a GPU: the kernels at DeepSeek's sizes against float64, and models with
experts and without, with CUDA graphs for decodes and without: greedy tokens of transformers."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import error
from latent_cases import LatentCase, cache_write, decode, prefill
from test_families import check_greedy, check_rounding, make_case

#: V2-Lite's heads.
REAL = LatentCase(
    torch.bfloat16, "cuda", num_heads=16, latent_size=512, rotary_size=64, plain_size=128,
    value_size=128, block_size=64, scale=0.07, programs=None,
)  # fmt: skip
LENGTHS = [1, 64, 65, 1000, 0, 31, 8192, 500]
ROWS = [(1, 700), (1, 20), (1, 5), (300, 300), (70, 1500), (129, 130)]
LATENT: dict[str, Any] = {
    "num_key_value_heads": 8, "head_dim": 64, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 8.0, "mscale": 0.707,
    "mscale_all_dim": 0.707, "original_max_position_embeddings": 128,
}  # fmt: skip
#: Layers without experts can be held by graphs whatever the experts are computed with.
CASES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {**LATENT, "first_k_dense_replace": 4, "rope_parameters": YARN},
    "deepseek_v3": {**LATENT, "first_k_dense_replace": 4, "q_lora_rank": 192},
    "deepseek_v3 with experts": {**LATENT, "q_lora_rank": 192, "moe_intermediate_size": 256},
}


@pytest.mark.parametrize("num_heads", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("block_size", [16, 64, 128])
def test_decodes(num_heads: int, block_size: int) -> None:
    torch.manual_seed(0)
    case = replace(REAL, num_heads=num_heads, block_size=block_size)
    assert error(decode(case, LENGTHS)) < 4e-3
    assert error(decode(case, [20_000])) < 4e-3
    assert error(decode(replace(case, programs=3), [100, 0, 40])) < 4e-3


def test_decodes_of_many_rows() -> None:
    rng = random.Random(0)
    assert error(decode(REAL, [rng.randrange(1, 600) for _ in range(300)])) < 4e-3


@pytest.mark.timeout(300)  # 32-bit products of this size are compiled slowly
def test_decodes_in_float32() -> None:
    assert error(decode(replace(REAL, dtype=torch.float32), LENGTHS[:6])) < 1e-5


@pytest.mark.parametrize("capacity", [1000, 1 << 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_prefill(dtype: torch.dtype, capacity: int) -> None:
    torch.manual_seed(0)
    case = replace(REAL, dtype=dtype)
    limit = 1e-5 if dtype == torch.float32 else 4e-3
    assert error(prefill(case, ROWS, num_decodes=3, capacity=capacity)) < limit


def test_cache_write() -> None:
    assert max(map(error, cache_write(REAL, tokens=300))) < 4e-3


@pytest.mark.timeout(600)  # kernels are compiled
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_greedy_tokens_are_those_of_transformers(name: str, graphs: bool, tmp_path: Path) -> None:
    check_greedy(make_case(name, tmp_path, "cuda", CASES), "cuda", graphs)


@pytest.mark.timeout(600)
def test_greedy_tokens_with_experts(tmp_path: Path) -> None:
    case = make_case("deepseek_v3 with experts", tmp_path, "cuda", CASES)
    check_greedy(case, "cuda", graphs=False)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_rounding_errors_in_bfloat16(name: str, tmp_path: Path) -> None:
    check_rounding(make_case(name, tmp_path, "cuda", CASES), "cuda")
