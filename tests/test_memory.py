"""Memory for the KV cache: how many blocks there are, and what is said when there are too few; its
division among groups of layers: bounds, and that no group starves another."""

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
from hypothesis import given, settings
from hypothesis import strategies as st

from aioinfer.config import CacheConfig, Config, ModelConfig, ParallelConfig
from aioinfer.errors import ConfigError
from aioinfer.ipc.kv_spec import AttentionSpec, KVGroup, LatentSpec, StateSpec, group_layers
from aioinfer.ipc.placement import RankSpec
from aioinfer.worker import host_memory, memory
from aioinfer.worker.host_memory import available_memory, machine_memory
from aioinfer.worker.memory import (
    CacheDemand,
    available_bytes,
    count_blocks,
    divide_memory,
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
        groups=groups, block_bytes=(3 * MIB,) * len(groups), block_size=16, max_num_seqs=4,
        max_chunk=64,
    )  # fmt: skip
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
    found = list(host_memory._control_groups(tmp_path / "cgroup", tmp_path / "mount"))
    assert found == [(4000, 1200), (3000, 1200)]
    # in a container the group's path is the host's, and the root has the limit
    (tmp_path / "cgroup").write_text(memberships.replace("/outer", "/elsewhere"))
    for file in (root / "outer").glob("memory.*"):
        shutil.copy(file, root)
    found = list(host_memory._control_groups(tmp_path / "cgroup", tmp_path / "mount"))
    assert found == [(3000, 1200)]
    assert list(host_memory._control_groups(tmp_path / "none")) == []


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


# ---------------------------------------------------------------- division

GIB = 2**30
SPECS = st.one_of(
    st.builds(AttentionSpec, st.integers(1, 3), st.just(4), st.none() | st.integers(1, 300)),
    st.builds(LatentSpec, st.integers(1, 20)),
    st.builds(StateSpec, st.tuples(st.integers(1, 3000)), st.sampled_from(["float32", "bfloat16"])),
)


def make_demand(groups: tuple[KVGroup, ...], **fields: Any) -> CacheDemand:
    values = {"block_size": 16, "max_num_seqs": 64, "max_chunk": 512} | fields
    sizes = tuple(group.bytes_per_block(values["block_size"], 2) for group in groups)
    return CacheDemand(groups=groups, block_bytes=sizes, **values)


@st.composite
def cases(draw: st.DrawFn) -> tuple[CacheDemand, int, int, int]:
    """Returns a demand, memory, and the shortest and the longest length that is to fit."""
    demand = make_demand(
        group_layers(
            draw(
                st.lists(
                    st.lists(SPECS, min_size=1, max_size=2, unique=True), min_size=1, max_size=6
                )
            )
        ),
        block_size=draw(st.sampled_from([1, 16, 128])),
        max_num_seqs=draw(st.integers(1, 300)),
        max_chunk=draw(st.integers(1, 3000)),
    )
    max_len = draw(st.integers(1, 5000))
    min_len = draw(st.integers(1, max_len))
    needed = demand.total_bytes(demand.blocks_of_one(min_len))
    return demand, needed + draw(st.integers(0, 300 * needed)), min_len, max_len


@settings(max_examples=150, deadline=None)
@given(cases())
def test_it_fits_and_holds_the_request_that_must_fit(case: tuple[CacheDemand, int, int, int]):
    demand, available, min_len, max_len = case
    division = divide_memory(demand, available, min_len, max_len)
    assert demand.total_bytes(division) <= available
    for blocks, needed, enough, group in zip(
        division,
        demand.blocks_of_one(min_len),
        demand.enough_blocks(max_len),
        demand.groups,
        strict=True,
    ):
        assert blocks >= needed
        assert enough is None or group.keeps_states or blocks <= max(enough, needed)
        assert enough is None or group.window is None or enough >= needed
    keep_all = [
        size
        for size, enough in zip(demand.block_bytes, demand.enough_blocks(max_len), strict=True)
        if enough is None
    ]
    if keep_all:
        left = available - demand.total_bytes(division)
        assert left < sum(keep_all), "memory is left over that would hold a block more"


@settings(max_examples=100, deadline=None)
@given(
    window=st.integers(1, 4000),
    ratio=st.sampled_from([0.1, 0.5, 1, 3, 5, 20]),
    memory=st.integers(50, 5000),
)
def test_requests_of_any_length_run_half_as_many_as_with_a_division_for_them(
    window: int, ratio: float, memory: int
) -> None:
    max_len = 100_000
    full = KVGroup(AttentionSpec(1, 100), (0,))
    windowed = KVGroup(AttentionSpec(1, int(100 * ratio), window), (1,))
    demand = make_demand((full, windowed), max_num_seqs=10_000, max_chunk=16)
    length = window + 100
    one = demand.total_bytes(demand.blocks_of_one(length))
    available = memory * one
    division = divide_memory(demand, available, length, max_len)
    longest = demand.longest_alone(available, max_len)
    while length <= longest:
        running = demand.num_running(division, length)
        alone = demand.total_bytes(demand.blocks_of_one(length))
        assert running >= 0.44 * min(10_000, available // alone) - 1
        length *= 2


STATES = tuple(KVGroup(StateSpec((size,), "float32"), (1,)) for size in (10, 1000))


@settings(max_examples=100, deadline=None)
@given(memory=st.integers(1, 10**9), seqs=st.integers(1, 300), caching=st.booleans())
def test_states_have_two_blocks_a_request_and_a_share_for_snapshots(
    memory: int, seqs: int, caching: bool
) -> None:
    """With plenty of memory: else the running requests have what there is."""
    groups = (KVGroup(AttentionSpec(1, 8), (0,)), *STATES)
    demand = make_demand(groups, max_num_seqs=seqs, prefix_caching=caching)
    available = demand.total_bytes(demand.blocks_of_one(1000)) + memory
    _, *states = divide_memory(demand, available, 1000, 1000)
    snapshots = int(min(memory, available / 8) // demand.snapshot_bytes) if caching else 0
    assert states[0] == states[1]
    assert 2 + snapshots <= states[0] <= 2 * seqs + snapshots
    if memory > 20 * seqs * demand.total_bytes(demand.blocks_of_one(1000)):
        assert states[0] == 2 * seqs + snapshots


def test_a_model_of_states_alone_has_snapshots_for_the_rest() -> None:
    demand = make_demand(STATES, max_num_seqs=4)
    available = 500 * demand.snapshot_bytes + 7
    assert divide_memory(demand, available, 1000, 1000) == [500, 500]
    demand = make_demand(STATES, max_num_seqs=4, prefix_caching=False)
    assert divide_memory(demand, available, 1000, 1000) == [8, 8]


def test_configured_blocks_have_a_snapshot_for_each_running_request() -> None:
    """`count` has 4 of these."""
    config = make_config(num_blocks=500)
    assert count(config, FULL, *STATES) == (500, 12, 12)
    assert count(make_config(num_blocks=3), FULL, *STATES) == (3, 6, 6)


def test_a_group_alone_has_all_the_memory() -> None:
    for spec in (AttentionSpec(2, 8), LatentSpec(9)):
        demand = make_demand((KVGroup(spec, (0, 1)),))
        size = demand.block_bytes[0]
        for blocks in (1, 7, 12345):
            assert divide_memory(demand, blocks * size + size - 1, 16, 10**6) == [blocks]


def test_long_contexts_do_not_starve_the_windows_of_many_short_requests() -> None:
    """Gemma 3 27B: 52 layers with a window of 1024 tokens, 10 without, in 40 GiB."""
    specs = [AttentionSpec(16, 128, None if i % 6 == 5 else 1024) for i in range(62)]
    demand = make_demand(
        group_layers([[spec] for spec in specs]), block_size=128, max_num_seqs=256, max_chunk=8192
    )
    windows, full = divide_memory(demand, 40 * GIB, 9472, 131_072)
    assert full * 128 > 2 * 131_072, "two of the longest requests"
    assert windows // 9 >= 40, "forty whose windows are full"


def test_plenty_of_memory_goes_where_all_tokens_are_kept() -> None:
    groups = (KVGroup(AttentionSpec(1, 64, 100), (0,)), KVGroup(AttentionSpec(1, 64), (1,)))
    demand = make_demand(groups)
    windows, full = divide_memory(demand, GIB, 1000, 1000)
    assert [windows, None] == demand.enough_blocks(1000)
    assert full > 200_000


@settings(max_examples=60, deadline=None)
@given(
    window=st.integers(1, 60),
    chunk=st.integers(1, 60),
    block_size=st.integers(1, 9),
    data=st.data(),
)
def test_running_requests_never_own_more_blocks_of_a_window_than_are_enough(
    window: int, chunk: int, block_size: int, data: st.DataObject
) -> None:
    """Every way in which the tokens of a step can be shared out, at the worst positions."""
    group = KVGroup(AttentionSpec(1, 1, window), (0,))
    seqs = data.draw(st.integers(1, 5))
    demand = make_demand((group,), block_size=block_size, max_num_seqs=seqs, max_chunk=chunk)
    cuts = sorted(data.draw(st.lists(st.integers(0, chunk), min_size=seqs - 1, max_size=seqs - 1)))
    parts = [b - a for a, b in zip([0, *cuts], [*cuts, chunk], strict=True)]
    owned = sum(group.max_blocks(10**6, block_size, max(1, part)) for part in parts)
    (enough,) = demand.enough_blocks(10**6)
    assert enough is not None
    assert owned <= enough
