"""Layers whose weights are on the host compute what they compute on the device, whenever copies are
made that nothing forbids: as soon as they are begun, or as late as a layer waits for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from aioinfer import LLM, SamplingParams
from aioinfer.config import ModelConfig
from aioinfer.errors import ConfigError
from aioinfer.layers import offload
from aioinfer.layers.backend import Backend, Offload
from aioinfer.layers.offload import choose_layers
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.models.decoder import DecoderModel
from aioinfer.models.registry import build_model
from aioinfer.models.weight_update import WeightUpdate
from aioinfer.worker.rank_model import RankModel
from tests.cpu_transfers import CpuTransfers
from tests.paged_model import CPU, PagedModel
from tests.tiny_models import tiny_model

PROMPT = [7, 3, 250, 41, 9, 90]


@pytest.fixture(autouse=True)
def small_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of tiny models count as large, but for norms and counters."""
    monkeypatch.setattr(offload, "MIN_BYTES", 512)


def test_the_fewest_layers_are_chosen_and_spread() -> None:
    assert choose_layers([10] * 14, 1) == [3, 7, 11]
    assert choose_layers([10] * 14, 60) == [2, 4, 6, 8, 10, 12]
    assert choose_layers([10] * 14, 120) == [*range(1, 13)]
    for sizes, nbytes in (([10] * 14, 121), ([10] * 4, 10)):
        with pytest.raises(ConfigError, match=r"a worker's \d+ layers have"):
            choose_layers(sizes, nbytes)


def load(
    folder: Path, transfers: CpuTransfers | None = None, rank: int = 0, size: int = 1,
    **options: Any,
) -> DecoderModel:  # fmt: skip
    group = ParallelGroup(rank, size) if size > 1 else ParallelGroup.single()
    backend = Backend(CPU, torch.bfloat16, group)
    if transfers is not None:
        backend.offload = Offload(1, transfers)
    with torch.inference_mode():
        model = build_model(folder, backend, ModelConfig(path="", **options))
        model.load(folder, "auto", 0, lambda done, total: None)
    assert isinstance(model, DecoderModel)
    return model


def logits_of(model: DecoderModel) -> torch.Tensor:
    paged = PagedModel(model, 4, torch.bfloat16)
    steps = [paged.step({0: PROMPT}), paged.step({0: [11], 1: PROMPT[:3]}), paged.step({0: [4]})]
    return torch.cat([logits for step in steps for logits in step.values()])


LAYERS = {"num_hidden_layers": 7}
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dense": ("qwen3", {}, {}),
    "float8": ("qwen3", {}, {"quantization": "fp8"}),
    "experts": ("deepseek_v3", {}, {}),
    "biased experts": ("gpt_oss", {}, {}),
    "states": ("lfm2", {"layer_types": ["conv", "full_attention"] * 3 + ["conv"]}, {}),
    "shared keys": ("gemma3n_text", {"num_hidden_layers": 5}, {}),
}


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_the_same(tmp_path: Path, kind: str, is_late: bool) -> None:
    family, fields, options = KINDS[kind]
    folder = tiny_model(family, tmp_path, dtype=torch.bfloat16, **LAYERS | fields)
    transfers = CpuTransfers(is_late=is_late)
    plain, model = load(folder, **options), load(folder, transfers, **options)
    assert model.offloaded is not None
    assert model.offloaded.nbytes > model.offloaded.slot_bytes
    assert model.weights_bytes == (
        plain.weights_bytes - model.offloaded.nbytes + model.offloaded.slot_bytes
    )
    torch.testing.assert_close(logits_of(model), logits_of(plain), rtol=0, atol=0)
    assert transfers.count == 3 * 3
    assert "of weights on the host" in model.describe(4)


def test_each_rank_has_its_shard(tmp_path: Path) -> None:
    folder = tiny_model("qwen3", tmp_path, **LAYERS)
    whole, *ranks = (load(folder, CpuTransfers(), *rank) for rank in ((0, 1), (0, 2), (1, 2)))
    assert whole.offloaded is not None
    for rank in ranks:
        assert rank.offloaded is not None
        assert rank.offloaded.nbytes == whole.offloaded.nbytes // 2


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("quantization", ["auto", "fp8"])
def test_new_weights_go_to_the_host(tmp_path: Path, quantization: str, is_late: bool) -> None:
    first, second = (
        tiny_model("qwen3", tmp_path / str(seed), seed=seed, **LAYERS) for seed in (0, 1)
    )
    given = {"quantization": quantization}
    model = load(first, CpuTransfers(is_late=is_late), **given)
    before, expected = (logits_of(load(folder, **given)) for folder in (first, second))
    with torch.inference_mode():
        WeightUpdate(model).read(second)
    torch.testing.assert_close(logits_of(model), expected, rtol=0, atol=0)
    with torch.inference_mode():
        update = WeightUpdate(model)
        for each in load_file(first / "model.safetensors").items():
            update.take([each])
        update.finish()
    torch.testing.assert_close(logits_of(model), before, rtol=0, atol=0)


SETTINGS: dict[str, Any] = {
    "model.tokenizer": "none", "model.dtype": "bfloat16", "model.offload_gb": 1e-6,
    "parallel.device": "cpu", "parallel.executor": "inline", "parallel.cpu_threads": 1,
    "cache.block_size": 4, "cache.num_blocks": 60, "scheduler.max_num_batched_tokens": 32,
    "speculation.method": "ngram", "speculation.max_draft_tokens": 2,
}  # fmt: skip
PARAMS = [
    SamplingParams(temperature=temperature, max_tokens=12, ignore_eos=True, seed=5)
    for temperature in (0.0, 1.0)
]


def texts_of(llm: LLM) -> list[list[int]]:
    prompts = [PROMPT * 4, PROMPT[2:], PROMPT[:2]]
    outputs = [output for params in PARAMS for output in llm.generate(prompts, params)]
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("quantization", ["auto", "fp8"])
def test_texts_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantization: str
) -> None:
    """With drafts, after new weights, and after sleep."""
    settings = SETTINGS | {"model.quantization": quantization}
    first, second = (
        tiny_model("qwen3", tmp_path / str(seed), seed=seed, **LAYERS) for seed in (0, 1)
    )
    expected = []
    for folder in (first, second):
        plain = settings | {"model.offload_gb": 0.0}
        with LLM(str(folder), settings=plain, progress=False) as llm:
            expected.append(texts_of(llm))
    transfers = CpuTransfers(is_late=True)
    monkeypatch.setattr(RankModel, "_make_transfers", lambda made: transfers)
    with LLM(str(first), settings=settings, progress=False) as llm:
        assert texts_of(llm) == expected[0]
        assert transfers.count > 0
        assert "of weights on the host" in llm.frontend.engines[0].report.implementation
        llm.update_weights(second)
        assert texts_of(llm) == expected[1]
        llm.sleep(2)
        llm.wake_up()
        assert texts_of(llm) == expected[1]


def test_where_nothing_can_be_offloaded(tmp_path: Path) -> None:
    folder = tiny_model("qwen3", tmp_path, **LAYERS)
    with pytest.raises(ConfigError, match=r"on a CPU all weights are in memory of the host"):
        LLM(str(folder), settings=SETTINGS, progress=False)
