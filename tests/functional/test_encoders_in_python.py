"""Encoders from Python: texts that are cut, and pairs for a cross-encoder, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from aioinfer import LLM, AsyncLLM
from aioinfer.errors import RequestError
from tests.encoder_models import tiny_encoder

QUERY = "the river ran"
DOCUMENTS = ["rivers run", "the towns of old are many", "q"]
LONG = "the old town, under five bridges " * 40
SETTINGS: dict[str, Any] = {"parallel.cpu_threads": 1, "parallel.executor": "inline"}


@torch.inference_mode()
def expected_scores(folder: Path, model: Any) -> list[float]:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    pairs = tokenizer([QUERY] * 3, DOCUMENTS, return_token_type_ids=True)
    rows = zip(pairs.input_ids, pairs.token_type_ids, strict=True)
    logits = [
        model(torch.tensor([ids]), token_type_ids=torch.tensor([types])).logits
        for ids, types in rows
    ]
    return [float(each.sigmoid()) for each in logits]


@torch.inference_mode()
def expected_vector(folder: Path, model: Any, length: int) -> np.ndarray:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    ids = tokenizer(LONG, truncation=True, max_length=length).input_ids
    mean = model.bert(torch.tensor([ids])).last_hidden_state[0].mean(0)
    return (mean / mean.norm()).numpy()


def test_llm(tmp_path: Path) -> None:
    model = tiny_encoder("bert", tmp_path, num_labels=1)
    with LLM(str(tmp_path), settings=SETTINGS, progress=False) as llm:
        assert np.allclose(llm.score(QUERY, DOCUMENTS), expected_scores(tmp_path, model), atol=1e-5)
        with pytest.raises(RequestError, match="maximum context length"):
            llm.embed(LONG)
        with pytest.raises(RequestError, match="more than this model's maximum"):
            llm.embed(LONG, truncate_prompt_tokens=513)
        for kept, length in ((12, 12), (-1, 512)):
            (found,) = llm.embed(LONG, truncate_prompt_tokens=kept)
            assert np.allclose(found, expected_vector(tmp_path, model, length), atol=2e-5)
        with pytest.raises(RequestError, match="cannot generate"):
            llm.generate(QUERY)


@pytest.mark.asyncio
async def test_async_llm(encoder: tuple[Path, list[float], np.ndarray]) -> None:
    folder, scores, vector = encoder
    async with await AsyncLLM.launch(str(folder), settings=SETTINGS, progress=False) as llm:
        found = [await llm.score(QUERY, document) for document in DOCUMENTS]
        assert np.allclose(found, scores, atol=1e-5)
        assert np.allclose(await llm.embed(LONG, truncate_prompt_tokens=12), vector, atol=2e-5)
        states = await llm.encode([2, 9, 10, 3], "all")
        assert states.shape == (4, 64)


@pytest.fixture
def encoder(tmp_path: Path) -> tuple[Path, list[float], np.ndarray]:
    """A cross-encoder, its scores, and the vector of the first tokens of a long text."""
    model = tiny_encoder("bert", tmp_path, num_labels=1)
    return tmp_path, expected_scores(tmp_path, model), expected_vector(tmp_path, model, 12)
