"""Heads that predict further tokens: their outputs are those of transformers' layer between the
modules of the checkpoint."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from aioinfer.config_sections import LoraConfig
from aioinfer.errors import ConfigError
from aioinfer.features.adapters.layers.slots import AdapterSlots
from aioinfer.layers.backend import Backend
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.models.decoder import DecoderModel
from aioinfer.models.mtp import find_projection
from aioinfer.models.registry import build_model
from tests.mtp_models import LAYOUTS, mtp_model
from tests.paged_model import CPU, PagedModel, model_options
from tests.tiny_models import tiny_model


def load(folder: Path) -> DecoderModel:
    """Returns the model with its head."""
    backend = Backend(CPU, torch.float32, ParallelGroup(0, 1), wants_mtp=True)
    model = build_model(folder, backend, model_options())
    assert isinstance(model, DecoderModel)
    model.load(folder, "auto", 0, lambda done, total: None)
    return model


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_head_computes_what_transformers_does(name: str, tmp_path: Path) -> None:
    """A text in chunks; then the head's own output in the place of hidden states."""
    folder, reference = mtp_model(name, tmp_path)
    model = load(folder)
    head = model.mtp
    assert head is not None
    assert model.embedding is not None
    rng = random.Random(2)
    text = [rng.randrange(3, 500) for _ in range(24)]
    embedded = model.embedding(torch.tensor(text[1:], dtype=torch.int32)).hidden
    paged = PagedModel(model, 16)
    hidden = torch.randn(23, model.hidden_size, generator=torch.Generator().manual_seed(1))
    outputs = []
    with torch.inference_mode():
        for start, end in ((0, 9), (9, 10), (10, 23)):
            step = paged.prepare({0: text[start:end]})
            outputs.append(head(hidden[start:end], embedded[start:end], step))
    output = torch.cat(outputs)
    expected = reference(hidden, embedded)
    assert (output - expected).abs().max() < 2e-5 * expected.std()


def test_adapters_do_not_change_the_head(tmp_path: Path) -> None:
    """A drafter's passes have other tokens than the step whose tokens are sorted by adapter."""
    folder, _ = mtp_model("glm4_moe", tmp_path)
    backend = Backend(CPU, torch.float32, ParallelGroup(0, 1), wants_mtp=True)
    backend.extension = slots = AdapterSlots(LoraConfig(max_adapters=1, max_rank=4), backend)
    build_model(folder, backend, model_options())
    assert backend.extension is slots
    modules = {module for product in slots.products for module in product.modules}
    assert "model.layers.1.self_attn.q_proj" in modules
    assert not any("layers.2." in module for module in modules)


def test_whether_a_checkpoint_has_a_head(tmp_path: Path) -> None:
    plain = tiny_model("qwen2", tmp_path / "plain")
    assert find_projection(plain) is None
    for name in LAYOUTS:
        assert find_projection(mtp_model(name, tmp_path / name)[0]) is not None


def test_a_model_without_a_head_cannot_have_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs a model with a head"):
        load(tiny_model("llama", tmp_path / "llama"))
    with pytest.raises(ConfigError, match=r"missing \(mtp\."):
        load(tiny_model("qwen3_next", tmp_path / "qwen3_next"))
