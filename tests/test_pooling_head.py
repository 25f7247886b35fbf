"""Classification heads against transformers, and dense modules of sentence-transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from aioinfer.config import PoolingConfig
from aioinfer.engine.pooling_head import read_dense_modules, read_head
from aioinfer.engine.served_model import Pooling
from aioinfer.errors import ConfigError
from tests.encoder_models import FAMILIES, random_texts, tiny_encoder


@pytest.mark.parametrize("family", FAMILIES)
def test_heads_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    fields = {"classifier_bias": True, "norm_bias": True} if family == "modernbert" else {}
    labels = dict(enumerate("abc"))
    model = tiny_encoder(family, tmp_path, num_labels=3, id2label=labels, **fields)
    head = read_head(tmp_path)
    assert head is not None
    assert head.labels == ("a", "b", "c")
    (text,) = random_texts([9], model.config.vocab_size)
    ids = torch.tensor([text])
    with torch.inference_mode():
        state = getattr(model, model.base_model_prefix)(ids).last_hidden_state[0, 0]
        expected = model(ids).logits[0]
    assert head.pooling == "cls"
    assert np.allclose(head.logits(state.numpy()), expected, atol=1e-5)
    assert np.allclose(head.probabilities(state.numpy()), expected.softmax(0), atol=1e-5)
    both = np.stack([state.numpy(), np.zeros(64, np.float32)])
    assert np.allclose(head.logits(both)[0], expected, atol=1e-5)


def changed(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


def test_activations(tmp_path: Path) -> None:
    tiny_encoder("bert", tmp_path, num_labels=1)
    identity = {"activation_fn": "torch.nn.modules.linear.Identity"}
    for fields, activation in (
        ({}, "sigmoid"),
        ({"sentence_transformers": identity}, "identity"),
        ({"sentence_transformers": None}, "sigmoid"),
    ):
        changed(tmp_path, **fields)
        head = read_head(tmp_path)
        assert head is not None
        assert head.activation == activation
    tiny_encoder("bert", tmp_path, num_labels=2, problem_type="multi_label_classification")
    head = read_head(tmp_path)
    assert head is not None
    assert head.activation == "sigmoid"
    assert head.probabilities(np.zeros(64, np.float32)).shape == (2,)


def test_a_head_that_is_not_known(tmp_path: Path) -> None:
    tiny_encoder("modernbert", tmp_path)
    changed(tmp_path, classifier_activation="silu")
    with pytest.raises(ConfigError, match="classifier_activation 'silu'"):
        read_head(tmp_path)
    changed(tmp_path, architectures=["ModernBertModel"])
    assert read_head(tmp_path) is None


def test_dense_modules(tmp_path: Path) -> None:
    """They are computed before an embedding is cut and normalised."""
    weight, bias = torch.randn(5, 8), torch.randn(5)
    place = tmp_path / "2_Dense"
    place.mkdir()
    save_file({"linear.weight": weight, "linear.bias": bias}, place / "model.safetensors")
    config = {"activation_function": "torch.nn.modules.activation.Tanh"}
    (place / "config.json").write_text(json.dumps(config))
    modules = [
        {"type": "sentence_transformers.models.Transformer", "path": ""},
        {"type": "sentence_transformers.models.Dense", "path": "2_Dense"},
        {"type": "sentence_transformers.models.Normalize", "path": "3"},
    ]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    pooling = Pooling.load(tmp_path, PoolingConfig(), "mean")
    assert (pooling.kind, pooling.embedding_size(8)) == ("mean", 5)
    state = torch.randn(8)
    expected = torch.tanh(weight @ state + bias)[:3]
    expected = (expected / expected.norm()).numpy()
    assert np.allclose(pooling.embedding(state.numpy(), 3), expected, atol=1e-6)
    (place / "config.json").write_text('{"activation_function": "a.b.Mish"}')
    with pytest.raises(ConfigError, match="'mish'"):
        read_dense_modules(tmp_path, modules)
    (place / "config.json").write_text(json.dumps(config))
    (place / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"has no model\.safetensors"):
        read_dense_modules(tmp_path, modules)
