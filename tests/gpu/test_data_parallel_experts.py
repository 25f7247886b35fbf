"""Engines on two GPUs that share experts, each with requests of its own: the same tokens as one
engine gives in float32, whatever the other one has to do at the time.

A rank that does not come to an exchange stops the other: every test has a time limit, and steps
have a shorter one, whose error names the rank.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_settings import NEEDS_TWO, engine_settings, tokens_of
from random_models import random_model, random_prompts
from safetensors.torch import load_file, save_file

from aioinfer import LLM, AsyncLLM, SamplingParams
from aioinfer.api.admin.control import expert_load
from aioinfer.features.expert_load.worker import INTERVAL_S
from aioinfer.llm import Output
from tests.disturbance import disturbed, worker_pids

pytestmark = [
    pytest.mark.timeout(420),  # kernels are compiled, and engines started
    NEEDS_TWO,
]

DEVICE, VOCAB = "cuda", 512
LENGTHS = (1, 3, 17, 40, 129, 200, 66, 5)
FIELDS: dict[str, Any] = {
    "hidden_size": 256, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 3, "num_experts": 16, "num_experts_per_tok": 4,
    "moe_intermediate_size": 64, "max_position_embeddings": 1024, "initializer_range": 0.05,
    "eos_token_id": 2,
}  # fmt: skip
TWO_ENGINES: dict[str, Any] = {
    "parallel__data_parallel_size": 2,
    "parallel__expert_parallel": True,
    "parallel__restart_workers": 0,
}
#: Of one engine's steps, so that prompts come in chunks, beside the other's decodes.
CHUNK = 96


def greedy(max_tokens: int = 32) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def settings(**options: Any) -> dict[str, Any]:
    values = {
        "parallel__device": DEVICE, "parallel__executor": "multiprocess",
        "scheduler__max_num_batched_tokens": CHUNK, "scheduler__max_num_seqs": 16,
    }  # fmt: skip
    return engine_settings(**values | options)


@contextmanager
def running(folder: Path, **options: Any) -> Iterator[LLM]:
    """Engines, whose schedulers are checked at the end, and which have posted equally many steps
    then, unless they were restarted."""
    with LLM(str(folder), settings=settings(**options), progress=False) as llm:
        assert all((DEVICE in e.report.device) == (DEVICE == "cpu") for e in llm.frontend.engines)
        yield llm
        engines = llm.frontend.engines
        for engine in engines:
            engine.scheduler.check_integrity()
        if not any(engine.metrics.restarts for engine in engines):
            until(lambda: len({posted(engine) for engine in engines}) == 1)


def posted(engine: Any) -> int:
    """Returns how many steps an engine has posted."""
    return int(engine.scheduler._step_id)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(
        tmp_path_factory.mktemp("model"), family="qwen3_moe", vocab_size=VOCAB, **FIELDS
    )


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return random_prompts(LENGTHS, VOCAB)


@pytest.fixture(scope="module")
def expected(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    with running(folder) as llm:
        tokens = tokens_of(llm.generate(prompts, greedy()))
    assert len({tuple(one) for one in tokens}) == len(tokens)
    return tokens


@pytest.mark.parametrize("graphs", [True, False])
def test_tokens_are_those_of_one_engine(
    folder: Path, prompts: list[list[int]], expected: list[list[int]], graphs: bool
) -> None:
    """Together, so that prompts of one engine are beside decodes of the other; one after the other,
    so that one engine has nothing to do; with processes held up at random; and after a rest, in
    which neither takes a step."""
    with running(folder, **TWO_ENGINES, parallel__cuda_graphs=graphs) as llm:
        engines = llm.frontend.engines
        if DEVICE == "cuda":
            assert all((engine.report.graph_bytes != 0) == graphs for engine in engines)
        assert tokens_of(llm.generate(prompts, greedy())) == expected
        alone = [llm.generate([prompt], greedy())[0].token_ids for prompt in prompts[:4]]
        assert alone == expected[:4]
        assert min(engine.metrics.generation_tokens for engine in engines) > 0
        until(lambda: not any(engine.scheduler.num_in_flight for engine in engines))
        before = [posted(engine) for engine in engines]
        time.sleep(1.0)
        assert [posted(engine) for engine in engines] == before
        with disturbed(worker_pids(), seed=1, longest_s=0.05) as stopped:
            for _ in range(3):
                assert tokens_of(llm.generate(prompts, greedy())) == expected
        assert stopped


def test_requests_that_come_and_go(
    folder: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """A third of them is ended at some point; the others get their tokens."""
    rng = random.Random(3)

    async def client(llm: AsyncLLM, number: int) -> None:
        index, is_doomed = number % len(prompts), number % 3 == 0
        await asyncio.sleep(rng.uniform(0, 2))
        stream = await llm.add_request(prompts[index], greedy())
        patience, tokens = rng.randint(0, 20), []
        if is_doomed and not patience:
            stream.abort()
        async for output in stream:
            tokens = output.token_ids
            if is_doomed and len(tokens) >= patience:
                stream.abort()
                return
        if not is_doomed:
            assert tokens == expected[index]

    async def serve() -> None:
        given = settings(**TWO_ENGINES)
        async with await AsyncLLM.launch(str(folder), settings=given, progress=False) as llm:
            for _ in range(3):  # with rests in between
                async with asyncio.timeout(120), asyncio.TaskGroup() as group:
                    for number in range(40):
                        group.create_task(client(llm, number))
            for engine in llm.frontend.engines:
                engine.scheduler.check_integrity()

    asyncio.run(serve())


def test_all_tokens_go_to_one_rank(prompts: list[list[int]], tmp_path: Path) -> None:
    """Of equal scores the first experts are taken, which the first rank has."""
    folder = random_model(tmp_path, family="qwen3_moe", vocab_size=VOCAB, **FIELDS)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    routers = [name for name in tensors if name.endswith("mlp.gate.weight")]
    assert len(routers) == FIELDS["num_hidden_layers"]
    save_file(
        tensors | {name: torch.zeros_like(tensors[name]) for name in routers},
        file,
        metadata={"format": "pt"},
    )
    with running(folder) as llm:
        expected = tokens_of(llm.generate(prompts, greedy()))
    with running(folder, **TWO_ENGINES) as llm:
        assert tokens_of(llm.generate(prompts, greedy())) == expected
        time.sleep(INTERVAL_S)
        llm.generate([[5]], greedy(2))  # a step of either engine is one of both, and reports
        engines = llm.frontend.engines
        until(lambda: not any(engine.scheduler.num_in_flight for engine in engines))
        load = expert_load(engines[0])
        by_rank = load.by_rank(load.totals)
        assert by_rank[:, 0].min() > 0
        assert by_rank[:, 1].max() == 0


@pytest.mark.parametrize("quantization", ["auto", "fp8"])
def test_rounding_errors(quantization: str, prompts: list[list[int]], tmp_path: Path) -> None:
    """They are no worse than those of one engine. Tokens take all experts: where some are selected,
    rounding decides which. Longer prompts than `CHUNK` are whole steps here."""
    fields = FIELDS | {"num_experts_per_tok": FIELDS["num_experts"]}
    folder = random_model(tmp_path, family="qwen3_moe", vocab_size=VOCAB, **fields)
    first = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=20)
    rounded: dict[str, Any] = {
        "model__dtype": "bfloat16", "model__quantization": quantization,
        "scheduler__max_num_batched_tokens": 1024,
    }  # fmt: skip
    found = []
    for options in ({}, rounded, rounded | TWO_ENGINES):
        with running(folder, **options) as llm:
            found.append(llm.generate(prompts, first))
    exact, alone, ours = found
    limit = 1.5 * errors(alone, exact).square().mean().sqrt() + 1e-3
    assert errors(ours, exact).square().mean().sqrt() <= limit


def errors(rounded: Sequence[Output], exact: Sequence[Output]) -> torch.Tensor:
    """Returns the errors of log-probabilities of the first tokens, of those that both report."""
    found = []
    for one, other in zip(rounded, exact, strict=True):
        (mine,), (true,) = one.completions[0].logprobs or [], other.completions[0].logprobs or []
        known = dict(true.top)
        found += [value - known[token] for token, value in mine.top if token in known]
    assert len(found) > 10 * len(exact)
    return torch.tensor(found)


def test_a_lost_worker_ends_the_wait_of_the_other(
    folder: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """The worker of the idle engine is lost, both are restarted, and the output goes on."""
    options = TWO_ENGINES | {"parallel__restart_workers": 2}
    with running(folder, **options) as llm, ThreadPoolExecutor(1) as thread:
        whole = llm.generate([prompts[3]], greedy(600))[0].token_ids
        engines: list[Any] = llm.frontend.engines
        before = [engine.metrics.generation_tokens for engine in engines]
        result = thread.submit(llm.generate, [prompts[3]], greedy(600))

        def grown() -> list[bool]:
            now = [engine.metrics.generation_tokens for engine in engines]
            return [tokens > then + 20 for tokens, then in zip(now, before, strict=True)]

        until(lambda: any(grown()))
        idle = engines[grown().index(False)]
        os.kill(idle._workers.executor.ranks._processes[0].pid, signal.SIGKILL)
        assert result.result(200)[0].token_ids == whole
        assert [engine.metrics.restarts for engine in engines] == [1, 1]
        assert tokens_of(llm.generate(prompts, greedy())) == expected
