"""The ways in which KV blocks cross the host's link: the pieces of a batch are the blocks."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import pytest
import torch

from aioinfer.ipc.plan import I32
from aioinfer.layers.kv_cache import FLOAT8
from aioinfer.worker.block_crossings import (
    U64,
    BatchedCrossing,
    Crossing,
    PlainCrossing,
    make_crossing,
)
from aioinfer.worker.host_blocks import make_host_blocks
from aioinfer.worker.kv_tensors import KVTensors
from tests.test_host_blocks import make_kv

Pieces = tuple[U64, U64, U64]


class Memory:
    """A KV cache and places of the host, all of random bytes that depend on the dtype alone."""

    def __init__(
        self, dtype: torch.dtype, make: Callable[[KVTensors, list[torch.Tensor]], Crossing]
    ):
        self.kv = make_kv(dtype)
        self.host = make_host_blocks(self.kv, 3 * self.kv.nbytes).groups
        for memory in self.host:
            memory.random_(0, 100)
        self.crossing = make(self.kv, self.host)

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Memory)
        blocks = [[kv.blocks(group) for group in range(4)] for kv in (self.kv, other.kv)]
        return all(map(torch.equal, self.host, other.host)) and all(map(torch.equal, *blocks))


def random_moves(rng: np.random.Generator, *, to_device: bool) -> I32:
    """Returns moves of groups with layers and of one without; places may be named twice, blocks
    only where they are read."""
    moves = []
    for group, count in enumerate((6, 6, 6, 5)):
        blocks = rng.permutation(count)[: rng.integers(0, count + 1)]
        if not to_device:
            blocks = rng.choice(count, len(blocks))
        moves += [[group, rng.integers(0, 8), block] for block in blocks]
    return rng.permutation(np.array(moves, np.int32).reshape(-1, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FLOAT8])
def test_batches_copy_what_single_copies_do(dtype: torch.dtype) -> None:
    """Also where the pieces of a call are copied in another order, as a driver may."""
    rng = np.random.default_rng(0)

    def copy(targets: U64, sources: U64, sizes: U64) -> None:
        assert len(targets)
        for piece in rng.permutation(len(targets)):
            ctypes.memmove(int(targets[piece]), int(sources[piece]), int(sizes[piece]))

    batched = Memory(dtype, lambda kv, places: BatchedCrossing(kv, places, copy))
    plain = Memory(dtype, make_crossing)
    assert isinstance(plain.crossing, PlainCrossing)
    assert batched == plain
    for number in range(40):
        moves = random_moves(rng, to_device=number % 2 == 0)
        for memory in (batched, plain):
            if number % 2 == 0:
                memory.crossing.to_device(moves)
            else:
                memory.crossing.to_host(moves)
        assert batched == plain


def test_a_call_has_a_piece_of_each_part_and_layer() -> None:
    """And of several blocks for one place the last. There is no call without pieces."""
    calls: list[Pieces] = []
    memory = Memory(
        torch.float32,
        lambda kv, places: BatchedCrossing(kv, places, lambda *pieces: calls.append(pieces)),
    )
    memory.crossing.to_host(np.array([[2, 0, 1]], np.int32))
    memory.crossing.to_device(np.empty((0, 3), np.int32))
    assert not calls
    memory.crossing.to_host(np.array([[3, 0, 1], [2, 0, 1], [0, 7, 2], [0, 7, 3]], np.int32))
    ((targets, sources, sizes),) = calls
    assert sizes.tolist() == [4 * 2 * 8 * 4] * 2 * 3 + [3 * 5 * 2] * 2
    assert targets[0] == memory.host[0][7].data_ptr()
    assert sources[0] == memory.kv.block(0, 3).data_ptr()
