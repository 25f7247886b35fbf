"""Sampling on the host where each rank has the logits of its own shard of the vocabulary.

Full logits are never gathered. A row with filters needs the largest logits of each rank, the
candidates: from these every rank computes which tokens min-p, top-k and top-p keep, or that more
candidates are needed. All ranks come to the same result.
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
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.worker.host_sampling import RowParams, best_tokens, gumbel_noise
from aioinfer.worker.slots import FILTERED, RANDOM, Slots

F64 = npt.NDArray[np.float64]

#: Logits over temperature that a rank sends at first of a row with filters, and by how much it
#: multiplies them if they do not suffice.
CANDIDATES = 128
MORE = 4


def sample_rows(
    scores: F32,
    slots: Slots,
    slot_ids: I32,
    positions: I32,
    flags: npt.NDArray[np.uint8],
    vocabulary: Vocabulary,
) -> npt.NDArray[np.int32]:
    """Does what `host_sampling.sample_rows` does, together with the ranks of the other shards: all
    of them call this, and return the same.

    Args:
        scores: float32 [S, local_size], adjusted logits.
        vocabulary: the shard.
    """
    sampled = np.empty(len(scores), np.int32)
    plain = np.flatnonzero(~flags & FILTERED)
    filtered = np.flatnonzero(flags & FILTERED)
    with np.errstate(over="ignore", invalid="ignore"):
        if len(plain):
            params = RowParams.of(slots, slot_ids[plain], positions[plain])
            found = _best_of_shard(scores[plain], flags[plain], params, vocabulary.start)
            best, tokens = gather(vocabulary.group, slots.device, *found)
            winner = best_tokens(best.T)
            sampled[plain] = np.where(winner < 0, -1, tokens[winner, np.arange(len(plain))])
        if len(filtered):
            params = RowParams.of(slots, slot_ids[filtered], positions[filtered])
            sampled[filtered] = _sample_filtered(scores[filtered], params, vocabulary, slots.device)
    return sampled


def _best_of_shard(
    scores: F32, flags: npt.NDArray[np.uint8], params: RowParams, first: int
) -> tuple[F32, npt.NDArray[np.int32]]:  # fmt: skip
    """Returns the best score of each row (with noise, where a temperature is above 0) and its
    token: float32 and int32 [n].

    Without any token to sample the score is minus infinity; NaN or infinity if a logit is.
    """
    best, tokens = np.full(len(scores), -np.inf, np.float32), np.zeros(len(scores), np.int32)
    ids = np.arange(first, first + scores.shape[1], dtype=np.uint32)
    for i, scaled in enumerate(scores if len(ids) else ()):
        if flags[i] & RANDOM:
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
    scores: F32, params: RowParams, vocabulary: Vocabulary, device: torch.device
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


@dataclass(slots=True)
class Candidates:
    """The largest logits over temperature of R rows with filters.

    Attributes:
        values: float32 [R, C], in any order, padded with minus infinity.
        tokens: int32 [R, C], their ids.
        largest: float32 [R]; NaN or infinity if a logit is.
        mass: float64 [R], the sum of exp(value - largest) of all values; 0 where top-p is 1.
    """

    values: F32
    tokens: I32
    largest: F32
    mass: F64

    @classmethod
    def empty(cls, rows: int, count: int) -> Candidates:
        """Returns the candidates of a rank without tokens."""
        values = np.full((rows, count), -np.inf, np.float32)
        return cls(
            values,
            np.zeros((rows, count), np.int32),
            np.full(rows, -np.inf, np.float32),
            np.zeros(rows),
        )

    def find(self, row: int, scaled: F32, first: int, top_p: float) -> None:
        """Enters the candidates of one row: `scaled` float32 [local_size] are its logits over
        temperature, of the token ids from `first` on."""
        largest = scaled.max(initial=-np.inf)
        self.largest[row] = largest
        if not math.isfinite(largest):
            return
        if top_p < 1:
            self.mass[row] = np.exp(scaled - largest).sum(dtype=np.float64)
        count = min(self.values.shape[1], len(scaled))
        # mostly enough, and few to partition
        at = np.flatnonzero(scaled >= largest - np.float32(8))
        if len(at) < count:
            at = np.arange(len(scaled))
        if len(at) > count:
            at = at[np.argpartition(scaled[at], len(at) - count)[len(at) - count :]]
        self.values[row, :count] = scaled[at]
        self.tokens[row, :count] = first + at


def keep_candidates(
    candidates: Candidates,
    complete: npt.NDArray[np.bool_],
    vocab_size: int,
    top_k: int,
    top_p: float,
    min_p: float,
) -> tuple[F32, I32] | None:
    """Returns the values and the tokens of one row that the filters keep, by the rules of
    `host_sampling.filter_tokens`, or None if it takes more candidates to know them.

    Args:
        candidates: of the row, with the ranks as rows; the largest of all is finite.
        complete: bool [ranks], whether a rank has sent all that it has.
    """
    largest = float(candidates.largest.max())
    lowest_sent = np.where(complete, -np.inf, candidates.values.min(axis=1))
    floor = float(lowest_sent.max())  # all that lies above is known
    known = candidates.values > floor
    values, tokens = candidates.values[known], candidates.tokens[known]
    descending = np.sort(values)[::-1]
    border = float(np.float32(largest + math.log(min_p))) if min_p > 0 else -math.inf
    limits_k = 0 < top_k < vocab_size
    if limits_k and len(descending) >= top_k:
        border = max(border, float(descending[top_k - 1]))
    if top_p < 1:
        kept = np.exp(descending[descending >= border] - largest)
        if border > floor or floor == -math.inf:
            mass = float(kept.sum(dtype=np.float64))
        elif min_p > 0 or limits_k:
            return None
        else:
            mass = float(
                (candidates.mass * np.exp(candidates.largest.astype(np.float64) - largest)).sum()
            )
        reached = int(np.searchsorted(np.cumsum(kept, dtype=np.float64), top_p * mass))
        if reached < len(kept):
            border = max(border, float(descending[reached]))
    if border <= floor and floor > -math.inf:
        return None
    keep = values >= border
    return values[keep], tokens[keep]


def gather(
    group: ParallelGroup, device: torch.device, *arrays: npt.NDArray[Any]
) -> list[npt.NDArray[Any]]:
    """Returns every rank's arrays, each [ranks, ...], in one all-gather through tensors on
    `device`.

    The arrays' shapes and dtypes have to be the same on every rank.
    """
    packed = np.concatenate(
        [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays]
    )
    everything = (
        group.all_gather_last(torch.from_numpy(packed).to(device))
        .cpu()
        .numpy()
        .reshape(group.size, -1)
    )
    ends = np.cumsum([array.nbytes for array in arrays])[:-1]
    parts = np.split(everything, ends, axis=1)
    return [
        part.copy().view(array.dtype).reshape(group.size, *array.shape)
        for part, array in zip(parts, arrays, strict=True)
    ]
