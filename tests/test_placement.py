"""Where ranks stand in a world of several groups."""

from __future__ import annotations

import pickle

import pytest

from aioinfer.ipc.placement import RankSpec, place_on_hosts


def test_the_groups_of_a_grid() -> None:
    spec = RankSpec(0, 12, groups=(("pp", 2), ("dp", 3), ("tp", 2)))
    assert spec.members("tp") == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]
    assert spec.members("dp") == [[0, 2, 4], [1, 3, 5], [6, 8, 10], [7, 9, 11]]
    assert spec.members("pp") == [[0, 6], [1, 7], [2, 8], [3, 9], [4, 10], [5, 11]]


@pytest.mark.parametrize(
    ("address", "is_local"),
    [
        ("127.0.0.1", True), ("127.3.2.1", True), ("::1", True), ("localhost", True),
        ("10.0.0.7", False), ("gpu-7.cluster", False),
    ],
)  # fmt: skip
def test_which_addresses_are_of_this_host(address: str, is_local: bool) -> None:
    assert RankSpec(master_address=address).is_local == is_local


@pytest.mark.parametrize(
    "fields",
    [
        {"world_size": 4, "groups": (("tp", 2),)},
        {"world_size": 4, "groups": (("tp", 2), ("tp", 2))},
        {"world_size": 2, "groups": (("tensor", 2),)},
        {"world_size": 2},
        {"rank": 2, "world_size": 2, "groups": (("tp", 2),)},
        {"rank": -1},
    ],
)
def test_what_is_no_world(fields: dict) -> None:
    with pytest.raises(ValueError):
        RankSpec(**fields)


def test_it_can_be_sent_to_a_process() -> None:
    spec = RankSpec(3, 4, 1, "10.0.0.7", 29500, (("dp", 2), ("tp", 2)))
    assert pickle.loads(pickle.dumps(spec)) == spec


def test_ranks_are_numbered_in_each_engine_of_a_world() -> None:
    groups = (("dp", 2), ("tp", 2))
    places = [RankSpec(rank, 4, rank % 2, groups=groups) for rank in range(4)]
    assert [place.engine_rank for place in places] == [0, 1, 0, 1]
    assert {place.engine_size for place in places} == {2}
    assert [place.sends_results for place in places] == [True, False, True, False]
    assert RankSpec(3, 4, groups=(("pp", 2), ("tp", 2))).engine_rank == 3


def test_ranks_of_several_hosts_are_numbered_on_each() -> None:
    groups = (("pp", 2), ("tp", 2))
    places = place_on_hosts(groups, [0, 1, 1, 0], ("10.0.0.7", 2900), owns_devices=True)
    assert [place.rank for place in places] == [0, 1, 2, 3]
    assert [place.local_rank for place in places] == [0, 0, 1, 1]
    assert [place.sends_results for place in places] == [False, False, True, False]
    assert {place.groups for place in places} == {groups}
    assert {(place.master_address, place.master_port) for place in places} == {("10.0.0.7", 2900)}
    assert not any(place.is_local for place in places)
    assert all(place.owns_devices for place in places)
    assert all(place.is_local for place in place_on_hosts(groups, [0, 0, 0, 0]))


def test_the_ranks_of_stages() -> None:
    places = place_on_hosts((("pp", 3), ("tp", 2)), [0] * 6)
    assert [place.rank for place in places] == list(range(6))
    assert [place.stage for place in places] == [0, 0, 1, 1, 2, 2]
    assert [place.index_in("tp") for place in places] == [0, 1] * 3
    assert [place.rank for place in places if place.sends_results] == [4]
    assert places[3].name == "3 (stage 1)"
    assert places[3].members("tp")[1] == [2, 3]
    assert places[5].names_of_all[:2] == ["0 (stage 0)", "1 (stage 0)"]


def test_without_a_pipeline_the_first_rank_answers() -> None:
    places = place_on_hosts((("tp", 3),), [0] * 3)
    assert [place.sends_results for place in places] == [True, False, False]
    assert (places[1].name, places[1].size_of("pp"), places[1].stage) == ("1", 1, 0)
    assert places[1].names_of_all == ["0", "1", "2"]
