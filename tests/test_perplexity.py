"""The perplexity that the script prints is that of transformers' logits."""

from __future__ import annotations

import argparse
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import perplexity
from tests.real_tokenizers import smollm2_folder
from tests.tiny_models import tiny_model

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path: Path, tokenizer_cache: Path) -> Path:
    folder = tiny_model("llama", tmp_path, vocab_size=49_152)
    for file in smollm2_folder(tokenizer_cache).glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


def test_windows_are_scored_as_in_transformers(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = argparse.Namespace(tokens=50, window=20)
    settings = [f"model.path={folder}", "parallel.executor=inline", "model.dtype=float32"]
    found = perplexity.measure(settings, options)
    ids = AutoTokenizer.from_pretrained(folder)(perplexity.reference_text())["input_ids"][:50]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = []
    for start in (0, 20, 40):
        window = torch.tensor([ids[start : start + 20]])
        with torch.inference_mode():
            logprobs = model(window).logits[0, :-1].double().log_softmax(-1)
        expected.append(logprobs.gather(1, window[0, 1:, None])[:, 0].numpy())
    np.testing.assert_allclose(found, np.concatenate(expected), atol=1e-4)
    perplexity.show(["as it is", "worse"], [found, found - 0.5])
    shown = capsys.readouterr().out
    assert f"{math.exp(-found.mean()):.4f}" in shown
    assert f"{math.exp(0.5):.5f}" in shown
    assert f"{math.exp(0.5**2 / 2):.5f}" in shown
