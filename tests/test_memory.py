"""Memory for the KV cache: how many blocks there are, and what is said when there are too few."""

from __future__ import annotations

import errno
import re
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from aioinfer.config import CacheConfig, Config, ModelConfig
from aioinfer.errors import ConfigError
from aioinfer.ipc.kv_spec import AttentionSpec, KVGroup, StateSpec
from aioinfer.worker.kv_division import CacheDemand
from aioinfer.worker.memory import (
    available_bytes,
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
STATE = KVGroup(StateSpec(1), (2,))


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
    groups = FULL, WINDOW, STATE
    # the windows of 4 requests, wherever in a block they begin, and a step of 64 tokens
    assert count(config, *groups) == (500, (4 * (33 + 2 * 16 - 1) + 64) // 16, 4)
    assert count(make_config(num_blocks=5), *groups) == (5, 5, 4)


@pytest.mark.parametrize("groups", [(FULL, WINDOW), (FULL, STATE), (WINDOW,), (WINDOW, STATE)])
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
    assert machine == psutil.virtual_memory().total
    with pytest.raises(ConfigError, match=r"cache.cpu_memory_gib = 1e\+06, and the machine has "):
        count(make_config(cpu_memory_gib=1e6))
    most = machine // (3 * MIB)
    assert count(make_config(num_blocks=most, cpu_memory_gib=1e6)) == (most,)
    with pytest.raises(ConfigError, match=f"set it to less than {most + 1}$"):
        count(make_config(num_blocks=most + 1))


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
