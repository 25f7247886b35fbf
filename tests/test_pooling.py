"""How a model's folder says that it pools, and what becomes of pooled states."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from aioinfer.api.decoding import MAX_PROMPTS, MAX_TOKEN_IDS, decode, decode_large
from aioinfer.api.openai.pooling import EmbeddingRequest
from aioinfer.api.openai.scoring import RerankRequest, ScoreRequest
from aioinfer.config import PoolingConfig
from aioinfer.engine.pooling_head import (
    ClassificationHead,
    DenseLayer,
    read_dense_modules,
    read_head,
)
from aioinfer.engine.served_model import Pooling, cosine_similarity
from aioinfer.errors import ConfigError, RequestError
from tests.encoder_models import FAMILIES, random_texts, tiny_encoder


def load(folder: Path, files: dict[str, Any], **config: Any) -> Pooling:
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    return Pooling.load(folder, PoolingConfig(**config))


def module(kind: str, path: str = "") -> dict[str, str]:
    return {"type": f"sentence_transformers.models.{kind}", "path": path}


CLS = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
MODULES = [module("Transformer"), module("Pooling", "2_Own")]


@pytest.mark.parametrize(
    ("files", "kind", "normalize"),
    [
        ({}, "last", True),
        ({"1_Pooling/config.json": CLS}, "cls", True),
        ({"1_Pooling/config.json": {"pooling_mode": "lasttoken"}}, "last", True),
        ({"modules.json": MODULES, "2_Own/config.json": CLS}, "cls", False),
        ({"modules.json": [*MODULES, module("Normalize", "3")]}, "last", True),
    ],
)
def test_what_the_folder_says(
    tmp_path: Path, files: dict[str, Any], kind: str, normalize: bool
) -> None:
    pooling = load(tmp_path, files)
    assert (pooling.kind, pooling.normalize, pooling.obstacle) == (kind, normalize, None)
    assert pooling.params().pooling == kind
    configured = load(tmp_path, files, type="mean")
    assert (configured.kind, configured.normalize) == ("mean", normalize)


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({"1_Pooling/config.json": {"pooling_mode_max_tokens": True}}, "pooling_mode_max_tokens"),
        ({"1_Pooling/config.json": CLS | {"pooling_mode_lasttoken": True}}, " and "),
        ({"1_Pooling/config.json": CLS | {"include_prompt": False}}, "include_prompt"),
        ({"modules.json": [*MODULES, module("Dense", "3_Dense")]}, "3_Dense has no model"),
        ({"modules.json": [*MODULES, module("LSTM", "3_LSTM")]}, "LSTM"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(
    tmp_path: Path, files: dict[str, Any], named: str
) -> None:
    pooling = load(tmp_path, files)
    with pytest.raises(RequestError, match=named):
        pooling.params()
    assert pooling.params("mean").pooling == "mean"
    assert load(tmp_path, files, type="last").params().pooling == "last"


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"modules\.json must hold a list"):
        load(tmp_path, {"modules.json": {}})
    (tmp_path / "modules.json").write_text("[")
    with pytest.raises(ConfigError, match=r"modules\.json cannot be read"):
        load(tmp_path, {})


def test_prompts(tmp_path: Path) -> None:
    prompts = {"query": "Q: ", "passage": "P: "}
    own = {"prompts": prompts, "default_prompt_name": "passage"}
    pooling = load(tmp_path, {"config_sentence_transformers.json": own})
    assert [pooling.prompt(name) for name in (None, "query")] == ["P: ", "Q: "]
    assert pooling.prompt_of("document", "passage") == "P: "
    assert pooling.prompt_of("web") == "P: "
    with pytest.raises(RequestError, match="this model has query, passage") as caught:
        pooling.prompt("web")
    assert caught.value.param == "prompt_name"


def test_embeddings_of_states() -> None:
    state = np.array([3, 4, 12], np.float32)
    normalized, plain = Pooling(), Pooling(normalize=False)
    assert np.allclose(normalized.embedding(state), state / 13)
    assert np.allclose(normalized.embedding(state, 2), [0.6, 0.8])
    assert plain.embedding(state, 2).tolist() == [3, 4]
    assert np.allclose(plain.embedding(state, normalize=True), state / 13)
    assert normalized.embedding(np.zeros(3, np.float32)).tolist() == [0, 0, 0]
    assert np.isclose(cosine_similarity(state, 2 * state), 1)
    assert cosine_similarity(np.zeros(3, np.float32), state) == 0


def test_probabilities() -> None:
    weight = np.array([[1, 0], [0, 1], [0, 0]], np.float32)
    head = ClassificationHead((DenseLayer(weight),), ("a", "b", "c"))
    found = head.probabilities(np.array([100, 0], np.float32))
    assert found.argmax() == 0
    assert np.isclose(found.sum(), 1)
    single = ClassificationHead((DenseLayer(weight[:1]),), ("a",), activation="sigmoid")
    assert single.probabilities(np.array([0, 5], np.float32)).tolist() == [0.5]


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


def embedding(value: Any) -> EmbeddingRequest:
    return decode(json.dumps({"input": value}).encode(), EmbeddingRequest)


@pytest.mark.parametrize(
    ("value", "inputs"),
    [
        ("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1, 2], [3]], [[1, 2], [3]]),
        (["a", [1]], ["a", [1]]), ([1, "a"], [[1, "a"]]),
    ],
)  # fmt: skip
def test_inputs_one_by_one(value: Any, inputs: list[Any]) -> None:
    assert embedding(value).prompts() == inputs


@pytest.mark.parametrize("value", [[], [1, [1]], ["a"] * (MAX_PROMPTS + 1), [-1], None])
def test_wrong_inputs(value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        embedding(value)
    assert str(caught.value.param).startswith("input")


def test_long_lists_of_token_ids() -> None:
    value = [list(range(20_000)), [5] * 40_000]
    raw = json.dumps({"input": value, "dimensions": 8}).encode()
    assert decode_large(raw, EmbeddingRequest) == decode(raw, EmbeddingRequest)
    with pytest.raises(RequestError, match="token ids") as caught:
        decode_large(b'{"input":[' + b"1," * MAX_TOKEN_IDS + b"1]}", EmbeddingRequest)
    assert caught.value.param == "input"


def test_texts_of_both_sides() -> None:
    raw = json.dumps({"text_1": "a", "text_2": ["b", "c"]}).encode()
    assert decode(raw, ScoreRequest).sides() == {"text_1": ["a"], "text_2": ["b", "c"]}
    documents = {"query": "a", "documents": ["b", {"text": "c"}]}
    found = decode(json.dumps(documents).encode(), RerankRequest).sides()
    assert found == {"query": ["a"], "documents": ["b", "c"]}
