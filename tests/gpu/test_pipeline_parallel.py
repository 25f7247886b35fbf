"""Pipeline stages on two GPUs give what one gives, with graphs and without, and at what cost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aioinfer import LLM, SamplingParams
from aioinfer.features.speculation.planning import ACCEPTED
from tests.gpu.random_models import random_model

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

VOCAB_SIZE = 3000
#: Kinds of rows that pass through the graph, are re-sampled behind it, or need all tokens.
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0.8, top_k=40, seed=7, max_tokens=40, ignore_eos=True),
    SamplingParams(
        temperature=0.0, repetition_penalty=1.2, logprobs=2, max_tokens=40, ignore_eos=True
    ),
    SamplingParams(temperature=0.0, prompt_logprobs=2, max_tokens=8, ignore_eos=True),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(
        tmp_path_factory.mktemp("model"), vocab_size=VOCAB_SIZE, eos_token_id=None,
        num_hidden_layers=4, max_position_embeddings=1024, head_dim=64,  # which kernels have
    )  # fmt: skip


def generate(folder: Path, **settings: Any) -> list[list[int]]:
    """Returns the tokens of requests of all kinds, more of them than one micro-batch holds."""
    merged = {
        "parallel.executor": "multiprocess", "parallel.device": "cuda", "model.tokenizer": "none",
        "model.dtype": "float32", "cache.num_blocks": 200, "speculation.method": "none",
    } | {key.replace("__", "."): value for key, value in settings.items()}  # fmt: skip
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, VOCAB_SIZE, n).tolist() for n in (1, 5, 33, 90, 400, 17, 64, 700)]
    params = [PARAMS[number % len(PARAMS)] for number in range(len(prompts))]
    with LLM(str(folder), settings=merged, progress=False) as llm:
        outputs = [output.token_ids for output in llm.generate(prompts, params)]
        engine = llm.frontend.engines[0]
        engine.scheduler.check_integrity()
        for time in engine.stage_times():
            assert time.busy_s > 0
    return outputs


@pytest.mark.parametrize("graphs", [True, False])
def test_two_stages_give_what_one_gpu_gives(folder: Path, graphs: bool) -> None:
    expected = generate(folder, parallel__cuda_graphs=graphs)
    staged = {"parallel__pipeline_parallel_size": 2, "parallel__cuda_graphs": graphs}
    assert generate(folder, **staged) == expected
    chunks = {"scheduler__max_num_batched_tokens": 128}
    assert generate(folder, **staged, **chunks) == generate(
        folder, parallel__cuda_graphs=graphs, **chunks
    )


def test_drafts_save_steps(folder: Path) -> None:
    """The text is predicted rightly: by measured times drafts are worth it, and are kept."""
    params = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
    settings = {
        "parallel.pipeline_parallel_size": 2, "parallel.device": "cuda",
        "model.tokenizer": "none", "model.dtype": "float32", "cache.num_blocks": 200,
    }  # fmt: skip
    texts, steps = list[list[int]](), list[int]()
    for method in ("none", "ngram"):
        method_too = settings | {"speculation.method": method}
        with LLM(str(folder), settings=method_too, progress=False) as llm:
            texts.append(llm.generate([[5, 6, 7]], params)[0].token_ids)
            (engine,) = llm.frontend.engines
            assert (engine.report.max_lookahead > 0) == (method == "ngram")
            assert bool(engine.report.step_times) == (method == "ngram")
            steps.append(engine.scheduler.stats.steps)
            kept = engine.metrics.counts[ACCEPTED]
        params = replace(params, predicted_tokens=tuple(texts[0]))
    assert texts[0] == texts[1]
    assert steps[1] < 0.7 * steps[0]
    assert kept > 150


def test_it_rests_and_goes_on(folder: Path) -> None:
    """Nothing is left on its way between requests: a receive that nobody answers would keep a GPU
    busy, and end its process after some minutes."""
    settings = {
        "parallel.pipeline_parallel_size": 2, "parallel.device": "cuda",
        "model.tokenizer": "none", "cache.num_blocks": 200,
    }  # fmt: skip
    with LLM(str(folder), settings=settings, progress=False) as llm:
        first = llm.generate([[5, 6, 7]], PARAMS[0])[0].token_ids
        torch.cuda.synchronize()
        assert llm.generate([[5, 6, 7]], PARAMS[0])[0].token_ids == first


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs")
def test_tensor_parallel_stages(folder: Path) -> None:
    sizes = {"parallel__pipeline_parallel_size": 2, "parallel__tensor_parallel_size": 2}
    assert generate(folder, **sizes) == generate(folder, parallel__tensor_parallel_size=2)
