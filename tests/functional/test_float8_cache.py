"""The KV cache in float8, end to end: greedy tokens are those of a model that rounds keys and
values alike, by every way of getting there; SmolLM2's log-probabilities stay near those of
float32."""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from aioinfer import LLM, SamplingParams
from tests.functional.prompts import PROMPTS
from tests.functional.test_equality import MODEL
from tests.rounded_attention import generate, rounding_model
from tests.tiny_models import tiny_model

LAYERS, KV_HEADS, NEW_TOKENS = 2, 2, 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
LENGTHS = (1, 5, 17, 33, 70, 120)


@dataclass(frozen=True, slots=True)
class Case:
    """A checkpoint with scales, prompts, and the tokens of a model that rounds by those scales."""

    folder: Path
    prompts: list[list[int]]
    expected: list[list[int]]


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Gemma 3 has a window in every other layer."""
    folder = tiny_model(request.param, tmp_path_factory.mktemp(request.param))
    # coarse enough for tokens to change
    scales = {
        layer: (torch.tensor([0.002, 0.02]), torch.tensor([0.0005, 0.1])) for layer in range(LAYERS)
    }
    file = folder / "model.safetensors"
    stored = {
        f"model.layers.{layer}.self_attn.{name}": tensor
        for layer, both in scales.items()
        for name, tensor in zip(("k_scale", "v_scale"), both, strict=True)
    }
    rng = random.Random(2)
    prompts = [[rng.randrange(3, 512) for _ in range(length)] for length in LENGTHS]
    prompts.append(prompts[-1][:100] + prompts[0])
    model = rounding_model(folder, scales)
    save_file(load_file(file) | stored, file)
    return Case(folder, prompts, generate(model, prompts, NEW_TOKENS))


def run(case: Case, dtype: str = "fp8", **settings: Any) -> list[list[int]]:
    defaults = {
        "parallel.executor": "inline", "parallel.cpu_threads": 1, "model.tokenizer": "none",
        "model.dtype": "float32", "model.max_model_len": 256, "scheduler.max_num_seqs": 8,
        "cache.num_blocks": 100, "cache.dtype": dtype,
    }  # fmt: skip
    given = {name.replace("__", "."): value for name, value in settings.items()}
    with LLM(str(case.folder), settings=defaults | given, progress=False) as llm:
        outputs = llm.generate(case.prompts, GREEDY)
        if settings.get("cache__num_blocks"):
            assert llm.frontend.stats()["preemptions"]
        if settings.get("cache__enable_prefix_caching"):
            outputs = llm.generate(case.prompts, GREEDY)
            assert outputs[-1].num_cached_tokens == 96
        llm.frontend.engines[0].scheduler.check_integrity()
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("way", ["batch", "chunks", "preempted", "cached"])
def test_tokens_are_those_of_rounded_keys_and_values(case: Case, way: str) -> None:
    settings: dict[str, Any] = {
        "batch": {},
        "chunks": {"scheduler__max_num_batched_tokens": 24},
        "preempted": {"cache__num_blocks": 20},
        "cached": {"cache__enable_prefix_caching": True},
    }[way]
    assert run(case, **settings) == case.expected
    if way == "batch":
        assert run(case, "model") != case.expected


@pytest.mark.extended
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_give_the_same(case: Case, ranks: int, tmp_path: Path) -> None:
    """Of four ranks two share each KV head; calibrated, where the checkpoint has no scales, they
    agree on its scale."""
    parallel = {"parallel__executor": "multiprocess", "parallel__tensor_parallel_size": ranks}
    assert run(case, **parallel) == case.expected
    folder = shutil.copytree(case.folder, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    plain = {name: tensor for name, tensor in tensors.items() if not name.endswith("_scale")}
    save_file(plain, folder / "model.safetensors")
    calibrated = replace(case, folder=folder)
    assert run(calibrated, **parallel) == run(calibrated) != case.expected


@pytest.mark.extended
def test_real_weights() -> None:
    """SmolLM2 with calibrated scales: log-probabilities of what it writes in float32."""
    base = {
        "parallel.executor": "inline",
        "cache.cpu_memory_gib": 0.1,
        "model.max_model_len": 512,
        "scheduler.max_num_seqs": 8,
    }
    scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    texts: list[list[int]] = []
    logprobs = []
    for dtype in ("model", "fp8"):
        with LLM(MODEL, settings=base | {"cache.dtype": dtype}, progress=False) as llm:
            if not texts:
                written = llm.generate(PROMPTS[:4], SamplingParams(temperature=0, max_tokens=64))
                texts = [o.prompt_token_ids + o.token_ids for o in written]
            outputs = llm.generate(texts, scored)
            scores = [o.prompt_scores for o in outputs]
            logprobs.append(torch.cat([torch.tensor(s.logprobs) for s in scores if s is not None]))
    plain, rounded = logprobs
    assert len(plain) > 200
    assert float((plain - rounded).mean().abs()) < 0.02
    assert float((plain - rounded).abs().mean()) < 0.1
