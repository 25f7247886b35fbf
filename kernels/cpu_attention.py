"""Attention of decodes over the paged KV cache on CPUs, compiled by numba: float32 throughout.

A row's query heads that share a KV head are computed together, by one thread: the scores of all
keys, their softmax, the weighted sum of the values, over the blocks as they lie. Nothing is
gathered or padded, so the result for a row does not depend on the other rows, not in one bit.

`rotate` applies rotary embeddings to queries and keys and writes keys and values to the cache.
"""

from __future__ import annotations

import enum
from functools import cache
from typing import Any

import numpy as np
from aioinfer.kernels.cpu_team import Compiled, fetch_add, own_scratch, run_task
from aioinfer.kernels.cpu_vectors import (
    LANES,
    VECTOR_BYTES,
    add,
    add_outer,
    broadcast,
    exponential,
    load,
    load_integer,
    load_number,
    load_short,
    multiply,
    multiply_add,
    store,
    store_number,
    store_tile,
    subtract,
    sum_lanes,
    zero_tile,
)
from numba import njit

#: Head sizes are multiples of this: two vectors of values are summed at a time.
HEAD_STEP = 2 * LANES
#: Bytes of a thread's scratch memory before its scores: a tile of sums.
TILE_BYTES = 4 * 2 * VECTOR_BYTES


class AttentionTask(enum.IntEnum):
    """Indices into the description of a call, int64 each; strides are in bytes.

    With `TOKENS` above 0 the call is `rotate`, else attention.
    """

    TOKENS = 0
    ROWS = enum.auto()  # decodes
    QUERIES = enum.auto()  # float32 [rows, heads, head size]; of `rotate`: [T, all heads, ..]
    QUERY_STRIDE = enum.auto()  # between rows
    OUT = enum.auto()  # float32 like the queries; of `rotate`: queries and keys, rotated
    OUT_STRIDE = enum.auto()
    TABLES = enum.auto()  # int32 [rows, ..], the KV blocks; of `rotate`: int64 [T], the slots
    TABLE_STRIDE = enum.auto()
    LENGTHS = enum.auto()  # int32 [rows], tokens in the cache; of `rotate`: positions
    SCRATCH = enum.auto()
    SCRATCH_STRIDE = enum.auto()  # of a thread; less the tile a multiple of the scores' bytes
    THREADS = enum.auto()
    # fields that stay
    KEYS = enum.auto()  # float32 [blocks, block size, KV heads, head size]
    VALUES = enum.auto()
    KV_HEADS = enum.auto()
    SHARED = enum.auto()  # query heads for each KV head
    HEAD_SIZE = enum.auto()
    BLOCK_SIZE = enum.auto()
    WINDOW = enum.auto()  # tokens, or 0 for all
    SCALE = enum.auto()  # of scores, the bits of a float32
    COS_SIN = enum.auto()  # float32 [positions, rotated]
    ROTATED = enum.auto()  # channels of a head that are rotated
    TEAM = enum.auto()  # the address of the team, where there are several threads
    BODY = enum.auto()  # the address of `Compiled.work`
    NEXT = enum.auto()  # the next row and KV head that no thread has taken
    ARRIVED = enum.auto()  # threads that have begun


# numba takes members of an enumeration for objects: plain numbers
_T = [8 * place.value for place in AttentionTask]
_TOKENS, _ROWS, _QUERIES, _QUERY_STRIDE, _OUT, _OUT_STRIDE, _TABLES, _TABLE_STRIDE = _T[:8]
_LENGTHS, _SCRATCH, _SCRATCH_STRIDE, _THREADS, _KEYS, _VALUES, _KV_HEADS, _SHARED = _T[8:16]
_HEAD_SIZE, _BLOCK_SIZE, _WINDOW, _SCALE, _COS_SIN, _ROTATED, _TEAM, _BODY = _T[16:24]
_NEXT, _ARRIVED = _T[24:]
#: The fields that `run_task` reads.
_WORK = (_THREADS, _TEAM, _BODY, _ARRIVED, _NEXT)


@njit
def _copy(source, destination, count):
    """Copies so many bytes, a multiple of a vector's."""
    for place in range(0, count, VECTOR_BYTES):
        store(destination + place, load(source + place))


@njit
def _rotate_head(x, out, cos, rotated, size):
    """Rotates one head (GPT-NeoX's order); the rest of its channels are copied."""
    half = 2 * rotated
    for place in range(0, half, VECTOR_BYTES):
        cosine, sine = load(cos + place), load(cos + half + place)
        first, second = load(x + place), load(x + half + place)
        store(out + place, subtract(multiply(first, cosine), multiply(second, sine)))
        store(out + half + place, multiply_add(second, cosine, multiply(first, sine)))
    _copy(x + 2 * half, out + 2 * half, 4 * size - 2 * half)


@njit
def _rotate(task):
    """Rotates the queries and keys of all tokens and writes keys and values to the cache."""
    kv_heads, size = load_integer(task + _KV_HEADS), load_integer(task + _HEAD_SIZE)
    heads = kv_heads * load_integer(task + _SHARED)
    rotated = load_integer(task + _ROTATED)
    for token in range(load_integer(task + _TOKENS)):
        x = load_integer(task + _QUERIES) + token * load_integer(task + _QUERY_STRIDE)
        out = load_integer(task + _OUT) + token * load_integer(task + _OUT_STRIDE)
        position = load_short(load_integer(task + _LENGTHS) + 4 * token)
        cos = load_integer(task + _COS_SIN) + 4 * rotated * position
        for head in range(heads + kv_heads):
            _rotate_head(x + 4 * size * head, out + 4 * size * head, cos, rotated, size)
        kv_bytes = 4 * size * kv_heads
        slot = load_integer(load_integer(task + _TABLES) + 8 * token) * kv_bytes
        _copy(out + 4 * size * heads, load_integer(task + _KEYS) + slot, kv_bytes)
        values = x + 4 * size * (heads + kv_heads)
        _copy(values, load_integer(task + _VALUES) + slot, kv_bytes)


@njit
def _dot(x, y, size):
    """Returns the product of two vectors of `size` float32."""
    total = broadcast(np.float32(0.0))
    for place in range(0, 4 * size, VECTOR_BYTES):
        total = multiply_add(load(x + place), load(y + place), total)
    return sum_lanes(total)


@njit
def _softmax(scores, count, highest):
    """Makes scores (float32 [count], with room for a whole vector) weights whose sum, which is
    returned, is not 1 yet."""
    padded = (count + LANES - 1) // LANES * LANES
    for place in range(count, padded):
        store_number(scores + 4 * place, np.float32(-np.inf))
    total = broadcast(np.float32(0.0))
    shift = broadcast(highest)
    for place in range(0, 4 * padded, VECTOR_BYTES):
        weights = exponential(subtract(load(scores + place), shift))
        store(scores + place, weights)
        total = add(total, weights)
    return sum_lanes(total)


def _make_weigh(rows: int) -> Any:
    @njit
    def weigh(weights, stride, table, values, first, last, size, token_bytes, tile):
        """Sums two vectors of the values of keys `first` to `last` - 1, weighted for each of
        `rows` query heads, and writes them to the tile."""
        sums = zero_tile(rows)
        key = first
        while key < last:
            block = load_short(table + 4 * (key // size))
            value = values + (block * size + key % size) * token_bytes
            for _ in range(min(last, (key // size + 1) * size) - key):
                sums = add_outer(sums, load(value), load(value + VECTOR_BYTES), weights, stride)
                value += token_bytes
                weights += 4
                key += 1
        store_tile(tile, sums)

    return weigh


_weigh_1, _weigh_2, _weigh_4 = (_make_weigh(rows) for rows in (1, 2, 4))


@njit
def _score(task, queries, keys, table, first, last, scores, stride):
    """Writes the scores of keys `first` to `last` - 1 for the query heads of a KV head, and turns
    them into weights; the sums of the weights lie before them."""
    shared, size = load_integer(task + _SHARED), load_integer(task + _HEAD_SIZE)
    block_size, scale = load_integer(task + _BLOCK_SIZE), load_number(task + _SCALE)
    token_bytes = 4 * size * load_integer(task + _KV_HEADS)
    for key in range(first, last):
        block = load_short(table + 4 * (key // block_size))
        place = keys + (block * block_size + key % block_size) * token_bytes
        for head in range(shared):
            score = _dot(queries + 4 * size * head, place, size) * scale
            store_number(scores + head * stride + 4 * (key - first), score)
    for head in range(shared):
        own = scores + head * stride
        highest = load_number(own)
        for key in range(1, last - first):
            highest = max(highest, load_number(own + 4 * key))
        store_number(own - 4, _softmax(own, last - first, highest))


@njit
def _attend(task, row, kv_head, scratch):
    """Attends the query heads of one KV head of a row."""
    shared, size = load_integer(task + _SHARED), load_integer(task + _HEAD_SIZE)
    table = load_integer(task + _TABLES) + row * load_integer(task + _TABLE_STRIDE)
    last = load_short(load_integer(task + _LENGTHS) + 4 * row)
    window = load_integer(task + _WINDOW)
    first = max(0, last - window) if window else 0
    stride = (load_integer(task + _SCRATCH_STRIDE) - TILE_BYTES) // shared
    scores = scratch + TILE_BYTES + VECTOR_BYTES
    place = 4 * size * shared * kv_head
    queries = load_integer(task + _QUERIES) + row * load_integer(task + _QUERY_STRIDE) + place
    out = load_integer(task + _OUT) + row * load_integer(task + _OUT_STRIDE) + place
    keys = load_integer(task + _KEYS) + 4 * size * kv_head
    values = load_integer(task + _VALUES) + 4 * size * kv_head
    _score(task, queries, keys, table, first, last, scores, stride)
    block_size = load_integer(task + _BLOCK_SIZE)
    token_bytes = 4 * size * load_integer(task + _KV_HEADS)
    for channel in range(0, 4 * size, 2 * VECTOR_BYTES):
        head = 0
        while head < shared:
            own, some = scores + head * stride, values + channel
            if shared - head >= 4:
                count = 4
                _weigh_4(own, stride, table, some, first, last, block_size, token_bytes, scratch)
            elif shared - head >= 2:
                count = 2
                _weigh_2(own, stride, table, some, first, last, block_size, token_bytes, scratch)
            else:
                count = 1
                _weigh_1(own, stride, table, some, first, last, block_size, token_bytes, scratch)
            for number in range(count):
                factor = np.float32(1.0) / load_number(own + number * stride - 4)
                tile = scratch + 2 * VECTOR_BYTES * number
                place = out + 4 * size * (head + number) + channel
                store(place, multiply(load(tile), broadcast(factor)))
                other = multiply(load(tile + VECTOR_BYTES), broadcast(factor))
                store(place + VECTOR_BYTES, other)
            head += count


def _work(task):
    """One thread's part: takes rows and KV heads until none is left."""
    stride = load_integer(task + _SCRATCH_STRIDE)
    scratch = own_scratch(task + _ARRIVED, load_integer(task + _SCRATCH), stride)
    kv_heads = load_integer(task + _KV_HEADS)
    total = load_integer(task + _ROWS) * kv_heads
    number = fetch_add(task + _NEXT, 1)
    while number < total:
        _attend(task, number // kv_heads, number % kv_heads, scratch)
        number = fetch_add(task + _NEXT, 1)


def _run(task):
    """Computes a call."""
    if load_integer(task + _TOKENS):
        _rotate(task)
        return
    run_task(task, _WORK)


@cache
def compile_kernel() -> Compiled:
    """Compiles the functions; see `compile_functions`."""
    return Compiled.compile("cpu_attention", _run, _work)
