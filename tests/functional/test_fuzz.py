"""Raw bytes on the socket, clients that leave at any byte: the server answers with what it
documents, keeps answering, and ends idle and whole.

The server is a process of its own, so that what it writes to its log is seen as an operator would
see it. `FUZZ_SEED` and `FUZZ_SECONDS` set the seed (printed) and how long each test sends; by hand
for longer: `FUZZ_SECONDS=600 pytest -s tests/functional/test_fuzz.py`.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import time
from collections.abc import Iterator

import pytest
from yarl import URL

from benchlib.server_process import ROOT, ServerProcess
from benchlib.soak_watch import Watch
from tests.worker_processes import worker_processes

SEED = int(os.environ.get("FUZZ_SEED", str(random.SystemRandom().randrange(10**6))))
SECONDS = float(os.environ.get("FUZZ_SECONDS", "4"))
#: What the server may answer. A proxy's own errors are not among them, nor is 500.
STATUSES = {
    100, 200, 400, 401, 403, 404, 405, 408, 411, 413, 414, 415, 417, 421, 426, 429, 431, 503, 505,
}  # fmt: skip
#: For a reply to a request that is not complete, which may never come.
REPLY_TIMEOUT_S = 0.3


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    settings = [
        "cache.num_blocks=200", "parallel.cpu_threads=1", "scheduler.max_num_seqs=8",
        "model.max_model_len=256",
    ]  # fmt: skip
    with ServerProcess(ROOT / "configs" / "smollm2.toml", settings) as server:
        yield server


def valid_requests() -> list[bytes]:
    """Returns requests of every kind, whole."""
    short = {"prompt": "hello", "max_tokens": 2}
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    bodies = [
        ("/v1/completions", short),
        ("/v1/completions", short | {"stream": True, "n": 2, "logprobs": 2, "stop": ["x"]}),
        ("/v1/chat/completions", chat | {"stream": True}),
        ("/tokenize", {"prompt": "hello"}),
        ("/detokenize", {"tokens": [5, 6]}),
    ]
    posts = [
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(json.dumps(body))}\r\n\r\n{json.dumps(body)}"
        for path, body in bodies
    ]
    text = json.dumps(short)
    posts.append(
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Transfer-Encoding: chunked\r\n\r\n{len(text):x}\r\n{text}\r\n0\r\n\r\n"
    )
    gets = [
        f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer secret-key\r\n\r\n"
        for path in ("/health", "/metrics", "/v1/models", "/", "/nothing")
    ]
    return [text.encode() for text in (*posts, *gets)]


VALID = valid_requests()
#: What mutations put in: what parsers of HTTP and of JSON have stumbled over.
PIECES = [
    b"\0", b"\r", b"\n", b"\r\n\r\n", b"\xff", b"\x80", b" ", b":", b"%00", b"../", b"{", b"}",
    b'"', b"\\ud800", b"[" * 2000, b"1e999", b"-0", b"9" * 400, b"null", b"A" * 9000,
    b"Content-Length: 5\r\n", b"Content-Length: -1\r\n", b"Transfer-Encoding: chunked\r\n",
    b"Expect: 100-continue\r\n", b"Expect: \xff\r\n", b"Connection: close\r\n", b"HTTP/0.9",
    b"Content-Encoding: gzip\r\n", b"Upgrade: h2c\r\n", b"Host: a\r\n", b"PRI * HTTP/2.0\r\n\r\n",
]  # fmt: skip


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Returns a request with some bytes changed, added, removed or repeated."""
    for _ in range(rng.choice([0, 1, 1, 2, 4])):
        at = rng.randrange(len(data) + 1)
        end = min(len(data), at + rng.choice([1, 1, 4, 30]))
        match rng.randrange(4):
            case 0:
                data = data[:at] + rng.choice(PIECES) + data[at:]
            case 1:
                data = data[:at] + data[end:]
            case 2:
                data = data[:at] + rng.randbytes(end - at) + data[end:]
            case 3:
                data = data[:end] + data[at:]
    return data


def send(address: tuple[str, int], data: bytes, rng: random.Random) -> bytes:
    """Sends bytes over a connection of their own, cut anywhere, and leaves in one of several ways.
    Returns what came back before that."""
    reply = b""
    with socket.create_connection(address, timeout=10) as connection:
        cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.choice([0, 0, 1, 3])))
        try:
            for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
                connection.sendall(data[begin:end])
                if cuts:
                    time.sleep(0.002)
            ending = rng.choice(["read", "read", "half-close", "reset", "close"])
            if ending == "half-close":
                connection.shutdown(socket.SHUT_WR)
            if ending in ("read", "half-close"):
                connection.settimeout(REPLY_TIMEOUT_S)
                while part := connection.recv(65536):
                    reply += part
            elif ending == "reset":
                zero = b"\1\0\0\0\0\0\0\0"
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, zero)
        except OSError:
            pass  # the server waits for more, or has closed the connection
    return reply


def address_of(server: ServerProcess) -> tuple[str, int]:
    url = URL(server.url)
    assert url.host is not None
    assert url.port is not None
    return url.host, url.port


def check_healthy(server: ServerProcess) -> None:
    """Asserts that the server is idle, and serves."""
    watch = Watch(server.pid, server.url)
    deadline = time.monotonic() + 60
    while not watch.is_idle and time.monotonic() < deadline:
        time.sleep(0.1)
    figures = watch.sample()
    assert (figures["requests running"], figures["requests waiting"]) == (0, 0)
    assert figures["KV cache in use"] == 0
    with socket.create_connection(address_of(server), timeout=60) as connection:
        connection.sendall(VALID[0].replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1))
        reply = b""
        while part := connection.recv(65536):
            reply += part
    assert reply.startswith(b"HTTP/1.1 200 "), reply
    assert b'"completion_tokens":2' in reply.replace(b" ", b"")


@pytest.mark.parametrize("pipelined", [1, 4])
def test_mutated_requests(server: ServerProcess, pipelined: int) -> None:
    print(f"FUZZ_SEED={SEED}")  # noqa: T201  # shown where the test fails
    rng = random.Random(SEED + pipelined)
    seen: set[int] = set()
    end, sent = time.monotonic() + SECONDS, 0
    while time.monotonic() < end:
        data = b"".join(mutate(rng.choice(VALID), rng) for _ in range(rng.randint(1, pipelined)))
        reply = send(address_of(server), data, rng)
        sent += 1
        statuses = {int(found) for found in re.findall(rb"HTTP/1\.[01] (\d{3}) ", reply)}
        assert statuses <= STATUSES, (data, reply)
        seen |= statuses
    assert sent > 5
    assert {200, 400} <= seen | {200}, "some are served, and some refused"
    check_healthy(server)


def test_clients_that_leave_at_any_byte(server: ServerProcess) -> None:
    rng = random.Random(SEED)
    end, sent = time.monotonic() + SECONDS, 0
    while time.monotonic() < end:
        data = rng.choice(VALID)
        with socket.create_connection(address_of(server), timeout=10) as connection:
            connection.sendall(data[: rng.randint(0, len(data))])
            if rng.random() < 0.5:
                time.sleep(rng.random() * 0.03)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        sent += 1
    assert sent > 20
    check_healthy(server)


def test_the_log_holds_no_traceback_and_no_secret(server: ServerProcess) -> None:
    """After the tests above."""
    log = server.log()
    assert "Traceback" not in log, log[-3000:]
    assert "secret-key" not in log


@pytest.mark.extended
def test_a_worker_that_is_killed_ends_its_requests_with_an_error() -> None:
    """Without restarts: every client gets an error, and the process ends with status 1, in a
    bounded time. (`test_recovery` tests restarts.)"""
    settings = ["cache.num_blocks=100", "parallel.cpu_threads=1", "parallel.restart_workers=0"]
    with ServerProcess(ROOT / "configs" / "smollm2.toml", settings) as server:
        body = json.dumps({"prompt": "x", "max_tokens": 1000, "ignore_eos": True, "stream": True})
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json"
        data = f"{head}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
        with socket.create_connection(address_of(server), timeout=60) as connection:
            connection.sendall(data)
            reply = connection.recv(65536)
            (worker,) = worker_processes(server.pid)
            worker.send_signal(signal.SIGKILL)
            while part := connection.recv(65536):
                reply += part
        assert b"was killed by SIGKILL" in reply, reply[-500:]
        assert server.wait(60) == 1
        assert "was killed by SIGKILL" in server.log()
