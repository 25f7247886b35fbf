"""docs/adding-a-family.md, followed literally: its file and its lines make a family that computes
what transformers does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import aioinfer.models
from aioinfer.models import registry
from aioinfer.models.decoder import DecoderModel
from tests.paged_model import PagedModel, load_model
from tests.test_models import SINGLE, TEXTS, VOCAB, assert_close, reference_logits, reference_model
from tests.tiny_models import tiny_model

PAGE = (Path(__file__).parent.parent / "docs" / "adding-a-family.md").read_text("utf-8")


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(PAGE.splitlines()) <= 80
    file, line, family = re.findall(r"```(?:python)?\n(.*?)```", PAGE, re.DOTALL)
    name = re.findall(r"`aioinfer/models/(\w+)\.py`", PAGE)[0]
    assert not (Path(registry.__file__).parent / f"{name}.py").exists()
    (tmp_path / f"{name}.py").write_text(file, "utf-8")
    monkeypatch.setattr(aioinfer.models, "__path__", [*aioinfer.models.__path__, str(tmp_path)])
    monkeypatch.setattr(registry, "MODULES", [*registry.MODULES, *eval(f"[{line}]")])
    assert eval(f"[{family}]") == [name]
    fields = {"sliding_window": 9, "num_key_value_heads": 2}
    folder = tiny_model(name, tmp_path / "model", vocab_size=VOCAB, **fields)
    theirs = reference_model(folder)
    assert type(theirs).__name__ in registry.families()
    expected = reference_logits(theirs)
    assert len(set(torch.cat(expected).argmax(-1).tolist())) > 25
    model = load_model(folder, SINGLE)
    assert isinstance(model, DecoderModel)
    assert_close(PagedModel(model, 16).run_at_random(TEXTS, longest=12, seed=0), expected)
