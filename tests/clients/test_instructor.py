"""instructor: every mode of OpenAI's and Anthropic's APIs."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, Literal

import anthropic
import instructor
import openai
import pytest
from conftest import QUESTION, Server
from instructor import Mode
from instructor.core import IncompleteOutputException as IncompleteOutput
from instructor.core import InstructorRetryException
from pydantic import BaseModel, ConfigDict, Field

MESSAGES: Any = [{"role": "user", "content": QUESTION}]
MODES = [Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON_SCHEMA, Mode.RESPONSES_TOOLS]


class Weather(BaseModel):
    """The weather of a city for some days."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Paris", "Rome"]
    days: int = Field(ge=1, le=9)


def make_client(server: Server, mode: Mode) -> Any:
    return instructor.from_openai(
        openai.OpenAI(base_url=server.base, api_key="none", max_retries=0), mode=mode
    )


def length(mode: Mode) -> dict[str, int]:
    return {"max_output_tokens" if mode is Mode.RESPONSES_TOOLS else "max_tokens": 100}


@pytest.mark.parametrize("mode", MODES)
def test_create(server: Server, mode: Mode) -> None:
    found = make_client(server, mode).chat.completions.create(
        model=server.model, messages=MESSAGES, response_model=Weather, temperature=0, max_retries=0,
        **length(mode),
    )  # fmt: skip
    assert isinstance(found, Weather)


@pytest.mark.parametrize("mode", [Mode.TOOLS, Mode.JSON_SCHEMA])
def test_partial(server: Server, mode: Mode) -> None:
    *_, last = make_client(server, mode).chat.completions.create_partial(
        model=server.model, messages=MESSAGES, response_model=Weather, temperature=0, max_tokens=100
    )
    assert 1 <= last.days <= 9


def test_iterable(server: Server) -> None:
    """Objects one by one from a stream; a small model does not end the list by itself."""
    found = make_client(server, Mode.TOOLS).chat.completions.create_iterable(
        model=server.model, messages=MESSAGES, response_model=Weather, temperature=0, max_tokens=150
    )
    assert isinstance(next(iter(found)), Weather)


def test_json_by_words(server: Server) -> None:
    """The schema is in the prompt alone, and any object comes: whether it fits is the model's
    part."""
    client, seen = make_client(server, Mode.JSON), []
    client.on("completion:response", seen.append)
    with contextlib.suppress(InstructorRetryException, IncompleteOutput):
        client.chat.completions.create(
            model=server.model, messages=MESSAGES, response_model=Weather, temperature=0,
            max_tokens=40, max_retries=0,
        )  # fmt: skip
    assert seen[0].choices[0].message.content.lstrip().startswith("{")


def test_async_with_the_completion(server: Server) -> None:
    async def run() -> Any:
        client: Any = instructor.from_openai(
            openai.AsyncOpenAI(base_url=server.base, api_key="none", max_retries=0)
        )
        return await client.chat.completions.create_with_completion(
            model=server.model, messages=MESSAGES, response_model=Weather, temperature=0
        )

    found, completion = asyncio.run(run())
    assert isinstance(found, Weather)
    assert completion.usage.completion_tokens > 1


def test_anthropic(server: Server) -> None:
    client: Any = instructor.from_anthropic(
        anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    )
    found = client.messages.create(
        model=server.model, messages=MESSAGES, response_model=Weather, max_tokens=100, max_retries=0
    )
    assert isinstance(found, Weather)


def test_a_cut_answer_is_recognised(server: Server) -> None:
    with pytest.raises(IncompleteOutput):
        make_client(server, Mode.TOOLS).chat.completions.create(
            model=server.model, messages=MESSAGES, response_model=Weather, max_tokens=3,
            max_retries=0,
        )  # fmt: skip
