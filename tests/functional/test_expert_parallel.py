"""Mixtures of experts with whole experts on the ranks, of one engine or of several that share them:
greedy tokens of transformers, through the whole engine with two worker processes."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from aioinfer import LLM, SamplingParams
from aioinfer.api.admin.control import expert_load
from aioinfer.features.expert_load.worker import INTERVAL_S
from aioinfer.ipc.expert_placement import ExpertPlacement, LayerPlacement
from tests.gpu.engine_settings import engine_settings
from tests.gpu.random_models import random_model

pytestmark = pytest.mark.extended

VOCAB = 512
NEW_TOKENS = 20
LENGTHS = (1, 8, 21, 60, 75)
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {}, "deepseek_v3": {}, "glm4_moe": {}, "mixtral": {"num_local_experts": 5},
    "qwen2_moe": {}, "qwen3_moe": {},
}  # fmt: skip


def reference_tokens(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Returns the greedy tokens of transformers in float32."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokens = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW_TOKENS,
            eos_token_id=None,
        )  # fmt: skip
        tokens.append(found[0, len(prompt) :].tolist())
    return tokens


def make_prompts() -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(3, VOCAB) for _ in range(length)] for length in LENGTHS]


def greedy(max_tokens: int = NEW_TOKENS) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def start(folder: Path, **settings: Any) -> LLM:
    """Starts two workers, with prompts in chunks."""
    values = {
        "parallel__device": "cpu", "parallel__cpu_threads": 1, "parallel__executor": "multiprocess",
        "parallel__expert_parallel": True, "model__max_model_len": 512,
        "scheduler__max_num_batched_tokens": 32,
    }  # fmt: skip
    return LLM(str(folder), settings=engine_settings(**values | settings), progress=False)


TWO_RANKS: dict[str, Any] = {"parallel__tensor_parallel_size": 2}
TWO_ENGINES: dict[str, Any] = {"parallel__data_parallel_size": 2}


@pytest.mark.parametrize(
    ("name", "division"),
    [
        *(pytest.param(name, TWO_RANKS, id=f"{name}-ranks") for name in FAMILIES),
        # of each kind of routing, and experts that the engines do not divide
        *(
            pytest.param(name, TWO_ENGINES, id=f"{name}-engines")
            for name in ("deepseek_v3", "mixtral", "qwen2_moe")
        ),
    ],
)
def test_two_workers(name: str, division: dict[str, Any], tmp_path: Path) -> None:
    """In one batch, and one prompt after the other."""
    folder = random_model(tmp_path, family=name, vocab_size=VOCAB, **FAMILIES[name])
    prompts = make_prompts()
    expected = reference_tokens(folder, prompts)
    assert len({tuple(tokens) for tokens in expected}) == len(expected)
    with start(folder, **division) as llm:
        outputs = llm.generate(prompts, greedy())
        single = [llm.generate([prompt], greedy())[0] for prompt in prompts[:2]]
        engines = llm.frontend.engines
        for engine in engines:
            engine.scheduler.check_integrity()
        posted = [engine.scheduler._step_id for engine in engines]
        generated = [engine.metrics.generation_tokens for engine in engines]
    assert [output.token_ids for output in outputs] == expected
    assert [output.token_ids for output in single] == expected[:2]
    if division is TWO_ENGINES:
        assert posted[0] == posted[1]
        assert min(generated) > NEW_TOKENS


def test_copies_of_experts_and_their_counts(tmp_path: Path) -> None:
    """Through a placement file, on ranks and on engines; every token is counted once."""
    folder = random_model(tmp_path, family="qwen3_moe", vocab_size=VOCAB)
    config = json.loads((folder / "config.json").read_text())
    layers, experts = config["num_hidden_layers"], config["num_local_experts"]
    by_rank = (*range(experts // 2), experts - 1), (*range(experts // 2, experts), 0, 1)
    placement = ExpertPlacement(dict.fromkeys(range(layers), LayerPlacement(by_rank)))
    file = tmp_path / "placement.json"
    file.write_text(json.dumps(placement.to_json()))
    prompts = make_prompts()
    expected = reference_tokens(folder, prompts)
    settings = {
        "parallel__expert_parallel": str(file),
        "cache__enable_prefix_caching": False,
        "speculation__method": "none",  # tokens of drafts are counted, too
    }
    for division in (TWO_RANKS, TWO_ENGINES):
        with start(folder, **division | settings) as llm:
            outputs = llm.generate(prompts, greedy())
            time.sleep(INTERVAL_S)
            llm.generate([[5], [6]], greedy(1))  # the first step of each engine brings a report
            loads = [expert_load(engine) for engine in llm.frontend.engines]
        assert [output.token_ids for output in outputs] == expected
        counted = sum(load.totals.sum(axis=1) for load in loads) // config["num_experts_per_tok"]
        computed = sum(len(prompt) + NEW_TOKENS - 1 for prompt in prompts)
        # the last layer computes the sampled tokens alone
        before = [computed] * (layers - 1) + [len(prompts) * NEW_TOKENS]
        late = {int(now) - then for now, then in zip(counted, before, strict=True)}
        assert late <= {0, 1, 2}
        assert len(late) == 1
        assert loads[0].by_rank(loads[0].totals).shape == (layers, 2)


def test_engines_that_share_experts_are_started_anew_together(tmp_path: Path) -> None:
    """One of them idles when the worker of the other is lost, and outputs go on as they were."""
    folder = random_model(tmp_path, family="qwen3_moe", vocab_size=VOCAB)
    prompt = make_prompts()[2]
    with start(folder, **TWO_ENGINES) as llm, ThreadPoolExecutor(1) as thread:
        expected = llm.generate([prompt], greedy(300))[0].token_ids
        engines: list[Any] = llm.frontend.engines
        before = [engine.metrics.generation_tokens for engine in engines]
        running = thread.submit(llm.generate, [prompt], greedy(300))
        deadline = time.monotonic() + 60

        def grown() -> list[bool]:
            now = [engine.metrics.generation_tokens for engine in engines]
            return [tokens > then + 20 for tokens, then in zip(now, before, strict=True)]

        while not any(grown()) and time.monotonic() < deadline:
            time.sleep(0.005)
        idle = engines[grown().index(False)]
        os.kill(idle._workers.executor.ranks._processes[0].pid, signal.SIGKILL)
        assert running.result(120)[0].token_ids == expected
        assert [engine.metrics.restarts for engine in engines] == [1, 1]
        again = llm.generate([prompt, [7, 8, 9]], greedy(30))
        assert again[0].token_ids == expected[:30]
