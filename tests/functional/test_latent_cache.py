"""Scheduler and worker over models with latent attention: greedy outputs equal transformers', with
prefix-cache hits, prompts in chunks, preemption and forks."""

from __future__ import annotations

from pathlib import Path

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

pytestmark = pytest.mark.extended

FAMILIES = ("deepseek_v2", "deepseek_v3")


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(request.param, tmp_path_factory.mktemp("latents") / "model", vocab_size=200)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Prompts of which many begin alike."""
    return prompts_that_begin_alike(9)


@pytest.fixture(scope="module")
def expected(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    return expected_outputs(folder, prompts)


def test_prefix_hits(folder: Path, prompts: list[list[int]], expected: list[list[int]]) -> None:
    scheduler = check_prefix_hits(folder, prompts, expected)
    assert [group.spec for group in scheduler.kv_cache.groups] == [LatentSpec(24 + 8)]


@pytest.mark.sample
def test_chunks_and_preemption_change_nothing(
    folder: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    check_chunks_and_preemption(folder, prompts, expected)


def test_forks_share_blocks(
    folder: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    outputs, _ = generate(folder, prompts[:4], n=3)
    assert outputs == [output for output in expected[:4] for _ in range(3)]
