"""docs/api.md against the server: its commands work, and it names every field."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

import document_keys
from aioinfer.api.openai.chat import ChatRequest
from aioinfer.api.openai.completions import CompletionRequest
from tests.functional.conftest import Served

pytestmark = pytest.mark.extended

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text("utf-8")
COMMANDS = re.findall(r"^curl .*", PAGE, re.MULTILINE)


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("command", COMMANDS)
async def test_a_command(served: Served, command: str) -> None:
    _, *options = shlex.split(command)
    body = options.pop() if "-d" in options else None
    (url,) = [option for option in options if option.startswith("http://127.0.0.1:8000/")]
    assert set(options) <= {"-N", "-d", "-g", url}
    assert "-g" in options or not set("[]{}") & set(url)  # which curl expands without it
    # the Content-Type that curl sends with -d
    kind = {"Content-Type": "application/x-www-form-urlencoded"}
    async with served.http.request(
        "GET" if body is None else "POST",
        url.removeprefix("http://127.0.0.1:8000"),
        data=body,
        headers=None if body is None else kind,
    ) as response:
        assert response.status == 200, await response.text()
        await response.read()


@pytest.mark.sample
def test_every_endpoint_has_a_command() -> None:
    paths = {re.search(r":8000(/\S*)", command)[1] for command in COMMANDS}
    rows = [row for row in PAGE.splitlines() if re.match(r"\| `(GET|POST) ", row)]
    assert rows
    assert all(paths & set(re.findall(r"(?:GET|POST) (/[\w/]*)", row)) for row in rows)


@pytest.mark.sample
def test_every_field_is_described() -> None:
    assert document_keys.render_fields(PAGE) == PAGE, "run `make docs`"
    described, _, _ = PAGE.partition("## Fields of all endpoints")
    for kind in (CompletionRequest, ChatRequest):
        fields = document_keys.supported_fields(kind)
        assert {name for name in fields if f"`{name}`" not in described} == set()
