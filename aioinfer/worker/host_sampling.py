"""Sampling on the host, in numpy: filters, noise and the argmax, a row at a time.

The sampler calls `sample_rows`, or `vocab_parallel.sample_rows`, which uses the same parts, where
several ranks share the vocabulary. Whatever can be is computed in numpy: its argmax takes a tenth
of the time of torch's.

Noise is a pure function of seed, position and token id. Gumbel-max (Gumbel 1954; Maddison et al.
2014) samples from a softmax: argmax over tokens of logit / temperature + g. Here g depends on
nothing but the request's seed, the position of the token to be sampled (counted from the beginning
of the prompt) and the token id. So the same seed gives the same text, whatever else is in the batch
and however the step is computed. It is made of 32-bit unsigned integer operations that wrap, `^` is
exclusive or, `>>` shifts in zeros, and `mix` is the finaliser "lowbias32" of C. Wellons' hash
prospector:

    mix(h):  h ^= h >> 16;  h *= 0x7feb352d;  h ^= h >> 15;  h *= 0x846ca68b;  h ^= h >> 16
    key0 = mix(seed_high ^ mix(seed_low ^ mix(position + 0x9e3779b9)))
    key1 = mix(seed_high ^ mix(seed_low ^ mix(position + 0x7f4a7c15)))
    h    = mix of (token ^ key0), with  h ^= key1  after its first multiplication
    u    = ((h >> 9) + 0.5) * 2**-23         (float32, exact; between 2**-24 and 1 - 2**-24)
    g    = -log(-log(u))                     (float32)

This is the arithmetic of the host, since torch has no unsigned integers; the kernel that does the
same on a GPU (`kernels.sampling`) gives the same u bit for bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from aioinfer.ipc.plan import F32, I32
from aioinfer.sampling_params import FILTERS
from aioinfer.worker.slots import FILTERED, RANDOM, Slots

U32 = npt.NDArray[np.uint32]

#: How far below the largest scaled logit top-k and top-p look, one after the other, so that they
#: rarely sort the whole vocabulary.
SPANS = (8.0, 12.0, math.inf)


def sample_rows(
    scores: F32, slots: Slots, slot_ids: I32, positions: I32, flags: npt.NDArray[np.uint8]
) -> npt.NDArray[np.int32]:
    """Samples the token at `positions[i]` of the request in slot `slot_ids[i]` from row i of
    `scores`.

    Args:
        scores: float32 [S, vocab_size], adjusted logits.
        slots: with the parameters of each request.
        slot_ids, positions: int32 [S].
        flags: uint8 [S], the sampling flags of the rows.

    Returns:
        int32 [S], token ids; -1 where the logits hold NaN or infinity, or every token is banned.
    """
    random = np.flatnonzero(flags & RANDOM)
    if not len(random):
        return best_tokens(scores)
    sampled = np.empty(len(scores), np.int32)
    greedy = np.flatnonzero(~flags & RANDOM)
    if len(greedy):
        sampled[greedy] = best_tokens(scores[greedy])
    sampled[random] = _sample_random(
        scores, random, slots, flags, slot_ids[random], positions[random]
    )
    return sampled


def best_tokens(scores: F32) -> npt.NDArray[np.int32]:
    """Returns the best token (the lowest id among equals) of each row of float32 [S, vocab_size],
    or -1 without one."""
    tokens = scores.argmax(axis=1).astype(np.int32)  # the first NaN, if there is any
    best = scores[np.arange(len(tokens)), tokens]
    tokens[~np.isfinite(best)] = -1
    return tokens


@dataclass(slots=True)
class RowParams:
    """The sampling parameters of n rows, on the host.

    Attributes:
        key0, key1: uint32 [n], of the noise.
        temperature: float32 [n].
        filters: of each row, in the order of `FILTERS`.
    """

    key0: U32
    key1: U32
    temperature: F32
    filters: list[tuple[Any, ...]]

    @classmethod
    def of(cls, slots: Slots, slot_ids: I32, positions: I32) -> RowParams:
        """Returns the parameters of the requests in `slot_ids` at `positions`, both int32 [n]."""
        at = torch.from_numpy(slot_ids).to(slots.device)
        columns = [slots.params[name][at].tolist() for name in FILTERS]
        return cls(
            *gumbel_keys(slots.seeds[at].cpu().numpy(), positions),
            slots.params["temperature"][at].cpu().numpy(),
            list(zip(*columns, strict=True)),
        )


def _sample_random(
    scores: F32,
    rows: npt.NDArray[Any],
    slots: Slots,
    flags: npt.NDArray[np.uint8],
    slot_ids: I32,
    positions: I32,
) -> npt.NDArray[np.int32]:
    """Samples one token for each of `rows` of `scores`; returns int32 [rows], -1 where there is
    none.

    One row at a time: its arrays then stay in the core's cache, and a filtered row works on few
    tokens.
    """
    params = RowParams.of(slots, slot_ids, positions)
    vocabulary = np.arange(scores.shape[1], dtype=np.uint32)
    sampled = np.empty(len(rows), np.int32)
    with np.errstate(over="ignore", invalid="ignore"):  # broken logits are found by their largest
        for i, row in enumerate(rows):
            scaled = scores[row] / params.temperature[i]
            largest = float(scaled.max())
            if not math.isfinite(largest):
                sampled[i] = -1
                continue
            tokens = vocabulary
            if flags[row] & FILTERED:
                kept = filter_tokens(scaled, largest, *params.filters[i])
                tokens, scaled = vocabulary[kept], scaled[kept]
            scaled += gumbel_noise(params.key0[i], params.key1[i], tokens)
            sampled[i] = tokens[scaled.argmax()]
    return sampled


def filter_tokens(
    scaled: F32, largest: float, top_k: int, top_p: float, min_p: float
) -> npt.NDArray[np.intp]:
    """Returns the ids (ascending) of the tokens that min-p, top-k and top-p keep, in this order; at
    least one.

    Each filter sees the tokens that the filters before it kept, and keeps all of them down to some
    logit, so that equal logits stay or go together: top-k may keep more than k, and top-p more than
    it must.

    Args:
        scaled: float32 [vocab_size], logits over temperature, finite or minus infinity; `largest`
            of them.
        top_k: 0 keeps all. top_p: 1 keeps all. min_p: 0 keeps all.
    """
    lowest = largest - SPANS[0]
    head = np.flatnonzero(scaled >= lowest)
    values = scaled[head]
    border = largest + math.log(min_p) if min_p > 0 else -math.inf
    if 0 < top_k < len(scaled):
        among = values if len(values) >= top_k else scaled
        border = max(border, float(np.partition(among, len(among) - top_k)[len(among) - top_k]))
    if top_p < 1:
        kept = values[values >= border] if border >= lowest else scaled[scaled >= border]
        border = max(border, _top_p_border(kept, largest, top_p))
    return head[values >= border] if border >= lowest else np.flatnonzero(scaled >= border)


def _top_p_border(kept: F32, largest: float, top_p: float) -> float:
    """Returns the lowest of the fewest largest logits in `kept` that hold `top_p` of its
    probability."""
    mass = top_p * float(np.exp(kept - largest).sum(dtype=np.float64))
    for span in SPANS:
        descending = np.sort(kept[kept >= largest - span])[::-1]
        sums = np.cumsum(np.exp(descending - largest), dtype=np.float64)
        reached = int(np.searchsorted(sums, mass))
        if reached < len(descending):
            return float(descending[reached])
    return -math.inf  # all of them, but for rounding


def gumbel_keys(seeds: npt.NDArray[np.int64], positions: I32) -> tuple[U32, U32]:
    """Returns `key0` and `key1` (uint32 [n]) of the noise, from the seeds' 64 bits and the
    positions (both [n])."""
    halves = np.ascontiguousarray(seeds).view(np.uint64)
    low, high = halves.astype(np.uint32), (halves >> np.uint64(32)).astype(np.uint32)
    at = positions.astype(np.uint32)
    first = _mix(high ^ _mix(low ^ _mix(at + np.uint32(0x9E3779B9))))
    return first, _mix(high ^ _mix(low ^ _mix(at + np.uint32(0x7F4A7C15))))


def uniforms(key0: U32, key1: U32, tokens: U32) -> F32:
    """Returns the uniforms u (float32, the shape that the arguments broadcast to) of token ids
    under the keys."""
    hashed = tokens ^ key0
    hashed ^= hashed >> np.uint32(16)
    hashed *= np.uint32(0x7FEB352D)
    hashed ^= key1
    hashed ^= hashed >> np.uint32(15)
    hashed *= np.uint32(0x846CA68B)
    hashed ^= hashed >> np.uint32(16)
    hashed >>= np.uint32(9)
    u = hashed.view(np.int32).astype(np.float32)  # from signed integers there is an instruction
    u += np.float32(0.5)
    u *= np.float32(2**-23)
    return u


def _mix(hashed: U32) -> U32:
    hashed = hashed ^ (hashed >> np.uint32(16))
    hashed *= np.uint32(0x7FEB352D)
    hashed ^= hashed >> np.uint32(15)
    hashed *= np.uint32(0x846CA68B)
    return hashed ^ (hashed >> np.uint32(16))


def gumbel_noise(key0: U32, key1: U32, tokens: U32) -> F32:
    """Returns the noise g, like `uniforms`."""
    noise = uniforms(key0, key1, tokens)
    np.log(noise, out=noise)
    np.negative(noise, out=noise)
    np.log(noise, out=noise)
    return np.negative(noise, out=noise)
