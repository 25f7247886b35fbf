"""Step features of another package, tests/feature_package, over a socket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.functional.conftest import SMOLLM2, Served, serve

pytestmark = pytest.mark.asyncio(loop_scope="session")

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "return_token_ids": True}
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def featured() -> AsyncIterator[Served]:
    async with serve(model__path=SMOLLM2, model__features=["only_even", "watch_token"]) as served:
        yield served


async def test_arguments_and_what_comes_back(featured: Served) -> None:
    arguments = {"only_even": True, "watch_token": 42}
    bodies = [(COMPLETIONS, {"prompt": ["The capital", "is"]}), (CHAT, {"messages": QUESTION})]
    for path, body in bodies:
        plain = await featured.post(path, **BODY, **body)
        reply = await featured.post(path, vllm_xargs=arguments, n=2, **BODY, **body)
        assert len(reply["choices"]) == 2 * len(plain["choices"])
        assert not any("features" in choice for choice in plain["choices"])
        assert any(token % 2 for choice in plain["choices"] for token in choice["token_ids"])
        for choice in reply["choices"]:
            assert not any(token % 2 for token in choice["token_ids"])
            assert choice["features"].keys() == {"watch_token"}
            assert len(choice["features"]["watch_token"]) == len(choice["token_ids"])
            assert set(map(type, choice["features"]["watch_token"])) == {float}
    await featured.stream(COMPLETIONS, prompt="a", vllm_xargs=arguments, max_tokens=3)


async def test_a_name_under_which_a_feature_offers_the_model(featured: Served) -> None:
    """Its own tokens are the model's: `variant_of` names no variant."""
    plain = await featured.post(CHAT, messages=QUESTION, **BODY)
    watched = await featured.post(CHAT, messages=QUESTION, model="smollm2-watched", **BODY)
    assert (plain["model"], watched["model"]) == ("smollm2", "smollm2-watched")
    (before,), (choice,) = plain["choices"], watched["choices"]
    assert choice["token_ids"] == before["token_ids"]
    assert len(choice["features"]["watch_token"]) == len(choice["token_ids"])
    card = await featured.get("/v1/models/smollm2-watched")
    assert (card["parent"], card["root"]) == ("smollm2", "smollm2")


async def test_measurements(featured: Served) -> None:
    feature = next(each for each in featured.engine.features if each.name == "watch_token")
    feature.host.metrics.count("watched_rows", 3)
    feature.host.metrics.observe("watching_seconds", 0.25)
    async with featured.http.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    labels = '{engine="0",model_name="smollm2"}'
    assert f"aioinfer:feature_watched_rows_total{labels} 3.0" in lines
    assert f"aioinfer:feature_watching_seconds_sum{labels} 0.25" in lines
    assert sum("constrained_rows" in line and line[0] != "#" for line in lines) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"only_evn": True}, "takes the argument 'only_evn'; known are only_even, watch_token"),
        ({"watch_token": "the"}, "watch_token must be a token id, not 'the'"),
    ],
)
async def test_wrong_arguments(featured: Served, arguments: dict[str, Any], message: str) -> None:
    for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": QUESTION})):
        error = (await featured.post(path, 400, vllm_xargs=arguments, **body))["error"]
        assert message in error["message"]
        assert error["param"] == "vllm_xargs"


async def test_a_beam_search(featured: Served) -> None:
    body = {"use_beam_search": True, "n": 2, "vllm_xargs": {"only_even": True}}
    error = (await featured.post(COMPLETIONS, 400, prompt="a", **body))["error"]
    assert error["message"] == "vllm_xargs is not supported in a beam search"
    assert error["param"] == "vllm_xargs"
