"""Embeddings, scores and log-probabilities of prompts over the socket, and from `LLM`."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from tokenizers import Tokenizer

from tests.functional.conftest import Served, serve
from tests.gpu.random_models import random_model

pytestmark = pytest.mark.asyncio(loop_scope="session")

MODEL = "smollm2"
PAGE = Path(__file__).parents[2] / "docs" / "embeddings.md"
TEXTS = ["The capital of France is Paris.", "Water boils at 100 degrees.", "Hello"]
LONG = "The river ran through the old town, under five stone bridges. " * 12
#: What the tokenizer of the random models knows.
LETTERS = ["\u0140\u0141\u0142", "\u0150\u0151"]


def length(values: Any) -> float:
    return float(np.linalg.norm(np.asarray(values)))


# ------------------------------------------------------------------ embeddings


async def test_the_openai_client_reads_embeddings(
    client: openai.AsyncOpenAI, served: Served
) -> None:
    """It asks for base64 by itself."""
    reply = await client.embeddings.create(model=MODEL, input=TEXTS)
    assert [each.index for each in reply.data] == [0, 1, 2]
    assert [len(each.embedding) for each in reply.data] == [576] * 3
    assert all(math.isclose(length(each.embedding), 1, rel_tol=1e-5) for each in reply.data)
    assert reply.usage.prompt_tokens == reply.usage.total_tokens > 10
    floats = await client.embeddings.create(model=MODEL, input=TEXTS, encoding_format="float")
    for one, other in zip(reply.data, floats.data, strict=True):
        assert np.allclose(one.embedding, other.embedding, atol=1e-6)
    short = await client.embeddings.create(model=MODEL, input=TEXTS[0], dimensions=32)
    expected = np.array(reply.data[0].embedding[:32])
    assert np.allclose(short.data[0].embedding, expected / length(expected), atol=1e-5)
    assert served.engine.is_idle


async def test_texts_and_token_ids_are_the_same(served: Served) -> None:
    tokenizer = served.frontend.tokenizer
    assert tokenizer is not None
    ids = [tokenizer.encode(text) for text in TEXTS]
    found = []
    for value in (TEXTS, ids, TEXTS[0], ids[0]):
        reply = await served.post("/v1/embeddings", input=value, encoding_format="float")
        found.append([each["embedding"] for each in reply["data"]])
    assert np.allclose(found[0], found[1], atol=1e-6)
    assert np.allclose(found[2], found[3], atol=1e-6)
    assert np.allclose(found[0][0], found[2][0], atol=1e-4)


async def test_a_long_reply_comes_in_pieces(served: Served) -> None:
    reply = await served.post("/v1/embeddings", input=["Hi"] * 60, encoding_format="float")
    assert [each["index"] for each in reply["data"]] == list(range(60))
    assert np.allclose(reply["data"][0]["embedding"], reply["data"][59]["embedding"], atol=1e-4)


async def test_pooling_returns_states_as_they_are(served: Served) -> None:
    raw = await served.post("/pooling", input=TEXTS[0])
    plain = await served.post("/v1/embeddings", input=TEXTS[0])
    state = np.array(raw["data"][0]["data"])
    assert length(state) > 2
    assert np.allclose(state / length(state), plain["data"][0]["embedding"], atol=1e-5)
    mean = await served.post(
        "/pooling", input=TEXTS[0], pooling_type="mean", encoding_format="base64"
    )
    decoded = np.frombuffer(base64.b64decode(mean["data"][0]["data"]), np.float32)
    assert decoded.shape == state.shape
    assert not np.allclose(decoded, state, atol=0.1)


async def test_scores_and_reranking_are_cosines(served: Served) -> None:
    texts = ["What is the capital of France?", *TEXTS]
    reply = await served.post("/v1/embeddings", input=texts)
    query, *others = (np.array(each["embedding"]) for each in reply["data"])
    cosines = [float(query @ other) for other in others]
    scored = await served.post("/score", text_1=texts[0], text_2=TEXTS)
    assert np.allclose([each["score"] for each in scored["data"]], cosines, atol=1e-4)
    pairs = await served.post("/v1/score", text_1=TEXTS, text_2=TEXTS)
    assert np.allclose([each["score"] for each in pairs["data"]], 1, atol=1e-4)
    best = sorted(range(3), key=lambda index: -cosines[index])
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        ranked = await served.post(path, query=texts[0], documents=TEXTS, top_n=2)
        assert [each["index"] for each in ranked["results"]] == best[:2]
        scores = [each["relevance_score"] for each in ranked["results"]]
        assert np.allclose(scores, [cosines[index] for index in best[:2]], atol=1e-4)
        shown = [each.get("document") for each in ranked["results"]]
        texts_of = [{"text": TEXTS[index]} for index in best[:2]]
        assert shown == ([None, None] if path == "/v2/rerank" else texts_of)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {"input": ""}, "input"),
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": [1, ["a"]]}, "input"),
        ("/v1/embeddings", {"input": [1, 99_999]}, "input"),
        ("/v1/embeddings", {"input": [7] * 600}, "input"),
        ("/v1/embeddings", {"input": "a", "dimensions": 577}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ("/v1/embeddings", {"input": "a", "prompt_name": "query"}, "prompt_name"),
        ("/v1/embeddings", {}, "input"),
        ("/pooling", {"input": "a", "pooling_type": "max"}, "pooling_type"),
        ("/classify", {"input": "a"}, "model"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a"]}, "text_1"),
        ("/score", {"text_1": "a", "text_2": ""}, "text_2"),
        ("/score", {"text_1": ["a", ""], "text_2": ["a", "b"]}, "text_1"),
        ("/score", {"queries": "a", "documents": ["b", ""]}, "documents"),
        ("/rerank", {"query": "", "documents": ["a"]}, "query"),
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/rerank", {"query": "a", "documents": ["a"], "top_n": 0}, "top_n"),
    ],
)
async def test_wrong_bodies(served: Served, path: str, body: dict[str, Any], param: str) -> None:
    reply = await served.post(path, 400, **body)
    assert reply["error"]["param"] == param
    assert served.engine.is_idle


async def test_a_truncated_input(served: Served) -> None:
    await served.post("/v1/embeddings", 400, input=LONG * 4)
    reply = await served.post("/v1/embeddings", input=LONG * 4, truncate_prompt_tokens=-1)
    assert reply["usage"]["prompt_tokens"] == 512
    short = await served.post("/v1/embeddings", input=LONG, truncate_prompt_tokens=5)
    assert short["usage"]["prompt_tokens"] == 5
    ids = [5, 6, 7, 8]
    for side, kept in ((None, ids[2:]), ("left", ids[2:]), ("right", ids[:2])):
        fields = {"truncate_prompt_tokens": 2, "truncation_side": side}
        cut = await served.post("/v1/embeddings", input=ids, **fields)
        alone = await served.post("/v1/embeddings", input=kept)
        assert np.allclose(cut["data"][0]["embedding"], alone["data"][0]["embedding"], atol=1e-4)
    cut = await served.post(
        "/score", text_1=LONG, text_2=LONG, max_tokens_per_query=4, max_tokens_per_doc=5
    )
    assert cut["usage"]["prompt_tokens"] == 9


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/embeddings", {}),
        ("/pooling", {"pooling_type": "mean"}),
        ("/v1/embeddings", {"truncate_prompt_tokens": 512}),
        ("/api/embed", {"truncate": False}),
        ("/v1/completions", {"echo": True, "max_tokens": 0}),
        ("/v1/completions", {"echo": True, "max_tokens": 0, "logprobs": 0}),
        ("/completion", {"n_predict": 0}),
    ],
)
async def test_a_prompt_without_an_answer_may_fill_the_context(
    served: Served, path: str, fields: dict[str, Any]
) -> None:
    name = "prompt" if "completion" in path else "input"
    for length, status in ((512, 200), (513, 400)):
        prompt = [5] * (length - 1) + [7]
        if "truncate_prompt_tokens" in fields:
            status = 200
        reply = await served.post(path, status, **fields, **{name: prompt})
        if status == 400:
            assert "maximum context length is 512 tokens" in str(reply)
            continue
        usage = reply.get("usage") or {}
        counts = (usage.get("prompt_tokens"), reply.get("prompt_eval_count"))
        assert 512 in (*counts, reply.get("tokens_evaluated"))
        if "logprobs" in fields:
            whole = reply["choices"][0]["logprobs"]["token_logprobs"]
            shorter = await served.post(path, **fields, prompt=prompt[:300])
            first = shorter["choices"][0]["logprobs"]["token_logprobs"]
            assert len(whole) == 512
            assert np.allclose(whole[1:300], first[1:], atol=1e-3)
    await served.post("/v1/completions", prompt=[5] * 511, max_tokens=1)
    reply = await served.post("/v1/completions", 400, prompt=[5] * 512, max_tokens=1)
    assert reply["error"]["code"] == "context_length_exceeded"
    assert served.engine.is_idle


async def test_the_page_s_scores_tell_an_answer_from_another_text(speaking: Served) -> None:
    page = await asyncio.to_thread(PAGE.read_text, "utf-8")
    commands = [shlex.split(line) for line in re.findall(r"^curl .*", page, re.MULTILINE)]
    bodies = {
        command[1].removeprefix("http://127.0.0.1:8000"): json.loads(command[-1])
        for command in commands
    }
    body = bodies["/score"]
    right, wrong = (each["score"] for each in (await speaking.post("/score", **body))["data"])
    assert "Paris" in body["text_2"][0]
    assert right > wrong + 0.1
    assert (f"{right:.2f}", f"{wrong:.2f}") == ("0.88", "0.74")
    assert "score 0.88 and 0.74" in page.replace("\n", " ")
    (best,) = (await speaking.post("/v1/rerank", **bodies["/v1/rerank"]))["results"]
    assert "Paris" in best["document"]["text"]
    assert best["relevance_score"] == pytest.approx(right, abs=0.01)


# ------------------------------------------------------------------ prompts' log-probabilities


async def test_echo_with_logprobs(client: openai.AsyncOpenAI, served: Served) -> None:
    """As lm-evaluation-harness asks for it: every token but the first has what sampling gives."""
    tokenizer = served.frontend.tokenizer
    assert tokenizer is not None
    prompt = "The capital of France is Paris"
    ids = tokenizer.encode(prompt)
    reply = await client.completions.create(
        model=MODEL, prompt=[ids], echo=True, logprobs=2, max_tokens=1, temperature=0
    )
    (choice,) = reply.choices
    found = choice.logprobs
    assert found is not None
    assert found.tokens is not None
    assert found.token_logprobs is not None
    assert found.top_logprobs is not None
    assert choice.text.startswith(prompt)
    assert "".join(found.tokens) == choice.text
    assert found.text_offset == [len("".join(found.tokens[:i])) for i in range(len(found.tokens))]
    assert (found.token_logprobs[0], found.top_logprobs[0]) == (None, None)
    assert len(found.token_logprobs) == len(found.top_logprobs) == len(ids) + 1
    for number in range(1, len(ids)):
        step = await served.complete(prompt=ids[:number], max_tokens=1, temperature=0, logprobs=2)
        assert step["logprobs"]["top_logprobs"][0].keys() <= found.top_logprobs[number].keys()
        for token, logprob in step["logprobs"]["top_logprobs"][0].items():
            assert math.isclose(found.top_logprobs[number][token], logprob, abs_tol=1e-3)
    only = await client.completions.create(
        model=MODEL, prompt=prompt, echo=True, logprobs=2, max_tokens=0
    )
    assert only.choices[0].text == prompt
    assert only.choices[0].finish_reason == "length"
    assert only.choices[0].logprobs is not None
    assert only.choices[0].logprobs.tokens == found.tokens[:-1]
    assert only.usage is not None
    assert only.usage.completion_tokens == 0


async def test_a_streamed_echo_has_the_same_logprobs(served: Served) -> None:
    body = {
        "prompt": LONG, "echo": True, "logprobs": 1, "max_tokens": 3, "temperature": 0, "n": 2,
        "seed": 1,
    }  # fmt: skip
    whole = await served.post("/v1/completions", **body)
    events = await served.stream("/v1/completions", **body)
    for index, choice in enumerate(whole["choices"]):
        mine = [e["choices"][0] for e in events if e["choices"][0]["index"] == index]
        assert "".join(each["text"] for each in mine) == choice["text"]
        joined: dict[str, list[Any]] = {name: [] for name in choice["logprobs"]}
        for each in mine:
            for name, values in (each["logprobs"] or {}).items():
                joined[name] += values
        for name in ("tokens", "text_offset"):
            assert joined[name] == choice["logprobs"][name]
        for one, other in zip(
            joined["token_logprobs"], choice["logprobs"]["token_logprobs"], strict=True
        ):
            assert one == other or math.isclose(one, other, abs_tol=1e-3)


async def test_prompt_logprobs_in_the_shape_of_vllm(served: Served) -> None:
    tokenizer = served.frontend.tokenizer
    assert tokenizer is not None
    ids = tokenizer.encode(LONG)
    choice = await served.complete(prompt=ids, max_tokens=2, temperature=0, prompt_logprobs=2)
    first, *others = choice["prompt_logprobs"]
    assert first is None
    assert len(others) == len(ids) - 1
    for token, entry in zip(ids[1:], others, strict=True):
        own = entry[str(token)]
        assert own["decoded_token"] == tokenizer.token_text(token)[0]
        assert len(entry) in (2, 3)
        best = max(each["logprob"] for each in entry.values())
        assert (own["rank"] == 1) == (own["logprob"] == best)
        assert sorted(each["rank"] for each in entry.values())[:2] == [1, 2]
    assert choice["logprobs"] is None
    chat = await served.post(
        "/v1/chat/completions", max_tokens=1, prompt_logprobs=0,
        messages=[{"role": "user", "content": "Hi"}],
    )  # fmt: skip
    assert [len(entry) for entry in chat["prompt_logprobs"][1:]] == [1] * (
        chat["usage"]["prompt_tokens"] - 1
    )


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "echo": True, "stream": True}, "max_tokens"),
    ],
)
async def test_wrong_wishes_for_prompts(served: Served, body: dict[str, Any], param: str) -> None:
    reply = await served.post("/v1/completions", 400, prompt="Hello", **body)
    assert reply["error"]["param"] == param


# ------------------------------------------------------------------ other models


@dataclass(frozen=True, slots=True)
class Classifier:
    """A model with a classification head, and its logits for two texts and for both together."""

    folder: Path
    logits: list[torch.Tensor]


@pytest.fixture(params=[1, 3])
def classifier(request: pytest.FixtureRequest, tmp_path: Path) -> Classifier:
    from transformers import AutoModelForSequenceClassification, LlamaConfig

    folder = random_model(tmp_path, vocab_size=300, family="llama")
    config = LlamaConfig.from_pretrained(folder, num_labels=request.param, pad_token_id=0)
    model = AutoModelForSequenceClassification.from_config(config).float().eval()
    model.save_pretrained(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    one, other = (tokenizer.encode(text).ids for text in LETTERS)
    with torch.inference_mode():
        logits = [model(torch.tensor([ids])).logits[0] for ids in (one, other, one + other)]
    return Classifier(folder, logits)


async def test_a_classification_head(classifier: Classifier) -> None:
    """With one class the model is a cross-encoder."""
    num_labels = len(classifier.logits[0])
    settings = {"model__path": str(classifier.folder), "model__dtype": "float32"}
    async with serve(**settings) as served:
        reply = await served.post("/classify", input=LETTERS)
        for each, expected in zip(reply["data"], classifier.logits, strict=False):
            probs = expected.sigmoid() if num_labels == 1 else expected.softmax(0)
            assert np.allclose(each["probs"], probs, atol=1e-5)
            assert each["label"] == f"LABEL_{int(expected.argmax())}"
            assert each["num_classes"] == num_labels
        refused = await served.post("/v1/completions", 400, prompt=LETTERS[0])
        assert "cannot generate" in refused["error"]["message"]
        scored = await served.post("/score", text_1=LETTERS[0], text_2=LETTERS[1])
        if num_labels == 1:
            expected = float(classifier.logits[2].sigmoid()[0])
            assert math.isclose(scored["data"][0]["score"], expected, abs_tol=1e-5)
