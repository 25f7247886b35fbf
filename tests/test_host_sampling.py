"""Sampling on the host: noise is that of its definition bit for bit, uniform and uncorrelated;
min-p, top-k and top-p keep what transformers keeps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LogitsProcessorList, MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from aioinfer.sampling_params import SamplingParams
from aioinfer.worker.host_sampling import filter_tokens, gumbel_keys, uniforms
from tests.filled_slots import assert_fits
from tests.pairs import pairwise

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


# ---------------------------------------------------------------- filters


def warped(scaled: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """What transformers' warpers leave of scaled logits, in our order: min-p, top-k, top-p."""
    warpers = LogitsProcessorList()
    if params.min_p > 0:
        warpers.append(MinPLogitsWarper(params.min_p))
    if params.top_k > 0:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    return warpers(torch.zeros(1, 1, dtype=torch.long), scaled[None])[0]


@pairwise(
    spread=[0.01, 1.0, 4.0, 30.0],
    top_k=[0, 1, 50, 2999, 3000],
    top_p=[1.0, 0.999, 0.5, 1e-6],
    min_p=[0.0, 0.3, 1e-6],
)
def test_filters_keep_what_transformers_keeps(
    spread: float, top_k: int, top_p: float, min_p: float
) -> None:
    """From nearly flat logits, where top-p reaches beyond every span, to a single likely token."""
    params = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)
    torch.manual_seed(3)
    scaled = torch.randn(3000) * spread
    expected = warped(scaled, params).isfinite().nonzero()[:, 0].tolist()
    kept = filter_tokens(scaled.numpy(), float(scaled.max()), top_k, top_p, min_p).tolist()
    missing = set(kept) ^ set(expected)
    assert len(missing) <= (1 if top_p < 1 else 0), (
        "only rounding of a sum may move top-p's border, by a token"
    )
    assert kept == sorted(kept)
    assert kept


def test_equals_at_the_border_stay_together() -> None:
    scaled = np.log(np.array([0.1, 0.2, 0.2, 0.3, 0.2], np.float32))
    largest = float(scaled.max())
    assert filter_tokens(scaled, largest, 2, 1.0, 0.0).tolist() == [1, 2, 3, 4]
    assert filter_tokens(scaled, largest, 0, 0.45, 0.0).tolist() == [1, 2, 3, 4]
    assert filter_tokens(scaled, largest, 0, 0.25, 0.0).tolist() == [3]


@pytest.mark.parametrize("name", ["top_p", "min_p"])
def test_the_smallest_value_that_passes_keeps_what_it_must(name: str) -> None:
    smallest = getattr(SamplingParams(**{name: 2.0**-126}), name)
    assert smallest > 0
    scaled = np.array([0, -10, -80, -90], np.float32)
    top_p, min_p = (smallest, 0.0) if name == "top_p" else (1.0, smallest)
    kept = filter_tokens(scaled, 0.0, 0, top_p, min_p).tolist()
    assert kept == ([0] if name == "top_p" else [0, 1, 2])
