"""Pictures on a GPU: texts in float32 are those of transformers, in steps of prompts and decodes
together, and decodes are replayed from graphs."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_settings import NEEDS_TWO, TWO_RANKS, TWO_STAGES, inline_llm, worker_of

from aioinfer import SamplingParams
from aioinfer.config import MediaConfig, ModelConfig
from aioinfer.layers.backend import Backend
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.models.vision.registry import read_vision
from aioinfer.models.vision.tower import Tower
from aioinfer.worker.gpu_device import GpuDevice
from tests.vision_models import (
    MODELS,
    SOUND_MODELS,
    clip_of,
    conversation,
    picture,
    reference_output,
    save_model,
)

TOKENS = 12
PARAMS = SamplingParams(temperature=0, max_tokens=TOKENS, logprobs=0)
WIDE, HIGH = picture(200, 120, 1), picture(90, 210, 2)
TURNS: list[tuple[Any, ...]] = [
    ("A text alone",), ("What is this? ", WIDE), (HIGH, "and ", WIDE, " differ: how?"),
    ("The same twice: ", HIGH, HIGH),
]  # fmt: skip


#: Models whose attention kernels compute with heads of 64; with heads of 16 it is plain torch.
WITH_KERNELS = ("qwen3_vl", "gemma3", "mistral3", "smolvlm", "voxtral")


@pytest.mark.parametrize(
    ("name", "kernels"),
    [*((name, False) for name in MODELS), *((name, True) for name in WITH_KERNELS)],
)
def test_texts_are_transformers_s(
    name: str, kernels: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MediaConfig, "encoder_budget", 16)
    model = save_model(name, tmp_path, head_dim=64 if kernels else 16)
    with inline_llm(
        tmp_path, scheduler__max_num_batched_tokens=96, scheduler__max_num_seqs=8,
        cache__enable_prefix_caching=True, model__max_model_len=2048,
    ) as llm:  # fmt: skip
        said = [conversation(*parts, hears=name in SOUND_MODELS) for parts in TURNS]
        tower = worker_of(llm).runner.model.tower
        outputs, again = llm.chat(said, PARAMS), llm.chat(said, PARAMS)
        device = worker_of(llm).runner.device
        assert isinstance(device, GpuDevice)
        assert bool(device.graphs.decode.graphs) == kernels
        is_captured = kernels and not tower.format.is_bidirectional
        assert bool(device.graphs.pictured.graphs) == is_captured
    for parts, output, cached in zip(TURNS, outputs, again, strict=True):
        pictures = [part for part in parts if not isinstance(part, str)]
        expected = reference_output(model, name, output.prompt_token_ids, pictures, TOKENS)
        found = [each.logprob for each in output.completions[0].logprobs or ()]
        assert output.token_ids == expected.tokens
        assert found == pytest.approx(expected.logprobs, abs=2e-3)
        assert cached.token_ids == expected.tokens


@NEEDS_TWO
@pytest.mark.timeout(300)
@pytest.mark.parametrize("way", [TWO_RANKS, TWO_STAGES], ids=["two ranks", "two stages"])
@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3", "smolvlm"])
def test_two_gpus(name: str, way: dict[str, Any], tmp_path: Path) -> None:
    """Ranks of a stage divide the pictures of a step among them. The same once more, from the
    prefix cache; a near tie may show in one text, since sums are rounded differently."""
    model = save_model(name, tmp_path, head_dim=64)
    said = [conversation(*parts) for parts in TURNS]
    with inline_llm(
        tmp_path, scheduler__max_num_batched_tokens=96, scheduler__max_num_seqs=8,
        cache__enable_prefix_caching=True, model__max_model_len=2048, cache__block_size=16,
        **way,
    ) as llm:  # fmt: skip
        found = [llm.chat(said, PARAMS), llm.chat(said, PARAMS)]
    texts = [[list(output.token_ids) for output in outputs] for outputs in found]
    expected = []
    for parts, output in zip(TURNS, found[0], strict=True):
        pictures = [part for part in parts if not isinstance(part, str)]
        expected.append(
            reference_output(model, name, output.prompt_token_ids, pictures, TOKENS).tokens
        )
    for outputs in texts:
        assert sum(one == other for one, other in zip(outputs, expected, strict=True)) >= 3
    assert sum(output.num_cached_tokens for output in found[1]) > 0


def make_tower(name: str, folder: Path, dtype: torch.dtype) -> tuple[Tower, list[Any]]:
    """Returns a tower on the GPU, and what it takes of a picture or clip."""
    model = save_model(name, folder)
    vision = read_vision(folder, ModelConfig(path=""), MediaConfig())
    assert vision is not None
    processed = vision.format.process(clip_of(WIDE) if name in SOUND_MODELS else WIDE)
    tensors = {key.removeprefix("model."): value for key, value in model.state_dict().items()}
    tower = vision.tower(Backend.of(torch.device("cuda"), dtype, ParallelGroup.single()), 64)
    for key, shard in tower.weight_shards():
        if key in tensors:
            shard.destination.copy_(tensors[key])
    pixels = torch.from_numpy(processed.pixels.copy()).cuda()
    return tower, [[pixels, pixels], [processed.grid, processed.grid]]


@pytest.mark.parametrize("name", MODELS)
def test_a_tower_does_not_wait_for_the_gpu(name: str, tmp_path: Path) -> None:
    tower, given = make_tower(name, tmp_path, torch.bfloat16)
    expected = tower.encode(*given)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        found = tower.encode(*given)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert found.equal(expected)


def test_towers_in_bfloat16_are_near_float32(tmp_path: Path) -> None:
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        tower, given = make_tower("qwen3_vl", tmp_path, dtype)
        found.append(tower.encode(*given).float())
    exact, near = found
    assert torch.nn.functional.cosine_similarity(exact, near, dim=1).min() > 0.99
