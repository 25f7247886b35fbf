"""Pipeline stages give what one worker gives: several families, alone and with tensor parallelism,
and everything that a request may ask for, under preemption and chunked prefill."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from aioinfer import LLM, SamplingParams
from aioinfer.api.admin.control import expert_load
from aioinfer.errors import ConfigError
from aioinfer.features.expert_load.worker import INTERVAL_S, STEPS_BETWEEN
from tests.disturbance import worker_pids
from tests.functional import test_masks
from tests.functional.test_beam_search import CASES, SCARCE, check_small_model
from tests.gpu.random_models import random_model
from tests.prompt_rows import VOCAB_SIZE, Reference, check_all
from tests.tiny_models import tiny_model

pytestmark = pytest.mark.extended

NEW_TOKENS = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
RNG = random.Random(0)
PROMPTS = [[RNG.randrange(3, 500) for _ in range(RNG.randint(1, 60))] for _ in range(14)]
ONE = {
    "model.dtype": "float32", "model.tokenizer": "none", "parallel.executor": "inline",
    "parallel.device": "cpu", "parallel.cpu_threads": 1, "cache.block_size": 4,
    "cache.num_blocks": 120, "scheduler.max_num_batched_tokens": 48,
}  # fmt: skip


def sizes(pipeline: int, tensor: int = 1) -> dict[str, Any]:
    return {
        "parallel.executor": "multiprocess",
        "parallel.pipeline_parallel_size": pipeline,
        "parallel.tensor_parallel_size": tensor,
    }


def generate(folder: Path, settings: dict[str, Any]) -> list[list[int]]:
    with LLM(str(folder), settings=ONE | settings, progress=False) as llm:
        outputs = llm.generate(PROMPTS, GREEDY)
        engine = llm.frontend.engines[0]
        engine.scheduler.check_integrity()
        # blocks behind windows are freed: where all layers have one, they are never scarce
        assert engine.scheduler.stats.preemptions > 0 or engine.scheduler.limits.groups[0].window
        stages = settings.get("parallel.pipeline_parallel_size", 1)
        assert len(engine.stage_times()) == (stages if stages > 1 else 0)
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize(("stages", "tensor"), [(3, 1), (2, 2)])
def test_tokens_of_experts(stages: int, tensor: int, tmp_path: Path) -> None:
    """Every stage's layers are reported as they are by one worker."""
    folder = tiny_model("qwen3_moe", tmp_path, num_hidden_layers=3, eos_token_id=None)
    plenty = {
        "cache.num_blocks": 2000, "cache.enable_prefix_caching": False,
        "speculation.method": "none",  # tokens of drafts count, too
    }  # fmt: skip
    found = []
    for settings in ({}, sizes(stages, tensor)):
        with LLM(str(folder), settings=ONE | plenty | settings, progress=False) as llm:
            llm.generate(PROMPTS, GREEDY)
            load = expert_load(llm.frontend.engines[0])
            before = load.totals.sum(axis=1).copy()
            time.sleep(INTERVAL_S)
            # to the next step in which the stages send their counts, and to that with the report
            llm.generate([[5]], SamplingParams(max_tokens=2 * STEPS_BETWEEN, ignore_eos=True))
            time.sleep(INTERVAL_S)
            llm.generate([[5]], SamplingParams(max_tokens=1, ignore_eos=True))
            assert load.layers == [0, 1, 2]
            assert (load.totals.sum(axis=1) > before).all()
            found.append(load.by_expert(load.totals))
    whole, staged = found
    of_prompts = 3 * (sum(map(len, PROMPTS)) + len(PROMPTS) * (NEW_TOKENS - 1))
    for totals in found:
        # the last steps are not all reported; the last layer computes sampled tokens alone
        assert (totals[:2].sum(axis=1) >= of_prompts).all()
        assert (totals[:2].sum(axis=1) <= of_prompts + 3 * (2 * STEPS_BETWEEN + 2)).all()
    np.testing.assert_allclose(staged, whole, atol=3 * (2 * STEPS_BETWEEN + 2))


@pytest.mark.parametrize(
    ("family", "pipeline", "tensor", "fields"),
    [
        ("llama", 2, 1, {}),
        ("qwen2", 3, 1, {"num_hidden_layers": 3, "tie_word_embeddings": True}),
        ("mistral", 2, 2, {"sliding_window": 9}),
        ("gemma2", 2, 2, {"num_hidden_layers": 4, "tie_word_embeddings": True}),
        # the stages keep different things
        ("gemma3", 2, 1, {}),
        ("gpt_oss", 2, 1, {}),
        ("deepseek_v3", 2, 1, {}),
        ("qwen3_moe", 2, 2, {}),
        ("granite", 3, 1, {"num_hidden_layers": 5}),
    ],
)
def test_families(
    family: str, pipeline: int, tensor: int, fields: dict[str, Any], tmp_path: Path
) -> None:
    folder = tiny_model(family, tmp_path / "model", eos_token_id=None, **fields)
    scarce = {"cache.num_blocks": 40}
    expected = generate(folder, scarce)
    assert len({tuple(tokens) for tokens in expected}) > 9
    assert generate(folder, scarce | sizes(pipeline, tensor)) == expected


def test_experts_on_ranks_of_stages(tmp_path: Path) -> None:
    folder = tiny_model("qwen3_moe", tmp_path / "model", eos_token_id=None)
    scarce = {"cache.num_blocks": 40}
    expert_parallel = sizes(2, 2) | {"parallel.expert_parallel": True}
    assert generate(folder, scarce | expert_parallel) == generate(folder, scarce)


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(
        tmp_path_factory.mktemp("model"), vocab_size=test_masks.VOCAB_SIZE, eos_token_id=None,
        num_attention_heads=6, num_key_value_heads=2, num_hidden_layers=3,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("pipeline", "settings"), [(2, {"cache__num_blocks": 26}), (3, {})], ids=["scarce", "room"]
)
def test_constraints_and_sampling(masked: Path, pipeline: int, settings: dict[str, Any]) -> None:
    """Masks, forced tokens, penalties, biases and seeds; after the loss of a rank, too."""
    with test_masks.running(masked) as llm:
        expected = test_masks.generate(llm)
    others = worker_pids()
    staged = {name.replace(".", "__"): value for name, value in sizes(pipeline).items()}
    with test_masks.running(masked, **settings | staged) as llm:
        assert test_masks.generate(llm) == expected
        psutil.Process(worker_pids(others)[-1]).send_signal(signal.SIGKILL)
        assert test_masks.generate(llm) == expected
        assert llm.frontend.engines[0].metrics.restarts == 1


def test_beam_search(tmp_path: Path) -> None:
    folder = tiny_model("llama", tmp_path / "model", eos_token_id=list(range(2, 62)))
    settings = SCARCE | {"cache.enable_prefix_caching": False} | sizes(2)
    assert check_small_model(folder, settings, CASES[1:5], ignore_eos=True) > 0


def test_outputs_of_prompt_rows(tmp_path: Path) -> None:
    random_model(tmp_path, vocab_size=VOCAB_SIZE, family="gemma2", eos_token_id=None)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, VOCAB_SIZE, n).tolist() for n in (1, 2, 17, 33, 90, 400)]
    settings = {"cache.block_size": 16, "scheduler.max_num_batched_tokens": 48} | sizes(2)
    with LLM(str(tmp_path), settings=ONE | settings, progress=False) as llm:
        check_all(llm, Reference.of(tmp_path, prompts))


def test_named_and_all_logprobs(tmp_path: Path) -> None:
    """The last stage alone has logits, on two ranks; on the first there is nothing to find."""
    folder = tiny_model("llama", tmp_path / "model", eos_token_id=None)
    wanted: list[dict[str, Any]] = [{"logprob_token_ids": (7, 3, 11)}, {"logprobs": -1}, {}]
    params = [SamplingParams(temperature=0.0, max_tokens=6, **fields) for fields in wanted]
    found = []
    every = {"scheduler.max_logprobs": -1}
    for settings in (every, every | sizes(2, 2)):
        with LLM(str(folder), settings=ONE | settings, progress=False) as llm:
            found.append(llm.generate(PROMPTS[:3], params))
    for one, staged in zip(*found, strict=True):
        assert one.token_ids == staged.token_ids
        pairs = zip(
            one.completions[0].logprobs or (), staged.completions[0].logprobs or (), strict=True
        )
        for expected, got in pairs:
            assert dict(got.top) == pytest.approx(dict(expected.top), abs=1e-4)
    named, every, none = (output.completions[0].logprobs for output in found[1])
    assert [token for token, _ in named[0].top] == [7, 3, 11]
    assert (len(named), len(every[5].top), none) == (6, 512, None)


def test_a_calibrated_float8_cache(tmp_path: Path) -> None:
    folder = tiny_model("llama", tmp_path / "model", eos_token_id=None)
    float8 = {"cache.dtype": "fp8", "cache.num_blocks": 40}
    assert generate(folder, float8 | sizes(2)) == generate(folder, float8)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (sizes(3), r"pipeline_parallel_size = 3, but this model has 2 layers: set it to 2"),
        (sizes(2) | {"parallel.executor": "inline"}, r"'multiprocess' with .*pipeline_parallel"),
    ],
)
def test_what_cannot_be(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = tiny_model("llama", tmp_path / "model")
    with pytest.raises(ConfigError, match=message):
        LLM(str(folder), settings=ONE | settings, progress=False)
