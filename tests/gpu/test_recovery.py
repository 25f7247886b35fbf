"""GPU workers that are lost while a server process serves: new ones take their place, and streams
go on with the text of an undisturbed run.

In float32, so that tokens that are computed anew, in other steps, are the same.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.functional.test_lifecycle import Process
from tests.functional.test_recovery import (
    BODIES,
    VOCAB_SIZE,
    metric,
    stream,
    until_running,
    workers,
)
from tests.gpu.random_models import random_model

pytestmark = pytest.mark.timeout(300)

TOKENS = 2000
SIZES = [
    pytest.param(
        size,
        marks=pytest.mark.skipif(torch.cuda.device_count() < size, reason=f"needs {size} GPUs"),
    )
    for size in (1, 2, 4)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(
        tmp_path_factory.mktemp("model"),
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=4096,
        hidden_size=512,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
    )


@pytest.fixture
def process(request: pytest.FixtureRequest, folder: Path) -> Iterator[Process]:
    process = Process(
        "multiprocess",
        f"model.path={folder}",
        "model.dtype=float32",
        "parallel.device=cuda",
        f"parallel.tensor_parallel_size={request.param}",
        "scheduler.max_num_seqs=2",
    )
    yield process
    process.close()


@pytest.mark.parametrize("process", SIZES, indirect=True)
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=lambda fault: fault.name)
def test_requests_outlive_their_workers(process: Process, fault: signal.Signals) -> None:
    expected = [stream(process, body, max_tokens=TOKENS) for body in BODIES]
    assert len({*expected}) == 3
    before = workers(process)
    with ThreadPoolExecutor(3) as pool:
        texts = [pool.submit(stream, process, body, max_tokens=TOKENS) for body in BODIES]
        until_running(process, 2)
        before[-1].send_signal(fault)
        assert [text.result(120) for text in texts] == expected
    after = workers(process)
    assert len(after) == len(before)
    assert not {worker.pid for worker in before} & {worker.pid for worker in after}
    assert metric(process, "aioinfer:worker_restarts_total") == [1]
    assert metric(process, "aioinfer:interrupted_requests_total") == [2]
    process.popen.send_signal(signal.SIGTERM)
    process.workers += after
    assert process.end(timeout=20) == 0
