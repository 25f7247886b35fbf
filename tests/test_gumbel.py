"""The noise of sampling: that of its definition bit for bit, uniform and uncorrelated."""

from __future__ import annotations

import numpy as np
import pytest

from aioinfer.worker.sampling.gumbel import gumbel_keys, uniforms
from tests.filled_slots import assert_fits

MASK = 2**32 - 1


def mix(h: int) -> int:
    h ^= h >> 16
    h = h * 0x7FEB352D & MASK
    h ^= h >> 15
    h = h * 0x846CA68B & MASK
    return h ^ h >> 16


def uniform_by_hand(seed: int, position: int, token: int) -> float:
    """The module's definition in Python's integers."""
    low, high = seed & MASK, seed >> 32
    key0, key1 = (mix(high ^ mix(low ^ mix(position + c & MASK))) for c in (0x9E3779B9, 0x7F4A7C15))
    h = token ^ key0
    h ^= h >> 16
    h = h * 0x7FEB352D & MASK ^ key1
    h ^= h >> 15
    h = h * 0x846CA68B & MASK
    h ^= h >> 16
    return ((h >> 9) + 0.5) / 2**23


def test_uniforms_are_those_of_the_definition_bit_for_bit() -> None:
    seeds, positions = [0, 1, 2**64 - 1, 0x0123456789ABCDEF], [0, 1, 8191, 2**31 - 1]
    tokens = [0, 1, 49151, 2**31 - 1]
    key0, key1 = gumbel_keys(
        np.array(seeds, np.uint64).view(np.int64), np.array(positions, np.int32)
    )
    u = uniforms(key0[:, None], key1[:, None], np.array(tokens, np.uint32))
    assert u.dtype == np.float32
    for i, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        assert u[i].tolist() == [uniform_by_hand(seed, position, token) for token in tokens]


def test_uniforms_stay_off_both_ends() -> None:
    key0, key1 = gumbel_keys(np.array([5], np.int64), np.array([9], np.int32))
    u = uniforms(key0, key1, np.arange(2**22, dtype=np.uint32))
    assert 2**-24 <= u.min() < 1e-5
    assert 1 - 1e-5 < u.max() <= 1 - 2**-24


@pytest.mark.parametrize("along", ["tokens", "positions", "seeds"])
def test_uniforms_are_uniform_and_uncorrelated(along: str) -> None:
    count = 2**16
    index = np.arange(count)
    seeds = index.astype(np.int64) if along == "seeds" else np.array([11], np.int64)
    positions = (index if along == "positions" else np.array([100])).astype(np.int32)
    tokens = (index if along == "tokens" else np.array([123])).astype(np.uint32)
    key0, key1 = gumbel_keys(*np.broadcast_arrays(seeds, positions))
    u = uniforms(key0, key1, tokens).astype(np.float64)
    assert_fits(np.histogram(u, 256, (0, 1))[0], np.full(256, count / 256))
    pairs = np.histogram2d(u[:-1], u[1:], 16, [(0, 1), (0, 1)])[0].ravel()
    assert_fits(pairs, np.full(256, (count - 1) / 256))
