"""Pictures on a GPU: texts in float32 are those of transformers, in steps of prompts and decodes
together, and decodes are replayed from graphs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_settings import inline_llm, worker_of

from aioinfer import SamplingParams
from aioinfer.config import MediaConfig
from aioinfer.worker.gpu_device import GpuDevice
from tests.vision_models import (
    MODELS,
    SOUND_MODELS,
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


def without_waiting(call: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a call that fails where the host would wait for the GPU."""

    def checked(*arguments: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return call(*arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return checked


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
        monkeypatch.setattr(tower, "encode", without_waiting(tower.encode))
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


def test_towers_in_bfloat16_are_near_float32(tmp_path: Path) -> None:
    from aioinfer.config import ModelConfig
    from aioinfer.layers.backend import Backend
    from aioinfer.layers.parallel import ParallelGroup
    from aioinfer.models.vision.registry import read_vision

    model = save_model("qwen3_vl", tmp_path)
    vision = read_vision(tmp_path, ModelConfig(path=""), MediaConfig())
    assert vision is not None
    pictures = [vision.format.process(each) for each in (WIDE, HIGH, HIGH)]
    tensors = {name.removeprefix("model."): value for name, value in model.state_dict().items()}
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        device = torch.device("cuda")
        backend = Backend.of(device, dtype, ParallelGroup.single())
        tower = vision.tower(backend, 64)
        for name, shard in tower.weight_shards():
            shard.destination.copy_(tensors[name])
        pixels = [torch.from_numpy(each.pixels.copy()).to(device) for each in pictures]
        found.append(tower.encode(pixels, [each.grid for each in pictures]).float())
    exact, near = found
    assert torch.nn.functional.cosine_similarity(exact, near, dim=1).min() > 0.99
