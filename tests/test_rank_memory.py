"""The memory of a rank that sleeps: what a model refers to is found and moved, and a range of
addresses keeps its tensors (played by memory of the host where there is no GPU)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aioinfer.errors import WorkerCallError
from aioinfer.executor.inline import InlineExecutor
from aioinfer.layers.backend import Backend
from aioinfer.worker import rank_memory
from aioinfer.worker.rank_memory import (
    RankMemory,
    VirtualRankMemory,
    find_tensors,
    group_by_storage,
    move_tensors,
)
from tests.executor_runs import Run, greedy, tiny_config, tiny_llama

CPU = torch.device("cpu")


class HostRange:
    """A `VirtualMemory` of the host, which forgets what it holds when it is unmapped."""

    is_full = False

    def __init__(self, nbytes: int, device: torch.device):
        self.nbytes, self.mapped_bytes = nbytes, 0
        self._memory = torch.zeros(nbytes, dtype=torch.uint8)

    def map(self, nbytes: int | None = None) -> None:
        if HostRange.is_full:
            raise RuntimeError("out of memory")
        self.mapped_bytes = max(self.mapped_bytes, self.nbytes if nbytes is None else nbytes)

    def unmap(self) -> None:
        self.mapped_bytes = 0
        self._memory.fill_(0xFF)

    def tensor(self) -> torch.Tensor:
        assert self.mapped_bytes
        return self._memory


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> VirtualRankMemory:
    return memory_of_host(monkeypatch)


def memory_of_host(monkeypatch: pytest.MonkeyPatch) -> VirtualRankMemory:
    """Returns the memory of a rank on a GPU, played by memory of the host."""
    monkeypatch.setattr(rank_memory, "VirtualMemory", HostRange)
    monkeypatch.setattr(rank_memory, "pin", lambda memory: None)
    monkeypatch.setattr(rank_memory, "unpin", lambda addresses, device: None)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    return VirtualRankMemory(CPU)


def test_tensors_are_found_wherever_an_object_refers_to_them() -> None:
    tensors = [torch.full((2,), float(number)) for number in range(7)]

    class Slotted:
        __slots__ = ("weight",)

        def __init__(self, weight: torch.Tensor):
            self.weight = weight

    def closure(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        return lambda: tensor

    owner = SimpleNamespace(
        plain=tensors[0],
        nested={"a": [(tensors[1],)]},
        slotted=Slotted(tensors[2]),
        bound=partial(torch.add, tensors[3]),
        closure=closure(tensors[4]),
        module=torch.nn.ParameterList([torch.nn.Parameter(tensors[5], requires_grad=False)]),
        again=tensors[0],
        foreign=Backend(CPU, torch.float32, tensors[6]),  # type: ignore[arg-type]
    )
    owner.cycle = owner
    found = find_tensors([owner])
    assert sorted(float(tensor[0]) for tensor in found) == [0, 1, 2, 3, 4, 5]


def test_views_move_with_their_storage() -> None:
    with torch.inference_mode():
        whole = torch.arange(24, dtype=torch.bfloat16).view(4, 6)
        parts = [whole, whole[1:3], whole.t()[2:], torch.ones(3)]
    copies = [part.clone() for part in parts]
    memory = torch.zeros(4096, dtype=torch.uint8)
    groups = group_by_storage(parts)
    assert [len(group) for group in groups] == [3, 1]
    for begin, group in zip((512, 1024), groups, strict=True):
        move_tensors(group, memory, begin)
    for part, copy in zip(parts, copies, strict=True):
        assert torch.equal(part, copy)
        assert part.untyped_storage().data_ptr() == memory.data_ptr()
    with torch.inference_mode():
        whole.zero_()
    assert not parts[1].any()
    assert not parts[2].any()


def test_weights_come_back_and_keys_are_zero(memory: VirtualRankMemory) -> None:
    owner = SimpleNamespace(first=torch.randn(1000), second=torch.randn(30, 3)[::2])
    kept = owner.first.clone(), owner.second.clone()
    memory.take_weights([owner])
    keys = memory.make_kv((3, 5), torch.float32)
    memory.begin_service()
    keys.fill_(1.0)
    address = owner.first.data_ptr()
    for _ in range(2):
        memory.sleep()
        memory.sleep()
        assert memory.asleep == {"weights", "kv_cache"}
        assert not torch.equal(owner.first, kept[0])
        memory.wake_up(["weights"])
        assert torch.equal(owner.first, kept[0])
        assert torch.equal(owner.second, kept[1])
        memory.wake_up(["kv_cache", "weights"])
        assert not keys.any()
        assert owner.first.data_ptr() == address
        keys.fill_(1.0)
    owner.first += 1
    memory.note_update()
    memory.sleep()
    memory.wake_up(["weights", "kv_cache"])
    assert torch.equal(owner.first, kept[0] + 1)


def test_weights_that_are_dropped_are_not_copied(memory: VirtualRankMemory) -> None:
    owner = SimpleNamespace(weight=torch.randn(1000), table=torch.randn(70))
    table = owner.table.clone()
    memory.take_weights([owner])
    memory.begin_service()
    memory.sleep([owner.weight[500:600]])
    memory.note_update()
    memory.wake_up(["weights", "kv_cache"])
    assert torch.equal(owner.table, table)
    assert bool(owner.weight.isnan().all()), "nothing has brought it back"
    owner.weight.fill_(1.0)
    memory.sleep()
    memory.wake_up(["weights"])
    assert bool((owner.weight == 1.0).all())


def test_without_memory_they_go_on_sleeping(
    memory: VirtualRankMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = SimpleNamespace(weight=torch.randn(10))
    kept = owner.weight.clone()
    memory.take_weights([owner])
    memory.begin_service()
    memory.sleep()
    monkeypatch.setattr(HostRange, "is_full", True)
    with pytest.raises(WorkerCallError, match="no memory to wake up the weights"):
        memory.wake_up(["weights"])
    assert "weights" in memory.asleep
    monkeypatch.setattr(HostRange, "is_full", False)
    memory.wake_up(["weights", "kv_cache"])
    assert torch.equal(owner.weight, kept)


async def test_a_model_computes_the_same_with_moved_weights_and_after_sleep(
    memory: VirtualRankMemory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tiny_llama(tmp_path)
    config = tiny_config(folder, executor="inline")

    async def run(made: RankMemory) -> tuple[list[int], Any]:
        monkeypatch.setattr("aioinfer.worker.worker.make_rank_memory", lambda *_, sleeps: made)
        run = Run(InlineExecutor(config, folder))
        await run.start()
        tokens = await greedy(run, 6)
        await run.executor.call("sleep", {"level": 1}, 10)
        await run.executor.call("wake_up", {"tags": ["weights", "kv_cache"]}, 10)
        assert await greedy(run, 6) == tokens
        await run.executor.shutdown()
        return tokens, run

    plain, _ = await run(RankMemory(CPU))
    moved, _ = await run(memory)
    assert plain == moved
    assert memory._used > 0


def test_pages_of_the_cache_go_back_on_a_cpu() -> None:
    memory = RankMemory(CPU)
    keys = memory.make_kv((1024, 1024), torch.float32)
    keys.fill_(1.0)
    memory.sleep()
    memory.wake_up(["kv_cache"])
    assert memory.asleep == {"weights"}
    assert not keys.any()
    keys.fill_(2.0)
    assert bool((keys == 2.0).all())
