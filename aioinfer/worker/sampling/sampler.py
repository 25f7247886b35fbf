"""Sampling on a CPU: from the logits of a step's sampled rows to one token a row.

The model runner calls `sample` once a step, and once more for rows whose logits are changed by a
message that comes behind the plan (`features.WorkerFeature.late_logits`: masks). A row's logits go
through these steps, in vLLM's order, each only where the request has it: logit bias; minus infinity
for tokens banned before min_tokens; penalties (`adjustments`); the logits processors of features;
temperature; min-p; top-k; top-p (`filters`); Gumbel noise and the argmax (`gumbel`).
Whatever can be is computed in numpy: its argmax takes a tenth of the time of torch's.

Of several tensor-parallel ranks each has the logits of its shard of the vocabulary. They gather the
best token of each shard, or the candidates of the filters (`vocab_parallel`), and all sample the
same tokens, the same as one rank with all logits would.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from aioinfer.ipc.plan import F32, I32
from aioinfer.layers.embedding import Vocabulary
from aioinfer.sampling_params import FILTERS
from aioinfer.worker.sampling.adjustments import Adjust, adjust_logits
from aioinfer.worker.sampling.filters import filter_tokens
from aioinfer.worker.sampling.gumbel import U32, gumbel_keys, gumbel_noise
from aioinfer.worker.sampling.vocab_parallel import (
    CANDIDATES,
    MORE,
    Candidates,
    gather,
    keep_candidates,
)
from aioinfer.worker.slots import BANNED, BIASED, FILTERED, PENALIZED, RANDOM, Slots


def sample(
    logits: torch.Tensor,
    slots: Slots,
    slot_ids: I32,
    positions: I32,
    vocabulary: Vocabulary | None = None,
    adjust: Adjust | None = None,
    *,
    in_place: bool = False,
) -> torch.Tensor:
    """Samples the token at `positions[i]` of the request in slot `slot_ids[i]` from row i of
    `logits`.

    Args:
        logits: float32 [S, local_size], of the tokens of this rank's shard.
        slots: the sampling parameters. Not changed.
        slot_ids, positions: int32 [S].
        vocabulary: the shard; by default the whole vocabulary. If it is split over ranks, each has
            to call this, and returns the same.
        adjust: changes the logits further, before the temperature.
        in_place: whether `logits` may be changed.

    Returns:
        tokens: int32 [S] on the device of the logits; -1 where these held NaN or infinity, or every
        token was banned.
    """
    sharded = vocabulary if vocabulary is not None and vocabulary.group.size > 1 else None
    sampling_flags = slots.current_flags(slot_ids, positions)
    flags = int(np.bitwise_or.reduce(sampling_flags, initial=0))
    if flags & (BIASED | BANNED | PENALIZED) or adjust is not None:
        logits = logits if in_place else logits.clone()
        first = 0 if sharded is None else sharded.start
        adjust_logits(logits, slots, sampling_flags, slot_ids, positions, first)
        if adjust is not None:
            adjust(logits)
    scores = logits.cpu().numpy()
    if sharded is not None:
        sampled = _sample_vocab_parallel(
            scores, slots, sampling_flags, slot_ids, positions, sharded
        )
    elif not flags & RANDOM:
        sampled = _argmax(scores)
    else:
        sampled = np.empty(len(scores), np.int32)
        greedy = np.flatnonzero(~sampling_flags & RANDOM)
        random = np.flatnonzero(sampling_flags & RANDOM)
        if len(greedy):
            sampled[greedy] = _argmax(scores[greedy])
        sampled[random] = _sample_random(
            scores, random, slots, sampling_flags, slot_ids[random], positions[random]
        )
    return torch.from_numpy(sampled).to(logits.device)


def _argmax(scores: F32) -> npt.NDArray[np.int32]:
    """Returns the best token (the lowest id among equals) of each row of float32 [S, vocab_size],
    or -1 without one."""
    tokens = scores.argmax(axis=1).astype(np.int32)  # the first NaN, if there is any
    best = scores[np.arange(len(tokens)), tokens]
    tokens[~np.isfinite(best)] = -1
    return tokens


@dataclass(slots=True)
class _RowParams:
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
    def of(cls, slots: Slots, slot_ids: I32, positions: I32) -> _RowParams:
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
    sampling_flags: npt.NDArray[np.uint8],
    slot_ids: I32,
    positions: I32,
) -> npt.NDArray[np.int32]:
    """Samples one token for each of `rows` of `scores`; returns int32 [rows], -1 where there is
    none.

    One row at a time: its arrays then stay in the core's cache, and a filtered row works on few
    tokens.
    """
    params = _RowParams.of(slots, slot_ids, positions)
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
            if sampling_flags[row] & FILTERED:
                kept = filter_tokens(scaled, largest, *params.filters[i])
                tokens, scaled = vocabulary[kept], scaled[kept]
            scaled += gumbel_noise(params.key0[i], params.key1[i], tokens)
            sampled[i] = tokens[scaled.argmax()]
    return sampled


def _sample_vocab_parallel(
    scores: F32,
    slots: Slots,
    sampling_flags: npt.NDArray[np.uint8],
    slot_ids: I32,
    positions: I32,
    vocabulary: Vocabulary,
) -> npt.NDArray[np.int32]:
    """Samples a token for each row of `scores` float32 [S, local], together with the ranks of the
    other shards; returns int32 [S]."""
    sampled = np.empty(len(scores), np.int32)
    plain = np.flatnonzero(~sampling_flags & FILTERED)
    filtered = np.flatnonzero(sampling_flags & FILTERED)
    with np.errstate(over="ignore", invalid="ignore"):
        if len(plain):
            params = _RowParams.of(slots, slot_ids[plain], positions[plain])
            found = _best_of_shard(scores[plain], sampling_flags[plain], params, vocabulary.start)
            best, tokens = gather(vocabulary.group, slots.device, *found)
            winner = _argmax(best.T)
            sampled[plain] = np.where(winner < 0, -1, tokens[winner, np.arange(len(plain))])
        if len(filtered):
            params = _RowParams.of(slots, slot_ids[filtered], positions[filtered])
            sampled[filtered] = _sample_filtered(scores[filtered], params, vocabulary, slots.device)
    return sampled


def _best_of_shard(
    scores: F32, sampling_flags: npt.NDArray[np.uint8], params: _RowParams, first: int
) -> tuple[F32, npt.NDArray[np.int32]]:  # fmt: skip
    """Returns the best score of each row (with noise, where a temperature is above 0) and its
    token: float32 and int32 [n].

    Without any token to sample the score is minus infinity; NaN or infinity if a logit is.
    """
    best, tokens = np.full(len(scores), -np.inf, np.float32), np.zeros(len(scores), np.int32)
    ids = np.arange(first, first + scores.shape[1], dtype=np.uint32)
    for i, scaled in enumerate(scores if len(ids) else ()):
        if sampling_flags[i] & RANDOM:
            scaled = scaled / params.temperature[i]
            largest = scaled.max()
            if not math.isfinite(largest):
                best[i] = largest
                continue
            scaled += gumbel_noise(params.key0[i], params.key1[i], ids)
        at = scaled.argmax()
        best[i], tokens[i] = scaled[at], first + at
    return best, tokens


def _sample_filtered(
    scores: F32, params: _RowParams, vocabulary: Vocabulary, device: torch.device
) -> npt.NDArray[np.int32]:
    """Samples a token for each row, all with filters, from the candidates of all shards; returns
    int32 [n].

    All ranks see alike for which rows there are too few candidates, and repeat those rows with
    more, at last with all.
    """
    group = vocabulary.group
    sampled = np.full(len(scores), -1, np.int32)
    pending, count = list(range(len(scores))), CANDIDATES
    while pending:
        found = Candidates.empty(len(pending), min(count, vocabulary.shard_size))
        for at, i in enumerate(pending):
            found.find(
                at, scores[i] / params.temperature[i], vocabulary.start, params.filters[i][1]
            )
        values, tokens, largest, mass = gather(
            group, device, found.values, found.tokens, found.largest, found.mass
        )
        complete = np.array([vocabulary.local_size_of(rank) <= count for rank in range(group.size)])
        unsettled = []
        for at, i in enumerate(pending):
            if not math.isfinite(largest[:, at].max()):
                continue
            candidates = Candidates(values[:, at], tokens[:, at], largest[:, at], mass[:, at])
            kept = keep_candidates(candidates, complete, vocabulary.vocab_size, *params.filters[i])
            if kept is None:
                unsettled.append(i)
                continue
            noisy = kept[0] + gumbel_noise(
                params.key0[i], params.key1[i], kept[1].astype(np.uint32)
            )
            sampled[i] = kept[1][noisy == noisy.max()].min()
        pending, count = unsettled, count * MORE
    return sampled
