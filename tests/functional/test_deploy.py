"""The examples in configs/deploy: nginx passes streams on event by event, the unit and the
Dockerfile hold what they need."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import ClassVar

import aiohttp
import pytest
from yarl import URL

from aioinfer.api import context
from aioinfer.api.server import HttpServer
from aioinfer.config import load_config
from bench_loop import make_frontend
from tests.functional.conftest import Served

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "configs" / "deploy"
TLS = ROOT / "tests" / "tls"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def nginx_command(folder: Path, port: int, server: str, **changed: str) -> list[str]:
    """Returns the command that runs the example in front of a server's URL, as it is but for its
    port, the server's address, the paths, and directives in `changed`."""
    path = shutil.which("nginx")
    if path is None:
        pytest.skip("nginx is not installed")
    text = (DEPLOY / "nginx.conf").read_text("utf-8")
    changes = {
        "listen 443": f"listen 127.0.0.1:{port}",
        "server 127.0.0.1:8000": f"server 127.0.0.1:{URL(server).port}",
        "/etc/ssl/example.org.pem": str(TLS / "certificate.pem"),
        "/etc/ssl/example.org.key": str(TLS / "key.pem"),
        "/run/nginx.pid": str(folder / "nginx.pid"),
        "/var/log/nginx/error.log": "stderr",
    }
    for old, new in changes.items():
        assert old in text, old
        text = text.replace(old, new)
    for name, value in changed.items():
        text, count = re.subn(rf"\b{name} \w+;", f"{name} {value};", text)
        assert count == 1, name
    # where an unprivileged process may write
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = "".join(f"    {kind}_temp_path {folder / kind};\n" for kind in kinds)
    text = text.replace("http {\n", "http {\n" + temporary, 1)
    if os.geteuid() == 0:  # else its workers, of another user, could not write there
        text = f"user root;\n{text}"
    (folder / "nginx.conf").write_text(text, "utf-8")
    return [path, "-p", str(folder), "-c", str(folder / "nginx.conf"), "-g", "daemon off;"]


@asynccontextmanager
async def nginx(folder: Path, server: str, **changed: str) -> AsyncIterator[int]:
    """Runs the example in front of a server's URL. Yields the port on which it listens."""
    port = free_port()
    command = await asyncio.to_thread(nginx_command, folder, port, server, **changed)
    process = await asyncio.create_subprocess_exec(
        *command, stderr=asyncio.subprocess.PIPE, stdin=asyncio.subprocess.DEVNULL
    )
    try:
        await wait_listening(port, process)
        yield port
    finally:
        if process.returncode is None:
            process.terminate()
        await process.communicate()


def anybody() -> ssl.SSLContext:
    """Returns a context that accepts any certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


@pytest.mark.asyncio(loop_scope="session")
async def test_nginx_passes_streams_on_event_by_event(served: Served, tmp_path: Path) -> None:
    async with nginx(tmp_path, served.url) as port:
        connector = aiohttp.TCPConnector(ssl=anybody())
        url, name = f"https://127.0.0.1:{port}", {"Host": "example.org"}
        async with aiohttp.ClientSession(url, headers=name, connector=connector) as http:
            await check_stream(served, http)
            async with http.get("/v1/models") as response:
                assert response.status == 200
            for path in ("/metrics", "/", "/health"):
                async with http.get(path) as response:
                    assert response.status == 404, "for the machine itself only"
            with pytest.raises(aiohttp.ClientError):  # closed without an answer
                await http.get("/v1/models", headers={"Host": "other.example"})


@asynccontextmanager
async def impatient_server() -> AsyncIterator[tuple[HttpServer, str]]:
    """A server that waits half a second for a body, and whose workers compute nothing, one step in
    20 ms. Yields it and its URL."""
    frontend = await make_frontend(4, 0.02, {})
    server = HttpServer(frontend.config, frontend)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context, "TIMEOUT_S", 0.5)
        try:
            yield server, await server.start()
        finally:
            await server.close()
            await frontend.close()


class Upload:
    """A request over TLS whose body, of 200 KiB, is sent in parts."""

    BODY = json.dumps({"prompt": [5], "max_tokens": 40, "ignore_eos": True, "stream": True})
    PARTS: ClassVar = [BODY.encode().ljust(20 * 1024)] + [b" " * 20 * 1024] * 9

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.reader, self.writer = reader, writer

    @classmethod
    async def begin(cls, port: int) -> Upload:
        upload = cls(*await asyncio.open_connection("127.0.0.1", port, ssl=anybody()))
        head = "POST /v1/completions HTTP/1.1\r\nHost: example.org\r\nConnection: close\r\n"
        length = sum(map(len, cls.PARTS))
        upload.writer.write(
            f"{head}Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n".encode()
        )
        return upload

    async def send(self, *parts: bytes, every_s: float) -> None:
        for part in parts:
            self.writer.write(part)
            await self.writer.drain()
            await asyncio.sleep(every_s)

    async def read(self) -> list[bytes]:
        """Returns what is left of the reply, as it arrives."""
        found = []
        async with asyncio.timeout(20):
            while data := await self.reader.read(2**16):
                found.append(data)
        return found

    async def close(self) -> None:
        self.writer.close()
        with suppress(OSError):
            await self.writer.wait_closed()


def num_connections(server: HttpServer) -> int:
    assert server._connections is not None
    return len(server._connections.connections)


@pytest.mark.extended
async def test_a_slow_upload_stays_at_nginx_and_its_stream_is_not_buffered(tmp_path: Path) -> None:
    """The body takes longer than the server would wait, which gets it in one piece."""
    async with impatient_server() as (server, url), nginx(tmp_path, url) as port:
        upload = await Upload.begin(port)
        for part in Upload.PARTS[:-1]:
            await upload.send(part, every_s=0.1)
            assert num_connections(server) == 0
        await upload.send(Upload.PARTS[-1], every_s=0)
        parts = await upload.read()
        await upload.close()
    assert parts[0].startswith(b"HTTP/1.1 200 ")
    assert b"".join(parts).count(b"data: {") == 40
    assert len(parts) > 20, "a buffering proxy would pass everything on at once"


async def test_nginx_ends_an_upload_that_stalls(tmp_path: Path) -> None:
    changed = {"client_body_timeout": "1s"}
    async with impatient_server() as (server, url), nginx(tmp_path, url, **changed) as port:
        upload = await Upload.begin(port)
        await upload.send(*Upload.PARTS[:5], every_s=0.02)
        reply = b"".join(await upload.read())
        assert reply == b"", "nginx closes the connection without an answer"
        assert num_connections(server) == 0, "the server has not heard of it"
        await upload.close()


async def test_without_buffering_the_server_ends_a_slow_upload(tmp_path: Path) -> None:
    """`proxy_request_buffering off`: the time-outs are the server's, and so is the answer."""
    changed = {"proxy_request_buffering": "off"}
    async with impatient_server() as (_, url), nginx(tmp_path, url, **changed) as port:
        upload = await Upload.begin(port)
        sending = asyncio.create_task(upload.send(*[b" "] * 500, every_s=0.02))
        reply = b"".join(await upload.read())
        sending.cancel()
        await upload.close()
    assert reply.startswith(b"HTTP/1.1 408 ")
    assert json.loads(reply.partition(b"\r\n\r\n")[2])["error"]["code"] == "timeout"


async def check_stream(served: Served, http: aiohttp.ClientSession) -> None:
    """Asserts that the first events of a stream come while the server still computes."""
    body = {"prompt": "Once", "max_tokens": 60, "ignore_eos": True, "stream": True}
    early, text = 0, b""
    async with http.post("/v1/completions", json=body) as response:
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        async for part in response.content.iter_any():
            early += not served.engine.is_idle
            text += part
    assert text.endswith(b"data: [DONE]\n\n")
    events = [json.loads(event[6:]) for event in text.split(b"\n\n")[:-2]]
    assert all(event["choices"] for event in events)
    assert early > 20, "a buffering proxy would pass everything on at once"


async def wait_listening(port: int, process: asyncio.subprocess.Process) -> None:
    for _ in range(200):
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            assert process.returncode is None, (await process.communicate())[1].decode()
            await asyncio.sleep(0.05)
        else:
            writer.close()
            return
    pytest.fail("nginx does not listen")


def test_the_unit_is_right(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    text = (DEPLOY / "aioinfer.service").read_text("utf-8")
    # a program and documentation that exist here
    text = text.replace("/opt/aioinfer/.venv/bin/python", "/bin/true").replace(
        "/opt/aioinfer/docs/security.md", str(ROOT / "README.md")
    )
    unit = tmp_path / "aioinfer.service"
    unit.write_text(text, "utf-8")
    command = ["systemd-analyze", "verify", "--man=no", str(unit)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    of_unit = [line for line in ended.stderr.splitlines() if "aioinfer.service" in line]
    assert of_unit == []
    start = re.search(r"^ExecStart=(.*)$", text, re.MULTILINE)
    assert start is not None
    assert shlex.split(start[1])[1:3] == ["-m", "aioinfer"]


def test_the_dockerfile_copies_what_there_is_and_installs_from_the_lock_file() -> None:
    text = (DEPLOY / "Dockerfile").read_text("utf-8").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    kinds = {line.split()[0] for line in lines}
    assert kinds <= {
        "FROM", "RUN", "WORKDIR", "ENV", "COPY", "USER", "VOLUME", "EXPOSE", "STOPSIGNAL",
        "HEALTHCHECK", "ENTRYPOINT", "CMD",
    }  # fmt: skip
    copied = {name for line in lines if line.startswith("COPY") for name in line.split()[1:-1]}
    assert all((ROOT / name).exists() for name in copied)
    ignore = (DEPLOY / "Dockerfile.dockerignore").read_text("utf-8").splitlines()
    assert {line[1:] for line in ignore if line.startswith("!")} == copied
    installs = [line for line in lines if "pip install" in line]
    # packages come from the lock file; what else is installed brings no dependencies
    assert sum("--requirement requirements.lock" in line for line in installs) == 1
    assert all("--no-deps" in line for line in installs if "requirements.lock" not in line)
    weights = re.search(r"^WEIGHTS := (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert weights is not None
    assert any(weights[1] in line for line in installs), "the same weights as `make serve`"
    command = next(json.loads(line[4:]) for line in lines if line.startswith("CMD "))
    config = load_config(ROOT / command[1], command[3::2])
    assert config.server.host == "0.0.0.0"


def test_the_example_configuration_is_read() -> None:
    config = load_config(DEPLOY / "server.toml")
    nginx = (DEPLOY / "nginx.conf").read_text("utf-8")
    assert f"{config.server.host}:{config.server.port};" in nginx
    assert f"proxy_read_timeout {config.server.request_timeout_s:g}s" in nginx
    assert f"client_max_body_size {context.MAX_BYTES // 2**20}m" in nginx
