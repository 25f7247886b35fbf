"""Several ranks on CPUs, over gloo: sizes that are refused, ranks out of step with each other, and
one that is stopped for good."""

from __future__ import annotations

import json
import multiprocessing
import random
import re
import signal
import time
from pathlib import Path

import pytest

from aioinfer import LLM, SamplingParams
from aioinfer.errors import ConfigError
from tests.disturbance import disturbed, worker_pids
from tests.functional.test_equality import MODEL
from tests.functional.test_lifecycle import Process, events
from tests.gpu.random_models import random_model
from tests.worker_processes import worker_processes

VOCAB_SIZE = 512  # three ranks do not divide it


def test_a_size_that_does_not_divide_the_heads_is_refused_before_anything_starts() -> None:
    message = (
        r"parallel\.tensor_parallel_size = 2 does not divide this model \(9 heads, 3 KV heads, "
        r"intermediate size 1536\); these do: 1, 3$"
    )
    others = multiprocessing.active_children()  # of servers that other tests share
    with pytest.raises(ConfigError, match=message):
        LLM(MODEL, settings={"parallel.tensor_parallel_size": 2}, progress=False)
    assert multiprocessing.active_children() == others


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.extended)])
def test_ranks_that_are_out_of_step_sample_the_same_tokens(tmp_path: Path, size: int) -> None:
    """Each rank takes the next step's inputs from what it chose itself: greedily, and by seed under
    every adjustment."""
    random_model(
        tmp_path, vocab_size=VOCAB_SIZE, num_attention_heads=6, num_key_value_heads=1,
        eos_token_id=None,
    )  # fmt: skip
    rng = random.Random(size)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 60))] for _ in range(6)]
    sampling_flags = [
        {"temperature": 0.0},
        {
            "temperature": 0.9, "seed": 1, "top_k": 40, "top_p": 0.9, "repetition_penalty": 1.2,
            "frequency_penalty": 0.5,
        },
        {
            "temperature": 1.2, "seed": 2, "min_p": 0.02, "presence_penalty": 1.0, "logprobs": 3,
            "logit_bias": {7: 2.0},
        },
    ]  # fmt: skip
    params = [
        SamplingParams(max_tokens=16, ignore_eos=True, **sampling_flags[i % len(sampling_flags)])
        for i in range(len(prompts))
    ]
    settings = {
        "parallel.tensor_parallel_size": size, "parallel.cpu_threads": 1, "model.dtype": "float32",
        "cache.num_blocks": 64, "cache.enable_prefix_caching": False,
        "scheduler.max_num_batched_tokens": 64,
    }  # fmt: skip
    others = worker_pids()
    with LLM(str(tmp_path), settings=settings, progress=False) as llm:
        expected = [output.token_ids for output in llm.generate(prompts, params)]
        workers = worker_pids(others)
        with disturbed(workers, seed=size, longest_s=0.02) as stopped:
            outputs = llm.generate(prompts, params)
    assert [output.token_ids for output in outputs] == expected
    assert len({tuple(tokens) for tokens in expected}) == len(prompts)
    assert len(stopped) > 10
    assert set(stopped) == set(workers)
    assert len(workers) == size


@pytest.mark.extended
def test_a_stopped_rank_ends_the_server_within_ten_seconds(tmp_path: Path) -> None:
    random_model(tmp_path, vocab_size=VOCAB_SIZE, max_position_embeddings=4096)
    process = Process(
        "multiprocess",
        f"model.path={tmp_path}",
        "parallel.tensor_parallel_size=2",
        "parallel.restart_workers=0",
    )
    try:
        rank_1 = worker_processes(process.popen.pid)[1]
        response = process.tell_a_story(max_tokens=3000)
        rank_1.send_signal(signal.SIGSTOP)
        stopped_at = time.monotonic()
        error = json.loads(events(response)[-2])["error"]  # before [DONE]
        assert error["code"] == "engine_dead"
        assert re.search(
            r"worker 1 has not run for \d s: it is stopped, as by SIGSTOP: rank 1 was ",
            error["message"],
        )
        assert time.monotonic() - stopped_at < 10
        assert process.end(timeout=15) == 1
        assert process.popen.stderr is not None
        assert "worker 1 has not run" in process.popen.stderr.read()
    finally:
        process.close()
