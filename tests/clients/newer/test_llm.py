"""The command line program `llm`, with an extra model of OpenAI's API in its configuration."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import QUESTION, WEATHER, Server, check_weather

CAPITAL = "What is the capital of France?"
FUNCTION = """
def get_weather(city: str) -> str:
    "Returns the weather of a city."
    return f"sun in {city}"
"""


@pytest.fixture
def run(server: Server, tmp_path: Path) -> Callable[..., str]:
    """Returns what the program prints."""
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: local\n  model_name: {server.model}\n  api_base: {server.base}\n"
        "  supports_tools: true\n  supports_schema: true\n"
    )
    program = [str(Path(sys.executable).with_name("llm")), "prompt", "--model", "local"]
    options = ["--key", "none", "--option", "temperature", "0", "--option", "max_tokens", "48"]

    def call(*arguments: str) -> str:
        done = subprocess.run(
            [*program, *options, *arguments], env=os.environ | {"LLM_USER_PATH": str(tmp_path)},
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    return call


def test_text(run: Callable[..., str]) -> None:
    whole = run(CAPITAL, "--no-stream", "--usage")
    assert "Paris" in whole
    assert "Token usage: " in whole
    streamed = run(CAPITAL)
    assert streamed.strip() == whole.partition("Token usage")[0].strip()
    assert "Paris" in run("And what river is there?", "--system", "Speak of Paris.")


@pytest.mark.parametrize("further", [[], ["--no-stream"]])
def test_an_object(run: Callable[..., str], further: list[str]) -> None:
    check_weather(run(QUESTION, "--schema", json.dumps(WEATHER), *further))
    assert run("A city as JSON", "--option", "json_object", "1", *further).lstrip().startswith("{")


@pytest.mark.parametrize("further", [[], ["--no-stream"]])
def test_a_tool(run: Callable[..., str], further: list[str]) -> None:
    """Whether it is called is the model's part: the program cannot require it."""
    said = run(QUESTION, "--functions", FUNCTION, "--tools-debug", *further)
    assert "error" not in said.lower()
    assert said.strip()
