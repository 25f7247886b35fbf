"""Replicas of a small random model behind a gateway under Ray Serve, on one machine without GPUs:
their answers are a single server's, streams are not buffered, and no stream ends with an error
where a replica is killed, added or removed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPResponse
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
from yarl import URL

from tests.functional.test_lifecycle import ROOT, Process, events
from tests.gpu.random_models import random_model
from tests.worker_processes import living

pytest.importorskip("ray.serve")
#: Ray takes a minute to start on a machine that does other work.
pytestmark = [pytest.mark.extended, pytest.mark.timeout(600)]

SETTINGS = (
    "parallel.executor=inline", "parallel.cpu_threads=1", "cache.num_blocks=2000",
    "cache.block_size=16", "scheduler.max_num_seqs=16", "server.port=0",
)  # fmt: skip


def text(start: int, length: int) -> list[int]:
    """Returns a prompt of so many tokens; others begin with other tokens."""
    return [(start * 7 + 3 * i) % 512 for i in range(length)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(
        tmp_path_factory.mktemp("model"), vocab_size=512, max_position_embeddings=8192
    )


class Driver:
    """A process that runs one of the modules that deploy, and is told what to do by lines."""

    def __init__(self, module: str, folder: Path, settings: Sequence[str]) -> None:
        self.log = folder / "driver.log"
        with self.log.open("w") as log:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", module, f"model.path={folder}", *settings],
                cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip

    def read(self) -> str:
        """Returns the next line that the process says, and not Ray."""
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            if line.startswith("driver: "):
                return line.removeprefix("driver: ").strip()
        raise AssertionError(f"the deployment ended: {self.log.read_text()[-4000:]}")

    def ask(self, line: str) -> str:
        """Returns the answer of the process to a line."""
        assert self.popen.stdin is not None
        self.popen.stdin.write(f"{line}\n")
        self.popen.stdin.flush()
        return self.read()


class Deployment(Driver):
    """A process that deploys, and a client of the gateway."""

    def __init__(self, folder: Path) -> None:
        self.connections: list[HTTPConnection] = []
        super().__init__("tests.serve_driver", folder, SETTINGS)
        try:
            self.url = URL(self.read())
            self.wait_for_replicas(2)
        except BaseException:
            self.close()
            raise

    def scale(self, replicas: int) -> None:
        assert self.ask(f"scale {replicas}") == "scaled"

    def begin(self, path: str, **body: Any) -> HTTPResponse:
        connection = HTTPConnection("127.0.0.1", self.url.port or 0, timeout=60)
        self.connections.append(connection)
        headers = {"Content-Type": "application/json", "Connection": "close"}
        connection.request("POST", path, json.dumps(body), headers)
        return connection.getresponse()

    def stream(self, prompt: list[int], max_tokens: int, **body: Any) -> HTTPResponse:
        usual = {"stream": True, "temperature": 0, "ignore_eos": True}
        found = {"prompt": prompt, "max_tokens": max_tokens} | usual | body
        return self.begin("/v1/completions", **found)

    def complete(self, prompt: list[int], max_tokens: int = 8) -> dict[str, Any]:
        response = self.stream(prompt, max_tokens, stream=False)
        reply: dict[str, Any] = json.loads(response.read())
        assert response.status == 200, reply
        return reply

    def wait_for_replicas(self, count: int) -> None:
        """Returns when the gateway sends requests to so many replicas."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            connection = HTTPConnection("127.0.0.1", self.url.port or 0, timeout=10)
            connection.request("GET", "/health/ready")
            reply = json.loads(connection.getresponse().read())
            connection.close()
            if reply.get("replicas") == count:
                return
            time.sleep(0.1)
        raise AssertionError(f"the gateway has {reply}")

    def replicas(self) -> list[psutil.Process]:
        return [p for p in self.processes() if "aioinfer:Replica" in " ".join(p.cmdline())]

    def processes(self) -> list[psutil.Process]:
        return psutil.Process(self.popen.pid).children(recursive=True)

    def close(self) -> None:
        for connection in self.connections:
            connection.close()
        try:
            processes = self.processes()
        except psutil.NoSuchProcess:
            processes = []
        assert self.popen.stdin is not None
        assert self.popen.stdout is not None
        self.popen.stdin.close()
        status = self.popen.wait(60)
        self.popen.stdout.close()
        _, alive = psutil.wait_procs(processes, timeout=20)
        left = living(alive)
        for process in left:
            process.kill()
        assert left == [], "processes of Ray's are left behind"
        assert status == 0


@pytest.fixture(scope="module")
def deployment(folder: Path) -> Iterator[Deployment]:
    deployment = Deployment(folder)
    yield deployment
    deployment.close()


@pytest.fixture(scope="module")
def single(folder: Path) -> Iterator[Process]:
    process = Process("inline", f"model.path={folder}", *SETTINGS[2:])
    yield process
    process.close()


def text_of(response: HTTPResponse) -> str:
    *chunks, done = events(response)
    assert done == "[DONE]", chunks[-1:]
    return "".join(json.loads(chunk)["choices"][0]["text"] for chunk in chunks)


def test_answers_are_those_of_a_single_server(deployment: Deployment, single: Process) -> None:
    for number in range(6):
        prompt = text(number, 20 + number)
        body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        expected = json.loads(single.request("POST", "/v1/completions", **body).read())
        assert deployment.complete(prompt, 12)["choices"] == expected["choices"]
        assert text_of(deployment.stream(prompt, 12)) == expected["choices"][0]["text"]
    refused = deployment.begin("/v1/completions", prompt="Ā", temperature=-1)
    assert refused.status == 400
    assert json.loads(refused.read())["error"]["param"] == "temperature"


def test_events_come_one_by_one(deployment: Deployment) -> None:
    response = deployment.stream(text(50, 20), 300)
    times = []
    while line := response.readline():
        if line.startswith(b"data: {"):
            times.append(time.monotonic())
    assert len(times) >= 300
    gaps = [later - earlier for earlier, later in pairwise(times)]
    # what is buffered comes in bursts, with nothing between them
    assert sum(gap > 0.0002 for gap in gaps) > len(gaps) / 2
    assert times[-1] - times[0] > 3 * max(gaps)


def test_equal_prefixes_go_to_one_replica(deployment: Deployment) -> None:
    cached = Counter[int]()
    for group in range(4):
        prefix = text(100 + group, 320)
        for number in range(5):
            usage = deployment.complete(prefix + text(number, 20))["usage"]
            cached[usage["prompt_tokens_details"]["cached_tokens"] >= 320] += 1
            time.sleep(0.3)  # until the load is reported as it is
    assert cached == {False: 4, True: 16}


def test_a_request_that_is_given_up_is_aborted(deployment: Deployment) -> None:
    response = deployment.stream(text(60, 20), 4000)
    assert response.readline().startswith(b"data: {")
    response.close()  # and its socket with it
    # the slots of one replica at a time: with the one given up, a request would have to wait
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        begun = time.monotonic()
        load = HTTPConnection("127.0.0.1", deployment.url.port or 0, timeout=10)
        load.request("GET", "/load")  # of all replicas
        idle = json.loads(load.getresponse().read())["server_load"] == 0
        load.close()
        if idle and all_idle(deployment):
            return
        time.sleep(max(0.0, begun + 0.2 - time.monotonic()))
    raise AssertionError("a replica goes on with it")


def all_idle(deployment: Deployment) -> bool:
    """Whether no replica computes: none takes processor time."""
    before = sum(sum(p.cpu_times()[:2]) for p in deployment.replicas())
    time.sleep(1.0)
    return sum(sum(p.cpu_times()[:2]) for p in deployment.replicas()) - before < 0.5


def test_the_streams_of_a_killed_replica_go_on(deployment: Deployment, single: Process) -> None:
    """Eight streams run on two replicas, of which one is killed: all end with their whole text. New
    requests are answered, and Serve starts another replica."""
    prompts = [text(70 + number, 20) for number in range(8)]
    streams = [deployment.stream(prompt, 600) for prompt in prompts]
    firsts = [response.readline() for response in streams]
    begun_on = Counter(response.headers["X-Aioinfer-Replica"] for response in streams)
    assert len(begun_on) == 2
    victim = deployment.replicas()[0]
    victim.send_signal(signal.SIGKILL)
    with ThreadPoolExecutor(8) as pool:
        ends = list(pool.map(events, streams))
    for prompt, first, end in zip(prompts, firsts, ends, strict=True):
        *lines, done = (line for line in end if line)
        assert done == "[DONE]"
        chunks = [json.loads(line) for line in (first.removeprefix(b"data: "), *lines)]
        assert not any("error" in chunk for chunk in chunks), chunks[-1]
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        body = {"prompt": prompt, "max_tokens": 600, "temperature": 0, "ignore_eos": True}
        expected = json.loads(single.request("POST", "/v1/completions", **body).read())
        shown = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        assert shown == expected["choices"][0]["text"]
    for number in range(4):
        deployment.complete(text(80 + number, 20))
    deployment.wait_for_replicas(2)


def test_replicas_come_and_go_under_load(deployment: Deployment) -> None:
    stop, failures, answered = threading.Event(), [], Counter[str]()

    def ask(client: int) -> None:
        number = 0
        while not stop.is_set():
            number += 1
            try:
                response = deployment.stream(text(client * 31 + number, 40), 60)
                assert response.status == 200, response.read()
                text_of(response)
                answered[response.headers["X-Aioinfer-Replica"]] += 1
            except Exception as error:  # whatever it is, the test reports it
                failures.append(f"{time.monotonic():.1f} {error!r}")

    clients = [threading.Thread(target=ask, args=(client,)) for client in range(6)]
    for client in clients:
        client.start()
    deployment.scale(3)
    deployment.wait_for_replicas(3)
    deadline = time.monotonic() + 60
    while len(answered) < 3 and time.monotonic() < deadline:
        time.sleep(0.1)
    with_three = len(answered)
    deployment.scale(1)
    deployment.wait_for_replicas(1)
    time.sleep(1)
    stop.set()
    for client in clients:
        client.join()
    assert failures == []
    assert with_three == 3
    deployment.scale(2)
    deployment.wait_for_replicas(2)


def test_an_interrupted_command_leaves_nothing_on_a_cluster(
    deployment: Deployment, folder: Path
) -> None:
    """Not even where what it deploys has never been ready, and it touches no other application."""
    command = [sys.executable, "-m", "aioinfer", "deploy", "--config", "configs/smollm2.toml"]
    for setting in (f"model.path={folder}", *SETTINGS):
        command += ["--set", setting]
    command += ["--address", deployment.ask("address")]
    env = os.environ | {"RAY_AUTH_MODE": "token"}  # which Ray sets for the address auto alone
    refused = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert refused.returncode == 2
    assert "an application 'aioinfer' runs on this cluster already" in refused.stderr
    command += ["--name", "other", "--cpus-per-replica", "64"]
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "loading 1 replica (" in process.stdout.readline()
        assert '"CPU": 64.0' in process.stdout.readline()
        assert deployment.ask("applications") == "aioinfer other"
        process.send_signal(signal.SIGTERM)
        process.stdout.readlines()
    assert process.returncode == 130
    assert deployment.ask("applications") == "aioinfer"
    deployment.complete(text(90, 20))


def test_the_command_says_what_a_user_needs(folder: Path) -> None:
    """And nothing of what Ray says of itself, until the end and at it."""
    command = [sys.executable, "-m", "aioinfer", "deploy", "--config", "configs/smollm2.toml"]
    for setting in (f"model.path={folder}", *SETTINGS):
        command += ["--set", setting]
    command += ["--replicas", "2", "--cpus-per-replica", "0.1"]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        lines: list[str] = []
        while not lines or " is ready at " not in lines[-1]:
            lines.append(process.stdout.readline())
            assert lines[-1], lines
        process.send_signal(signal.SIGTERM)
        lines += process.stdout.readlines()
    model = re.escape(str(folder))
    wanted = [
        rf"aioinfer \S+ deploys {model} under Ray Serve .*",
        rf"{model}: loading 2 replicas \(logs, and Ray's: \S+/logs\)",
        r"[012] of 2 replicas run",
        rf"{model} is ready at http://127\.0\.0\.1:\d+",
        r"ending once the requests that have come are answered",
    ]
    assert all(any(re.fullmatch(each, line.strip()) for each in wanted) for line in lines), lines
    assert process.returncode == 0
    assert lines[-1].startswith("ending")
    assert len(lines) <= 8
