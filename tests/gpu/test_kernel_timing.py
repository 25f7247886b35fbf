"""Kernels are timed when a worker first starts on a card, and read from a file when it next does;
whichever is chosen, results are the same but for rounding."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from aioinfer import LLM, SamplingParams
from aioinfer.layers.backend import Backend
from aioinfer.layers.formats.base import Epilogue, epilogue_of
from aioinfer.layers.kernel_choices import ProductChoices
from aioinfer.worker import kernel_timing
from aioinfer.worker.worker import Worker
from benchlib.quantized_folder import awq, quantize_folder
from tests.gpu.engine_settings import check_nothing_was_compiled, tokens_of, worker_of
from tests.gpu.random_models import random_model, random_prompts

VOCAB_SIZE = 4096
#: Models by their weights, and what the stored products begin with.
FORMATS = {"dense": "dense", "biased": "dense biased", "fp8": "fp8 ", "4 bits": "4 bits in groups"}


@pytest.fixture(scope="module")
def device() -> torch.device:
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("kernels are timed from compute capability 9 on")
    return torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def enough_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets timing end, however many other processes use the GPU."""
    monkeypatch.setattr(kernel_timing, "BUDGET_S", 60.0)


@pytest.fixture
def empty_cache(tmp_path: Path) -> Iterator[Path]:
    """A folder of compiled kernels of its own."""
    folder = tmp_path / "triton"
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(folder)
        yield folder


def serve(folder: Path, prompts: list[list[int]], **settings: Any) -> tuple[list[Any], Worker]:
    """Returns the tokens of prompts from an engine of its own, whose worker has ended."""
    given = {
        "parallel.device": "cuda",
        "parallel.executor": "inline",
        "scheduler.max_num_seqs": 64,
        "cache.num_blocks": 200,
        "speculation.method": "none",  # the rows of a step would follow from measured times
    } | {name.replace("__", "."): value for name, value in settings.items()}
    with LLM(str(folder), settings=given, progress=False) as llm:
        worker = worker_of(llm)
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        outputs = llm.generate(prompts[:1], params) + llm.generate(prompts, params)
        check_nothing_was_compiled(llm)
    return tokens_of(outputs), worker


def make_model(name: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    """Returns the folder of a random model, and what its configuration has to say of it."""
    family = "qwen2" if name == "biased" else "qwen3"
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    random_model(folder / "dense", vocab_size=VOCAB_SIZE, family=family, **sizes)
    if name == "4 bits":
        return quantize_folder(folder / "dense", folder / "quantized", awq(128)), {}
    return folder / "dense", {"model__quantization": "fp8"} if name == "fp8" else {}


@pytest.mark.parametrize(("name", "format"), FORMATS.items())
def test_a_first_start_times_and_a_second_one_reads(
    name: str, format: str, tmp_path: Path, device: torch.device, empty_cache: Path
) -> None:
    """Nothing is compiled while serving either way, and a stream alone gets the same tokens."""
    model, settings = make_model(name, tmp_path)
    prompts = random_prompts([3, 1, 9, 40, 130, *range(1, 60)], VOCAB_SIZE)
    first, worker = serve(model, prompts, **settings)
    assert worker.timed_choices > 10
    (file,) = empty_cache.glob("aioinfer-kernels-*.json")
    stored = json.loads(file.read_bytes())["choices"]
    assert sum(map(len, stored.values())) == worker.timed_choices
    assert any(product.startswith(format) for product in stored)
    second, worker = serve(model, prompts, **settings)
    assert worker.timed_choices == 0
    assert second[0] == first[0]


@pytest.mark.parametrize("name", FORMATS)
@torch.inference_mode()
def test_every_candidate_computes_the_product(
    name: str, tmp_path: Path, device: torch.device
) -> None:
    model, settings = make_model(name, tmp_path)
    _, worker = serve(model, random_prompts([3], VOCAB_SIZE), **settings)
    backend = worker._backend
    table = backend.choices.products
    for choices in [each for each in table.values() if each.product.operation == "plain"]:
        out = torch.empty(2, choices.product.outputs, dtype=backend.dtype, device=device)
        x = torch.zeros(2, choices.product.inputs, dtype=backend.dtype, device=device)
        choices.weights[0].multiply(x, Epilogue(out=out))  # as a rank of several does
    # where queries, keys and values have biases, no product is plain
    assert {"biased" if name == "biased" else "partial"} < {p.operation for p in table}
    compared = 0
    for choices in table.values():
        for rows in (1, 2, 8, 9, 16, 33, 100, 512):
            if rows > 1 or choices.has_single_row:
                compared += compare(choices, rows, backend)
    assert compared > 20


def compare(choices: ProductChoices, rows: int, backend: Backend) -> int:
    """Compares a product by all candidates with that by the default; returns how many others
    there are."""
    product, weight = choices.product, choices.weights[0]
    generator = torch.Generator(backend.device).manual_seed(rows)
    options = {"dtype": backend.dtype, "device": backend.device, "generator": generator}
    x = torch.randn(rows, product.inputs, **options)
    total = torch.randn(rows, product.outputs, **options)
    results = []
    candidates = weight.candidates(product.operation, rows)
    for candidate in candidates:
        choices.forced = candidate
        added = total.clone()
        result = weight.multiply(x, epilogue_of(product.operation, choices.norm, added))
        if result.ndim == 3:  # parts that are left to be added
            result = added + result.sum(0)
        results.append(result.float())
        choices.forced = None
    for candidate, result in zip(candidates, results, strict=True):
        error = (result - results[0]).norm() / results[0].norm()
        assert error < 1e-2, (str(product), rows, str(candidate))
    return max(0, len(candidates) - 1)


def test_a_damaged_file_is_timed_anew(
    tmp_path: Path, device: torch.device, empty_cache: Path
) -> None:
    random_model(tmp_path / "model", vocab_size=VOCAB_SIZE, head_dim=64)
    prompts = random_prompts([5, 6], VOCAB_SIZE)
    _, worker = serve(tmp_path / "model", prompts)
    count = worker.timed_choices
    (file,) = empty_cache.glob("aioinfer-kernels-*.json")
    file.write_text("{")
    _, worker = serve(tmp_path / "model", prompts)
    assert worker.timed_choices == count > 0
