"""Models without a file of ours on a GPU: greedy tokens in float32 equal to those of transformers,
over the attention kernels and, for head sizes that they lack, in plain torch."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from aioinfer import LLM, SamplingParams
from tests.test_fallback import MODELS, save
from tests.test_models import VOCAB

NEW_TOKENS = 24
LENGTHS = (1, 2, 17, 60, 129)
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)


@pytest.mark.parametrize("head_size", [64, 40])
@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_are_those_of_transformers(name: str, head_size: int, tmp_path: Path) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    folder = save(name, tmp_path, hidden_size=8 * head_size, initializer_range=0.1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().cuda()
    rng = random.Random(1)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(length)] for length in LENGTHS]
    settings = {
        "model.tokenizer": "none", "model.dtype": "float32", "parallel.device": "cuda",
        "parallel.executor": "inline", "cache.num_blocks": 64,
    }  # fmt: skip
    with LLM(str(folder), settings=settings, progress=False) as llm:
        implementation = llm.frontend.engines[0].report.implementation
        assert ("in plain torch" in implementation) == (head_size == 40)
        outputs = llm.generate(prompts, GREEDY)
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor([prompt + output.token_ids], device="cuda")
        with torch.inference_mode():
            best = model(ids).logits[0, len(prompt) - 1 : -1].argmax(-1)
        assert output.token_ids == best.tolist()
