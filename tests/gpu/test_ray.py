"""Workers that Ray places on two GPUs of this host give what those of the `multiprocess` executor
give, and nothing of Ray is left."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("ray")

import psutil
import ray
from ray.cluster_utils import Cluster

from aioinfer import LLM, SamplingParams
from tests.gpu.engine_settings import engine_settings
from tests.gpu.random_models import random_model, random_prompts
from tests.worker_processes import is_worker

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
VOCAB_SIZE = 4096
#: In the command lines of Ray's processes.
PARTS = ("raylet", "gcs_server", "ray::", "ray/_private")
#: Rows whose tokens the graph samples, and rows that are sampled behind it.
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=7, top_p=0.9, max_tokens=48, ignore_eos=True),
    SamplingParams(temperature=0.0, logprobs=2, max_tokens=48, ignore_eos=True),
    SamplingParams(temperature=0.0, allowed_token_ids=[5, 9, 77], max_tokens=8, ignore_eos=True),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(
        tmp_path_factory.mktemp("model"), vocab_size=VOCAB_SIZE, num_hidden_layers=4,
        max_position_embeddings=1024, eos_token_id=None, head_dim=64,  # which kernels have
    )  # fmt: skip


def generate(folder: Path, executor: str, **parallel: Any) -> list[list[int]]:
    sizes = {f"parallel__{name}": value for name, value in parallel.items()}
    settings = engine_settings(parallel__executor=executor, model__tokenizer="none", **sizes)
    prompts = random_prompts((1, 5, 33, 90, 400, 17, 64, 700), VOCAB_SIZE)
    params = [PARAMS[number % len(PARAMS)] for number in range(len(prompts))]
    with LLM(str(folder), settings=settings, progress=False) as llm:
        for engine in llm.frontend.engines:
            assert "cpu" not in engine.report.device
        outputs = [output.token_ids for output in llm.generate(prompts, params)]
        for engine in llm.frontend.engines:
            engine.scheduler.check_integrity()
    return outputs


@pytest.mark.parametrize(
    "shape",
    [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}, {"data_parallel_size": 2}],
    ids=["tensor", "pipeline", "data"],
)
def test_the_same_tokens_as_without_ray(folder: Path, shape: dict[str, Any]) -> None:
    assert generate(folder, "ray", **shape) == generate(folder, "multiprocess", **shape)
    _assert_nothing_is_left()


def test_stages_on_two_nodes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are of this host, but the ranks take them for two: hidden states and tokens go through
    NCCL."""
    nodes = [{"num_cpus": 1, "num_gpus": 1, "env_vars": {"CUDA_VISIBLE_DEVICES": n}} for n in "01"]
    shape = {"pipeline_parallel_size": 2}
    expected = generate(folder, "multiprocess", **shape)
    cluster = Cluster(initialize_head=True, head_node_args={**nodes[0], "include_dashboard": False})
    try:
        cluster.add_node(**nodes[1])
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        assert generate(folder, "ray", **shape) == expected
    finally:
        ray.shutdown()
        cluster.shutdown()
    _assert_nothing_is_left()


def _assert_nothing_is_left() -> None:
    assert not ray.is_initialized()
    deadline = time.monotonic() + 30
    while (lines := _processes_of_ray()) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert lines == []


def _processes_of_ray() -> list[str]:
    lines = []
    for child in psutil.Process().children(recursive=True):
        try:
            line = " ".join(child.cmdline())
        except psutil.NoSuchProcess:
            continue
        if is_worker(child) or any(part in line for part in PARTS):
            lines.append(line)
    return lines
