"""Latent attention at tiny sizes, against float64: decodes in any number of splits, prefill in any
number of segments, norm and rotation with the cache write."""

from __future__ import annotations

import pytest
import torch
from aioinfer.kernels.decode_plan import DecodeConfig
from cases import error
from latent_cases import LatentCase, cache_write, decode, prefill

pytestmark = pytest.mark.extended

SMALL = DecodeConfig(tile=16, num_warps=4, num_stages=1, programs_per_sm=1, part_tiles=1)
LENGTHS = [5, 40, 0, 90, 17, 1]


def small(**fields: object) -> LatentCase:
    return LatentCase(**{"dtype": torch.float32, "device": "cpu", "config": SMALL, **fields})


@pytest.mark.parametrize("programs", [1, 3, 40])
def test_decodes_on_any_number_of_programs(programs: int) -> None:
    assert error(decode(small(programs=programs), LENGTHS)) < 1e-5


@pytest.mark.parametrize(
    ("num_heads", "latent_size", "rotary_size"), [(1, 32, 8), (6, 24, 16), (20, 16, 4)]
)
def test_decodes_of_several_shapes(num_heads: int, latent_size: int, rotary_size: int) -> None:
    """One group of heads and two, padded and not."""
    case = small(num_heads=num_heads, latent_size=latent_size, rotary_size=rotary_size)
    assert error(decode(case, [33, 0, 70])) < 1e-5


@pytest.mark.parametrize(("block_size", "tile"), [(64, 16), (16, 32)])
def test_tiles_smaller_and_larger_than_blocks(block_size: int, tile: int) -> None:
    config = DecodeConfig(tile, 4, 1, 1, 1)
    assert error(decode(small(block_size=block_size, config=config), [100, 64, 3])) < 1e-5


@pytest.mark.sample
@pytest.mark.parametrize("num_heads", [4, 64])
def test_decodes_in_float16(num_heads: int) -> None:
    """64 heads fill a wide product, and are merged in several parts."""
    case = small(dtype=torch.float16, num_heads=num_heads, latent_size=16)
    assert error(decode(case, [33, 0, 70])) < 1e-2


@pytest.mark.parametrize("capacity", [11, 40, 1000])
def test_prefill_in_any_number_of_segments(capacity: int) -> None:
    """Rows with and without tokens before them, and decodes, which are not touched."""
    rows = [(1, 9), (20, 20), (3, 50), (17, 30), (1, 8)]
    assert error(prefill(small(num_heads=2), rows, num_decodes=1, capacity=capacity)) < 1e-5


@pytest.mark.sample
def test_prefill_in_float16() -> None:
    rows = [(20, 20), (3, 50)]
    case = small(dtype=torch.float16, num_heads=1)
    assert error(prefill(case, rows, num_decodes=0, capacity=30)) < 1e-2


@pytest.mark.sample
@pytest.mark.parametrize(("num_heads", "latent_size", "rotary_size"), [(3, 24, 8), (20, 32, 16)])
def test_norm_rotation_and_cache_write(num_heads: int, latent_size: int, rotary_size: int) -> None:
    case = small(num_heads=num_heads, latent_size=latent_size, rotary_size=rotary_size)
    assert max(map(error, cache_write(case, tokens=9))) < 1e-5
