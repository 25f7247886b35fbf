"""Logit biases, bans and penalties on the host, applied to a row's logits before sampling.

The sampler calls `adjust_logits` for the rows of requests with any of these. The kernels that do
the same on a GPU are in `kernels.penalties`. Step features change logits behind them (`Adjust`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from aioinfer.ipc.plan import I32
from aioinfer.worker.sampling.occurrences import IN_PROMPT
from aioinfer.worker.slots import BANNED, BIASED, PENALIZED, Slots

#: Changes float32 logits [n, local_size] in place, behind biases, bans and penalties: see
#: `features.WorkerFeature.adjust`.
Adjust = Callable[[torch.Tensor], None]


def adjust_logits(
    logits: torch.Tensor,
    slots: Slots,
    sampling_flags: npt.NDArray[np.uint8],
    slot_ids: I32,
    positions: I32,
    first: int = 0,
) -> None:
    """Applies biases, bans and penalties in place, to the rows of `logits` of requests with any of
    these.

    Args:
        logits: float32 [S, V], of the token ids from `first` on; other ids are left to the ranks
            whose shards hold them.
        slots: with the parameters of each request.
        sampling_flags: uint8 [S], which of these apply at these positions.
        slot_ids, positions: int32 [S].
        first: the token id of the first column.
    """
    if not logits.shape[1]:
        return
    rows = np.flatnonzero(sampling_flags & BIASED)
    if len(rows):
        lists = slots.bias_ids, slots.params["num_bias"], slots.bias_values
        _add(logits, rows, slot_ids[rows], first, *lists)
    rows = np.flatnonzero(sampling_flags & BANNED)
    if len(rows):
        _add(logits, rows, slot_ids[rows], first, slots.banned_ids, slots.params["num_banned"])
    rows = np.flatnonzero(sampling_flags & PENALIZED)
    if len(rows):
        _penalize(logits, slots, rows, slot_ids[rows], positions[rows], first)


def _add(
    logits: torch.Tensor,
    rows: npt.NDArray[Any],
    slot_ids: I32,
    first: int,
    ids: torch.Tensor,
    counts: torch.Tensor,
    values: torch.Tensor | None = None,
) -> None:
    """Adds `values`, or minus infinity, to the logits of the tokens `ids` (both [num_slots, width])
    in `rows`, in place; of a slot's list the first `counts[slot]` entries count."""
    at = torch.from_numpy(slot_ids).to(logits.device)
    count = counts[at][:, None]
    width = int(count.max())
    columns = ids[:, :width][at] - first
    counted = torch.arange(width, device=logits.device) < count
    counted &= (columns >= 0) & (columns < logits.shape[1])
    added = torch.full_like(columns, -math.inf, dtype=torch.float32)
    if values is not None:
        added = values[:, :width][at]
    where = torch.from_numpy(rows).to(logits.device)[:, None].expand(columns.shape)[counted]
    logits.index_put_((where, columns[counted].long()), added[counted], accumulate=True)


def _penalize(
    logits: torch.Tensor,
    slots: Slots,
    rows: npt.NDArray[Any],
    slot_ids: I32,
    positions: I32,
    first: int,
) -> None:
    """Applies the penalties of `slot_ids` to `rows` of `logits`, in place.

    Repetition: divides positive and multiplies negative logits of tokens of prompt and output
    (CTRL, Keskar et al. 2019). Frequency and presence: subtracted for each, and once for any,
    occurrence in the output (OpenAI). Only the tokens that occur are touched. One that occurs twice
    is read and written twice, with the same value.
    """
    device = logits.device
    where = torch.from_numpy(rows).to(device)[:, None]
    at = torch.from_numpy(slot_ids).long().to(device)
    lengths = torch.from_numpy(positions).to(device)[:, None]
    longest = int(positions.max())
    tokens = slots.tokens[:, :longest][at].long()
    tokens = torch.where(torch.arange(longest, device=device) < lengths, tokens, tokens[:, :1])
    occurrences = slots.occurrences
    counted = occurrences.row_of_slot[at].long()[:, None]
    counts = occurrences.rows[counted, tokens] & (IN_PROMPT - 1)
    repetition, presence, frequency = (
        slots.params[f"{name}_penalty"][at][:, None]
        for name in ("repetition", "presence", "frequency")
    )
    if logits.shape[1] < occurrences.rows.shape[1]:
        local = (tokens >= first) & (tokens < first + logits.shape[1])
        where, counts, repetition, presence, frequency = (
            t.expand(local.shape)[local] for t in (where, counts, repetition, presence, frequency)
        )
        tokens = tokens[local] - first
    values = logits[where, tokens]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= frequency * counts + presence * (counts > 0)
    logits[where, tokens] = values
