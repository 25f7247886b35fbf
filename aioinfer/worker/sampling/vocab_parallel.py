"""Sampling where each rank has the logits of its own shard of the vocabulary. The samplers call it.

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
from aioinfer.layers.parallel import ParallelGroup

F64 = npt.NDArray[np.float64]

#: Logits over temperature that a rank sends at first of a row with filters, and by how much it
#: multiplies them if they do not suffice.
CANDIDATES = 128
MORE = 4


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
    `filters.filter_tokens`, or None if it takes more candidates to know them.

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
