"""Models with states on two GPUs, whose heads or layers are shared out: the tokens of one GPU, in
float32, with chunks, prefix hits, preemption and forks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from aioinfer import LLM, SamplingParams
from aioinfer.features.speculation.planning import ACCEPTED, DRAFT_TOKENS
from tests.gpu.engine_settings import NEEDS_TWO, engine_settings, tokens_of
from tests.gpu.random_models import random_model, random_prompts
from tests.gpu.test_speculation import look_always_ahead

pytestmark = [
    pytest.mark.timeout(300),  # kernels are compiled
    NEEDS_TWO,
]
VOCAB_SIZE = 4096
#: Around blocks of 64 tokens and chunks of 200.
LENGTHS = (1, 17, 63, 64, 65, 129, 199, 200, 201, 300, 500)
GREEDY = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
SIZES = {
    "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4,
    "max_position_embeddings": 1024, "initializer_range": 0.05, "eos_token_id": None,
}  # fmt: skip
DELTA_NET = {
    "head_dim": 256,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("qwen3_5_text", DELTA_NET),
    "qwen3_5 experts": (
        "qwen3_5_moe_text",
        {**DELTA_NET, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128},
    ),
    "granite": (
        "granitemoehybrid",
        {"head_dim": 64, "layer_types": ["linear_attention", "full_attention"] * 2,
         "shared_intermediate_size": 1024, "mamba_n_heads": 16, "mamba_d_head": 64,
         "mamba_d_state": 64},
    ),
}  # fmt: skip
KINDS = ["tensor_parallel_size", "pipeline_parallel_size"]


class Case(NamedTuple):
    """A model, prompts of which each begins the next, and their tokens on one GPU."""

    folder: Path
    prompts: list[list[int]]
    expected: list[list[int]]


@contextmanager
def running(folder: Path, **settings: Any) -> Iterator[LLM]:
    merged = engine_settings(
        **{
            "parallel__executor": "multiprocess",
            "model__tokenizer": "none",
            "cache__block_size": 64,
            "scheduler__max_num_seqs": 8,
            "scheduler__max_num_batched_tokens": 200,
        }
        | settings
    )
    with LLM(str(folder), settings=merged, progress=False) as llm:
        (engine,) = llm.frontend.engines
        assert engine.report.graph_bytes != 0
        yield llm
        engine.scheduler.check_integrity()


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    family, fields = MODELS[request.param]
    folder = tmp_path_factory.mktemp("model")
    random_model(folder, family=family, vocab_size=VOCAB_SIZE, **{**SIZES, **fields})
    (text,) = random_prompts([max(LENGTHS)], VOCAB_SIZE)
    prompts = [text[:length] for length in LENGTHS]
    with running(folder) as llm:
        expected = tokens_of(llm.generate(prompts, GREEDY))
    assert len({tuple(tokens) for tokens in expected}) == len(expected)
    return Case(folder, prompts, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_prefix_hits_and_forks(case: Case, kind: str) -> None:
    ranks = {f"parallel__{kind}": 2}
    with running(case.folder, cache__enable_prefix_caching=True, **ranks) as llm:
        for turn in range(2):
            outputs = llm.generate(case.prompts, GREEDY)
            assert tokens_of(outputs) == case.expected
            if turn:
                found = sum(output.num_cached_tokens for output in outputs)
                assert found > 0.4 * sum(LENGTHS)
        four = llm.generate([case.prompts[-1]], replace(GREEDY, n=4))[0]
        assert [list(one.token_ids) for one in four.completions] == [case.expected[-1]] * 4


@pytest.mark.parametrize("kind", KINDS)
def test_preemption(case: Case, kind: str) -> None:
    """Blocks for the prompts of all requests, but not for their texts."""
    ranks = {f"parallel__{kind}": 2}
    few = {"cache__num_blocks": 8, "model__max_model_len": 128}
    prompts, expected = case.prompts[2:4] * 3, case.expected[2:4] * 3
    with running(case.folder, **few, **ranks) as llm:
        assert tokens_of(llm.generate(prompts, GREEDY)) == expected
        assert llm.frontend.engines[0].scheduler.stats.preemptions > 0


def test_drafts_in_a_pipeline(case: Case) -> None:
    """Each stage replays the inputs of the drafts that the last one has kept. Random texts do not
    repeat themselves: drafts come from a prediction, of which every seventh token is wrong."""
    ahead = {"parallel__pipeline_parallel_size": 2, "speculation__method": "ngram"}
    predictions = [tuple(2 if n % 7 == 6 else t for n, t in enumerate(e)) for e in case.expected]
    params = [replace(GREEDY, predicted_tokens=tokens) for tokens in predictions]
    with running(case.folder, **ahead) as llm:
        look_always_ahead(llm)
        tokens = tokens_of(llm.generate(case.prompts, params))
        counts = llm.frontend.engines[0].metrics.counts
    # products of other numbers of rows round differently, which a near tie may show
    differing = [n for n, text in enumerate(tokens) if text != case.expected[n]]
    assert len(differing) <= 1, differing
    assert counts[DRAFT_TOKENS] > counts[ACCEPTED] > 0
