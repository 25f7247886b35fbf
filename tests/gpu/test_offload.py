"""Layers whose weights are on the host, on a GPU: copies on a stream of their own, in CUDA graphs
and out of them, give the texts of a model that has all of its weights on the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aioinfer import LLM, SamplingParams
from aioinfer.layers.backend import Backend
from tests.gpu.engine_settings import WAYS, engine_settings
from tests.gpu.random_models import random_model, random_prompts

VOCAB_SIZE = 4099
FIELDS: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "eos_token_id": None, "max_position_embeddings": 1024,
    "head_dim": 64, "num_hidden_layers": 9, "hidden_size": 512, "intermediate_size": 1024,
}  # fmt: skip
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.9, max_tokens=24, ignore_eos=True, seed=7),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("qwen3"), **FIELDS)


def texts_of(llm: LLM) -> list[list[int]]:
    prompts = [{"prompt_token_ids": each} for each in random_prompts((5, 40, 300), VOCAB_SIZE)]
    alone = [llm.generate([prompt], params)[0] for params in PARAMS for prompt in prompts]
    return [output.token_ids for output in alone]


def compare(folder: Path, **settings: Any) -> None:
    found = []
    for nbytes in (0.0, 1e-6):
        merged = engine_settings(model__offload_gb=nbytes, **settings)
        with LLM(str(folder), settings=merged, progress=False) as llm:
            found.append(texts_of(llm))
            has_host = "of weights on the host" in llm.frontend.engines[0].report.implementation
            assert has_host == (nbytes > 0)
    assert found[0] == found[1]


@pytest.mark.parametrize("settings", WAYS)
def test_texts_are_the_same(folder: Path, settings: dict[str, Any]) -> None:
    compare(folder, **settings)


@pytest.fixture
def in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Settings with which both models have the same kernels, and steps of as many rows: their
    rounding changes texts."""
    make = Backend.of

    def of(*args: Any, **kwargs: Any) -> Backend:
        backend = make(*args, **kwargs)
        backend.pdl = False
        return backend

    monkeypatch.setattr(Backend, "of", of)
    return {
        "model__dtype": "bfloat16",
        "parallel__executor": "inline",
        "speculation__method": "none",
    }


@pytest.mark.parametrize("more", [{}, *({"model__quantization": q} for q in ("fp8", "int8"))])
def test_in_bfloat16_and_quantized(
    folder: Path, in_bfloat16: dict[str, Any], more: dict[str, Any]
) -> None:
    compare(folder, **in_bfloat16 | more)


def test_experts(tmp_path: Path, in_bfloat16: dict[str, Any]) -> None:
    fields = FIELDS | {"moe_intermediate_size": 128}
    compare(random_model(tmp_path, family="qwen3_moe", **fields), **in_bfloat16)


def test_drafts(folder: Path) -> None:
    compare(folder, speculation__method="ngram", speculation__max_draft_tokens=3)


@pytest.mark.parametrize("sleeps", [False, True])
def test_sleep_and_new_weights(folder: Path, tmp_path: Path, sleeps: bool) -> None:
    other = random_model(tmp_path, seed=1, **FIELDS)
    plain = engine_settings()
    with LLM(str(other), settings=plain, progress=False) as llm:
        new = texts_of(llm)
    settings = engine_settings(model__offload_gb=1e-6, model__sleep_mode=sleeps)
    with LLM(str(folder), settings=settings, progress=False) as llm:
        old = texts_of(llm)
        assert old != new
        for level in (1, 2) if sleeps else ():
            llm.sleep(level)
            llm.wake_up()
            assert texts_of(llm) == old
        llm.update_weights(other)
        assert texts_of(llm) == new
        if sleeps:
            llm.sleep()
            llm.wake_up()
            assert texts_of(llm) == new
