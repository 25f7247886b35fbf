"""Scheduler and worker over real models whose layers differ in what they keep: a sliding window in
some and all tokens in the others, or latents. Greedy outputs equal transformers', however they are
scheduled. (Models with states: `test_state_models`, `test_state_cache`.)"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aioinfer.ipc.kv_spec import LatentSpec
from tests.scheduled_worker import (
    check_chunks_and_preemption,
    check_prefix_hits,
    expected_outputs,
    generate,
    prompts_that_begin_alike,
)
from tests.tiny_models import tiny_model

WINDOW = 13
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {
        "num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": WINDOW,
        "max_window_layers": 2,
    },
    "deepseek_v2": {},
    "deepseek_v3": {},
}  # fmt: skip
#: Prompts of which many begin alike, most of them longer than the window.
PROMPTS = prompts_that_begin_alike(12)
extended = pytest.mark.extended


@pytest.fixture(
    scope="module",
    params=["qwen2", *(pytest.param(name, marks=extended) for name in MODELS if name != "qwen2")],
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family = request.param
    root = tmp_path_factory.mktemp(family)
    return tiny_model(family, root / "model", vocab_size=200, **MODELS[family])


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    return expected_outputs(folder, PROMPTS)


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_outputs_equal_those_of_transformers(
    folder: Path, expected: list[list[int]], block_size: int
) -> None:
    scheduler = check_prefix_hits(folder, PROMPTS, expected, block_size=block_size)
    groups = scheduler.kv_cache.groups
    if isinstance(groups[0].spec, LatentSpec):
        assert [group.spec for group in groups] == [LatentSpec(24 + 8)]
    else:
        assert [group.window for group in groups] == [None, WINDOW]


@pytest.mark.sample
def test_chunks_and_preemption_change_nothing(folder: Path, expected: list[list[int]]) -> None:
    check_chunks_and_preemption(folder, PROMPTS, expected)


def test_forks_share_the_blocks_of_all_groups(folder: Path, expected: list[list[int]]) -> None:
    outputs, _ = generate(folder, PROMPTS, n=3)
    assert outputs == [output for output in expected for _ in range(3)]
