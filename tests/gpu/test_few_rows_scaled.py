"""Products of one-byte weights, compiled: every shape of Qwen3-0.6B and Qwen3-8B against float64
references, and models beside the same models dequantized."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from aioinfer.kernels.quantize import InputFormat
from aioinfer.kernels.scaled_product import BLOCK_CONFIGS, CONFIGS, ProductConfig
from cases import error
from engine_settings import check_nothing_was_compiled, engine_settings, inline_llm
from random_models import random_model
from scaled_cases import (
    FP8,
    INT8,
    ScaledCase,
    cublas,
    few_rows,
    many_rows,
    quantization_error,
    quantized,
)

from aioinfer import LLM, SamplingParams
from tests.scaled_models import layouts, set_config, write, write_dequantized

DEVICE, BF16 = "cuda", torch.bfloat16
LIMIT = 1e-2
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
needs_hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
#: Output features, inputs, and whether gate and up are computed together.
SHAPES = {
    "8B qkv": (6144, 4096, False), "8B o": (4096, 4096, False), "8B gate_up": (12288, 4096, True),
    "8B down": (4096, 12288, False), "8B / 2 o": (4096, 2048, False),
    "8B / 2 down": (4096, 6144, False), "0.6B qkv": (4096, 1024, False),
    "0.6B o": (1024, 2048, False), "0.6B gate_up": (3072, 1024, True),
    "0.6B down": (1024, 3072, False), "Qwen2.5-7B gate_up": (18944, 3584, True),
    "Qwen2.5-7B down": (3584, 18944, False),
}  # fmt: skip
KINDS = {"fp8": (FP8, False), "fp8 blocks": (FP8, True), "int8": (INT8, False)}


def case(shape: str, kind: str, rows: int) -> ScaledCase:
    features, inputs, gated = SHAPES[shape]
    values, grouped = KINDS[kind]
    run = (8 if gated else 128) if grouped else 1
    return ScaledCase(rows, features, inputs, values, BF16, DEVICE, grouped, run, gated)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_few_rows(shape: str, kind: str) -> None:
    for rows in (1, 2, 7, 8, 9, 16):
        for normed in (True, False) if SHAPES[shape][1] <= 16384 else (False,):
            assert error(few_rows(case(shape, kind, rows), normed=normed)) < LIMIT, rows


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_many_rows(shape: str, kind: str) -> None:
    for rows in (17, 32, 33, 64, 100, 128, 129, 256, 777):
        one = case(shape, kind, rows)
        residual = None if one.gated else random.choice(["sum", "bias", None])
        assert error(many_rows(one, groups=one.grouped, residual=residual)) < LIMIT, rows


@pytest.mark.parametrize("kind", ["fp8", "fp8 blocks"])
def test_activations_that_are_not_quantized(kind: str) -> None:
    for shape in ("8B down", "0.6B gate_up"):
        for rows in (17, 64, 200):
            assert error(many_rows(case(shape, kind, rows), groups=None)) < LIMIT, (shape, rows)


def tiles(table: tuple[Any, ...]) -> list[ProductConfig]:
    return [config for _, pair in table for config in pair]


@pytest.mark.parametrize(
    ("config", "kind"),
    [(replace(tile, exact_sums=exact), "fp8") for tile in tiles(CONFIGS) for exact in (True, False)]
    + [(tile, "int8") for tile in tiles(CONFIGS)]
    + [(tile, "fp8 blocks") for tile in tiles(BLOCK_CONFIGS)],
)
def test_every_tile(config: ProductConfig, kind: str) -> None:
    """Rows, features and inputs that are no multiples of a tile."""
    values, grouped = KINDS[kind]
    for rows, features, inputs, run in ((37, 200, 1040, 8), (300, 1000, 4000, 1)):
        runs = run if grouped else 1
        for gated in (True, False):
            one = ScaledCase(rows, features, inputs, values, BF16, DEVICE, grouped, runs, gated)
            assert error(many_rows(one, groups=grouped, config=config)) < LIMIT, one


@needs_hopper
@pytest.mark.parametrize("shape", [name for name, (*_, gated) in SHAPES.items() if not gated])
def test_cublas(shape: str) -> None:
    for rows in (17, 128, 777):
        assert error(cublas(case(shape, "fp8", rows))) < LIMIT, rows


@pytest.mark.parametrize("before", ["", "norm"])
@pytest.mark.parametrize(("kind", "grouped"), [(FP8, False), (FP8, True), (INT8, False)])
def test_quantization(kind: torch.dtype, grouped: bool, before: str) -> None:
    """A value that lies between two may be rounded to either, which the arithmetic before it
    decides."""
    for width in (1024, 4096, 12288, 18944):
        format = InputFormat(kind, grouped)
        pair = quantized(33, width, format, torch.float32, DEVICE, before=before)
        assert quantization_error(*pair) < 5e-3, width


# ---------------------------------------------------------------- models

SIZES = {
    "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "head_dim": 64,
    "max_position_embeddings": 1024, "initializer_range": 0.05, "vocab_size": 4096,
}  # fmt: skip
NEW_TOKENS = 24


def generate(folder: Path, prompts: list[list[int]], **settings: Any) -> list[list[int]]:
    greedy = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    with LLM(str(folder), settings=engine_settings(**settings), progress=False) as llm:
        return [list(output.token_ids) for output in llm.generate(prompts, greedy)]


def prompts(count: int, longest: int) -> list[list[int]]:
    rng = random.Random(count)
    return [[rng.randrange(3, 4096) for _ in range(rng.randint(1, longest))] for _ in range(count)]


@pytest.mark.parametrize("graphs", [True, False])
def test_greedy_tokens_where_activations_keep_their_type(graphs: bool, tmp_path: Path) -> None:
    """The tokens are those of the dequantized model in plain torch."""
    quantized, plain = tmp_path / "quantized", tmp_path / "plain"
    random_model(quantized, **SIZES)
    shutil.copytree(quantized, plain)
    write_dequantized(plain, write(quantized, layouts((128, 128))["float weights alone"]))
    wanted = prompts(6, 40)
    settings = {} if graphs else {"parallel__cuda_graphs": False}
    expected = generate(plain, wanted, parallel__device="cpu", parallel__executor="inline")
    assert generate(quantized, wanted, **settings) == expected


@pytest.mark.parametrize(
    "layout", ["float channel", "float static", "fp8 block", "int channel", "fp8"]
)
def test_tokens_where_activations_are_quantized(layout: str, tmp_path: Path) -> None:
    """Half of the requests or more begin as with the dequantized model: logits differ by a few
    percent."""
    quantized, plain = tmp_path / "quantized", tmp_path / "plain"
    random_model(quantized, **SIZES)
    shutil.copytree(quantized, plain)
    write_dequantized(plain, write(quantized, layouts((128, 128))[layout]))
    wanted = prompts(40, 60)
    ours, theirs = generate(quantized, wanted), generate(plain, wanted)
    firsts = [one[0] == other[0] for one, other in zip(ours, theirs, strict=True)]
    assert sum(firsts) >= 0.5 * len(firsts), firsts


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_models_that_are_quantized_while_they_are_loaded(kind: str, tmp_path: Path) -> None:
    """In bf16 and at random, as the benchmarks run them; nothing is compiled while serving."""
    random_model(tmp_path, **SIZES)
    settings = {"model__quantization": kind, "model__dtype": "bfloat16"}
    for load_format in ("auto", "dummy"):
        tokens = generate(tmp_path, prompts(30, 100), model__load_format=load_format, **settings)
        assert {len(each) for each in tokens} == {NEW_TOKENS}


@pytest.mark.parametrize("layout", ["float channel", "fp8 block", "int channel"])
def test_nothing_is_compiled_while_serving(layout: str, tmp_path: Path) -> None:
    random_model(tmp_path, **SIZES)
    write(tmp_path, layouts((128, 128))[layout])
    greedy = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    with inline_llm(tmp_path, model__dtype="bfloat16") as llm:
        for length in (1, 2, 8, 9, 16, 17, 32, 33, 64, 65, 127, 128, 129, 300):
            llm.generate([[5] * length], greedy)
        llm.generate(prompts(50, 100), greedy)
        check_nothing_was_compiled(llm)


def test_unaligned_blocks_are_read(tmp_path: Path) -> None:
    """Blocks that the kernels do not take are dequantized when they are loaded."""
    quantized, plain = tmp_path / "quantized", tmp_path / "plain"
    random_model(quantized, **SIZES)
    shutil.copytree(quantized, plain)
    write_dequantized(plain, write(quantized, layouts((48, 80))["fp8 block"]))
    set_config(plain, quantization_config=None)
    assert generate(quantized, prompts(4, 30)) == generate(plain, prompts(4, 30))
