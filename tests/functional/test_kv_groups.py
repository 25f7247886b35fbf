"""Scheduler and worker over a real model whose layers differ in what they keep: a sliding window in
some, all tokens in the others. Greedy outputs equal transformers', however they are scheduled."""

from __future__ import annotations

import random
from array import array
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from aioinfer.config import CacheConfig, Config, ModelConfig, ParallelConfig, SchedulerConfig
from aioinfer.layers.parallel import ProcessGroups
from aioinfer.sampling_params import SamplingParams
from aioinfer.scheduler.limits import SchedulerLimits
from aioinfer.scheduler.request import ForkGroup, Request
from aioinfer.scheduler.scheduler import Scheduler
from aioinfer.worker.worker import Worker
from tests.tiny_models import tiny_model

NEW_TOKENS, WINDOW, SLOTS = 40, 13, 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(
        "qwen2",
        tmp_path_factory.mktemp("windows") / "model",
        vocab_size=200,
        num_hidden_layers=4,
        use_sliding_window=True,
        sliding_window=WINDOW,
        max_window_layers=2,
    )


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Prompts of which many begin alike, most of them longer than the window."""
    rng = random.Random(1)
    stem = [rng.randrange(200) for _ in range(30)]
    return [
        stem[: rng.randrange(1, 31)] + [rng.randrange(200) for _ in range(rng.randrange(1, 40))]
        for _ in range(12)
    ]


@pytest.fixture(scope="module")
def expected(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            pad_token_id=0,
            eos_token_id=None,
        )
        outputs.append(output[0, len(prompt) :].tolist())
    return outputs


def generate(
    folder: Path, prompts: list[list[int]], n: int = 1, budget: int = 512, **cache: Any
) -> tuple[list[list[int]], Scheduler]:
    """Returns the output of each of the `n` requests a prompt, and the scheduler at rest."""
    config = Config(
        model=ModelConfig(path=str(folder)),
        cache=CacheConfig(**{"cpu_memory_gib": 0.01, "block_size": 4} | cache),
        scheduler=SchedulerConfig(max_num_seqs=SLOTS, max_num_batched_tokens=budget),
        parallel=ParallelConfig(device="cpu", cpu_threads=1),
    )
    worker = Worker(config, folder, ProcessGroups.single())
    report = worker.load(lambda done, total: None)
    assert [group.window for group in report.groups] == [None, WINDOW]
    worker.allocate(report.num_blocks, 110)
    worker.warm_up()
    scheduler = Scheduler(
        SchedulerLimits(
            groups=report.groups,
            num_blocks=report.num_blocks,
            block_size=report.block_size,
            max_num_seqs=SLOTS,
            token_budget=budget,
            prefill_cap=budget,
        )
    )
    requests = []
    for prompt in prompts:
        group = ForkGroup() if n > 1 else None
        for sibling in range(n):
            tokens, length = array("i", prompt), len(prompt)
            params = SamplingParams(temperature=0.0)
            requests.append(
                Request(
                    str(len(requests)),
                    tokens,
                    length,
                    params,
                    length + NEW_TOKENS,
                    sibling,
                    group=group,
                )
            )
            scheduler.add(requests[-1])
    pending: deque[Any] = deque()
    while not scheduler.is_idle or pending:
        while scheduler.num_in_flight < 2 and (plan := scheduler.schedule()) is not None:
            pending.append(worker.execute(plan))
        scheduler.update(pending.popleft().wait())
    scheduler.check_integrity()
    assert scheduler.kv_cache.num_free == scheduler.kv_cache.num_blocks
    return [request.tokens[request.prompt_len :].tolist() for request in requests], scheduler


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_a_window_beside_full_attention_equals_transformers(
    folder: Path, prompts: list[list[int]], expected: list[list[int]], block_size: int
) -> None:
    outputs, scheduler = generate(folder, prompts, block_size=block_size)
    assert outputs == expected
    assert len({tuple(output) for output in outputs}) == len(prompts)
    assert scheduler.stats.prefix_hit > 0


def test_chunks_and_preemption_change_nothing(
    folder: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    outputs, scheduler = generate(folder, prompts, budget=7, num_blocks=28)
    assert outputs == expected
    assert scheduler.stats.preemptions > 3


def test_forks_share_the_blocks_of_all_groups(
    folder: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    outputs, _ = generate(folder, prompts, n=3)
    assert outputs == [output for output in expected for _ in range(3)]
