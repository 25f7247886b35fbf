"""Encoders behind the socket, against transformers: embeddings, classes, and pairs of texts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from aioinfer.cli.server_process import _ready_text
from aioinfer.startup import describe_workers
from tests.encoder_models import random_texts, tiny_encoder
from tests.functional.conftest import Served, openai_client, serve

pytestmark = pytest.mark.asyncio(loop_scope="session")

TEXTS = ["the river ran", "ab", "the old town, under five bridges " * 4, "x"]
DOCUMENTS = ["rivers run", "the towns of old are many", "q"]


@dataclass(frozen=True, slots=True)
class Encoder:
    """A random encoder in a folder, as transformers has it."""

    folder: Path
    model: Any
    tokenizer: PreTrainedTokenizerFast

    def settings(self, **others: Any) -> dict[str, Any]:
        """Returns the settings of a server of it."""
        usual = {"model__path": str(self.folder), "model__max_model_len": None}
        return {**usual, "parallel__executor": "inline", **others}


@pytest.fixture
def encoder(request: pytest.FixtureRequest, tmp_path: Path) -> Encoder:
    """Made by the parameter: the family, and fields of its configuration."""
    family, fields = request.param
    model = tiny_encoder(family, tmp_path, **fields)
    return Encoder(tmp_path, model, PreTrainedTokenizerFast.from_pretrained(tmp_path))


def of(family: str, **fields: Any) -> pytest.MarkDecorator:
    """Returns the mark of a test of one encoder."""
    return pytest.mark.parametrize("encoder", [(family, fields)], indirect=True, ids=[family])


@torch.inference_mode()
def mean_states(model: Any, texts: list[list[int]]) -> np.ndarray:
    """Returns the normalised means of hidden states."""
    base = getattr(model, model.base_model_prefix)
    states = [base(torch.tensor([text])).last_hidden_state[0].mean(0) for text in texts]
    return torch.nn.functional.normalize(torch.stack(states)).numpy()


@of("bert")
async def test_embeddings_of_texts_of_all_lengths(encoder: Encoder) -> None:
    """In steps of 512 tokens, each with whole prompts."""
    model, tokenizer = encoder.model, encoder.tokenizer
    lengths = [1, 512, 7, 7, 100, 511, 2, 64, 9, 7, 128, 33, 400]
    ids = random_texts(lengths, model.config.vocab_size)
    async with serve(**encoder.settings(scheduler__max_num_batched_tokens=512)) as served:
        assert served.frontend.max_model_len == 512
        async with openai_client(served) as client:
            reply = await client.embeddings.create(model="smollm2", input=ids)
            vectors = np.array([each.embedding for each in reply.data])
            assert np.allclose(vectors, mean_states(model, ids), atol=2e-5)
            assert reply.usage.prompt_tokens == sum(lengths)
            expected = mean_states(model, [tokenizer(text).input_ids for text in TEXTS])
            reply = await client.embeddings.create(model="smollm2", input=TEXTS)
            assert np.allclose([each.embedding for each in reply.data], expected, atol=2e-5)
        await _check_states(served, model, ids[2])
        assert served.engine.is_idle
        served.engine.scheduler.check_integrity()
        # what reports on a KV cache finds none
        for path in ("/metrics", "/health", "/props", "/v1/models", "/status"):
            async with served.http.get(path) as response:
                assert response.status in (200, 404)


async def _check_states(served: Served, model: Any, ids: list[int]) -> None:
    """Compares pooled states in all ways with transformers'."""
    with torch.inference_mode():
        states = model.bert(torch.tensor([ids])).last_hidden_state[0].numpy()
    for kind, expected in (
        ("cls", states[0]), ("last", states[-1]), ("mean", states.mean(0)), ("all", states),
    ):  # fmt: skip
        reply = await served.post("/pooling", input=ids, pooling_type=kind)
        assert np.allclose(reply["data"][0]["data"], expected, atol=2e-5)


@of("bert")
async def test_what_an_encoder_does_not_do(encoder: Encoder) -> None:
    async with serve(**encoder.settings()) as served:
        messages = [{"role": "user", "content": "a"}]
        for path, body in (
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/chat/completions", {"messages": messages}),
            ("/v1/messages", {"messages": messages, "max_tokens": 4, "model": "smollm2"}),
        ):
            refused = await served.post(path, 400, **body)
            assert "cannot generate" in refused["error"]["message"]
        shown = await served.post("/api/show", model="smollm2")
        assert shown["capabilities"] == ["embedding"]
        assert "/v1/embeddings" in _ready_text(served.url, served.frontend)
        described = describe_workers([served.engine.report])
        assert described["KV cache"] == "none: prompts are computed whole"
        long = await served.post("/v1/embeddings", 400, input="a " * 300)
        assert long["error"]["code"] == "context_length_exceeded"
        text = await served.post("/detokenize", tokens=[2, *encoder.tokenizer("ab the").input_ids])
        assert "ab the" in text["prompt"]


@of("xlm-roberta")
async def test_texts_are_cut_as_transformers_cuts_them(encoder: Encoder) -> None:
    model, tokenizer = encoder.model, encoder.tokenizer
    long = "the river ran on and on " * 30
    async with serve(**encoder.settings()) as served:
        for kept, side in ((-1, None), (20, "right"), (20, "left"), (2, None)):
            tokenizer.truncation_side = side or "right"
            most = kept if kept > 0 else served.frontend.max_model_len
            ids = tokenizer(long, truncation=True, max_length=most).input_ids
            assert len(ids) == most
            options = {} if side is None else {"truncation_side": side}
            reply = await served.post(
                "/v1/embeddings", input=long, truncate_prompt_tokens=kept, **options
            )
            found = reply["data"][0]["embedding"]
            assert np.allclose(found, mean_states(model, [ids])[0], atol=2e-5)


@pytest.mark.parametrize(
    "encoder",
    [
        ("bert", {"num_labels": 1}),
        ("roberta", {"num_labels": 1}),
        pytest.param(("distilbert", {"num_labels": 1}), marks=pytest.mark.extended),
        pytest.param(("modernbert", {"num_labels": 1}), marks=pytest.mark.extended),
    ],
    indirect=True,
    ids=lambda made: made[0],
)
async def test_a_cross_encoder_scores_pairs(encoder: Encoder) -> None:
    """With token types, where the family has them."""
    model, tokenizer, query = encoder.model, encoder.tokenizer, TEXTS[0]
    has_types = model.config.model_type == "bert"

    def expected(max_length: int | None = None) -> list[float]:
        pairs = tokenizer([query] * 3, DOCUMENTS, truncation=max_length is not None,
                          max_length=max_length, return_token_type_ids=True)  # fmt: skip
        names = ["input_ids"] + (["token_type_ids"] if has_types else [])
        with torch.inference_mode():
            each = [
                model(**{name: torch.tensor([pairs[name][index]]) for name in names}).logits
                for index in range(3)
            ]
        return [float(logits.sigmoid()) for logits in each]

    async with serve(**encoder.settings()) as served:
        reply = await served.post("/score", text_1=query, text_2=DOCUMENTS)
        assert np.allclose([each["score"] for each in reply["data"]], expected(), atol=1e-5)
        ranked = await served.post(
            "/v2/rerank", query=query, documents=DOCUMENTS, truncate_prompt_tokens=18
        )
        scores = {each["index"]: each["relevance_score"] for each in ranked["results"]}
        assert np.allclose([scores[index] for index in range(3)], expected(18), atol=1e-5)
        values = [each["relevance_score"] for each in ranked["results"]]
        assert values == sorted(values, reverse=True)


LABELS = {0: "bad", 1: "good", 2: "neither"}


@of("modernbert", num_labels=3, id2label=LABELS, classifier_pooling="mean")
async def test_classes(encoder: Encoder) -> None:
    model, tokenizer = encoder.model, encoder.tokenizer
    async with serve(**encoder.settings()) as served:
        reply = await served.post("/classify", input=TEXTS)
        for text, found in zip(TEXTS, reply["data"], strict=True):
            with torch.inference_mode():
                ids = tokenizer(text, return_tensors="pt").input_ids
                probs = model(ids).logits[0].softmax(0).numpy()
            assert np.allclose(found["probs"], probs, atol=1e-5)
            assert found["label"] == LABELS[int(probs.argmax())]


@pytest.mark.extended
@of("bert")
async def test_two_processes_share_an_encoder(encoder: Encoder) -> None:
    model = encoder.model
    ids = random_texts([5, 90, 31], model.config.vocab_size)
    options = {"parallel__tensor_parallel_size": 2, "parallel__executor": "auto"}
    async with serve(**encoder.settings(**options)) as served:
        reply = await served.post("/v1/embeddings", input=ids)
        found = [each["embedding"] for each in reply["data"]]
        assert np.allclose(found, mean_states(model, ids), atol=2e-5)
