"""What layers keep: groups, and how many blocks a request owns at once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aioinfer.ipc.kv_spec import (
    AttentionSpec,
    KVGroup,
    KVSpec,
    LatentSpec,
    StateSpec,
    group_layers,
    groups_of_stage,
)

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
