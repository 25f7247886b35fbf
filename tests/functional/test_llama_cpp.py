"""The endpoints that programs know from llama.cpp's server."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.functional.conftest import Served, serve

pytestmark = [pytest.mark.extended, pytest.mark.asyncio(loop_scope="session")]

PROMPT = "The capital of France is"
GREEDY = {"prompt": PROMPT, "temperature": 0, "n_predict": 6}


@pytest.fixture(scope="module")
def served(speaking: Served) -> Served:
    return speaking


async def events(served: Served, path: str, **body: Any) -> list[dict[str, Any]]:
    async with served.http.post(path, json=body | {"stream": True}) as response:
        assert response.status == 200, await response.text()
        assert response.content_type == "text/event-stream"
        *parts, rest = (await response.text()).split("\n\n")
    assert rest == ""
    return [json.loads(part.removeprefix("data: ")) for part in parts]


async def test_a_completion(served: Served) -> None:
    whole = await served.post("/completion", **GREEDY, return_tokens=True, cache_prompt=False)
    assert "Paris" in whole["content"]
    assert (whole["stop"], whole["stop_type"], whole["truncated"]) == (True, "limit", False)
    assert whole["timings"]["predicted_n"] == len(whole["tokens"]) == 6
    assert whole["timings"]["prompt_n"] + whole["timings"]["cache_n"] == whole["tokens_evaluated"]
    assert whole["prompt"] == PROMPT
    assert whole["generation_settings"]["n_predict"] == 6
    *parts, last = await events(served, "/completion", **GREEDY)
    assert "".join(part["content"] for part in parts) == whole["content"]
    assert [part["tokens"] for part in parts] == [[token] for token in whole["tokens"]]
    assert not any(part["stop"] for part in parts)
    assert (last["content"], last["tokens"], last["stop_type"]) == ("", [], "limit")
    assert last["timings"]["predicted_n"] == 6
    assert last["has_new_line"] == whole["has_new_line"] == ("\n" in whole["content"])
    assert (await served.post("/completion", **GREEDY))["tokens"] == []
    stopped = await served.post("/completion", **GREEDY, stop=[" Paris"])
    assert (stopped["stop_type"], stopped["stopping_word"]) == ("word", " Paris")
    loaded = await served.post("/completion", **GREEDY | {"n_predict": 0})
    assert loaded["content"] == ""


async def test_forms_of_prompts(served: Served) -> None:
    ids = (await served.post("/tokenize", content=PROMPT, add_special=True))["tokens"]
    one = (await served.post("/completion", **GREEDY))["content"]
    assert (await served.post("/completion", **GREEDY | {"prompt": ids}))["content"] == one
    both = await served.post("/completion", **GREEDY | {"prompt": [ids, PROMPT]})
    assert [reply["index"] for reply in both] == [0, 1]
    assert [reply["content"] for reply in both] == [one, one]
    start, end = "The capital", " is"
    ids_of = served.frontend.encode
    mixed = [*await ids_of(start), " of", *await ids_of(" France"), end]
    assert (await served.post("/completion", **GREEDY | {"prompt": mixed}))["content"] == one
    for wrong in ([], [[1, [2]]], {"prompt_string": 5}, [-1], 7):
        reply = await served.post("/completion", 400, **GREEDY | {"prompt": wrong})
        assert reply["error"]["type"] == "invalid_request_error"
        assert reply["error"]["code"] == 400


async def test_probabilities(served: Served) -> None:
    reply = await served.post("/completion", **GREEDY, n_probs=4)
    found = reply["completion_probabilities"]
    assert "".join(token["token"] for token in found) == reply["content"]
    for token in found:
        assert bytes(token["bytes"]).decode() == token["token"]
        assert token["logprob"] <= 0
        assert token["top_logprobs"][0]["id"] == token["id"]
        assert len(token["top_logprobs"]) == 4
    *parts, _ = await events(served, "/completion", **GREEDY, n_probs=4)
    assert [part["completion_probabilities"] for part in parts] == [[token] for token in found]
    for number in (-1, 129):
        error = (await served.post("/completion", 400, **GREEDY, n_probs=number))["error"]
        assert error["param"] == "n_probs"


async def test_what_is_asked_of_sampling(served: Served) -> None:
    for biases in ([[" Paris", False]], [[" Paris", -100], [7042, False]], {" Paris": -50}):
        reply = await served.post("/completion", **GREEDY, logit_bias=biases)
        assert "Paris" not in reply["content"]
    body = GREEDY | {"n_predict": 60}
    reply = await served.post("/completion", **body, json_schema={"enum": [{"a": 4}]})
    assert json.loads(reply["content"]) == {"a": 4}
    reply = await served.post("/completion", **body, grammar='root ::= "a"{5,5}')
    assert (reply["content"], reply["stop_type"]) == ("aaaaa", "eos")
    neutral = {"mirostat": 0, "mirostat_tau": 5.0, "typical_p": 1, "dry_multiplier": 0.0,
               "dry_sequence_breakers": ["\n"], "xtc_probability": 0, "xtc_threshold": 0.1,
               "dynatemp_range": 0, "repeat_last_n": 64, "repeat_penalty": 1.0, "n_keep": 0,
               "id_slot": -1}  # fmt: skip
    plain = await served.post("/completion", **GREEDY)
    assert (await served.post("/completion", **GREEDY, **neutral))["content"] == plain["content"]
    for name, value in {"mirostat": 2, "dry_multiplier": 0.8, "samplers": ["top_k"], "lora": [{}],
                        "t_max_predict_ms": 5, "n_cmpl": 2, "post_sampling_probs": True,
                        "response_fields": ["content"]}.items():  # fmt: skip
        reply = await served.post("/completion", 400, **GREEDY, **{name: value})
        assert reply["error"]["param"] == name
    reply = await served.post("/completion", 400, **GREEDY, repeat_last_n=64, repeat_penalty=1.1)
    assert reply["error"]["param"] == "repeat_last_n"


async def test_an_end_that_never_comes(served: Served) -> None:
    for ignores in (True, False):
        reply = await served.post("/completion", **GREEDY, ignore_eos=ignores)
        biases = reply["generation_settings"]["logit_bias"]
        assert biases == ([{"token": 2, "bias": None}] if ignores else [])


async def test_tokens_and_texts(served: Served) -> None:
    text = "What is the capital of 媽 and 🤗?"
    tokens = (await served.post("/tokenize", content=text))["tokens"]
    assert tokens == await served.frontend.encode(text, False)
    assert (await served.post("/detokenize", tokens=tokens))["content"] == text
    assert await served.post("/detokenize", tokens=tokens, model="smollm2") == {"prompt": text}
    await served.post("/tokenize", 400, content=text, prompt=text)


async def test_a_template(served: Served) -> None:
    messages = [{"role": "system", "content": "Test."}, {"role": "user", "content": "Hi there"}]
    prompt = (await served.post("/apply-template", messages=messages))["prompt"]
    assert prompt.endswith("<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n")
    ids = (await served.post("/tokenize", messages=messages))["tokens"]
    assert (await served.post("/detokenize", tokens=ids))["content"] == prompt
    body = {"messages": messages, "add_generation_prompt": False}
    assert (await served.post("/apply-template", **body))["prompt"].endswith("there<|im_end|>\n")


async def test_embeddings(served: Served) -> None:
    reference = await served.post("/v1/embeddings", input=["a river", "a stream"])
    found = await served.post("/embedding", content=["a river", "a stream"])
    for one, item in zip(found, reference["data"], strict=True):
        assert one["embedding"] == [pytest.approx(item["embedding"], abs=1e-4)]
    (same,) = await served.post("/embedding", input="a river")
    assert same["embedding"] == [pytest.approx(found[0]["embedding"][0], abs=1e-6)]
    await served.post("/embedding", 400, content="x", input="x")


async def test_what_is_said_of_the_server(served: Served) -> None:
    props = await served.get("/props")
    assert props["model_path"].endswith(".gguf")
    assert props["default_generation_settings"]["n_ctx"] == 512
    slots = await served.get("/slots")
    assert props["total_slots"] == len(slots) == 4
    assert not any(slot["is_processing"] for slot in slots)
    assert (await served.get("/models"))["data"][0]["id"] == "smollm2"
    messages = [{"role": "user", "content": "Hi"}]
    reply = await served.post("/chat/completions", messages=messages, max_tokens=3)
    assert reply["object"] == "chat.completion"
    reply = await served.post("/responses", input="Hi", max_output_tokens=3)
    assert reply["object"] == "response"


async def test_times_of_a_chat(served: Served) -> None:
    ask = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    options = {"stream_options": {"include_usage": True}, "timings_per_token": True}
    *parts, last = await served.stream("/chat/completions", **ask, **options)
    assert last["timings"]["predicted_n"] == last["usage"]["completion_tokens"]
    assert last["timings"]["predicted_per_second"] > 0
    assert not any("timings" in part for part in parts)


async def test_errors(served: Served) -> None:
    error = (await served.post("/completion", 400, prompt="word " * 900))["error"]
    assert error["type"] == "exceed_context_size_error"
    assert "exceeds the available context size" in error["message"]
    error = (await served.post("/completions", 404, prompt="x", max_tokens=5))["error"]
    assert "did you mean /v1/completions?" in error["message"]
    error = (await served.post("/completion", 400, **GREEDY, grammar="x", json_schema={}))["error"]
    assert error["param"] == "json_schema"


async def test_embeddings_without_pooling() -> None:
    async with serve(pooling__type="all") as served:
        tokens = (await served.post("/tokenize", content="a river and a hill"))["tokens"]
        (reply,) = await served.post("/embedding", content="a river and a hill")
        vectors = torch.tensor(reply["embedding"])
        assert vectors.shape == (len(tokens), 576)
        assert not torch.allclose(vectors.norm(dim=1), torch.ones(len(tokens)))
        for path, body in (
            ("/v1/embeddings", {"input": "x"}),
            ("/rerank", {"query": "x", "documents": ["y"]}),
            ("/api/embed", {"input": "x"}),
        ):
            error = await served.post(path, 400, **body)  # type: ignore[arg-type]
            assert "each token" in str(error["error"])
        (plain,) = (await served.post("/pooling", input=tokens))["data"]
        assert torch.allclose(torch.tensor(plain["data"]), vectors, atol=1e-4)


async def test_a_stream_reports_how_far_the_prompt_is(served: Served) -> None:
    """Steps of 256 tokens; the second time most of the prompt is in the cache."""
    prompt = [7, 8, 9, 10] * 100
    body: dict[str, Any] = {"temperature": 0, "return_progress": True}
    found = await served.stream("/v1/completions", prompt=prompt, max_tokens=3, **body)
    reports = [event.pop("prompt_progress") for event in found if "prompt_progress" in event]
    assert [each["processed"] for each in reports] == [256, 400]
    assert {(each["total"], each["cache"]) for each in reports} == {(400, 0)}
    assert 0 <= reports[0]["time_ms"] <= reports[1]["time_ms"]
    assert [event["choices"][0]["text"] for event in found[:2]] == ["", ""]
    plain = await served.complete(prompt=prompt, max_tokens=3, temperature=0)
    assert "".join(event["choices"][0]["text"] for event in found) == plain["text"]
    (report,) = [
        event["prompt_progress"]
        for event in await served.stream("/v1/completions", prompt=prompt, max_tokens=2, **body)
        if "prompt_progress" in event
    ]
    assert (report["total"], report["processed"]) == (400, 400)
    assert report["cache"] > 300
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "n": 2}
    found = await served.stream("/v1/chat/completions", **chat, **body)
    (report,) = [event for event in found if "prompt_progress" in event]
    assert report["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": None}]
    whole = await served.post("/v1/chat/completions", **chat, **body)
    texts = ["", ""]
    for event in found:
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == [choice["message"]["content"] for choice in whole["choices"]]
    error = await served.post(
        "/v1/completions", 400, prompt=prompt, **body, stream=True, echo=True, logprobs=1
    )
    assert error["error"]["param"] == "return_progress"
