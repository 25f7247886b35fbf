"""Memory for the KV cache: how many blocks there are, and what is said when there are too few."""

from __future__ import annotations

import errno
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from aioinfer.config import CacheConfig, Config, ModelConfig, ParallelConfig
from aioinfer.errors import ConfigError
from aioinfer.ipc.kv_spec import AttentionSpec, KVGroup
from aioinfer.ipc.placement import RankSpec
from aioinfer.worker import memory
from aioinfer.worker.kv_division import CacheDemand
from aioinfer.worker.memory import (
    available_bytes,
    available_memory,
    count_blocks,
    machine_memory,
    make_kv,
    report_shortage,
)

CPU = torch.device("cpu")
MIB = 2**20


def make_config(max_model_len: int | None = None, **cache: Any) -> Config:
    return Config(
        model=ModelConfig(path="model", max_model_len=max_model_len), cache=CacheConfig(**cache)
    )


FULL, WINDOW = KVGroup(AttentionSpec(1, 1), (0,)), KVGroup(AttentionSpec(1, 1, 33), (1,))


def count(config: Config, *groups: KVGroup) -> tuple[int, ...]:
    """Returns the blocks of 16 tokens and 3 MiB in each group, where requests get 1000 tokens
    long."""

    def no_step() -> None:
        raise AssertionError("a CPU's memory is configured, not measured")

    groups = groups or (FULL,)
    demand = CacheDemand(
        groups=groups,
        block_bytes=(3 * MIB,) * len(groups),
        block_size=16,
        max_num_seqs=4,
        max_chunk=64,
    )
    return count_blocks(config, CPU, demand, 1000, available_bytes(config, CPU, no_step))


def test_a_cpu_has_what_is_configured() -> None:
    assert count(make_config(cpu_memory_gib=0.5)) == (512 // 3,)
    assert count(make_config(cpu_memory_gib=0.5, max_model_len=170 * 16)) == (170,)
    assert count(make_config(num_blocks=7, cpu_memory_gib=1e-6)) == (7,)


def test_configured_blocks_are_those_of_layers_that_keep_all_tokens() -> None:
    config = make_config(num_blocks=500)
    groups = FULL, WINDOW
    # the windows of 4 requests, wherever in a block they begin, and a step of 64 tokens
    assert count(config, *groups) == (500, (4 * (33 + 2 * 16 - 2) + 64) // 16)
    assert count(make_config(num_blocks=5), *groups) == (5, 5)


@pytest.mark.parametrize("groups", [(FULL, WINDOW), (WINDOW,)])
def test_the_blocks_of_all_groups_fit_into_what_is_configured(groups: tuple[KVGroup, ...]) -> None:
    used = 3 * sum(count(make_config(cpu_memory_gib=0.5, max_model_len=1000), *groups))
    assert used <= 512
    if FULL in groups:
        assert used > 512 - 3, "what the others cannot use is given to layers that keep all tokens"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            make_config(cpu_memory_gib=0.002),
            r"not one KV block of 3.00 MiB fits .* set "
            r"cache.cpu_memory_gib to at least 0.003$",
        ),
        (
            make_config(cpu_memory_gib=0.01, max_model_len=1000),
            r"model.max_model_len = 1000 needs 189.00 MiB of KV cache, and 10.24 MiB are left: set "
            r"cache.cpu_memory_gib to at least 0.19, "
            r"or model.max_model_len to at most 48$",
        ),
        (
            make_config(cpu_memory_gib=0.002, max_model_len=1000),
            r"and 2.05 MiB are left: set "
            r"cache.cpu_memory_gib to at least 0.19$",
        ),
        (
            make_config(num_blocks=5, max_model_len=81),
            r"needs 6 KV blocks: set cache.num_blocks to at least 6, or model.max_model_len to at "
            r"most 80$",
        ),
    ],
)
def test_the_error_names_what_to_change_and_to_what(config: Config, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        count(config)
    remedy = re.search(r"(cpu_memory_gib|num_blocks) to at least ([\d.]+)", str(caught.value))
    assert remedy
    better = {remedy[1]: float(remedy[2]) if "." in remedy[2] else int(remedy[2])}
    assert count(make_config(config.model.max_model_len, **better))[0] > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cpu_cache_takes_memory_only_as_it_is_used(dtype: torch.dtype) -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    kv = make_kv((2, 4, 1024, 16, 8, 64 if dtype == torch.float32 else 128), dtype, CPU)
    assert kv.dtype == dtype
    assert kv.is_contiguous()
    assert kv.data_ptr() % 64 == 0
    assert process.memory_info().rss - before < 64 * MIB < kv.nbytes
    kv[1, 3, 1023] = 1
    assert kv[:, :, 1000:].float().sum() == np.prod(kv.shape[3:])


def test_memory_that_the_machine_does_not_have_is_refused() -> None:
    machine = machine_memory()
    assert machine <= psutil.virtual_memory().total
    assert 0 < available_memory() <= machine
    most = machine // (3 * MIB)
    assert count(make_config(num_blocks=most, cpu_memory_gib=1e6)) == (most,)
    with pytest.raises(ConfigError, match=f"set it to less than {most + 1}$"):
        count(make_config(num_blocks=most + 1))


def checked(
    monkeypatch: pytest.MonkeyPatch, config: Config, weights_gib: float, dtype: str, free_gib: float
) -> str:
    """Returns what is said about weights on a machine of 16 GiB."""
    monkeypatch.setattr(memory, "machine_memory", lambda: 16 * memory.GIB)
    monkeypatch.setattr(memory, "available_memory", lambda: int(free_gib * memory.GIB))
    try:
        memory.check_weights(
            config, int(weights_gib * memory.GIB), getattr(torch, dtype), RankSpec()
        )
    except ConfigError as error:
        return str(error)
    return ""


def test_weights_and_cache_are_compared_with_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each setting that a message names makes it fit."""
    config = make_config(cpu_memory_gib=4)
    assert checked(monkeypatch, config, 8, "float32", 12) == ""
    assert checked(monkeypatch, make_config(num_blocks=1), 12, "float32", 12) == ""
    text = checked(monkeypatch, config, 8, "float32", 11.517)
    assert text == (
        "on the CPU, as torch finds no GPU, the weights take 8.00 GiB and the KV cache takes "
        "4.00 GiB (cache.cpu_memory_gib), and 11.52 GiB of memory are free: set "
        "cache.cpu_memory_gib to at most 3.51"
    )
    assert checked(monkeypatch, make_config(cpu_memory_gib=3.51), 8, "float32", 11.517) == ""
    assert "on the CPU, as torch finds no GPU, the KV cache takes 4.00 GiB (" in checked(
        monkeypatch, config, 0, "float32", 3
    )
    text = checked(monkeypatch, config, 20, "float32", 13)
    assert "the weights take 20.00 GiB and" in text
    assert "and the machine has 16.00 GiB of memory: set model.path to a smaller model" in text
    assert text.endswith(
        "or model.dtype to 'bfloat16' and cache.cpu_memory_gib to at most 3 (slower on most CPUs)"
    )
    assert checked(monkeypatch, make_config(cpu_memory_gib=3), 10, "bfloat16", 13) == ""
    assert "bfloat16" not in checked(monkeypatch, config, 40, "float32", 13)
    assert "bfloat16" not in checked(monkeypatch, config, 20, "bfloat16", 13)


def test_workers_of_one_machine_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(make_config(cpu_memory_gib=1), parallel=ParallelConfig(data_parallel_size=2))
    assert checked(monkeypatch, config, 7, "float32", 8) == ""
    text = checked(monkeypatch, config, 7.5, "float32", 16)
    assert "15.00 GiB and the KV cache takes 2.00 GiB (cache.cpu_memory_gib) in 2 workers" in text
    assert text.endswith("set cache.cpu_memory_gib to at most 0.5")


@pytest.mark.parametrize("version", [1, 2])
def test_a_limit_of_a_control_group_holds(tmp_path: Path, version: int) -> None:
    """By files as the kernel writes them: a group with a limit in one with a lower limit, and one
    without."""
    names, path, prefix = ("memory.max", "memory.current"), "", ""
    memberships = "0::/outer/inner/own\n"
    if version == 1:
        names, path = ("memory.limit_in_bytes", "memory.usage_in_bytes"), "memory"
        prefix = "total_"
        memberships = "5:cpu,cpuacct:/\n4:memory:/outer/inner/own\n0::/\n"
    root = tmp_path / "mount" / path
    for group, limit, used in (("outer", "3000", 2500), ("outer/inner", "4000", 2500)):
        folder = root / group
        folder.mkdir(parents=True, exist_ok=True)
        (folder / names[0]).write_text(f"{limit}\n")
        (folder / names[1]).write_text(f"{used}\n")
        (folder / "memory.stat").write_text(
            f"anon 1200\n{prefix}active_file 800\n{prefix}inactive_file 500\n"
        )
    own = root / "outer" / "inner" / "own"
    own.mkdir()
    (own / names[0]).write_text("max\n")
    (own / names[1]).write_text("1\n")
    (tmp_path / "cgroup").write_text(memberships)
    found = list(memory._control_groups(tmp_path / "cgroup", tmp_path / "mount"))
    assert found == [(4000, 1200), (3000, 1200)]
    # in a container the group's path is the host's, and the root has the limit
    (tmp_path / "cgroup").write_text(memberships.replace("/outer", "/elsewhere"))
    for file in (root / "outer").glob("memory.*"):
        shutil.copy(file, root)
    found = list(memory._control_groups(tmp_path / "cgroup", tmp_path / "mount"))
    assert found == [(3000, 1200)]
    assert list(memory._control_groups(tmp_path / "none")) == []


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OverflowError("too large"),
        OSError(errno.ENOMEM, "no memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried\nto allocate"),
        torch.OutOfMemoryError("CUDA out of memory"),
    ],
    ids=repr,
)
def test_an_allocation_that_fails_names_the_settings(error: Exception) -> None:
    with (
        pytest.raises(ConfigError, match=r"^there is not enough memory for x: lower y"),
        report_shortage("x", "lower y"),
    ):
        raise error


@pytest.mark.parametrize("error", [RuntimeError("bad"), OSError(errno.ENOENT, "x"), KeyError("x")])
def test_other_errors_are_left_alone(error: Exception) -> None:
    with pytest.raises(type(error), match=r"bad|x"), report_shortage("x", "lower y"):
        raise error
