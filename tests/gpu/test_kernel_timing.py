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
from aioinfer.executor.inline import InlineExecutor
from aioinfer.layers.backend import Backend
from aioinfer.layers.formats.dense import KernelDenseWeight
from aioinfer.layers.kernel_choices import Operation
from aioinfer.layers.norm import RMSNorm
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.layers.shards import Shard, Source
from aioinfer.worker.worker import Worker
from tests.gpu.random_models import random_model, random_prompts

VOCAB_SIZE = 4096
OPERATIONS: tuple[Operation, ...] = (
    "plain", "partial", "biased", "residual", "gated", "normed", "normed gated"
)  # fmt: skip


@pytest.fixture(scope="module")
def device() -> torch.device:
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("kernels are timed from compute capability 9 on")
    return torch.device("cuda", 0)


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
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
    } | {name.replace("__", "."): value for name, value in settings.items()}
    with LLM(str(folder), settings=given, progress=False) as llm:
        executor = llm.frontend.engines[0]._executor
        assert isinstance(executor, InlineExecutor)
        worker = executor._worker
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        outputs = llm.generate(prompts[:1], params) + llm.generate(prompts, params)
        assert worker.compilations is not None
        assert worker.compilations.names == []
        worker.compilations.stop()
    return [output.outputs[0].token_ids for output in outputs], worker


@pytest.mark.parametrize("bias", [False, True])
def test_a_first_start_times_and_a_second_one_reads(
    bias: bool, tmp_path: Path, device: torch.device, empty_cache: Path
) -> None:
    """Nothing is compiled while serving either way, and both serve the same tokens."""
    model = tmp_path / "model"
    family = "qwen2" if bias else "qwen3"
    random_model(model, vocab_size=VOCAB_SIZE, family=family, head_dim=64, hidden_size=256)
    prompts = random_prompts([3, 1, 9, 40, 130, *range(1, 60)], VOCAB_SIZE)
    first, worker = serve(model, prompts)
    assert worker.timed_choices > 10
    (file,) = empty_cache.glob("aioinfer-kernels-*.json")
    stored = json.loads(file.read_bytes())
    assert sum(map(len, stored["choices"].values())) == worker.timed_choices
    assert {product.split()[0] for product in stored["choices"]} == {"dense"}
    second, worker = serve(model, prompts)
    assert worker.timed_choices == 0
    assert second == first
    _, worker = serve(model, prompts, parallel__time_kernels=False)
    assert worker.timed_choices == 0
    assert worker._backend.choices.products
    assert all(each.find(2) is None for each in worker._backend.choices.products.values())


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


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 16, 24, 48, 100, 512])
@pytest.mark.parametrize("operation", OPERATIONS)
@torch.inference_mode()
def test_every_candidate_computes_the_product(
    operation: Operation, rows: int, device: torch.device
) -> None:
    torch.manual_seed(rows)
    backend = Backend.of(device, torch.bfloat16, ParallelGroup.single())
    out, inputs = 1536, 1024
    weight = KernelDenseWeight(
        [Source("weight", Shard.whole(out))], Shard.whole(inputs), backend,
        torch.randn(out, inputs, dtype=torch.bfloat16, device=device) / inputs**0.5,
    )  # fmt: skip
    norm = RMSNorm("norm", inputs, 1e-6, backend)
    norm.weight.uniform_(0.5, 1.5)
    x = torch.randn(rows, inputs, dtype=torch.bfloat16, device=device)
    added = torch.randn(rows, out, dtype=torch.bfloat16, device=device)
    bias = added[0]
    candidates = weight.candidates(operation, rows)
    assert bool(candidates) == (rows == 1 or "normed" not in operation)

    def compute() -> torch.Tensor:
        match operation:
            case "plain":
                return weight.multiply(x)
            case "partial":
                return weight.multiply(x, out=torch.empty_like(added))
            case "biased":
                return weight.multiply(x, bias)
            case "residual":
                total = added.clone()
                weight.add_product(x, total)
                return total
            case "gated":
                return weight.multiply_gated(x)
            case "normed":
                return weight.multiply_normed(x, norm)
            case "normed gated":
                return weight.multiply_gated(x, norm)

    if not candidates:
        return
    default = compute()
    (choices,) = [each for each in backend.choices.products.values() if each.weights == [weight]]
    assert choices.product.operation == operation
    results = []
    for candidate in candidates:
        choices.forced = candidate
        results.append(compute())
    assert torch.equal(results[0], default)
    for result in results:
        error = (result - default).float().norm() / default.float().norm()
        assert error < 5e-3
