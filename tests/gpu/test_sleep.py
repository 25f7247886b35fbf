"""Sleep on a GPU: memory goes back to the driver and comes again at the same addresses, and graphs
that were captured before replay the same texts."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from aioinfer import LLM, SamplingParams
from aioinfer.errors import WorkerCallError
from aioinfer.worker.tensor_handles import describe_tensors
from aioinfer.worker.virtual_memory import CHUNK_BYTES, VirtualMemory
from tests.gpu.engine_settings import engine_settings
from tests.gpu.random_models import random_model, random_prompts

VOCAB_SIZE = 4099
GREEDY = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, max_tokens=48, seed=7, ignore_eos=True)
MIB = 2**20


def free_bytes() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def test_a_range_keeps_its_addresses_while_its_memory_comes_and_goes() -> None:
    size = CHUNK_BYTES + 3 * MIB
    filled = torch.zeros(4, dtype=torch.uint8, device="cuda")
    filled.fill_(1)
    assert int(filled.sum()) == 4 * int(filled.any())  # kernels take memory, too
    before = free_bytes()
    memory = VirtualMemory(size, torch.device("cuda", 0))
    assert before - free_bytes() < 32 * MIB, "addresses take no memory"
    memory.map()
    assert before - free_bytes() >= size
    tensor = memory.tensor()
    address = tensor.data_ptr()
    for value in (1, 2, 3):
        tensor.fill_(value)
        assert int(tensor[-1]) == int(tensor[0]) == value
        memory.unmap()
        assert before - free_bytes() < 32 * MIB
        memory.map()
        assert memory.tensor().data_ptr() == address
        tensor.zero_()
        assert not bool(tensor.any())
    del memory
    assert int(tensor.sum()) == 0, "the tensor keeps the range"
    del tensor
    assert before - free_bytes() < 32 * MIB


def test_a_graph_replays_on_memory_that_came_again() -> None:
    memory = VirtualMemory(8 * MIB, torch.device("cuda", 0))
    memory.map()
    values = memory.tensor()[: 4 * MIB].view(torch.float32)
    result = torch.zeros((), device="cuda")
    values.fill_(1.0)
    torch.sum(values)  # loads what the graph needs
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result.copy_(values.sum())
    graph.replay()
    assert float(result) == MIB
    memory.unmap()
    memory.map()
    values.fill_(2.0)
    graph.replay()
    assert float(result) == 2 * MIB


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(
        tmp_path_factory.mktemp("qwen3"), vocab_size=VOCAB_SIZE, eos_token_id=None,
        max_position_embeddings=1024, head_dim=64,
    )  # fmt: skip


def texts_of(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    """Returns the tokens of each prompt alone: in bfloat16 they depend on the rows of a step."""
    return [
        llm.generate([{"prompt_token_ids": prompt}], params)[0].token_ids
        for params in (GREEDY, SEEDED)
        for prompt in prompts
    ]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("more", [{}, {"cache__dtype": "fp8"}, {"model__quantization": "fp8"}])
def test_a_model_wakes_up_with_the_texts_of_before(
    folder: Path, ranks: int, more: dict[str, Any]
) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip("needs two GPUs")
    settings = engine_settings(
        model__sleep_mode=True, model__dtype="bfloat16", parallel__tensor_parallel_size=ranks,
        cache__num_blocks=2000, speculation__method="none", **more,
    )  # fmt: skip
    prompts = random_prompts((5, 40, 300), VOCAB_SIZE)
    with LLM(str(folder), settings=settings, progress=False) as llm:
        expected = texts_of(llm, prompts)
        awake = free_bytes()
        cache = llm.frontend.engines[0].report.kv_cache_bytes
        for round_ in range(3):
            llm.sleep()
            assert llm.is_sleeping
            assert free_bytes() - awake > 0.9 * cache
            if round_ == 1:
                llm.wake_up(["weights"])
                assert llm.is_sleeping
            llm.wake_up()
            assert texts_of(llm, prompts) == expected


def test_without_the_setting_a_model_does_not_sleep(folder: Path) -> None:
    with LLM(str(folder), settings=engine_settings(), progress=False) as llm:
        expected = texts_of(llm, [[5, 6, 7]])
        with pytest.raises(WorkerCallError, match="sleep_mode"):
            llm.sleep()
        assert texts_of(llm, [[5, 6, 7]]) == expected


# ---------------------------------------------------------------- new weights


@pytest.mark.parametrize("quantization", ["auto", "fp8"])
@pytest.mark.parametrize("sleeps", [False, True])
def test_weights_come_from_a_process_on_the_same_gpu(
    folder: Path, tmp_path: Path, sleeps: bool, quantization: str
) -> None:
    """Graphs that were captured before compute with them; level 2 drops the former ones."""
    second = random_model(
        tmp_path, vocab_size=VOCAB_SIZE, eos_token_id=None, seed=1,
        max_position_embeddings=1024, head_dim=64,
    )  # fmt: skip
    settings = engine_settings(
        model__sleep_mode=True,
        model__dtype="bfloat16",
        model__quantization=quantization,
        speculation__method="none",
    )
    prompts = random_prompts((5, 40, 300), VOCAB_SIZE)
    with LLM(str(second), settings=settings, progress=False) as llm:
        expected = texts_of(llm, prompts)
    tensors = {
        name: tensor.cuda()
        for file in second.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
    info = describe_tensors(tensors.items())
    handles = info.pop("ipc_handles")
    with LLM(str(folder), settings=settings, progress=False) as llm:
        control, first = llm.frontend.control, texts_of(llm, prompts)
        assert first != expected

        async def update() -> None:
            await control.begin_update()
            await control.update("open_weights", **info, handles=handles)
            await control.end_update("ipc")

        if sleeps:
            llm.sleep(2)
            llm.wake_up(["weights"])
        llm.run(update())
        if sleeps:
            llm.wake_up(["kv_cache"])
        assert texts_of(llm, prompts) == expected
        llm.update_weights(folder)
        assert texts_of(llm, prompts) == first
        llm.load_weights(tensors.items())
        assert texts_of(llm, prompts) == expected
        llm.sleep()
        llm.wake_up()
        assert texts_of(llm, prompts) == expected, "the copy on the host is of the new weights"
