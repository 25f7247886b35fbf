"""Adapters on a GPU: products of tokens with several adapters, and texts in graphs, which are those
of a model whose weights have the adapter added."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from aioinfer.kernels.adapters import AdapterRoom, AdapterTiles, add_adapters, sort_by_adapter
from engine_settings import engine_settings
from random_models import random_model
from safetensors.torch import load_file, save_file

from aioinfer import LLM, SamplingParams
from aioinfer.executor.inline import InlineExecutor
from aioinfer.worker.gpu_device import GpuDevice
from tests.adapter_files import write_adapter

GPU = torch.device("cuda")
RANKS = {"first": 8, "second": 16, "third": 3}


@pytest.mark.parametrize("tokens", [1, 8, 65, 256, 3000])
@pytest.mark.parametrize(("width", "out", "modules"), [(4096, 6144, 3), (12288, 4096, 1)])
def test_products_of_half_precision(tokens: int, width: int, out: int, modules: int) -> None:
    generator = torch.Generator(GPU).manual_seed(tokens)

    def random_tensor(*shape: int) -> torch.Tensor:
        made = torch.randn(shape, generator=generator, device=GPU)
        return (made / shape[-1] ** 0.5).to(torch.bfloat16)

    rank = 16
    ranks = torch.tensor([rank, 5, rank], dtype=torch.int32, device=GPU)
    first, second = random_tensor(3, modules * rank, width), random_tensor(3, out, modules * rank)
    x, y = random_tensor(tokens, width), random_tensor(tokens, out)
    adapters = torch.randint(-1, 3, (tokens,), generator=generator, device=GPU, dtype=torch.int32)
    expected = y.float()
    for slot in range(3):
        used, rows = modules * int(ranks[slot]), (adapters == slot).nonzero()[:, 0]
        shrunk = x[rows].float() @ first[slot, :used].float().t()
        expected[rows] += shrunk @ second[slot, :, :used].float().t()
    tiles = AdapterTiles.empty(tokens, 3, GPU)
    sort_by_adapter(adapters, tiles, 3)
    room = AdapterRoom.empty(tokens, 3, modules * rank, torch.bfloat16, GPU)
    add_adapters(x, first, second, y, tiles, ranks, modules, room, pdl=True)
    torch.testing.assert_close(y.float(), expected, atol=0.03, rtol=0.02)


def make_adapter(folder: Path, model: Path, rank: int) -> tuple[Path, dict[str, torch.Tensor]]:
    """Saves a random adapter of all layers; returns it, and the model's weights with it added."""
    merged = load_file(model / "model.safetensors")
    modules = {
        name.removesuffix(".weight"): (tensor.shape[0], tensor.shape[1])
        for name, tensor in merged.items()
        if name.endswith("_proj.weight")
    }
    for module, added in write_adapter(folder, modules, rank=rank).items():
        merged[f"{module}.weight"] = merged[f"{module}.weight"] + added
    return folder, merged


def test_texts_are_those_of_merged_weights(tmp_path: Path) -> None:
    """Prompts and decodes of all adapters and none in the same steps, in graphs, in float32."""
    (tmp_path / "model").mkdir()
    model = random_model(
        tmp_path / "model", vocab_size=4001, head_dim=64, hidden_size=256, intermediate_size=512,
        num_hidden_layers=4, initializer_range=0.05, eos_token_id=None,
    )  # fmt: skip
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 4000) for _ in range(rng.randint(1, 90))] for _ in range(24)]
    names = [[None, *RANKS][number % 4] for number in range(len(prompts))]
    adapters, expected = {}, {}
    for name, rank in RANKS.items():
        adapters[name], merged = make_adapter(tmp_path / name, model, rank)
        other = tmp_path / f"merged {name}"
        other.mkdir()
        (other / "config.json").write_bytes((model / "config.json").read_bytes())
        save_file(merged, other / "model.safetensors", {"format": "pt"})
        expected[name] = generate(other, prompts, [None] * len(prompts))
    expected[None] = generate(model, prompts, [None] * len(prompts))
    settings = {"lora.adapters": {name: str(path) for name, path in adapters.items()}}
    for few in ({}, {"lora.max_adapters": 1}):
        found = generate(model, prompts, names, **settings, **few)
        wanted = [expected[name][number] for number, name in enumerate(names)]
        # a near tie may show in a request: sums are rounded differently
        same = sum(one == other for one, other in zip(found, wanted, strict=True))
        assert same >= len(wanted) - 2


def generate(
    model: Path, prompts: list[list[int]], names: list[str | None], **settings: Any
) -> list[list[int]]:
    """Returns greedy texts."""
    given = (
        engine_settings(
            parallel__executor="inline", model__skip_tokenizer=True, model__max_model_len=512
        )
        | settings
    )
    params = [SamplingParams(temperature=0, max_tokens=24, adapter=name) for name in names]
    with LLM(str(model), settings=given, progress=False) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
        executor = llm.frontend.engines[0]._workers.executor
        assert isinstance(executor, InlineExecutor)
        device = executor._worker.runner.device
        assert isinstance(device, GpuDevice)
        assert device.graphs.decode.graphs
        assert bool(device.graphs.adapted.graphs) == bool(settings)
    return [list(output.token_ids) for output in outputs]
