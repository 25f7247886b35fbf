"""GPU workers that are lost while a server process serves: new ones take their place, and streams
go on with the text of an undisturbed run.

In float32, so that tokens that are computed again, in other steps, are the same. States are
computed again from the tokens, too.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

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


#: Families and fields of their configurations: attention alone, and beside states.
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 64},
    "qwen3_5_text": {"head_dim": 256, "layer_types": ["linear_attention", "full_attention"],
                     "linear_key_head_dim": 128, "linear_value_head_dim": 128},
}  # fmt: skip


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(
        tmp_path_factory.mktemp("model"), family=request.param, vocab_size=VOCAB_SIZE,
        max_position_embeddings=4096, hidden_size=512, num_attention_heads=8, num_key_value_heads=4,
        **MODELS[request.param],
    )  # fmt: skip


@pytest.fixture
def process(request: pytest.FixtureRequest, folder: Path) -> Iterator[Process]:
    process = Process(
        "multiprocess", f"model.path={folder}", "model.dtype=float32", "parallel.device=cuda",
        f"parallel.tensor_parallel_size={request.param}", "scheduler.max_num_seqs=2",
    )  # fmt: skip
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
