"""One server of the demo model for all clients. `make test-clients` runs this folder in an
environment of its own (`.venv-clients`), and `newer/` in another, so that clients and server do not
share packages."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 300


@dataclass(frozen=True)
class Server:
    """Where the server is, and what it serves."""

    url: str
    model: str = "SmolLM2-135M-Instruct"

    @property
    def base(self) -> str:
        """The base URL of OpenAI's clients."""
        return f"{self.url}/v1"

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        """Returns the reply to a request without a client, to compare with."""
        reply = httpx.post(self.url + path, json=body, timeout=60)
        assert reply.status_code == 200, reply.text
        found: dict[str, Any] = reply.json()
        return found


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the server's Python and, for work on these tests, a server that runs already."""
    parser.addoption("--server-python", default=str(ROOT / ".venv/bin/python"))
    parser.addoption("--node-folder", default=str(ROOT / ".venv-clients/node"))
    parser.addoption("--aiperf", default=str(ROOT / ".venv-clients/aiperf/bin/aiperf"))
    parser.addoption("--url", help="a server of the demo model, such as http://127.0.0.1:8000")


@pytest.fixture(scope="session")
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server with a context of 2048 tokens, so that a test can exceed it."""
    if url := request.config.getoption("--url"):
        yield Server(url.rstrip("/"))
        return
    log = tmp_path_factory.mktemp("server") / "log"
    settings = {
        "server.port": 0,
        "model.max_model_len": 2048,
        # clients take a core of their own, and threads wait for one another at every layer
        "parallel.cpu_threads": 1,
    }
    options = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    command = [request.config.getoption("--server-python"), "-m", "aioinfer"]
    with log.open("w") as output, subprocess.Popen(
        [*command, "--config", "configs/smollm2.toml", *options],
        cwd=ROOT, stdout=output, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        try:
            yield Server(_wait(process, log))
        finally:
            process.terminate()
            process.wait(60)


def _wait(process: subprocess.Popen[bytes], log: Path) -> str:
    """Returns the address that a server prints once it is ready."""
    end = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < end and process.poll() is None:
        if found := re.search(r"is ready at (http://\S+)", log.read_text()):
            return found[1]
        time.sleep(0.2)
    pytest.fail(f"the server did not start:\n{log.read_text()}")


#: A function whose arguments a small model can write: every value is bounded.
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]},
                   "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"], "additionalProperties": False,
}  # fmt: skip
QUESTION = "What is the weather in Paris for the next three days?"


def check_weather(arguments: str | dict[str, Any]) -> None:
    """Asserts that arguments fit the schema `WEATHER`."""
    given = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert given.keys() == {"city", "days"}, given
    assert given["city"] in ("Paris", "Rome")
    assert type(given["days"]) is int
    assert 1 <= given["days"] <= 9
