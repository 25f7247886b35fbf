"""Ten thousand random requests, a third of them aborted at random moments: nothing is lost, nothing
is left, nothing grows."""

from __future__ import annotations

import asyncio
import gc
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from random_models import FIRST_CHARACTER, random_model

from aioinfer import SamplingParams
from aioinfer.config import load_config
from aioinfer.engine.frontend import Frontend
from aioinfer.engine.output import RequestOutput
from aioinfer.executor.inline import InlineExecutor

REQUESTS = 10_000
ROUNDS = 10
CLIENTS = 100
VOCAB_SIZE = 512
#: The fraction of requests that are to be aborted. Some end before their time comes: about a third
#: are.
DOOMED = 0.45
#: Each delta that any client gets ends a doomed request with a chance of one in so many. Requests
#: live for thousands of deltas.
PATIENCE = 3000


@dataclass(frozen=True, slots=True)
class Job:
    """A request, and whether it is to be aborted."""

    prompt: list[int]
    params: SamplingParams
    doomed: bool


#: The same request now and then, whose text must not depend on what goes on around it.
CANARY = Job(
    list(range(10, 90)),
    SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True),
    doomed=False,
)


def random_params(rng: random.Random) -> SamplingParams:
    """Returns parameters of every kind, in every combination."""
    max_tokens = rng.randint(1, 60)
    fields: dict[str, Any] = {
        "n": rng.choice([1, 1, 1, 1, 2, 3]), "max_tokens": max_tokens,
        "temperature": rng.choice([0.0, 0.7, 1.3]), "top_k": rng.choice([0, 0, 1, 40]),
        "top_p": rng.choice([1.0, 1.0, 0.9]), "min_p": rng.choice([0.0, 0.0, 0.05]),
        "ignore_eos": rng.random() < 0.5, "seed": rng.choice([None, rng.getrandbits(64)]),
    }  # fmt: skip
    if rng.random() < 0.3:
        fields |= {
            "repetition_penalty": rng.uniform(0.8, 1.5),
            "presence_penalty": rng.uniform(-2, 2),
            "frequency_penalty": rng.uniform(-2, 2),
        }
    if rng.random() < 0.2:
        fields["logprobs"] = rng.randint(0, 20)
    if rng.random() < 0.2:
        fields["logit_bias"] = {
            rng.randrange(VOCAB_SIZE): rng.uniform(-9, 9) for _ in range(rng.randint(1, 30))
        }
    if rng.random() < 0.2:
        fields["stop"] = tuple(
            chr(FIRST_CHARACTER + rng.randrange(100, VOCAB_SIZE)) for _ in range(rng.randint(1, 5))
        )
    if rng.random() < 0.2:
        fields |= {
            "stop_token_ids": (rng.randrange(VOCAB_SIZE), rng.randrange(VOCAB_SIZE)),
            "min_tokens": rng.randint(0, max_tokens),
        }
    return SamplingParams(**fields)


def random_jobs(count: int, rng: random.Random) -> list[Job]:
    """Returns requests of which some begin alike, every fiftieth the canary."""
    stems = [[rng.randrange(VOCAB_SIZE) for _ in range(100)] for _ in range(20)]
    jobs = []
    for index in range(count):
        length = rng.randint(1, 200)
        stem = rng.choice(stems) if rng.random() < 0.3 else []
        prompt = (stem + [rng.randrange(VOCAB_SIZE) for _ in range(length)])[:length]
        jobs.append(
            Job(prompt, random_params(rng), rng.random() < DOOMED) if index % 50 else CANARY
        )
    return jobs


async def run_clients(
    frontend: Frontend, jobs: list[Job], rng: random.Random
) -> list[RequestOutput]:
    """Serves the jobs to `CLIENTS` clients and returns the outputs, all ended.

    With each delta that any of them gets, one of the doomed may be aborted: while it waits, in the
    middle of its prompt, between two tokens, or after a preemption.
    """
    queue = iter(jobs)
    outputs: list[RequestOutput] = []
    doomed: list[RequestOutput] = []

    async def client() -> None:
        for job in queue:
            output = await frontend.submit(job.prompt, job.params)
            outputs.append(output)
            if job.doomed:
                doomed.append(output)
            async for _ in output:
                if rng.random() < len(doomed) / PATIENCE:
                    doomed.pop(rng.randrange(len(doomed))).abort()
            if output in doomed:
                doomed.remove(output)

    async with asyncio.TaskGroup() as group:
        for _ in range(CLIENTS):
            group.create_task(client())
    return outputs


async def come_to_rest(frontend: Frontend) -> None:
    """Checks that nothing is left of what ran, and waits for the steps that were planned ahead of
    its end."""
    assert (frontend.stats()["running"], frontend.stats()["waiting"]) == (0, 0)
    assert frontend.engines[0].scheduler.is_idle
    assert await frontend.drain(0)
    async with asyncio.timeout(30):
        while frontend.engines[0].scheduler.num_in_flight:  # noqa: ASYNC110 - wasted rows wake nobody
            await asyncio.sleep(0.001)
    frontend.engines[0].scheduler.check_integrity()
    assert frontend.engines[0].scheduler.kv_cache.num_free == sum(
        frontend.engines[0].report.num_blocks
    )


def check_ends(outputs: list[RequestOutput]) -> Counter[str]:
    """Checks how the requests ended and counts the reasons; "abort" and "abort early"
    are those with tokens and those without."""
    reasons: Counter[str] = Counter()
    for output in outputs:
        assert output.is_finished
        for request in (sequence.request for sequence in output.sequences):
            reason, params = str(request.finish_reason), output.params
            assert reason in ("abort", "length", "stop"), reason
            if reason == "length":
                assert request.num_output == params.max_tokens
            elif reason == "stop":
                assert request.num_output >= max(1, params.min_tokens)
            reasons["abort early" if reason == "abort" and not request.num_output else reason] += 1
    return reasons


async def measure_round(
    frontend: Frontend, jobs: list[Job], rng: random.Random
) -> tuple[Counter[str], set[tuple[int, ...]], int]:
    """Serves a round. Returns how its requests ended, the canary's texts, and the bytes of GPU
    memory in use when it is over, apart from `bytes_by_demand`.

    The canary goes last and alone, so that what the worker keeps of its last step is the same after
    every round.
    """
    outputs = await run_clients(frontend, jobs, rng)
    await come_to_rest(frontend)
    outputs += await run_clients(frontend, [CANARY], rng)
    await come_to_rest(frontend)
    gc.collect()
    texts = {tuple(g.sequences[0].request.tokens) for g in outputs if g.params is CANARY.params}
    return check_ends(outputs), texts, torch.cuda.memory_allocated() - bytes_by_demand(frontend)


def bytes_by_demand(frontend: Frontend) -> int:
    """Returns the bytes of what grows with the number of requests that have penalties."""
    executor = frontend.engines[0]._workers.executor
    assert isinstance(executor, InlineExecutor)
    slots = executor._worker.runner.slots
    return slots.occurrences.rows.nbytes


async def serve_load(
    folder: Path, device: str, dtype: str, requests: int = REQUESTS, first_measured_step: int = 2000
) -> None:
    """Serves the load and checks the scheduler's integrity after every round, and the memory
    from the given step on."""
    settings = {
        "model.path": str(folder), "model.dtype": dtype, "parallel.device": device,
        "parallel.executor": "inline", "cache.block_size": 16, "cache.num_blocks": 350,
        "scheduler.max_num_seqs": 64, "scheduler.max_num_batched_tokens": 512,
    }  # fmt: skip
    rng = random.Random(dtype)
    jobs = random_jobs(requests, rng)
    frontend = await Frontend.launch(load_config(None, settings))
    try:
        reasons: Counter[str] = Counter()
        texts: set[tuple[int, ...]] = set()
        memory: list[int] = []
        for first in range(0, requests, requests // ROUNDS):
            counted, seen, used = await measure_round(
                frontend, jobs[first : first + requests // ROUNDS], rng
            )
            reasons += counted
            texts |= seen
            if frontend.stats()["steps"] >= first_measured_step:
                memory.append(used)
        stats = frontend.stats()
    finally:
        await frontend.close()
    assert min(stats["preemptions"], stats["prefix_tokens_hit"], stats["wasted_rows"]) > 0, stats
    assert 0.25 < (reasons["abort"] + reasons["abort early"]) / reasons.total() < 0.4, reasons
    assert min(reasons.values()) > requests / 100, reasons
    assert dtype != "float32" or len(texts) == 1
    assert len(memory) >= 6
    # The allocator rounds up, and how many drafts the last step had differs between the rounds.
    grown = min(memory[-3:]) - min(memory[:3])
    assert grown < 4096, f"bytes in use after each round: {memory}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(
        tmp_path_factory.mktemp("model"), vocab_size=VOCAB_SIZE, head_dim=64, hidden_size=128
    )


@pytest.mark.timeout(300)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ten_thousand_requests(folder: Path, dtype: str) -> None:
    asyncio.run(serve_load(folder, "cuda", dtype))
