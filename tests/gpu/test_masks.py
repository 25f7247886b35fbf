"""Constrained requests on a GPU: graphs, masks and ranks give the tokens of the CPU, and nothing is
compiled while serving."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_settings import WAYS, check_nothing_was_compiled, tokens_of, worker_of
from engine_settings import inline_llm as running
from random_models import odd_vocabulary_model

from aioinfer import LLM, SamplingParams
from aioinfer.worker.gpu_device import GpuDevice
from tests.automata import Residues, accepts, constrain

VOCAB_SIZE = 4001  # no multiple of 32, and no number of ranks divides it
TOKENS = 40
RNG = random.Random(0)
PROMPTS = [[RNG.randrange(3, VOCAB_SIZE) for _ in range(RNG.randint(1, 90))] for _ in range(40)]


def params_of(number: int) -> SamplingParams:
    """Returns parameters of all kinds; those of odd numbers, which are their seeds, are for
    constrained requests. Greedy, so that roundings do not matter, or by seed."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8, "top_k": 40},
        {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.5, "logprobs": 2},
        {"temperature": 0.9, "logit_bias": {7: 2.0, 8: -50.0}},
        {"temperature": 0.0, "presence_penalty": 0.5},
        {"temperature": 0.0, "logprobs": 5},
    ]
    return SamplingParams(
        ignore_eos=True, seed=number, max_tokens=TOKENS, **kinds[number // 2 % len(kinds)]
    )


PARAMS = [params_of(number) for number in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return odd_vocabulary_model(tmp_path_factory.mktemp("model"), VOCAB_SIZE)


def generate(llm: LLM, every: int = 2) -> list[list[int]]:
    """Returns the tokens of all requests, of which of every `every` one is constrained."""
    undo = constrain(
        llm.frontend,
        lambda s: Residues(VOCAB_SIZE) if (s.output.params.seed or 0) % every == 1 else None,
    )
    try:
        return tokens_of(llm.generate(PROMPTS, PARAMS))
    finally:
        undo()


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    with running(folder, parallel__device="cpu") as llm:
        tokens = generate(llm)
    for number, each in enumerate(tokens):
        assert accepts(each, VOCAB_SIZE) == (number % 2 == 1)
    return tokens


def differing(tokens: list[list[int]], expected: list[list[int]]) -> list[int]:
    return [n for n, (a, b) in enumerate(zip(tokens, expected, strict=True)) if a != b]


@pytest.mark.parametrize("settings", WAYS)
def test_tokens_are_those_of_the_cpu(
    folder: Path, expected: list[list[int]], settings: dict[str, Any]
) -> None:
    with running(folder, **settings) as llm:
        tokens = generate(llm)
        for number, each in enumerate(tokens):
            assert len(each) == TOKENS
            assert accepts(each, VOCAB_SIZE) == (number % 2 == 1)
        # float32 sums are rounded differently, which a near tie may show
        assert len(differing(tokens, expected)) <= 1, differing(tokens, expected)


def test_plain_rows_beside_constrained_ones_are_undisturbed(folder: Path) -> None:
    with running(folder) as llm:
        plain = tokens_of(llm.generate(PROMPTS, PARAMS))
        mixed = generate(llm, every=40)
    assert differing(mixed, plain) == [1]


@pytest.mark.parametrize("executor", ["inline", "multiprocess"])
def test_nothing_is_compiled_while_serving(
    folder: Path, executor: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whatever the first constrained requests have; where a worker is a process, its log tells."""
    with running(folder, parallel__executor=executor, model__dtype="bfloat16") as llm:
        for every in (3, 2, 40):
            generate(llm, every)
        if executor == "inline":
            assert isinstance(worker_of(llm).runner.device, GpuDevice)
            check_nothing_was_compiled(llm)
    assert "was compiled while serving" not in capfd.readouterr().err


def test_masks_are_read_where_the_engine_writes_them(folder: Path) -> None:
    """Shared memory is registered with CUDA at the first mask."""
    from aioinfer.features.masks.worker import MaskUploads
    from aioinfer.ipc.masks import MaskMemory

    memory = MaskMemory()
    memory.resize(64, VOCAB_SIZE)
    buffers = memory.buffers(64, VOCAB_SIZE)
    uploads, device = MaskUploads(torch.device("cuda")), torch.device("cuda")
    for number in range(6):
        masks = buffers[number % 3, : number + 1]
        masks[:] = torch.randint(-(2**31), 2**31, masks.shape, dtype=torch.int32).numpy()
        assert torch.equal(uploads.upload(masks).cpu(), torch.from_numpy(masks))
    assert uploads._registered
    address = buffers.ctypes.data
    assert int(torch.cuda.cudart().cudaHostUnregister(address)) == 0
    assert torch.zeros(1, device=device).item() == 0
    memory.close()
