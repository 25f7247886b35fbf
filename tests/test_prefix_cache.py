"""Block hashes: equal only for equal prefixes, and extended without starting again."""

from __future__ import annotations

from array import array

from aioinfer.scheduler.prefix_cache import extend_hashes, root_hash


def hashes_of(tokens: list[int], block_size: int = 4, root: bytes | None = None) -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(hashes, array("i", tokens), block_size, root_hash() if root is None else root)
    return hashes


def test_only_full_blocks_have_hashes():
    assert [len(hashes_of(list(range(n)))) for n in (0, 3, 4, 7, 8, 9)] == [0, 0, 1, 1, 2, 2]


def test_a_hash_depends_on_everything_before_it():
    one, other = hashes_of([1, 2, 3, 4, 5, 6, 7, 8]), hashes_of([0, 2, 3, 4, 5, 6, 7, 8])
    assert one[0] != other[0]
    assert one[1] != other[1]
    assert hashes_of([1, 2, 3, 4, 9, 9, 9, 9])[0] == one[0]


def test_extending_gives_the_same_as_hashing_anew():
    tokens = array("i", range(20))
    hashes: list[bytes] = []
    for length in (3, 9, 10, 20):
        extend_hashes(hashes, tokens[:length], 4, root_hash())
    assert hashes == hashes_of(list(range(20)))


def test_extra_keys_part_what_may_not_be_shared():
    assert hashes_of([1, 2, 3, 4]) != hashes_of([1, 2, 3, 4], root=root_hash(b"tenant"))
