"""What programs know from vLLM's server beside OpenAI's endpoints."""

from __future__ import annotations

import base64
import math
from typing import Any

import pytest
import torch

from tests.functional.conftest import Served, serve

pytestmark = [pytest.mark.extended, pytest.mark.asyncio(loop_scope="session")]

CHAT = "/v1/chat/completions"
PROMPT = "The capital of France is"
ASK = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = {"temperature": 0, "max_tokens": 6}


async def test_a_vector_for_each_token(served: Served) -> None:
    ids = [list(range(20, 320)), [7, 8, 9]]
    body: dict[str, Any] = {"input": ids, "task": "token_embed"}
    data = (await served.post("/pooling", **body))["data"]
    found = [torch.tensor(each["data"]) for each in data]
    assert [each.shape for each in found] == [(300, 576), (3, 576)]
    assert all(torch.allclose(each.norm(dim=1), torch.ones(len(each))) for each in found)
    coded = (await served.post("/pooling", **body, encoding_format="base64"))["data"]
    same = torch.frombuffer(bytearray(base64.b64decode(coded[0]["data"])), dtype=torch.float32)
    assert torch.equal(same.view(300, 576), found[0])
    # as they are, the last one is what pooling by the last token gives
    plain = await served.post("/pooling", input=ids, pooling_type="all")
    last = await served.post("/pooling", input=ids, pooling_type="last")
    for whole, one in zip(plain["data"], last["data"], strict=True):
        assert torch.allclose(torch.tensor(whole["data"][-1]), torch.tensor(one["data"]), atol=1e-3)
    cut = await served.post("/pooling", **body, dimensions=8)
    assert torch.tensor(cut["data"][1]["data"]).shape == (3, 8)
    error = await served.post("/pooling", 400, input=[[5] * 500] * 40, task="token_embed")
    assert error["error"]["param"] == "input"
    await served.post("/pooling", 400, input="x", task="token_embed", pooling_type="mean")


async def test_a_conversation_is_embedded(served: Served) -> None:
    found = await served.post("/v1/embeddings", messages=ASK)
    ids = (await served.post("/tokenize", messages=ASK, add_generation_prompt=False))["tokens"]
    same = await served.post("/v1/embeddings", input=ids)
    assert found["usage"] == same["usage"]
    assert found["data"][0]["embedding"] == pytest.approx(same["data"][0]["embedding"], abs=1e-4)
    more = await served.post("/v1/embeddings", messages=ASK, add_generation_prompt=True)
    assert more["usage"]["prompt_tokens"] > len(ids)
    cut = await served.post("/v1/embeddings", messages=ASK * 99, truncate_prompt_tokens=9)
    assert cut["usage"]["prompt_tokens"] == 9
    for wrong in ({"messages": ASK, "input": "x"}, {}, {"input": None}, {"messages": []}):
        await served.post("/v1/embeddings", 400, **wrong)
    reply = await served.post("/v1/embeddings", 400, input="x", truncate_prompt_tokens=513)
    assert "smaller truncation size" in reply["error"]["message"]


async def test_forms_of_inputs(served: Served) -> None:
    """llama.cpp's: several kinds in one list."""
    many = ["a river", await served.frontend.encode("a river")]
    data = (await served.post("/v1/embeddings", input=many))["data"]
    assert len(data) == 2
    for item in data:
        assert item["embedding"] == pytest.approx(data[0]["embedding"], abs=1e-3)
    mixed = await served.post("/v1/embeddings", input=[12, 34, "string", 56])
    assert len(mixed["data"]) == 1
    for wrong in ([], {"content": "x"}, {"prompt_string": "x"}):
        await served.post("/v1/embeddings", 400, input=wrong)


async def test_names_of_embeddings_and_scores(served: Served) -> None:
    async def vector(path: str, **body: Any) -> float:
        item = (await served.post(path, input="a river", **body))["data"][0]
        return sum(x * x for x in item.get("embedding") or item["data"])

    assert await vector("/v1/embeddings", use_activation=True) == pytest.approx(1, abs=1e-3)
    assert await vector("/v1/embeddings", use_activation=False) > 2
    assert await vector("/pooling", task="embed") == pytest.approx(1, abs=1e-3)
    reply = await served.post("/pooling", 400, input="x", task="token_classify")
    assert "must be one of 'embed', 'token_embed'" in reply["error"]["message"]
    one, two = ["a river", "a stone"], ["a stream", "a rock"]
    first = await served.post("/score", text_1=one, text_2=two)
    found = await served.post("/score", queries=one, documents=two)
    for item, same in zip(found["data"], first["data"], strict=True):
        assert item["score"] == pytest.approx(same["score"], abs=1e-3)
    assert (await served.post("/score", 400, queries=one))["error"]["param"] == "text_2"
    await served.post("/score", 400, queries=one, text_1=one, text_2=two)


async def test_forms_of_reranking(served: Served) -> None:
    body = {"query": "a river", "texts": ["a stone", "a stream", "a rock"], "top_n": 2}
    best = await served.post("/rerank", **body, return_text=True)
    usual = await served.post("/rerank", query="a river", documents=body["texts"])
    assert [item["index"] for item in best] == [item["index"] for item in usual["results"]][:2]
    assert best[0]["text"] == body["texts"][best[0]["index"]]
    long = {"query": "a river", "documents": ["a stream flows " * 20]}
    whole = await served.post("/rerank", **long)
    cut = await served.post("/rerank", **long, max_tokens_per_doc=10)
    less = whole["usage"]["total_tokens"] - cut["usage"]["total_tokens"]
    assert less == len(await served.frontend.encode(long["documents"][0])) - 10
    await served.post("/rerank", 400, query="x", documents=["y"], texts=["y"])


async def test_log_probabilities_of_the_whole_vocabulary() -> None:
    """With `scheduler.max_logprobs = -1`, streamed and not, of completions and chats; the loop goes
    on meanwhile."""
    async with serve(**{"scheduler.max_logprobs": -1}) as served:
        vocab_size = served.frontend.vocab_size
        chat = {"messages": ASK, "temperature": 0, "max_tokens": 3, "logprobs": True}
        whole = await served.post(CHAT, **chat, top_logprobs=-1)
        content = whole["choices"][0]["logprobs"]["content"]
        for entry in content:
            top = entry["top_logprobs"]
            assert len(top) == vocab_size
            assert top[0]["token"] == entry["token"]
            assert sum(math.exp(each["logprob"]) for each in top) == pytest.approx(1, abs=1e-3)
        events = await served.stream(CHAT, **chat, top_logprobs=-1)
        found = [event["choices"][0]["logprobs"] for event in events]
        assert [entry for each in found if each for entry in each["content"]] == content
        body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 2}
        many = (await served.complete(**body, logprobs=1500))["logprobs"]
        few = (await served.complete(**body, logprobs=20))["logprobs"]
        for top, known in zip(many["top_logprobs"], few["top_logprobs"], strict=True):
            assert 1400 < len(top) <= 1500  # tokens of the same text count as one
            assert {name: top[name] for name in known} == pytest.approx(known, abs=1e-4)
        echoed = (await served.complete(**body, logprobs=60, echo=True))["logprobs"]
        assert echoed["tokens"][-2:] == few["tokens"]
        assert [len(top) for top in echoed["top_logprobs"][-2:]] == [60, 60]
        assert min(len(top) for top in echoed["top_logprobs"][1:]) >= 60
        error = await served.post("/v1/completions", 400, **body, prompt_logprobs=-1)
        assert "max_num_batched_tokens" in error["error"]["message"]
        error = await served.post(CHAT, 400, **chat | {"max_tokens": 400}, top_logprobs=-1)
        assert error["error"]["param"] == "top_logprobs"
        error = await served.post("/completion", 400, prompt=PROMPT, n_probs=129)
        assert error["error"]["type"] == "invalid_request_error"


async def test_log_probabilities_of_given_tokens(served: Served) -> None:
    chat = {"messages": ASK, **GREEDY, "logprobs": True, "logprob_token_ids": [42, 28, 999]}
    plain = (await served.post(CHAT, messages=ASK, **GREEDY, logprobs=True))["choices"][0]
    reply = (await served.post(CHAT, **chat, return_tokens_as_token_ids=True))["choices"][0]
    assert reply["message"] == plain["message"]
    for entry, known in zip(
        reply["logprobs"]["content"], plain["logprobs"]["content"], strict=True
    ):
        assert entry["logprob"] == known["logprob"]
        names = [each["token"] for each in entry["top_logprobs"]]
        assert names == ["token_id:42", "token_id:28", "token_id:999"]
    events = await served.stream(CHAT, **chat, n=2, return_tokens_as_token_ids=True)
    first = [event["choices"][0] for event in events if event["choices"][0]["index"] == 0]
    found = [entry for each in first if each["logprobs"] for entry in each["logprobs"]["content"]]
    assert found == reply["logprobs"]["content"]
    likely = (await served.complete(prompt=PROMPT, **GREEDY, logprobs=5))["logprobs"]
    ids = [served.frontend.tokenizer.encode(name)[0] for name in likely["top_logprobs"][0]]
    named = await served.complete(prompt=PROMPT, **GREEDY, logprob_token_ids=ids)
    assert named["logprobs"]["top_logprobs"][0] == pytest.approx(
        likely["top_logprobs"][0], abs=1e-4
    )
    for wrong in ([-1], [49_152], "5"):
        error = await served.post(CHAT, 400, **chat | {"logprob_token_ids": wrong})
        assert error["error"]["param"].startswith("logprob_token_ids")
