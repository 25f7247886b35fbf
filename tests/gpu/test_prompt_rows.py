"""Outputs of prompt rows on a GPU: those of transformers in float32, with and without graphs, and
for several ranks; nothing is compiled for them while serving."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from aioinfer import LLM
from tests.gpu.engine_settings import check_nothing_was_compiled, engine_settings, inline_llm
from tests.gpu.random_models import random_model
from tests.prompt_rows import VOCAB_SIZE, Reference, check_all

#: More rows than one chunk of logits has, and than the largest step of one test.
LENGTHS = (1, 2, 17, 129, 700)


@pytest.fixture(scope="module", params=["qwen3", "gemma2"])
def reference(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Reference:
    folder = tmp_path_factory.mktemp(request.param)
    random_model(
        folder, vocab_size=VOCAB_SIZE, family=request.param, eos_token_id=None,
        max_position_embeddings=1024, head_dim=64,
    )  # fmt: skip
    rng = random.Random(0)
    return Reference.of(
        folder, [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]
    )


@pytest.mark.parametrize("cuda_graphs", [True, False])
@pytest.mark.parametrize("budget", [256, 8192])
def test_one_gpu(reference: Reference, cuda_graphs: bool, budget: int) -> None:
    settings = {
        "parallel__cuda_graphs": cuda_graphs, "scheduler__max_num_batched_tokens": budget
    }  # fmt: skip
    with inline_llm(reference.folder, **settings) as llm:
        check_all(llm, reference)
        check_nothing_was_compiled(llm)


def test_two_gpus(reference: Reference) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    settings = engine_settings(
        parallel__tensor_parallel_size=2, scheduler__max_num_batched_tokens=256
    )
    with LLM(str(reference.folder), settings=settings, progress=False) as llm:
        check_all(llm, reference)


def test_bfloat16_is_near(reference: Reference) -> None:
    settings = engine_settings(parallel__executor="inline", model__dtype="bfloat16")
    with LLM(str(reference.folder), settings=settings, progress=False) as llm:
        for pooling in ("last", "mean", "cls"):
            found = llm.embed(reference.prompts, pooling=pooling, normalize=True)
            for number, embedding in enumerate(found):
                expected = reference.pooled(number, pooling)
                assert float(embedding @ expected) / float(np.linalg.norm(expected)) > 0.98
