"""A server without a tokenizer: token ids in and out. And token ids beside text, with one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.functional.conftest import Served, serve

PROMPT = [504, 3575, 282, 4649, 314]  # "The capital of France is"
GREEDY = {"temperature": 0, "max_tokens": 8}

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def without() -> AsyncIterator[Served]:
    async with serve(model__tokenizer="none") as served:
        yield served


def joined(events: list[dict[str, Any]], index: int = 0) -> list[int]:
    """Returns all token ids of a choice of a stream."""
    choices = [event["choices"][0] for event in events if event["choices"]]
    return [t for c in choices if c["index"] == index for t in c.get("token_ids", [])]


async def test_the_tokens_are_those_of_a_server_with_a_tokenizer(
    served: Served, without: Served
) -> None:
    expected = await served.complete(prompt=PROMPT, return_token_ids=True, **GREEDY)
    assert len(expected["token_ids"]) == 8
    assert expected["text"] == served.frontend.require_tokenizer().decode(expected["token_ids"])
    assert expected["prompt_token_ids"] == PROMPT
    choice = await without.complete(prompt=PROMPT, **GREEDY)
    assert choice == {**expected, "text": ""}


async def test_a_stream_brings_the_same_tokens_and_the_prompt_once(
    served: Served, without: Served
) -> None:
    whole = await served.complete(prompt=PROMPT, return_token_ids=True, **GREEDY)
    for server, text in ((served, whole["text"]), (without, "")):
        events = await server.stream(
            "/v1/completions", prompt=PROMPT, return_token_ids=True, **GREEDY
        )
        assert joined(events) == whole["token_ids"]
        choices = [event["choices"][0] for event in events]
        assert "".join(choice["text"] for choice in choices) == text
        assert [c["prompt_token_ids"] for c in choices if "prompt_token_ids" in c] == [PROMPT]
        assert choices[-1]["finish_reason"] == "length"


async def test_each_of_several_prompts_and_sequences_has_its_tokens(without: Served) -> None:
    body = {"prompt": [PROMPT, PROMPT[:3]], "n": 2, "temperature": 1, "seed": 3, "max_tokens": 5}
    reply = await without.post("/v1/completions", **body)
    prompts = [choice["prompt_token_ids"] for choice in reply["choices"]]
    assert prompts == [PROMPT, PROMPT, PROMPT[:3], PROMPT[:3]]
    events = await without.stream("/v1/completions", **body)
    for index, choice in enumerate(reply["choices"]):
        assert choice["index"] == index
        assert joined(events, index) == choice["token_ids"] != []


async def test_token_ids_come_only_where_they_are_requested(served: Served) -> None:
    assert "token_ids" not in await served.complete(prompt=PROMPT, **GREEDY)
    events = await served.stream("/v1/completions", prompt=PROMPT, **GREEDY)
    assert joined(events) == []


async def test_the_end_token_of_the_models_files_ends_a_request(without: Served) -> None:
    end = without.frontend.defaults.eos_token_ids[0]
    choice = await without.complete(
        prompt=PROMPT, max_tokens=5, temperature=0, logit_bias={str(end): 100}
    )
    assert (choice["token_ids"], choice["finish_reason"]) == ([end], "stop")
    assert choice["stop_reason"] is None  # that is said of `stop` and `stop_token_ids` alone
    choice = await without.complete(
        prompt=PROMPT, max_tokens=5, temperature=0, logit_bias={"5": 100}, stop_token_ids=[5]
    )
    assert (choice["token_ids"], choice["stop_reason"]) == ([5], 5)


async def test_logprobs_name_tokens_by_id(without: Served) -> None:
    choice = await without.complete(prompt=PROMPT, logprobs=2, **GREEDY)
    names = [f"token_id:{token}" for token in choice["token_ids"]]
    assert choice["logprobs"]["tokens"] == names
    for name, top in zip(names, choice["logprobs"]["top_logprobs"], strict=True):
        assert name in top
        assert len(top) == 2
    events = await without.stream("/v1/completions", prompt=PROMPT, logprobs=2, **GREEDY)
    # drafts that are kept come together
    chunks = [event["choices"][0]["logprobs"]["tokens"] for event in events[:-1]]
    assert [name for chunk in chunks for name in chunk] == names


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "a text"}, "prompt"),
        ("/v1/completions", {"prompt": ["a", "b"]}, "prompt"),
        ("/v1/completions", {"prompt": PROMPT, "stop": "."}, "stop"),
        ("/v1/completions", {"prompt": PROMPT, "echo": True}, "echo"),
        ("/v1/completions", {"prompt": PROMPT, "grammar": "start: A"}, "grammar"),
        ("/v1/completions", {"prompt": PROMPT, "bad_words": ["a"]}, "bad_words"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "messages"),
        ("/tokenize", {"prompt": "a text"}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}]}, "messages"),
        ("/detokenize", {"tokens": PROMPT}, "tokens"),
    ],
)
async def test_whatever_needs_text_is_rejected_with_the_reason(
    without: Served, path: str, body: dict[str, Any], param: str
) -> None:
    error = (await without.post(path, 400, **body))["error"]
    assert error["param"] == param
    assert "no tokenizer (model.tokenizer)" in error["message"]


async def test_the_page_learns_that_there_is_no_text(without: Served, served: Served) -> None:
    for server, texts in ((without, False), (served, True)):
        info = await server.get("/page/info")
        assert (info["tokenizer"], info["chat"]) == (texts, texts)
