"""Drafters on a CPU: the text is that of a run without drafts, whatever a drafter says, and a
drafter that is the target is right."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from aioinfer.config import SpeculationConfig
from aioinfer.sampling_params import SamplingParams
from aioinfer.scheduler.request import Request
from tests.scheduled_worker import (
    GREEDY,
    NEW_TOKENS,
    RandomLookahead,
    generate,
    prompts_that_begin_alike,
)
from tests.tiny_models import tiny_model

MOST = 4
PARAMS = (
    GREEDY,
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=1.0, top_k=20, min_p=0.02),
    SamplingParams(temperature=0.7, top_p=0.9),
)
PENALIZED = (
    SamplingParams(temperature=0.0, repetition_penalty=1.3),
    SamplingParams(temperature=0.0, logit_bias={7: 3.0, 11: -50.0}),
)


class AlwaysAhead(RandomLookahead):
    """Asks for as many lookahead rows of each request as there are drafts."""

    reserve = MOST - 1

    def lookahead(self, decodes: Sequence[Request]) -> Mapping[Request, int] | None:
        return dict.fromkeys(decodes, self._most)


def drafts_of(model: Path, method: str = "draft") -> SpeculationConfig:
    return SpeculationConfig(method=method, model=str(model), max_draft_tokens=MOST)  # type: ignore[arg-type]


def test_a_draft_model_that_is_the_target_is_always_right(tmp_path: Path) -> None:
    """Its text lacks the first token, which windows of 9 tokens leave behind."""
    folder = tiny_model("mistral", tmp_path, vocab_size=200, sliding_window=9)
    rng = random.Random(2)
    prompts = [[rng.randrange(200) for _ in range(rng.randint(20, 60))] for _ in range(9)]
    plain, _ = generate(folder, prompts, params=PARAMS)
    ahead = AlwaysAhead(MOST)
    outputs, _ = generate(
        folder, prompts, params=PARAMS, ahead=ahead, speculation=drafts_of(folder), block_size=16
    )
    assert outputs == plain
    assert ahead.num_kept == ahead.num_rows
    assert ahead.num_rows >= len(prompts) * NEW_TOKENS * MOST / (MOST + 1) * 0.9


@pytest.mark.parametrize("family", ["gemma3", "deepseek_v3"])
def test_other_families(family: str, tmp_path: Path) -> None:
    folder = tiny_model(family, tmp_path, vocab_size=200)
    prompts = prompts_that_begin_alike(8)
    plain, _ = generate(folder, prompts, params=PARAMS)
    ahead = AlwaysAhead(MOST)
    outputs, _ = generate(
        folder, prompts, params=PARAMS, ahead=ahead, speculation=drafts_of(folder)
    )
    assert outputs == plain
    assert ahead.num_kept > 0.2 * ahead.num_rows


def test_a_draft_model_of_another_shape(tmp_path: Path) -> None:
    """It has a KV group of its own, and is mostly wrong."""
    folder = tiny_model("llama", tmp_path / "target", vocab_size=200)
    small = tiny_model(
        "qwen3", tmp_path / "small", vocab_size=190, num_hidden_layers=1, head_dim=8, seed=3
    )
    prompts, params = prompts_that_begin_alike(9), (*PARAMS, *PENALIZED)
    plain, _ = generate(folder, prompts, params=params)
    ahead = RandomLookahead(MOST)
    outputs, _ = generate(folder, prompts, params=params, ahead=ahead, speculation=drafts_of(small))
    assert outputs == plain
    assert 0 < ahead.num_kept < 0.2 * ahead.num_rows


def test_siblings_chunks_and_preemption(tmp_path: Path) -> None:
    """Several sequences a prompt, prompts in chunks beside lookahead rows, and too few blocks."""
    folder = tiny_model("llama", tmp_path, vocab_size=200)
    prompts, params = prompts_that_begin_alike(5), (*PARAMS, *PENALIZED)
    plain, _ = generate(folder, prompts, n=3, params=params)
    ahead = RandomLookahead(3)
    outputs, scheduler = generate(
        folder, prompts, n=3, budget=13, num_blocks=60, params=params, ahead=ahead,
        speculation=drafts_of(folder),
    )  # fmt: skip
    assert outputs == plain
    assert scheduler.stats.preemptions > 1
    assert ahead.num_kept > 50
