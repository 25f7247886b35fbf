"""Scheduler and worker over models with latent attention: greedy outputs equal transformers', with
prefix-cache hits, prompts in chunks, preemption and forks."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from aioinfer.ipc.kv_spec import LatentSpec
from tests.scheduled_worker import expected_outputs, generate
from tests.tiny_models import tiny_model

FAMILIES = ("deepseek_v2", "deepseek_v3")


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(request.param, tmp_path_factory.mktemp("latents") / "model", vocab_size=200)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Prompts of which many begin alike."""
    rng = random.Random(1)
    stem = [rng.randrange(200) for _ in range(30)]
    return [
        stem[: rng.randrange(1, 31)] + [rng.randrange(200) for _ in range(rng.randrange(1, 40))]
        for _ in range(9)
    ]


@pytest.fixture(scope="module")
def expected(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    return expected_outputs(folder, prompts)


def test_prefix_hits(folder: Path, prompts: list[list[int]], expected: list[list[int]]) -> None:
    outputs, scheduler = generate(folder, prompts)
    assert [group.spec for group in scheduler.kv_cache.groups] == [LatentSpec(24 + 8)]
    assert outputs == expected
    assert len({tuple(output) for output in outputs}) == len(prompts)
    assert scheduler.stats.prefix_hit > 0


def test_chunks_and_preemption_change_nothing(
    folder: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    outputs, scheduler = generate(folder, prompts, budget=7, num_blocks=28)
    assert outputs == expected
    assert scheduler.stats.preemptions > 3


def test_forks_share_blocks(
    folder: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    outputs, _ = generate(folder, prompts[:4], n=3)
    assert outputs == [output for output in expected[:4] for _ in range(3)]
