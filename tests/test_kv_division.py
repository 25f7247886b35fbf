"""The division of memory among groups of layers: bounds, and that no group starves another."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from aioinfer.ipc.kv_spec import AttentionSpec, KVGroup, LatentSpec, group_layers
from aioinfer.worker.kv_division import CacheDemand, divide_memory

GIB = 2**30
SPECS = st.one_of(
    st.builds(AttentionSpec, st.integers(1, 3), st.just(4), st.none() | st.integers(1, 300)),
    st.builds(LatentSpec, st.integers(1, 20)),
)


def make_demand(groups: tuple[KVGroup, ...], **fields: int) -> CacheDemand:
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
        assert enough is None or blocks <= max(enough, needed)
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
    groups = (
        KVGroup(AttentionSpec(1, 64, 100), (0,)),
        KVGroup(AttentionSpec(1, 64), (1,)),
    )
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
