"""Step features of another package (tests/feature_package) on a GPU: graphs, late rows, logits
processors and ranks give the tokens of the CPU, and nothing is compiled while serving."""

from __future__ import annotations

import random
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_settings import WAYS, check_nothing_was_compiled, inline_llm
from random_models import odd_vocabulary_model

from aioinfer import LLM, SamplingParams
from aioinfer.llm import Output

VOCAB_SIZE = 4001  # no number of ranks divides it
TOKENS = 32
RNG = random.Random(0)
PROMPTS = [[RNG.randrange(3, VOCAB_SIZE) for _ in range(RNG.randint(1, 90))] for _ in range(36)]
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "top_k": 40},
    {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.5, "logprobs": 2},
    {"temperature": 0.0, "allowed_token_ids": range(40, 3000)},
    {"temperature": 0.9, "logit_bias": {7: 2.0, 8: -50.0}, "allowed_token_ids": range(3000)},
    {"temperature": 0.0, "logprobs": 5},
]
ARGUMENTS: list[dict[str, Any]] = [
    {}, {"only_even": True}, {"watch_token": 2001}, {"only_even": True, "watch_token": 4000},
]  # fmt: skip
PARAMS = [
    SamplingParams(
        ignore_eos=True, seed=number, max_tokens=TOKENS, **KINDS[number % len(KINDS)],
        extra_args=ARGUMENTS[number // len(KINDS) % len(ARGUMENTS)],
    )
    for number in range(len(PROMPTS))
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return odd_vocabulary_model(tmp_path_factory.mktemp("model"), VOCAB_SIZE)


def running(folder: Path, **settings: Any) -> AbstractContextManager[LLM]:
    usual = {"model__features": ["only_even", "watch_token"]}
    return inline_llm(folder, **usual | settings)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[Output]:
    with running(folder, parallel__device="cpu") as llm:
        return llm.generate(PROMPTS, PARAMS)


def check(outputs: list[Output], expected: list[Output]) -> None:
    """Float32 sums are rounded differently, which a near tie may show in one request."""
    differing = [n for n, o in enumerate(outputs) if o.token_ids != expected[n].token_ids]
    assert len(differing) <= 1, differing
    for number, (params, output) in enumerate(zip(PARAMS, outputs, strict=True)):
        (one,), arguments = output.completions, params.extra_args
        if arguments.get("only_even"):
            assert not any(token % 2 for token in one.token_ids)
        assert one.features.keys() == {"watch_token"} & arguments.keys()
        if one.features:
            assert len(one.features["watch_token"]) == TOKENS
        if one.features and number not in differing:
            wanted = expected[number].completions[0].features["watch_token"]
            assert np.allclose(one.features["watch_token"], wanted, atol=1e-2)


@pytest.mark.parametrize("settings", WAYS)
def test_outputs_are_those_of_the_cpu(
    folder: Path, expected: list[Output], settings: dict[str, Any]
) -> None:
    with running(folder, **settings) as llm:
        check(llm.generate(PROMPTS, PARAMS), expected)


def test_plain_rows_beside_others_are_undisturbed(folder: Path) -> None:
    """Replayed alone, and re-sampled beside rows with a logits processor."""
    plain = [number for number, params in enumerate(PARAMS) if not params.extra_args]
    with running(folder) as llm:
        alone = llm.generate([PROMPTS[n] for n in plain], [PARAMS[n] for n in plain])
        together = llm.generate(PROMPTS, PARAMS)
    differing = [n for n, o in zip(plain, alone, strict=True) if together[n].text != o.text]
    assert len(differing) <= 1, differing


def test_nothing_is_compiled_while_serving(folder: Path) -> None:
    """Neither feature has kernels; the sampler's are all compiled at the start."""
    with running(folder, model__dtype="bfloat16") as llm:
        llm.generate(PROMPTS, PARAMS)
        llm.generate(PROMPTS[:1], PARAMS[6:7])
        check_nothing_was_compiled(llm)
