"""How a model's folder says that it pools, and what becomes of pooled states."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aioinfer.config import PoolingConfig
from aioinfer.engine.pooling_head import ClassificationHead, DenseLayer
from aioinfer.engine.served_model import Pooling, cosine_similarity
from aioinfer.errors import ConfigError, RequestError


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
        (
            {"modules.json": [*MODULES, module("Dense", "3_Dense")]},
            "3_Dense has no model",
        ),
        ({"modules.json": [*MODULES, module("LSTM", "3_LSTM")]}, "LSTM"),
    ],
)
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
