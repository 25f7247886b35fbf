"""Scheduler and worker over a real model whose layers differ in what they keep: a sliding window in
some, all tokens in the others. Greedy outputs equal transformers', however they are scheduled."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.scheduled_worker import expected_outputs, generate
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
    rng = random.Random(1)
    stem = [rng.randrange(200) for _ in range(30)]
    return [
        stem[: rng.randrange(1, 31)] + [rng.randrange(200) for _ in range(rng.randrange(1, 40))]
        for _ in range(12)
    ]


@pytest.fixture(scope="module")
def expected(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    return expected_outputs(folder, prompts)


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_a_window_beside_full_attention_equals_transformers(
    folder: Path, prompts: list[list[int]], expected: list[list[int]], block_size: int
) -> None:
    outputs, scheduler = generate(folder, prompts, block_size=block_size)
    assert [group.window for group in scheduler.kv_cache.groups] == [None, WINDOW]
    assert outputs == expected
    assert len({tuple(output) for output in outputs}) == len(prompts)
    assert scheduler.stats.prefix_hit > 0


def test_chunks_and_preemption_change_nothing(
    folder: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    outputs, scheduler = generate(folder, prompts, budget=7, num_blocks=28)
    assert outputs == expected
    assert scheduler.stats.preemptions > 3


def test_forks_share_the_blocks_of_all_groups(
    folder: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    outputs, _ = generate(folder, prompts, n=3)
    assert outputs == [output for output in expected for _ in range(3)]
