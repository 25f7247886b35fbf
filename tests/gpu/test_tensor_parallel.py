"""Several GPUs share a model: the same tokens as one GPU gives in float32, ranks out of step, and
ranks that fail.

In float32 what is compared must be equal token for token. Each test is skipped where there are too
few GPUs. Workers are processes of their own throughout, so that this one holds no more GPU memory
than a test needs.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import multiprocessing
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from aioinfer import LLM, SamplingParams
from aioinfer.errors import EngineDeadError
from aioinfer.llm import Output
from tests.disturbance import disturbed, worker_pids
from tests.functional.test_lifecycle import Process, events
from tests.gpu.engine_settings import (
    NEEDS_FOUR,
    NEEDS_TWO,
    check_logprobs,
    engine_settings,
    tokens_of,
)
from tests.gpu.random_models import random_model
from tests.gpu.test_compilation import random_params
from tests.worker_processes import worker_processes

pytestmark = pytest.mark.timeout(300)

VOCAB_SIZE = 4099  # a prime number: the shards of the ranks differ
TOP = 20
GREEDY = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, max_tokens=48, ignore_eos=True, logprobs=5)
#: Sampling parameters of requests. Seeds are added, one a prompt.
PARAMETERS = {
    "plain": SEEDED,
    "greedy": replace(SEEDED, temperature=0.0),
    "top_k": replace(SEEDED, top_k=20),
    "top_p": replace(SEEDED, top_p=0.8),
    "min_p": replace(SEEDED, min_p=0.1),
    "all three": replace(SEEDED, top_k=50, top_p=0.9, min_p=0.02),
    # sample tokens of the prompt
    "penalties": replace(
        SEEDED, repetition_penalty=0.8, presence_penalty=-1.5, frequency_penalty=-0.5
    ),
    "greedy penalties": replace(
        SEEDED, temperature=0.0, repetition_penalty=1.5, frequency_penalty=1.0
    ),
    "bias": replace(SEEDED, top_p=0.9, logit_bias={5: 3.0, 2100: 2.0, 4098: 4.0, 7: -100.0}),
    "min_tokens": replace(SEEDED, ignore_eos=False, min_tokens=20, logit_bias={2: 8.0}),
}
SIZES = [pytest.param(2, marks=NEEDS_TWO), pytest.param(4, marks=NEEDS_FOUR)]


@contextmanager
def running(folder: Path, size: int, **settings: Any) -> Iterator[LLM]:
    """Worker processes on `size` GPUs, in float32 and without a prefix cache unless `settings` set
    otherwise; the schedulers' integrity is checked."""
    merged = engine_settings(
        **{"parallel__executor": "multiprocess", "parallel__tensor_parallel_size": size} | settings
    )
    with LLM(str(folder), settings=merged, progress=False) as llm:
        engines = llm.frontend.engines
        assert all("cpu" not in engine.report.device for engine in engines)
        assert len(worker_pids()) == size * len(engines)
        yield llm
        for engine in engines:
            engine.scheduler.check_integrity()
    assert multiprocessing.active_children() == []


def random_prompts(count: int, longest: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [
        [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, longest))] for _ in range(count)
    ]


@pytest.fixture(scope="module", params=[64, 128], ids=lambda size: f"heads of {size}")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of eight heads over four KV heads, which four ranks can share."""
    fields = {
        "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4,
        "initializer_range": 0.05, "eos_token_id": 2,
    }  # fmt: skip
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": request.param}
    return random_model(
        tmp_path_factory.mktemp("model"), vocab_size=VOCAB_SIZE, max_position_embeddings=1024,
        **fields, **heads,
    )  # fmt: skip


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return random_prompts(24, 300, seed=1)


@dataclass(frozen=True, slots=True)
class Expected:
    """What one GPU gives in float32.

    Attributes:
        greedy: the greedy tokens of each prompt.
        sampled: the outputs under each kind of parameters, for the first prompts.
        likeliest: the first prompts' outputs with many log-probabilities, in float32.
        rounded: the same in bfloat16.
    """

    greedy: list[list[int]]
    sampled: dict[str, list[Output]]
    likeliest: list[Output]
    rounded: list[Output]


LIKELIEST = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=TOP)


def sampled_outputs(llm: LLM, prompts: Sequence[list[int]]) -> dict[str, list[Output]]:
    """Returns the outputs under every kind of parameters, all in the same steps."""
    params = [
        replace(params, seed=number)
        for params in PARAMETERS.values()
        for number, _ in enumerate(prompts)
    ]
    outputs = llm.generate([*prompts] * len(PARAMETERS), params)
    return {
        name: outputs[i * len(prompts) : (i + 1) * len(prompts)]
        for i, name in enumerate(PARAMETERS)
    }


@pytest.fixture(scope="module")
def expected(folder: Path, prompts: list[list[int]]) -> Expected:
    with running(folder, 1) as llm:
        greedy = tokens_of(llm.generate(prompts, GREEDY))
        sampled, likeliest = sampled_outputs(llm, prompts[:6]), llm.generate(prompts, LIKELIEST)
    with running(folder, 1, model__dtype="bfloat16") as llm:
        rounded = llm.generate(prompts, LIKELIEST)
    assert len({tuple(tokens) for tokens in greedy}) == len(greedy), (
        "the prompts are too alike to prove anything"
    )
    return Expected(greedy, sampled, likeliest, rounded)


# ---------------------------------------------------------------- the same tokens


@pytest.mark.parametrize("size", SIZES)
def test_tokens_are_those_of_one_gpu(
    folder: Path, size: int, prompts: list[list[int]], expected: Expected
) -> None:
    """Greedily: together, so that prompts and decodes share steps, and one after the other.

    By seed: under every kind of parameters.
    """
    with running(folder, size) as llm:
        assert tokens_of(llm.generate(prompts, GREEDY)) == expected.greedy
        assert [
            llm.generate([prompt], GREEDY)[0].token_ids for prompt in prompts[:4]
        ] == expected.greedy[:4]
        sampled = sampled_outputs(llm, prompts[:6])
    for name, outputs in expected.sampled.items():
        assert tokens_of(sampled[name]) == tokens_of(outputs), name
        if name != "plain":
            assert tokens_of(outputs) != tokens_of(expected.sampled["plain"]), (
                f"{name} changes nothing"
            )
        for one, other in zip(sampled[name], outputs, strict=True):
            check_logprobs(one, other)


@pytest.mark.parametrize("size", SIZES)
def test_rounding_errors_in_bfloat16(
    folder: Path, size: int, prompts: list[list[int]], expected: Expected
) -> None:
    """They are no worse than those of one GPU."""
    with running(folder, size, model__dtype="bfloat16") as llm:
        outputs = llm.generate(prompts, LIKELIEST)
    ours, alone = (
        rounding_errors(outputs, expected.likeliest),
        rounding_errors(expected.rounded, expected.likeliest),
    )
    assert min(len(ours), len(alone)) > len(prompts) * TOP // 2
    assert ours.square().mean().sqrt() <= 1.5 * alone.square().mean().sqrt()
    assert ours.abs().max() < 0.5


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("quantization", ["fp8", "int8"])
def test_errors_of_quantized_weights(
    folder: Path, size: int, prompts: list[list[int]], expected: Expected, quantization: str
) -> None:
    """They are no worse than those of one GPU: the sum over the ranks is quantized for the next
    product as the norm of one GPU is."""
    found = []
    for ranks in (1, size):
        settings = {"model__dtype": "bfloat16", "model__quantization": quantization}
        with running(folder, ranks, **settings) as llm:
            found.append(rounding_errors(llm.generate(prompts, LIKELIEST), expected.likeliest))
    alone, ours = found
    assert min(len(ours), len(alone)) > len(prompts) * TOP // 4
    assert ours.square().mean().sqrt() <= 1.5 * alone.square().mean().sqrt()


def rounding_errors(rounded: Sequence[Output], exact: Sequence[Output]) -> torch.Tensor:
    """Returns the errors of log-probabilities, float32 [N]: of the tokens that both report, until
    the texts part."""
    errors = []
    for one, other in zip(rounded, exact, strict=True):
        for entry, true in zip(
            one.completions[0].logprobs or [], other.completions[0].logprobs or [], strict=True
        ):
            known = dict(true.top)
            errors += [value - known[token] for token, value in entry.top if token in known]
            if entry.token_id != true.token_id:
                break
    return torch.tensor(errors)


# ---------------------------------------------------------------- under every way of getting there


@pytest.mark.parametrize("size", SIZES)
def test_chunked_prefill(
    folder: Path, size: int, prompts: list[list[int]], expected: Expected
) -> None:
    with running(folder, size, scheduler__max_num_batched_tokens=64) as llm:
        outputs = llm.generate(prompts, GREEDY)
    assert tokens_of(outputs) == expected.greedy
    assert sum(output.num_prefill_steps > 1 for output in outputs) > len(prompts) // 2


@pytest.mark.parametrize("size", SIZES)
def test_preemption(folder: Path, size: int, prompts: list[list[int]], expected: Expected) -> None:
    longest = max(map(len, prompts)) + GREEDY.max_tokens
    blocks = 2 * -(-longest // 16)
    with running(
        folder, size, cache__block_size=16, cache__num_blocks=blocks, model__max_model_len=longest
    ) as llm:
        outputs = llm.generate(prompts, GREEDY)
        assert llm.frontend.stats()["preemptions"] >= 3
    assert tokens_of(outputs) == expected.greedy


@pytest.mark.parametrize("size", SIZES)
def test_prefix_cache_hits(
    folder: Path, size: int, prompts: list[list[int]], expected: Expected
) -> None:
    with running(
        folder,
        size,
        cache__block_size=16,
        cache__num_blocks=2000,
        cache__enable_prefix_caching=True,
    ) as llm:
        first, again = (llm.generate(prompts, GREEDY) for _ in range(2))
    assert tokens_of(first) == tokens_of(again) == expected.greedy
    assert all(
        output.num_cached_tokens >= 16 for output in again if len(output.prompt_token_ids) > 16
    )
    assert sum(output.num_cached_tokens > 0 for output in again) > len(prompts) // 2


@pytest.mark.parametrize("size", SIZES)
def test_ranks_that_are_out_of_step(
    folder: Path, size: int, prompts: list[list[int]], expected: Expected
) -> None:
    """Processes are stopped for moments at random, so that one GPU is steps ahead of another's
    launches."""
    with running(folder, size) as llm:
        workers = worker_pids()
        with disturbed(workers, seed=size, longest_s=0.05) as stopped:
            for _ in range(10):
                assert tokens_of(llm.generate(prompts, GREEDY)) == expected.greedy
                assert {
                    name: tokens_of(o) for name, o in sampled_outputs(llm, prompts[:6]).items()
                } == {name: tokens_of(o) for name, o in expected.sampled.items()}
    assert set(stopped) == set(workers)
    assert len(stopped) > 20


@NEEDS_TWO
def test_no_kernel_is_compiled_while_serving(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Workers report a kernel that they compile after their warm-up on their standard error."""
    rng = random.Random(0)
    with running(folder, 2, scheduler__max_num_seqs=300, cache__num_blocks=800) as llm:
        for prompt in random_prompts(10, 300, seed=2):
            llm.generate([prompt], random_params(rng))
        many = random_prompts(400, 200, seed=3)
        llm.generate(many, [random_params(rng) for _ in many])
    assert "compiled while serving" not in capfd.readouterr().err


# ---------------------------------------------------------------- several engines


@NEEDS_TWO
def test_two_engines(folder: Path, prompts: list[list[int]], expected: Expected) -> None:
    check_engines(folder, 1, prompts, expected)


@NEEDS_FOUR
def test_two_engines_of_two_ranks(
    folder: Path, prompts: list[list[int]], expected: Expected
) -> None:
    check_engines(folder, 2, prompts, expected)


def check_engines(folder: Path, size: int, prompts: list[list[int]], expected: Expected) -> None:
    with running(folder, size, parallel__data_parallel_size=2) as llm:
        assert tokens_of(llm.generate(prompts, GREEDY)) == expected.greedy
        assert {name: tokens_of(o) for name, o in sampled_outputs(llm, prompts[:6]).items()} == {
            name: tokens_of(o) for name, o in expected.sampled.items()
        }
        assert len(llm.frontend.engines) == 2
        assert all(engine.scheduler.stats.steps > 0 for engine in llm.frontend.engines)


# ---------------------------------------------------------------- ranks that fail


def free_bytes(count: int) -> list[int]:
    """Returns the free memory of the first GPUs, each of which then holds a context of this
    process."""
    gc.collect()
    torch.cuda.empty_cache()
    return [torch.cuda.mem_get_info(index)[0] for index in range(count)]


def fill(index: int) -> list[torch.Tensor]:
    """Takes all memory of a GPU that is left; it is free again when the tensors are gone and the
    cache is emptied."""
    held, size = [], torch.cuda.mem_get_info(index)[0]
    while size >= 2**20:
        try:
            held.append(torch.empty(size, dtype=torch.uint8, device=f"cuda:{index}"))
        except torch.OutOfMemoryError:
            size //= 2
    return held


def fail_while_serving(folder: Path, size: int, do_harm: Callable[[], Any]) -> str:
    """Has something happen to a rank while requests run and others come; returns the error, which
    must come within ten seconds.

    By then all workers are gone, and so is what they held of the GPUs.
    """
    before = free_bytes(size)
    endless = SamplingParams(temperature=0.0, max_tokens=900, ignore_eos=True)
    settings = {"parallel__tensor_parallel_size": size, "parallel__restart_workers": 0}
    merged = engine_settings(parallel__executor="multiprocess", **settings)
    with LLM(str(folder), settings=merged, progress=False) as llm:
        errors: list[BaseException] = []

        def generate(prompts: list[list[int]], params: SamplingParams) -> None:
            try:
                while True:
                    llm.generate(prompts, params)
            except EngineDeadError as error:
                errors.append(error)

        def start(*arguments: Any) -> threading.Thread:
            thread = threading.Thread(target=generate, args=arguments)
            thread.start()
            return thread

        batches = [start(random_prompts(8, 60, seed=5), endless)]
        deadline = time.monotonic() + 60
        while llm.frontend.stats()["steps"] < 20:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        harm = do_harm()
        began = time.monotonic()
        batches.append(start(random_prompts(8, 900, seed=6), GREEDY))
        for batch in batches:
            batch.join(30)
        assert time.monotonic() - began < 10
        assert not llm.frontend.is_healthy()
    assert multiprocessing.active_children() == []
    del harm
    after = free_bytes(size)
    assert all(now >= then - 2**24 for now, then in zip(after, before, strict=True)), (
        f"free before: {before}; after: {after}"
    )
    assert [type(error) for error in errors] == [EngineDeadError] * 2
    return str(errors[0])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT], ids=lambda number: number.name)
def test_a_killed_rank_is_named(folder: Path, size: int, number: signal.Signals) -> None:
    message = fail_while_serving(folder, size, lambda: os.kill(worker_pids()[1], number))
    assert f"worker 1 was killed by {number.name}: rank 1 was " in message


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_is_named(folder: Path, size: int, rank: int) -> None:
    message = fail_while_serving(folder, size, lambda: os.kill(worker_pids()[rank], signal.SIGSTOP))
    assert re.search(
        rf"worker {rank} has not run for \d s: it is stopped, as by SIGSTOP: rank "
        rf"{rank} was ",
        message,
    )
    assert f"worker {1 - rank}" not in message


@NEEDS_TWO
def test_a_rank_whose_gpu_has_no_memory_left(
    folder: Path, prompts: list[list[int]], expected: Expected
) -> None:
    """Serving takes its memory at the start, so requests go on; a rank that needs more is named."""
    outcome: list[object] = []

    def generate(llm: LLM) -> None:
        try:
            outcome.append(tokens_of(llm.generate(prompts, GREEDY)))
        except EngineDeadError as error:
            outcome.append(str(error))

    settings = {"parallel__tensor_parallel_size": 2, "parallel__restart_workers": 0}
    merged = engine_settings(parallel__executor="multiprocess", **settings)
    with LLM(str(folder), settings=merged, progress=False) as llm:
        held = fill(1)
        thread = threading.Thread(target=generate, args=(llm,), daemon=True)
        thread.start()
        thread.join(30)
        del held
        torch.cuda.empty_cache()
    if outcome != [expected.greedy]:
        assert re.search("worker 1 failed:.*out of memory", str(outcome[0]), re.DOTALL)


@NEEDS_TWO
@pytest.mark.skipif(
    any(
        importlib.util.find_spec(name) is None
        for name in ("aiohttp", "msgspec", "orjson", "prometheus_client", "uvloop")
    ),
    reason="needs what the HTTP server needs",
)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda number: number.name)
def test_the_server_ends_with_a_failure(folder: Path, number: signal.Signals) -> None:
    before = free_bytes(2)
    settings = {
        "model.path": folder, "model.max_model_len": 1024, "parallel.device": "cuda",
        "parallel.tensor_parallel_size": 2, "parallel.restart_workers": 0,
    }  # fmt: skip
    process = Process("multiprocess", *(f"{key}={value}" for key, value in settings.items()))
    try:
        rank_1 = worker_processes(process.popen.pid)[1]
        response = process.tell_a_story(max_tokens=1000)
        rank_1.send_signal(number)
        began = time.monotonic()
        error = json.loads(events(response)[-2])["error"]  # before [DONE]
        assert error["code"] == "engine_dead"
        assert "worker 1 " in error["message"]
        assert time.monotonic() - began < 10
        assert process.end(timeout=10) == 1
    finally:
        process.close()
    assert all(now >= then - 2**24 for now, then in zip(free_bytes(2), before, strict=True))
