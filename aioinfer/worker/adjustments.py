"""Changes of logits before tokens are sampled from them: biases, bans and penalties, each in plain
torch and as a kernel.

The sampler calls `adjust_logits` in steps with rows that need any of them, and `count_sampled` once
their tokens are sampled. Step features change logits behind them (`Adjust`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from aioinfer.ipc.plan import I32
from aioinfer.worker.slots import (
    BANNED,
    BIASED,
    IN_PROMPT,
    PENALIZED,
    RowTensors,
    SamplingRows,
    Slots,
)

#: Sampling flags of rows whose logits are changed.
ADJUSTED = BIASED | BANNED | PENALIZED

#: Changes float32 logits [n, local_size] in place, behind biases, bans and penalties: see
#: `features.WorkerFeature.adjust`.
Adjust = Callable[[torch.Tensor], None]


class _Adjustment(NamedTuple):
    """A change of logits, in place.

    Attributes:
        flag: the sampling flag of rows that need it.
        in_torch: changes some of the rows of logits, given their numbers [n], and the token id of
            the first column.
        with_kernel: changes those of all rows of logits whose slots need it, given the token id of
            the first column.
    """

    flag: int
    in_torch: Callable[[torch.Tensor, Slots, SamplingRows, npt.NDArray[Any], int], None]
    with_kernel: Callable[[torch.Tensor, Slots, RowTensors, int], None]


def adjust_logits(
    logits: torch.Tensor,
    slots: Slots,
    rows: SamplingRows,
    flags: npt.NDArray[np.uint8],
    first: int = 0,
) -> None:
    """Applies biases, bans and penalties in place, to the rows of `logits` of requests with any of
    these.

    Args:
        logits: float32 [S, V], of the token ids from `first` on; other ids are left to the ranks
            whose shards hold them.
        slots: with the parameters of each request.
        rows: the rows of `logits`.
        flags: uint8 [S], which of these apply at these positions.
        first: the token id of the first column.
    """
    if not logits.shape[1]:
        return
    flags_of_all = int(np.bitwise_or.reduce(flags, initial=0))
    for flag, in_torch, with_kernel in _ADJUSTMENTS:
        if not flags_of_all & flag:
            continue
        if rows.there is not None:
            with_kernel(logits, slots, rows.there, first)
        else:
            some = np.flatnonzero(flags & flag)
            in_torch(logits, slots, rows, some, first)


def count_sampled(
    tokens: torch.Tensor,
    slots: Slots,
    rows: SamplingRows,
    flags: npt.NDArray[np.uint8],
    *,
    has_later_rows: bool,
) -> None:
    """Counts sampled tokens (int32 [S], -1 where there is none) for the penalties of later ones.

    Args:
        slots, rows, flags: as for `adjust_logits`.
        has_later_rows: whether some rows are sampled later, whose flags are 0.
    """
    occurrences, there = slots.occurrences, rows.there
    if there is None:
        some = np.flatnonzero(flags & PENALIZED)
        at = torch.from_numpy(some)
        occurrences.add(torch.from_numpy(rows.slot_ids[some]), tokens[at])
        return
    from aioinfer.kernels.penalties import add_occurrences

    if has_later_rows:
        tokens = torch.where(there.is_real != 0, tokens, -1)
    add_occurrences(tokens, there.slots, occurrences.row_of_slot, occurrences.rows)


def _add_biases(
    logits: torch.Tensor, slots: Slots, rows: SamplingRows, some: npt.NDArray[Any], first: int
) -> None:
    lists = slots.bias_ids, slots.params["num_bias"], slots.bias_values
    _add(logits, some, rows.slot_ids[some], first, *lists)


def _add_biases_with_kernel(
    logits: torch.Tensor, slots: Slots, rows: RowTensors, first: int
) -> None:
    from aioinfer.kernels.penalties import add_biases

    biases = slots.bias_ids, slots.bias_values, slots.params["num_bias"]
    add_biases(logits, rows.slots, *biases, first=first)


def _ban(
    logits: torch.Tensor, slots: Slots, rows: SamplingRows, some: npt.NDArray[Any], first: int
) -> None:
    _add(logits, some, rows.slot_ids[some], first, slots.banned_ids, slots.params["num_banned"])


def _ban_with_kernel(logits: torch.Tensor, slots: Slots, rows: RowTensors, first: int) -> None:
    from aioinfer.kernels.penalties import ban_tokens

    ban_tokens(
        logits, rows.slots, slots.banned_ids, slots.params["num_banned"],
        positions=rows.positions, until=slots.params["banned_until"], first=first,
    )  # fmt: skip


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
    logits: torch.Tensor, slots: Slots, rows: SamplingRows, some: npt.NDArray[Any], first: int
) -> None:
    """Applies penalties to the rows `some` of `logits`, in place.

    Repetition: divides positive and multiplies negative logits of tokens of prompt and output
    (CTRL, Keskar et al. 2019). Frequency and presence: subtracted for each, and once for any,
    occurrence in the output (OpenAI). Only the tokens that occur are touched. One that occurs twice
    is read and written twice, with the same value. Drafts before a row count as its output.
    """
    device, positions = logits.device, rows.positions[some]
    where = torch.from_numpy(some).to(device)[:, None]
    at = torch.from_numpy(rows.slot_ids[some]).long().to(device)
    lengths = torch.from_numpy(positions).to(device)[:, None]
    longest = int(positions.max())
    tokens = slots.tokens[:, :longest][at].long()
    tokens = torch.where(torch.arange(longest, device=device) < lengths, tokens, tokens[:, :1])
    occurrences = slots.occurrences
    counted = occurrences.row_of_slot[at].long()[:, None]
    counts = occurrences.rows[counted, tokens] & (IN_PROMPT - 1)
    if rows.lookahead is not None:
        offsets = rows.lookahead.offsets[torch.from_numpy(some)]
        counts += _count_drafts(slots.tokens, at, lengths, offsets[:, None], tokens)
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


def _count_drafts(
    tokens_of_slots: torch.Tensor,
    slot_ids: torch.Tensor,
    lengths: torch.Tensor,
    offsets: torch.Tensor,
    tokens: torch.Tensor,
) -> torch.Tensor:
    """Returns how often each of `tokens` [n, m] is among the last `offsets` (int32 [n, 1]) of the
    first `lengths` (int32 [n, 1]) tokens of a row's slot: [n, m]."""
    back = torch.arange(1, int(offsets.max()) + 1, device=tokens.device)
    drafts = tokens_of_slots[slot_ids[:, None], (lengths - back).clamp(min=0)]
    drafts = torch.where(back <= offsets, drafts, -1)
    return (tokens[:, :, None] == drafts[:, None, :]).sum(-1)


def _penalize_with_kernel(logits: torch.Tensor, slots: Slots, rows: RowTensors, first: int) -> None:
    from aioinfer.kernels.penalties import apply_penalties

    counts, kinds = slots.occurrences, ("repetition", "presence", "frequency")
    offsets = inputs = None
    if rows.lookahead is not None:
        offsets, inputs = rows.lookahead.offsets, rows.lookahead.inputs
    apply_penalties(
        logits, rows.slots, counts.row_of_slot, counts.rows[:, first : first + logits.shape[1]],
        *(slots.params[f"{kind}_penalty"] for kind in kinds),
        offsets=offsets, inputs=inputs, first=first,
    )  # fmt: skip


#: In the order in which they are applied.
_ADJUSTMENTS = (
    _Adjustment(BIASED, _add_biases, _add_biases_with_kernel),
    _Adjustment(BANNED, _ban, _ban_with_kernel),
    _Adjustment(PENALIZED, _penalize, _penalize_with_kernel),
)
