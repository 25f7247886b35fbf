"""Workers that are lost while a server process serves: they come back, streams go on with the text
of an undisturbed run, queued requests are served, and repeated crashes end the server."""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.functional.test_lifecycle import Process, events
from tests.gpu.random_models import random_model
from tests.worker_processes import worker_processes

pytestmark = pytest.mark.longest

VOCAB_SIZE = 512
TOKENS = 300
#: Two that run, greedily and by seed under every count of tokens, and one that waits.
BODIES: list[dict[str, Any]] = [
    {"prompt": "ĀāĂă", "temperature": 0},
    {"prompt": "ĄąĆć", "temperature": 1.0, "seed": 7, "repetition_penalty": 1.1,
     "frequency_penalty": 0.2},
    {"prompt": "ĈĉĊċ", "temperature": 0.8, "seed": 3},
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(
        tmp_path_factory.mktemp("model"), vocab_size=VOCAB_SIZE, max_position_embeddings=4096
    )


@pytest.fixture
def process(request: pytest.FixtureRequest, folder: Path) -> Iterator[Process]:
    process = Process(
        "multiprocess", f"model.path={folder}", "scheduler.max_num_seqs=2", *request.param.split()
    )
    yield process
    process.close()


def workers(process: Process) -> list[psutil.Process]:
    """Returns the worker processes that live, in the order of their ranks."""
    return worker_processes(process.popen.pid)


def num_descriptors(process: Process) -> int:
    """Returns how many descriptors the server has open, connections of clients left out."""
    server = psutil.Process(process.popen.pid)
    clients = [c for c in server.net_connections("inet") if c.status != psutil.CONN_LISTEN]
    return server.num_fds() - len(clients)


def stream(process: Process, body: dict[str, Any], **more: Any) -> str:
    """Returns the text of a whole stream, or the error that ends it."""
    response = process.request(
        "POST",
        "/v1/completions",
        **{"stream": True, "ignore_eos": True, "max_tokens": TOKENS} | body | more,
    )
    assert response.status == 200
    *chunks, done = events(response)
    assert done == "[DONE]"
    if "error" in (last := json.loads(chunks[-1])):
        return str(last["error"])
    return "".join(json.loads(chunk)["choices"][0]["text"] for chunk in chunks)


def metric(process: Process, name: str) -> list[float]:
    """Returns the values of a metric, by engine."""
    lines = process.request("GET", "/metrics").read().decode().splitlines()
    return [float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{")]


def live_state(process: Process) -> dict[str, Any]:
    """Returns the state of the first engine as the page sees it."""
    response = process.request("GET", "/page/live")
    line = response.readline().removeprefix(b"data: ")
    response.close()
    return json.loads(line)["engines"][0]


def until_running(process: Process, count: int) -> None:
    """Returns when so many requests run that have generated some tokens."""
    begun = metric(process, "vllm:generation_tokens_total")[0]
    deadline = time.monotonic() + 30
    while (
        metric(process, "vllm:num_requests_running")[0] < count
        or metric(process, "vllm:generation_tokens_total")[0] < begun + 10 * count
    ):
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize(
    ("process", "fault"),
    [
        pytest.param("", signal.SIGKILL, id="one rank, killed"),
        pytest.param("", signal.SIGSTOP, marks=pytest.mark.extended, id="one rank, stopped"),
        pytest.param("parallel.tensor_parallel_size=2", signal.SIGKILL, marks=pytest.mark.extended,
                     id="two ranks, one killed"),
    ],
    indirect=["process"],
)  # fmt: skip
def test_requests_outlive_their_workers(process: Process, fault: signal.Signals) -> None:
    expected = [stream(process, body) for body in BODIES]
    assert len({*expected}) == 3
    before, descriptors = workers(process), num_descriptors(process)
    with ThreadPoolExecutor(3) as pool:
        texts = [pool.submit(stream, process, body) for body in BODIES]
        until_running(process, 2)
        before[-1].send_signal(fault)
        assert [text.result(60) for text in texts] == expected
    after = workers(process)
    assert len(after) == len(before)
    assert num_descriptors(process) == descriptors
    assert not any(worker.is_running() for worker in before)
    assert not {worker.pid for worker in before} & {worker.pid for worker in after}
    assert metric(process, "aioinfer:worker_restarts_total") == [1]
    assert metric(process, "aioinfer:interrupted_requests_total") == [2]
    assert metric(process, "aioinfer:engine_serving") == [1]
    health = process.request("GET", "/health")
    assert (health.status, json.loads(health.read())) == (200, {"status": "ok"})
    process.popen.send_signal(signal.SIGTERM)
    process.workers += after
    assert process.end(timeout=10) == 0
    assert process.popen.stderr is not None
    log = process.popen.stderr.read()
    assert "the workers are restarted" in log
    assert "the workers serve again; 3 requests go on" in log


@pytest.mark.extended
@pytest.mark.parametrize("process", ["parallel.restart_workers=2"], indirect=True)
def test_repeated_crashes_end_the_server(process: Process) -> None:
    """A request that ran at two of them is ended at the second."""
    with ThreadPoolExecutor(1) as pool:
        text = pool.submit(stream, process, BODIES[0], max_tokens=3000)
        for number in range(2):
            until_running(process, 1)
            workers(process)[0].kill()
            while metric(process, "aioinfer:worker_restarts_total") != [number + 1]:
                time.sleep(0.01)
            health = process.request("GET", "/health")
            assert health.status == 200
            assert json.loads(health.read()) == {"status": "degraded", "engines": ["restarting"]}
            assert live_state(process)["restart"] == [number + 1, 2]
        assert "ran when workers were lost, and cannot be resumed: worker 0" in text.result(60)
    assert len(stream(process, BODIES[1])) > 0
    assert live_state(process)["restart"] is None
    workers(process)[0].kill()
    assert process.end(timeout=20) == 1
    assert process.popen.stderr is not None
    assert "the engine has died: worker 0 was killed by SIGKILL" in process.popen.stderr.read()


def until_all_generate(process: Process, count: int) -> None:
    """Returns when each engine runs so many requests and has generated some tokens."""
    deadline = time.monotonic() + 30
    begun = metric(process, "vllm:generation_tokens_total")
    while metric(process, "vllm:num_requests_running") != [count, count] or any(
        now < then + 10 * count
        for now, then in zip(metric(process, "vllm:generation_tokens_total"), begun, strict=True)
    ):
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.extended
@pytest.mark.parametrize(
    "process", ["parallel.data_parallel_size=2 parallel.restart_workers=0"], indirect=True
)
def test_the_streams_of_a_dead_engine_go_on_with_the_other(process: Process) -> None:
    """Both engines are full, and more requests wait; the last of the bodies brings no seed, and
    gets the one that the server draws first."""
    drawn = {"prompt": BODIES[2]["prompt"], "temperature": 1.0}
    first = random.Random(0).getrandbits(64)  # of `model.seed`
    bodies = [
        {"seed": 1} | BODIES[0], *BODIES[1:], BODIES[1] | {"seed": 8}, BODIES[2] | {"seed": 9},
        drawn,
    ]  # fmt: skip
    with ThreadPoolExecutor(len(bodies)) as pool:
        expected = [*pool.map(lambda body: stream(process, {"seed": first} | body), bodies)]
        assert len({*expected}) == len(bodies)
        texts = [pool.submit(stream, process, body) for body in bodies]
        until_all_generate(process, 2)
        workers(process)[1].kill()
        assert [text.result(60) for text in texts] == expected
    moved, interrupted = (
        metric(process, f"aioinfer:{name}_requests_total") for name in ("moved", "interrupted")
    )
    assert sorted(moved)[0] == 0
    assert sorted(moved)[1] in (2, 3)
    assert sorted(interrupted) == [0, 2]
    assert sorted(metric(process, "aioinfer:engine_serving")) == [0, 1]
    health = process.request("GET", "/health")
    assert health.status == 200
    assert sorted(json.loads(health.read())["engines"]) == ["dead", "serving"]
    assert [stream(process, BODIES[0]) for _ in range(2)] == expected[:1] * 2
    workers(process)[0].kill()
    assert process.end(timeout=20) == 1
    assert process.popen.stderr is not None
    log = process.popen.stderr.read()
    assert "worker 0 was killed by SIGKILL" in log
    assert "this engine is dead, and 1 of 2 go on; of its requests" in log
    assert "were moved to them, and 0 ended" in log
