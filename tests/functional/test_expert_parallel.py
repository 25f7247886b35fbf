"""Mixtures of experts with whole experts on the ranks: greedy tokens of transformers, through the
whole engine with two worker processes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from aioinfer import LLM, SamplingParams
from tests.gpu.engine_settings import engine_settings
from tests.gpu.random_models import random_model

VOCAB = 512
NEW_TOKENS = 20
LENGTHS = (1, 8, 21, 60, 75)
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {},
    "deepseek_v3": {},
    "glm4_moe": {},
    "mixtral": {"num_local_experts": 5},
    "qwen2_moe": {},
    "qwen3_moe": {},
}


def reference_tokens(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Returns the greedy tokens of transformers in float32."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokens = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        found = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            eos_token_id=None,
        )
        tokens.append(found[0, len(prompt) :].tolist())
    return tokens


@pytest.mark.parametrize("name", FAMILIES)
def test_two_ranks(name: str, tmp_path: Path) -> None:
    """In one batch, with prompts in chunks."""
    folder = random_model(tmp_path, family=name, vocab_size=VOCAB, **FAMILIES[name])
    rng = random.Random(1)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(length)] for length in LENGTHS]
    expected = reference_tokens(folder, prompts)
    assert len({tuple(tokens) for tokens in expected}) == len(expected)
    settings = engine_settings(
        parallel__device="cpu",
        parallel__cpu_threads=1,
        parallel__executor="multiprocess",
        parallel__tensor_parallel_size=2,
        parallel__expert_parallel=True,
        model__max_model_len=512,
        scheduler__max_num_batched_tokens=32,
    )
    greedy = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    with LLM(str(folder), settings=settings, progress=False) as llm:
        outputs = llm.generate(prompts, greedy)
        llm.frontend.engines[0].scheduler.check_integrity()
    assert [output.token_ids for output in outputs] == expected
