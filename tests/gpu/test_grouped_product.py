"""Products with weights of 4-bit and 8-bit integers in groups, compiled, at Qwen3-8B's shapes; a
small model over them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from aioinfer.kernels.grouped_product import MAX_FUSED_ROWS, GroupedConfig, grouped_config
from aioinfer.kernels.grouped_weight import dequantize
from cases import error, poisoned
from engine_settings import inline_llm, tokens_of
from grouped_cases import QWEN3_8B, grouped, random_groups
from random_models import random_model
from references import dequantized

from aioinfer import SamplingParams
from benchlib.quantized_folder import Groups, awq, gptq, packed, quantize_folder

DEVICE = "cuda"
ROWS = (1, 2, 8, 9, 16, 32, 33, 64, 100, 256)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_zeros", [True, False])
@pytest.mark.parametrize("shape", QWEN3_8B)
def test_products(shape: str, has_zeros: bool, dtype: torch.dtype) -> None:
    features, inputs, gated = QWEN3_8B[shape]
    weight = random_groups(features, inputs, has_zeros=has_zeros, device=DEVICE)
    for rows in ROWS:
        assert error(grouped(weight, rows, dtype, gated=gated)) < 5e-3


@pytest.mark.parametrize("group", [32, 64, 128, 256, None])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("has_zeros", [True, False])
def test_groups(bits: int, group: int | None, has_zeros: bool) -> None:
    weight = random_groups(2048, 2176, bits=bits, group=group, has_zeros=has_zeros, device=DEVICE)
    for rows in (1, 5, 16, 64):
        for dtype in (torch.bfloat16, torch.float16):
            assert error(grouped(weight, rows, dtype)) < 5e-3


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_float32(rows: int) -> None:
    weight = random_groups(512, 1024, has_zeros=True, device=DEVICE)
    assert error(grouped(weight, rows, torch.float32, config=GroupedConfig(16, 8))) < 1e-5


@pytest.mark.parametrize("splits", [1, 2, 4, 8])
def test_split_products_are_the_same_every_time(splits: int) -> None:
    """Parts are summed in a fixed order, whichever program comes last."""
    weight = random_groups(1024, 8192, device=DEVICE)
    config = GroupedConfig(64, 8, splits=splits, num_warps=2)
    results = []
    for _ in range(5):
        torch.manual_seed(1)
        results.append(grouped(weight, 8, torch.bfloat16, config=config, pdl=True)[0])
    assert all(torch.equal(result, results[0]) for result in results)


def test_instructions_for_pairs_give_what_the_plain_expansion_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The integers that are multiplied are exact either way, and so are the results."""
    for dtype in (torch.bfloat16, torch.float16):
        for has_zeros in (True, False):
            weight = random_groups(256, 1024, has_zeros=has_zeros, device=DEVICE)
            for config in (GroupedConfig(64, 8, num_warps=2), GroupedConfig(64, 16)):
                torch.manual_seed(2)
                fast = grouped(weight, 8, dtype, config=config)[0]
                with monkeypatch.context() as patch:
                    patch.setattr("aioinfer.kernels.grouped_product._offset", lambda x, w: 0)
                    torch.manual_seed(2)
                    plain = grouped(weight, 8, dtype, config=config)[0]
                assert torch.equal(fast, plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dequantization(dtype: torch.dtype) -> None:
    for bits, group in ((4, 128), (4, 32), (8, None)):
        weight = random_groups(1000, 1500, bits=bits, group=group, has_zeros=True, device=DEVICE)
        out = dequantize(weight, poisoned(1000, 1500, dtype=dtype, device=DEVICE), pdl=True)
        assert torch.equal(out, dequantized(weight).float().to(dtype))


def test_every_number_of_rows_has_a_configuration_that_fits() -> None:
    weight = random_groups(24576, 4096, device=DEVICE)
    for rows in range(1, MAX_FUSED_ROWS + 1):
        config = grouped_config(rows, weight)
        assert error(grouped(weight, rows, torch.bfloat16, config=config)) < 5e-3


FORMATS = {
    "gptq": gptq(),
    "gptq in order of activations": gptq(Groups(is_symmetric=False, seed=3)),
    "awq": awq(),
    "packed": packed(Groups(size=32, is_symmetric=False)),
    "packed, 8 bits": packed(Groups(bits=8, size=None)),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_model_gives_the_tokens_that_it_gives_on_a_cpu(name: str, tmp_path: Path) -> None:
    """In float32: steps of one row, of few rows, and prefills of more than the kernels take."""
    dense = random_model(
        tmp_path / "dense", vocab_size=2048, hidden_size=512, intermediate_size=1024, head_dim=64,
        initializer_range=0.05, max_position_embeddings=1024, eos_token_id=2,
    )  # fmt: skip
    folder = quantize_folder(dense, tmp_path / "quantized", FORMATS[name])
    prompts = [[5 + i, *range(20, 20 + 30 * i)] for i in range(6)]
    greedy = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    tokens = {}
    for device in ("cuda", "cpu"):
        with inline_llm(folder, parallel__device=device) as llm:
            tokens[device] = tokens_of(
                [g for p in (prompts, prompts[:1]) for g in llm.generate(p, greedy)]
            )
    assert tokens["cuda"] == tokens["cpu"]
