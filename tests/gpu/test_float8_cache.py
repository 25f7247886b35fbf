"""The KV cache in float8 on a GPU, with and without CUDA graphs: greedy tokens in float32 equal to
those of a model that rounds keys and values alike; twice the tokens of bfloat16 in the same memory;
calibration."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_settings import inline_llm, tokens_of
from random_models import random_model
from safetensors.torch import load_file, save_file
from test_families import GREEDY, MODELS, NEW_TOKENS, SIZES, VOCAB

from tests.rounded_attention import generate, rounding_model

LENGTHS = (1, 2, 17, 129, 200)


def make_folder(folder: Path, name: str) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Saves a random model whose checkpoint has scales; returns those of keys and of values of each
    layer."""
    random_model(folder, family=name, vocab_size=VOCAB, **{**SIZES, **MODELS[name]})
    file = folder / "model.safetensors"
    stored = load_file(file)
    layers = sum(tensor.endswith("k_proj.weight") for tensor in stored)
    scales = {n: (torch.tensor([0.01, 0.05]), torch.tensor([0.02, 0.005])) for n in range(layers)}
    named = {
        f"model.layers.{layer}.self_attn.{kind}": tensor
        for layer, both in scales.items()
        for kind, tensor in zip(("k_scale", "v_scale"), both, strict=True)
    }
    save_file(stored | named, file, metadata={"format": "pt"})
    return scales


@pytest.mark.timeout(300)  # kernels are compiled
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3"])
def test_tokens_are_those_of_rounded_keys_and_values(name: str, tmp_path: Path) -> None:
    scales = make_folder(tmp_path, name)
    rng = random.Random(1)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(length)] for length in LENGTHS]
    model = rounding_model(tmp_path, scales, "cuda")
    expected = generate(model, prompts, NEW_TOKENS)
    del model
    for graphs in (True, False):
        settings: dict[str, Any] = {
            "cache__dtype": "fp8",
            "parallel__cuda_graphs": graphs,
            "scheduler__max_num_batched_tokens": 128,
        }
        with inline_llm(tmp_path, **settings) as llm:
            outputs = tokens_of(llm.generate(prompts, GREEDY))
        # what lies between two numbers of float8 may round to the other one, and a token change
        assert sum(a == b for a, b in zip(outputs, expected, strict=True)) >= len(prompts) - 1


@pytest.mark.timeout(300)
def test_half_the_bytes(tmp_path: Path) -> None:
    random_model(tmp_path, family="qwen3", vocab_size=VOCAB, **{**SIZES, **MODELS["qwen3"]})
    sizes = {}
    for dtype in ("model", "fp8"):
        with inline_llm(tmp_path, model__dtype="bfloat16", cache__dtype=dtype) as llm:
            report = llm.frontend.engines[0].report
            sizes[dtype] = report.kv_cache_bytes / report.num_blocks[0]
            texts = tokens_of(llm.generate([[5, 6, 7]] * 3, GREEDY))
            assert texts[0] == texts[1] == texts[2]
            if dtype == "fp8":
                assert report.cache_dtype == "float8 (e4m3; scales: calibrated)"
    assert sizes["model"] / sizes["fp8"] == pytest.approx(2, rel=0.01)
