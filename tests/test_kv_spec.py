"""What layers keep: groups, how many blocks a request owns at once, and the longest request."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioinfer.config import Config, load_config
from aioinfer.errors import ConfigError
from aioinfer.executor.capacity import Capacity, settle_capacity
from aioinfer.ipc.kv_spec import (
    AttentionSpec,
    KVGroup,
    KVSpec,
    LatentSpec,
    StateSpec,
    group_layers,
    groups_of_stage,
)
from aioinfer.worker.worker import LoadReport

FULL, LATENT = AttentionSpec(4, 64), LatentSpec(576)
WINDOW = AttentionSpec(4, 64, 1024)
STATE, INPUTS = StateSpec((16, 128, 128), "float32"), StateSpec((3, 4096), "bfloat16")


def test_layers_of_equal_specification_are_a_group() -> None:
    groups = group_layers([[WINDOW], [WINDOW], [FULL], [AttentionSpec(4, 64, 1024)], [LATENT]])
    assert groups == (KVGroup(WINDOW, (0, 1, 3)), KVGroup(FULL, (2,)), KVGroup(LATENT, (4,)))
    assert [group.window for group in groups] == [1024, None, None]


def test_a_block_takes_the_bytes_of_all_layers() -> None:
    sizes = [KVGroup(spec, (0, 1)).bytes_per_block(16, 2) for spec in (WINDOW, LATENT)]
    assert sizes == [2 * 16 * (2 * 4 * 64) * 2, 2 * 16 * 576 * 2]


def test_groups_of_states_are_behind_the_others() -> None:
    groups = group_layers([[INPUTS, STATE], [INPUTS, STATE], [FULL]])
    assert groups == (KVGroup(FULL, (2,)), KVGroup(INPUTS, (0, 1)), KVGroup(STATE, (0, 1)))
    assert [group.keeps_states for group in groups] == [False, True, True]


def test_a_block_of_states_takes_the_bytes_of_one_state() -> None:
    sizes = [KVGroup(spec, (0, 1, 3)).bytes_per_block(128, 1) for spec in (STATE, INPUTS)]
    assert sizes == [3 * 16 * 128 * 128 * 4, 3 * 3 * 4096 * 2]


@given(num_tokens=st.integers(1, 10**6), block_size=st.integers(1, 128), chunk=st.integers(1, 9999))
def test_a_request_owns_two_states_whatever_its_length(
    num_tokens: int, block_size: int, chunk: int
) -> None:
    blocks = KVGroup(STATE, (0,)).max_blocks(num_tokens, block_size, chunk)
    assert blocks == (1 if num_tokens <= block_size else 2)


def test_specifications_are_described_in_words() -> None:
    assert str(FULL) == "keys and values of 4 heads of size 64"
    assert str(AttentionSpec(1, 8, 9)) == (
        "keys and values of 1 head of size 8, a window of 9 tokens"
    )
    assert str(LATENT) == "latent vectors of size 576"
    assert str(STATE) == "states of 16 x 128 x 128 in float32"


@given(window=st.integers(1, 40), chunk=st.integers(1, 40), block_size=st.integers(1, 17))
def test_a_window_needs_as_many_blocks_as_its_worst_step_reads(
    window: int, chunk: int, block_size: int
) -> None:
    group = KVGroup(AttentionSpec(1, 1, window), (0,))
    longest = 200
    needed = max(
        (end - 1) // block_size - max(0, end - chunk - window + 1) // block_size + 1
        for end in range(chunk, longest + 1)
    )
    assert group.max_blocks(longest, block_size, chunk) == needed
    assert group.max_blocks(1, block_size, chunk) == 1


@given(
    spec=st.sampled_from([FULL, LATENT, AttentionSpec(1, 1, 7), STATE]),
    num_blocks=st.integers(1, 30),
    block_size=st.integers(1, 9),
    chunk=st.integers(1, 20),
)
def test_the_longest_request_is_the_last_that_its_blocks_suffice_for(
    spec: KVSpec, num_blocks: int, block_size: int, chunk: int
) -> None:
    group = KVGroup(spec, (0,))
    longest = group.max_tokens(num_blocks, block_size, chunk)
    if longest is None:
        assert group.max_blocks(10**6, block_size, chunk) <= num_blocks
    else:
        assert group.max_blocks(longest, block_size, chunk) <= num_blocks
        assert group.max_blocks(longest + 1, block_size, chunk) > num_blocks


def test_a_stage_has_its_own_layers_of_each_group() -> None:
    full, local = AttentionSpec(2, 8), AttentionSpec(2, 8, window=5)
    groups = group_layers([[local], [local], [full], [local]])
    assert [group.layers for group in groups] == [(0, 1, 3), (2,)]
    assert [group.layers for group in groups_of_stage(groups, range(2))] == [(0, 1), ()]
    assert [group.layers for group in groups_of_stage(groups, range(2, 4))] == [(1,), (0,)]


def config(**keys: int) -> Config:
    names = {
        "max_num_batched_tokens": "scheduler.max_num_batched_tokens",
        "max_model_len": "model.max_model_len",
    }
    return load_config(
        None, {"model.path": "m", **{names[key]: value for key, value in keys.items()}}
    )


ALL_KEYS, WINDOWED = KVGroup(AttentionSpec(1, 1), (0,)), KVGroup(AttentionSpec(1, 1, 32), (1,))


def report(*num_blocks: int, groups: tuple[KVGroup, ...] = (ALL_KEYS,)) -> LoadReport:
    return LoadReport(
        device="cpu", dtype="float32", weights_bytes=1, block_size=16, groups=groups,
        block_bytes=(7, 3)[: len(groups)], num_blocks=num_blocks, model_max_len=1000, vocab_size=9,
    )  # fmt: skip


def test_the_rank_with_the_least_memory_decides() -> None:
    capacity = settle_capacity(config(), [report(500), report(90), report(300)])
    assert capacity == Capacity((90,), 90 * 7, 1000)


def test_each_group_has_the_blocks_of_the_rank_with_the_fewest() -> None:
    groups = (ALL_KEYS, WINDOWED)
    reports = [report(100, 900, groups=groups), report(200, 800, groups=groups)]
    assert settle_capacity(config(), reports) == Capacity((100, 800), 100 * 7 + 800 * 3, 1000)


def test_a_model_that_fits_keeps_its_length() -> None:
    assert settle_capacity(config(), [report(63)]) == Capacity((63,), 63 * 7, 1000)


def test_a_cache_that_is_too_small_limits_the_length_and_the_report_has_the_reason() -> None:
    capacity = settle_capacity(config(), [report(62)])
    assert (capacity.num_blocks, capacity.max_model_len) == ((62,), 992)
    assert "holds 992 tokens of one request, the model could do 1000" in capacity.reason


def test_blocks_of_a_window_limit_the_length_only_if_one_step_needs_more() -> None:
    groups = (ALL_KEYS, WINDOWED)
    chunk = {"max_num_batched_tokens": 64}
    assert settle_capacity(config(**chunk), [report(500, 7, groups=groups)]).max_model_len == 1000
    capacity = settle_capacity(config(**chunk), [report(500, 6, groups=groups)])
    assert capacity.max_model_len == 96


def test_configured_numbers_are_kept() -> None:
    capacity = settle_capacity(config(max_model_len=160), [report(10)])
    assert capacity == Capacity((10,), 70, 160, "as configured")
    assert settle_capacity(config(max_model_len=1000), [report(500)]).max_model_len == 1000


@pytest.mark.parametrize(
    ("wanted", "num_blocks", "message"),
    [
        (1001, 500, "is 1001, but the model was made for 1000: set it to 1000 or less"),
        (801, 50, "is 801, but the KV cache holds 800 tokens of one request: set it to 800"),
    ],
)
def test_a_length_that_cannot_be_kept_is_rejected(
    wanted: int, num_blocks: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=f"model.max_model_len {message}"):
        settle_capacity(config(max_model_len=wanted), [report(num_blocks)])
