"""Scheduler and worker over a real model whose layers differ in what they keep: a sliding window in
some, all tokens in the others. Greedy outputs equal transformers', however they are scheduled."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scheduled_worker import (
    check_chunks_and_preemption,
    check_prefix_hits,
    expected_outputs,
    generate,
    prompts_that_begin_alike,
)
from tests.tiny_models import tiny_model

WINDOW = 13


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(
        "qwen2",
        tmp_path_factory.mktemp("windows") / "model",
        vocab_size=200,
        num_hidden_layers=4,
        use_sliding_window=True,
        sliding_window=WINDOW,
        max_window_layers=2,
    )


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Prompts of which many begin alike, most of them longer than the window."""
    return prompts_that_begin_alike(12)


@pytest.fixture(scope="module")
def expected(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    return expected_outputs(folder, prompts)


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_a_window_beside_full_attention_equals_transformers(
    folder: Path, prompts: list[list[int]], expected: list[list[int]], block_size: int
) -> None:
    scheduler = check_prefix_hits(folder, prompts, expected, block_size=block_size)
    assert [group.window for group in scheduler.kv_cache.groups] == [None, WINDOW]


def test_chunks_and_preemption_change_nothing(
    folder: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    check_chunks_and_preemption(folder, prompts, expected)


def test_forks_share_the_blocks_of_all_groups(
    folder: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    outputs, _ = generate(folder, prompts, n=3)
    assert outputs == [output for output in expected for _ in range(3)]
