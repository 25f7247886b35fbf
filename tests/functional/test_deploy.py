"""The examples in configs/deploy: nginx passes streams on event by event, the unit and the
Dockerfile hold what they need."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import shutil
import socket
import ssl
import subprocess
from pathlib import Path

import aiohttp
import pytest
from yarl import URL

from aioinfer.config import load_config
from tests.functional.conftest import Served

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "configs" / "deploy"
TLS = ROOT / "tests" / "tls"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def nginx_port(tmp_path_factory: pytest.TempPathFactory) -> int:
    return free_port()


@pytest.fixture
def nginx_command(tmp_path: Path, served: Served, nginx_port: int) -> list[str]:
    """Returns the command that runs the example as it is, but for its port, the server's address
    and the paths."""
    if shutil.which("nginx") is None:
        pytest.skip("nginx is not installed")
    text = (DEPLOY / "nginx.conf").read_text("utf-8")
    changes = {
        "listen 443": f"listen 127.0.0.1:{nginx_port}",
        "server 127.0.0.1:8000": f"server 127.0.0.1:{URL(served.url).port}",
        "/etc/ssl/example.org.pem": str(TLS / "certificate.pem"),
        "/etc/ssl/example.org.key": str(TLS / "key.pem"),
        "/run/nginx.pid": str(tmp_path / "nginx.pid"),
        "/var/log/nginx/error.log": "stderr",
    }
    for old, new in changes.items():
        assert old in text, old
        text = text.replace(old, new)
    # where an unprivileged process may write
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = "".join(f"    {kind}_temp_path {tmp_path / kind};\n" for kind in kinds)
    text = text.replace("http {\n", "http {\n" + temporary, 1)
    (tmp_path / "nginx.conf").write_text(text, "utf-8")
    path = shutil.which("nginx")
    assert path is not None
    return [path, "-p", str(tmp_path), "-c", str(tmp_path / "nginx.conf"), "-g", "daemon off;"]


@pytest.mark.asyncio(loop_scope="session")
async def test_nginx_passes_streams_on_event_by_event(
    served: Served, nginx_command: list[str], nginx_port: int
) -> None:
    nginx = await asyncio.create_subprocess_exec(
        *nginx_command, stderr=asyncio.subprocess.PIPE, stdin=asyncio.subprocess.DEVNULL
    )
    try:
        await wait_listening(nginx_port, nginx)
        anybody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
        url = f"https://127.0.0.1:{nginx_port}"
        name = {"Host": "example.org"}
        connector = aiohttp.TCPConnector(ssl=anybody)
        async with aiohttp.ClientSession(url, headers=name, connector=connector) as http:
            await check_stream(served, http)
            async with http.get("/v1/models") as response:
                assert response.status == 200
            for path in ("/metrics", "/", "/health"):
                async with http.get(path) as response:
                    assert response.status == 404, "for the machine itself only"
            with pytest.raises(aiohttp.ClientError):  # closed without an answer
                await http.get("/v1/models", headers={"Host": "other.example"})
    finally:
        if nginx.returncode is None:
            nginx.terminate()
        await nginx.communicate()


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
    copied = [line.split()[1:-1] for line in lines if line.startswith("COPY")]
    assert all((ROOT / name).exists() for names in copied for name in names)
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
    assert f"client_max_body_size {config.server.max_body_bytes // 2**20}m" in nginx
