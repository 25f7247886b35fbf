"""Everything is compiled before the first request: no kernel while serving, whatever the requests
have."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from engine_settings import has_graphs, worker_of
from transformers import AutoModelForCausalLM

from aioinfer import LLM, SamplingParams
from tests.gpu.random_models import random_model
from tests.test_fallback import MODELS, save
from tests.test_models import VOCAB

VOCAB_SIZE = 4096


def _left_out(x):  # type: ignore[no-untyped-def]
    tl.store(x, 1.0)


def random_params(rng: random.Random) -> SamplingParams:
    fields: dict[str, Any] = {
        "max_tokens": rng.randint(1, 20),
        "ignore_eos": True,
        "temperature": rng.choice([0.0, 0.8]),
    }
    extras = [
        {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.1}, {"repetition_penalty": 1.1},
        {"presence_penalty": 0.5},
        {"logit_bias": {5: 2.0, 7: -100.0}}, {"min_tokens": 1, "ignore_eos": False},
        {"logprobs": 5}, {"n": 3}, {"seed": 3},
    ]  # fmt: skip
    for extra in rng.sample(extras, rng.randint(0, 3)):
        fields |= extra
    return SamplingParams(**fields)


@pytest.mark.parametrize("max_num_seqs", [5, 300])
def test_no_kernel_is_compiled_while_serving(max_num_seqs: int, tmp_path: Path) -> None:
    random_model(tmp_path, vocab_size=VOCAB_SIZE, head_dim=64)
    settings = {
        "parallel.device": "cuda",
        "parallel.executor": "inline",
        "scheduler.max_num_seqs": max_num_seqs,
        "cache.num_blocks": 400,
    }
    rng = random.Random(0)
    lengths = [1, 2, 3, 15, 16, 17, 127, 128, 129, 300] + [rng.randint(1, 200) for _ in range(400)]
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths]
    with LLM(str(tmp_path), settings=settings, progress=False) as llm:
        watch = worker_of(llm).compilations
        assert watch is not None
        for alone in prompts[:10]:
            llm.generate([alone], random_params(rng))
        llm.generate(prompts, [random_params(rng) for _ in prompts])
        assert has_graphs(llm)
        assert watch.names == [], watch.names
        # made anew: one that a test before compiled would be at hand
        triton.jit(_left_out)[(1,)](torch.zeros(1, device="cuda"))
        assert len(watch.names) == 1
        watch.stop()


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
