"""Prompts that share part of a KV block with an earlier one, on a GPU: the block is copied, and the
tokens are those of an engine without a prefix cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_settings import inline_llm, tokens_of
from random_models import random_model, random_prompts
from test_families import GREEDY, MODELS, SIZES, VOCAB

#: Tokens that the prompts share: four blocks of 128 tokens, and part of one.
SHARED = 600


@pytest.mark.timeout(300)  # kernels are compiled
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen3", {"parallel__cuda_graphs": False}),
        ("qwen3", {"parallel__cuda_graphs": True}),
        ("qwen3", {"cache__dtype": "fp8"}),
        ("gemma3", {"parallel__cuda_graphs": True}),  # two groups, one with windows
    ],
    ids=["qwen3", "graphs", "fp8", "gemma3"],
)
def test_the_tokens_are_those_without_a_cache(
    family: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    random_model(tmp_path, family=family, vocab_size=VOCAB, **{**SIZES, **MODELS[family]})
    shared, first, *rest = random_prompts([SHARED, 150, *range(1, 13)], VOCAB)
    first, prompts = [*shared, *first], [[*shared, *own] for own in rest]
    outputs, cached = [], []
    for caching in (False, True):
        with inline_llm(tmp_path, cache__enable_prefix_caching=caching, **settings) as llm:
            llm.generate([first], GREEDY)
            found = llm.generate(prompts, GREEDY)
        outputs.append(tokens_of(found))
        cached.append([output.num_cached_tokens for output in found])
    assert cached == [[0] * len(prompts), [SHARED] * len(prompts)]
    assert sum(a == b for a, b in zip(*outputs, strict=True)) >= len(prompts) - 1
