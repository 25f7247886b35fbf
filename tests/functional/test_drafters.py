"""Drafters change no text: draft models and EAGLE-3 heads, beside every way of sampling, under
preemption, chunks, aborts, lost workers, and with two ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aioinfer import LLM, SamplingParams
from aioinfer.engine import recovery
from aioinfer.errors import ConfigError
from aioinfer.features.speculation.planning import ACCEPTED, DRAFT_TOKENS
from aioinfer.llm import CompletionOutput
from tests.eagle_models import eagle_head
from tests.functional.test_speculation import (
    PROMPTS,
    TOKENS,
    VOCAB_SIZE,
    abort_some,
    check,
    check_twice,
    params_of,
    requests,
    run_with_loss,
    running,
)

# fixtures
from tests.functional.test_speculation import expected as expected
from tests.functional.test_speculation import folder as folder
from tests.functional.test_speculation import plain as plain
from tests.functional.test_speculation import rows_cost_nothing as rows_cost_nothing
from tests.functional.test_speculation import stop as stop
from tests.gpu.random_models import random_prompts
from tests.mtp_models import mtp_model
from tests.tiny_models import tiny_model

pytestmark = pytest.mark.extended

Expected = list[list[CompletionOutput]]


@pytest.fixture(scope="module")
def drafters(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Settings of drafters by name."""
    small, head = (tmp_path_factory.mktemp(name) for name in ("small", "head"))
    tiny_model(
        "qwen3", small, vocab_size=VOCAB_SIZE - 8, num_hidden_layers=1, head_dim=8, seed=3,
        max_position_embeddings=256,
    )  # fmt: skip
    eagle_head(head, "midlayer", vocab_size=VOCAB_SIZE, draft_size=60, taps=(0, 1, 1))
    models = {"the target": ("draft", folder), "small": ("draft", small), "head": ("eagle3", head)}
    return {
        name: {"speculation__method": method, "speculation__model": str(model)}
        for name, (method, model) in models.items()
    }


@contextmanager
def drafting(folder: Path, **settings: Any) -> Iterator[LLM]:
    with running(folder, **settings) as llm:
        yield llm
        counts = llm.frontend.engines[0].metrics.counts
        assert counts[DRAFT_TOKENS] > counts[ACCEPTED] > 60  # texts repeat themselves


TWO_RANKS = {"parallel__executor": "multiprocess", "parallel__tensor_parallel_size": 2}
TWO_STAGES = {"parallel__executor": "multiprocess", "parallel__pipeline_parallel_size": 2}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("small", {"speculation__max_draft_tokens": 3}),
        ("head", {}),
        ("the target", {"scheduler__plan_ahead": False}),
        ("head", {"scheduler__max_num_batched_tokens": 9}),
        ("the target", {"speculation__max_draft_tokens": 15, "cache__block_size": 2}),
        ("small", TWO_RANKS),
        ("the target", TWO_STAGES),
        ("small", TWO_STAGES | {"scheduler__max_num_batched_tokens": 9}),
        ("head", TWO_STAGES | {"parallel__tensor_parallel_size": 2}),
        ("head", TWO_STAGES | {"scheduler__plan_ahead": False}),
    ],
    ids=str,
)
def test_the_text_is_the_plain_one(
    folder: Path, drafters: Any, name: str, settings: Any, expected: Expected, stop: str
) -> None:
    with drafting(folder, **drafters[name], **settings) as llm:
        check_twice(llm, stop, expected)


@pytest.mark.parametrize("name", ["the target", "small"])
def test_preempted_requests(
    folder: Path, drafters: Any, name: str, expected: Expected, stop: str
) -> None:
    with drafting(folder, cache__num_blocks=40, **drafters[name]) as llm:
        for found, wanted in zip(llm.generate(*requests(stop)), expected, strict=True):
            check(found.completions, wanted)
        assert llm.frontend.stats()["preemptions"] > 5


@pytest.mark.parametrize("settings", [{}, {"cache__num_blocks": 32}, TWO_STAGES], ids=str)
def test_a_predicted_output_goes_before_the_drafts_of_a_drafter(
    folder: Path, drafters: Any, settings: Any, plain: LLM
) -> None:
    """A text that does not repeat itself, and that the drafter does not know, predicted with a
    wrong part."""
    prompts = random_prompts([5, 7, 9, 11], VOCAB_SIZE)
    params = [
        SamplingParams(temperature=1.2, seed=seed, max_tokens=TOKENS, ignore_eos=True)
        for seed in range(len(prompts))
    ]
    wanted = [output.completions for output in plain.generate(prompts, params)]
    predicted = []
    for each, (completion,) in zip(params, wanted, strict=True):
        tokens = [*completion.token_ids[:20], 1, 2, 3, *completion.token_ids[23:]]
        predicted.append(replace(each, predicted_tokens=tuple(tokens)))
    with drafting(folder, **drafters["small"], **settings) as llm:
        for found, expected in zip(llm.generate(prompts, predicted), wanted, strict=True):
            check(found.completions, expected)


@pytest.mark.parametrize("name", ["the target", "head"])
def test_aborts_and_lost_workers(
    folder: Path, drafters: Any, name: str, expected: Expected, stop: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(recovery, "_FIRST_DELAY_S", 0.0)
    with drafting(folder, **drafters[name]) as llm:
        for index, text in llm.run(abort_some(llm, stop)).items():
            assert text == expected[index][0].text
        found = llm.run(run_with_loss(llm, stop))
        assert found == [completions[0].token_ids for completions in expected]


@pytest.mark.parametrize("name", ["qwen3_next", "mimo"])
def test_stages_with_states_and_with_the_head_of_the_model(name: str, tmp_path: Path) -> None:
    """Each stage replays the inputs of the rows that were kept; the last one has the head. Prompts
    repeat themselves, and so do texts of few tokens."""
    mtp_model(name, tmp_path, max_position_embeddings=256, vocab_size=40, eos_token_id=None)
    prompts = [[token % 40 for token in prompt] for prompt in PROMPTS]
    params = [params_of(case) for case in ("greedy", "seed", "filters", "repetition")]
    pairs = [(prompt, each) for prompt in prompts for each in params]
    texts = []
    for method, settings in (("none", {}), ("mtp", TWO_STAGES), ("ngram", TWO_STAGES)):
        with running(
            tmp_path, **settings, speculation__method=method, model__tokenizer="none"
        ) as llm:
            outputs = llm.generate(*map(list, zip(*pairs, strict=True)))
            texts.append([output.token_ids for output in outputs])
            counts = llm.frontend.engines[0].metrics.counts
        assert texts[0] == texts[-1]
        assert method == "none" or counts[DRAFT_TOKENS] > counts[ACCEPTED] > 0


def test_wrong_settings_are_refused(folder: Path, drafters: Any, tmp_path: Path) -> None:
    for settings, message in (
        ({"speculation__method": "draft"}, "needs speculation.model"),
        ({"speculation__method": "eagle3", "speculation__model": "./none"}, "speculation.model = "),
        ({**drafters["small"], "model__max_model_len": 400}, "to at most that"),
    ):
        with pytest.raises(ConfigError, match=message), running(folder, **settings):
            pass
