"""The server as a process: it becomes ready, drains on SIGTERM, does not wait on the second, and
dies with its worker."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

import psutil
import pytest
from yarl import URL

from tests.gpu.random_models import random_model
from tests.worker_processes import living, worker_processes

ROOT = Path(__file__).parents[2]


def command_of(executor: str, *settings: str) -> list[str]:
    """Returns the command line of a server."""
    command = [sys.executable, "-m", "aioinfer", "--config", "configs/smollm2.toml"]
    for setting in (
        f"parallel.executor={executor}",
        "server.port=0",
        "parallel.cpu_threads=1",
        "cache.num_blocks=200",
        *settings,
    ):
        command += ["--set", setting]
    return command


class Process:
    """A server process that has said that it is ready."""

    def __init__(self, executor: str, *settings: str) -> None:
        command = command_of(executor, *settings)
        self.connections: list[HTTPConnection] = []
        self.popen = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.ready_text = ""
        assert self.popen.stdout is not None
        while "curl" not in self.ready_text:
            line = self.popen.stdout.readline()
            assert line, f"the server ended: {self.popen.communicate()[1]}"
            self.ready_text += line
        self.port = (
            URL(next(word for word in self.ready_text.split() if word.startswith("http://"))).port
            or 0
        )
        self.workers = psutil.Process(self.popen.pid).children(recursive=True)

    def request(self, method: str, path: str, **body: Any) -> HTTPResponse:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=30)
        self.connections.append(connection)
        connection.request(method, path, json.dumps(body), {"Content-Type": "application/json"})
        return connection.getresponse()

    def tell_a_story(self, **body: Any) -> HTTPResponse:
        """Begins a stream, and returns when its first event is there."""
        response = self.request(
            "POST",
            "/v1/completions",
            **{"prompt": [5, 6, 7, 8], "stream": True, "ignore_eos": True} | body,
        )
        assert response.status == 200
        assert response.readline().startswith(b"data: {")
        return response

    def listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def end(self, timeout: float) -> int:
        """Returns the exit status; all processes must be gone."""
        status = self.popen.wait(max(timeout, 0))
        # the fork server ends when it sees that its parent has: a busy machine may delay that
        _, alive = psutil.wait_procs(self.workers, timeout=10)
        assert living(alive) == []
        return status

    def close(self) -> None:
        for connection in self.connections:
            connection.close()
        self.popen.kill()
        self.popen.communicate()


@pytest.fixture
def process() -> Iterator[Process]:
    process = Process("inline")
    yield process
    process.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is loaded in no time."""
    folder = tmp_path_factory.mktemp("model")
    return random_model(folder, vocab_size=512, max_position_embeddings=16384)


@pytest.fixture
def small(request: pytest.FixtureRequest, folder: Path) -> Iterator[Process]:
    """A server of that model, with room for a story that no test reads to its end."""
    settings = (f"model.path={folder}", "cache.num_blocks=1000", "cache.block_size=16")
    process = Process(*request.param.split(), *settings)
    yield process
    process.close()


LONG = 12_000


def events(response: HTTPResponse) -> list[str]:
    """Returns what is left of a stream."""
    return [line.removeprefix("data: ") for line in response.read().decode().splitlines() if line]


def test_while_the_model_is_loaded_the_server_answers() -> None:
    """The port is bound at once; every request until the server is ready is answered, and a second
    server finds out at once that the port is taken."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = command_of("multiprocess", f"server.port={port}")
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            seen = watch_start(port)
            second = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
            )
        finally:
            process.terminate()
            output, _ = process.communicate()
    assert "is ready at" in output
    assert process.returncode == 0
    starting = seen[: seen.index((200, 200))]
    assert len(starting) > 2
    assert set(starting) == {(200, 503)}
    assert second.returncode == 2
    assert re.fullmatch(f"aioinfer: cannot listen at .*server.port = {port}: .*\n", second.stderr)


def watch_start(port: int) -> list[tuple[int, int]]:
    """Returns what `/health/live` and `/health/ready` answered until the server was ready."""
    seen: list[tuple[int, int]] = []
    give_up = time.monotonic() + 120
    while not seen or seen[-1] != (200, 200):
        assert time.monotonic() < give_up
        connection = HTTPConnection("127.0.0.1", port, timeout=30)
        try:
            statuses = []
            for path in ("/health/live", "/health/ready"):
                connection.request("GET", path)
                response = connection.getresponse()
                response.read()
                statuses.append(response.status)
            seen.append((statuses[0], statuses[1]))
        except ConnectionRefusedError:
            assert not seen
        finally:
            connection.close()
        time.sleep(0.1)
    return seen


SECRET = b"sk-very-secret"


@pytest.mark.parametrize("small", ["inline logging.format=json"], indirect=True)
def test_nothing_that_clients_sent_is_logged(small: Process) -> None:
    """Malformed requests, errors and clients that reset: neither keys nor prompts get to stderr,
    and no traceback. Every line is an object, what the start reports too."""
    hostile = [
        b"GET / HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %s\x01\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer\n%s\r\n\r\n",
        b"GET /%s HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: %s\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nExpect: %s\xff\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: %s\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b'Content-Length: 38\r\n\r\n{"prompt": "%s", "n": "x"}',
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b'Transfer-Encoding: chunked\r\n\r\n2\r\n{"\r\n%s\r\n',
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        b'Content-Type: application/json\r\nContent-Length: 30\r\n\r\n{"messages": "%s"}',
        b"%s\r\n\r\n",
    ]
    for raw in hostile * 5:
        with socket.create_connection(("127.0.0.1", small.port), timeout=30) as client:
            client.sendall(raw.replace(b"%s", SECRET))
            assert client.recv(10) == b"HTTP/1.1 4"
    for _ in range(5):  # clients that reset in the midst of a stream
        response = small.tell_a_story(max_tokens=500, prompt=SECRET.decode())
        with socket.socket(fileno=os.dup(response.fileno())) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        response.close()
        small.connections[-1].close()
    assert small.request("GET", "/health").status == 200
    small.popen.send_signal(signal.SIGTERM)
    _, errors = small.popen.communicate(timeout=30)
    assert "secret" not in errors
    assert "Traceback" not in errors
    assert 1 <= sum("malformed requests" in line for line in errors.splitlines()) <= 5
    started, *others = map(json.loads, errors.splitlines())
    assert started["event"] == "started"
    assert started["arithmetic"].startswith("float32")
    assert started["in_all_s"] > 0
    refused = [line for line in others if line.get("path") == "/v1/chat/completions"]
    assert {(line["client"], line["code"], line["reason"]) for line in refused} == {
        ("127.0.0.1", "invalid_type", "messages must be an array, not a string")
    }


def test_sigterm_lets_running_requests_finish(process: Process) -> None:
    if shutil.which("curl"):  # the command of the ready line works as it stands
        command = shlex.split(process.ready_text.splitlines()[-1])
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=30, check=True
        ).stdout
        assert '"delta":{"content":"' in answer
        assert answer.endswith("data: [DONE]\n\n")
    story = process.tell_a_story(max_tokens=60, stream_options={"include_usage": True})
    kept = HTTPConnection("127.0.0.1", process.port, timeout=30)
    process.connections.append(kept)
    kept.request("GET", "/health")  # connects, before the server stops to listen
    assert kept.getresponse().read()
    process.popen.send_signal(signal.SIGTERM)
    status = 200
    while status == 200:  # until the signal has arrived
        kept.request("GET", "/health")
        response = kept.getresponse()
        status = response.status
        error = json.loads(response.read())
    assert status == 503, "kept connections are refused"
    assert error["error"]["code"] == "not_ready"
    assert response.headers["Connection"] == "close"
    *_, usage, done = events(story)
    assert not process.listens()
    assert done == "[DONE]"
    assert json.loads(usage)["usage"]["completion_tokens"] == 60
    assert process.end(timeout=10) == 0


@pytest.mark.parametrize("small", ["multiprocess"], indirect=True)
def test_sigterm_to_the_whole_group_lets_running_requests_finish(small: Process) -> None:
    assert small.workers
    response = small.tell_a_story(max_tokens=200, stream_options={"include_usage": True})
    for member in (*small.workers, small.popen):
        member.send_signal(signal.SIGTERM)
    *_, usage, done = events(response)
    assert done == "[DONE]"
    assert json.loads(usage)["usage"]["completion_tokens"] == 200
    assert small.end(timeout=10) == 0


@pytest.mark.parametrize("small", ["inline"], indirect=True)
def test_a_second_sigterm_does_not_wait(small: Process) -> None:
    response = small.tell_a_story(max_tokens=LONG)
    small.popen.send_signal(signal.SIGTERM)
    while small.listens():
        time.sleep(0.01)
    small.popen.send_signal(signal.SIGTERM)
    last = events(response)[-2]  # before [DONE]
    assert json.loads(last)["error"]["type"] == "server_error"
    assert small.end(timeout=15) == 0


@pytest.mark.parametrize("small", ["multiprocess parallel.restart_workers=0"], indirect=True)
def test_a_killed_worker_ends_the_server(small: Process) -> None:
    response = small.tell_a_story(max_tokens=LONG)
    killed_at = time.monotonic()
    worker_processes(small.popen.pid)[0].kill()
    last = events(response)[-2]  # before [DONE]
    assert json.loads(last)["error"]["code"] == "engine_dead"
    health = small.request("GET", "/health")
    assert health.status == 503
    assert json.loads(health.read())["error"]["code"] == "engine_dead"
    assert small.end(timeout=15 - (time.monotonic() - killed_at)) == 1


@pytest.mark.parametrize(
    "small",
    ["multiprocess parallel.data_parallel_size=2 parallel.restart_workers=0"],
    indirect=True,
)
def test_killed_workers_of_all_engines_end_the_server(small: Process) -> None:
    responses = [small.tell_a_story(max_tokens=LONG, prompt=[7, number]) for number in range(2)]
    killed_at = time.monotonic()
    for worker in worker_processes(small.popen.pid):
        worker.kill()
    for response in responses:
        error = json.loads(events(response)[-2])["error"]  # before [DONE]
        assert error["code"] == "engine_dead"
        # what it was doing at that moment is chance: between two steps it waits for a plan
        assert re.match(
            "engine [01]: worker 0 was killed by SIGKILL: rank 0 was (executing "
            "step|waiting for a plan)",
            error["message"],
        )
    assert small.request("GET", "/health").status == 503
    assert small.end(timeout=15 - (time.monotonic() - killed_at)) == 1
