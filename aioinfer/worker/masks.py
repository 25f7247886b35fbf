"""Masks on the worker's side: waits for them, and applies them to logits on a CPU. The kernel that
does the same on a GPU is in `kernels.masks`.

A runner computes a step first and asks for the masks of its constrained rows last, so that the
engine fills them meanwhile (see `ipc.masks`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from aioinfer.ipc.masks import ConstrainedRows
from aioinfer.ipc.plan import I32, StepPlan


class MaskSource(Protocol):
    """The source of the masks of a step."""

    def __call__(self, plan: StepPlan, count: int) -> I32:
        """Waits for the masks of a plan with `count` constrained rows, and returns them, int32
        [count, words]: a view into memory that all processes share. It is valid until the result
        of the step has been posted."""
        ...


@dataclass(frozen=True, slots=True)
class MaskedRows:
    """The rows of a step that are sampled under a mask.

    Attributes:
        rows: int32 [M], their places among the sampled rows.
        masks: int32 [M, words], as `ipc.masks` describes them.
    """

    rows: I32
    masks: I32


def constrained_rows(plan: StepPlan) -> I32 | None:
    """Returns the rows of a plan that wait for masks (int32 [M]), or None without any."""
    section = plan.section(ConstrainedRows)
    return section.rows if section is not None and len(section.rows) else None


def await_masks(plan: StepPlan, source: MaskSource | None) -> tuple[MaskedRows | None, int]:
    """Returns the constrained rows of a plan with their masks, once they are there, and how many
    nanoseconds that took; None and 0 for a plan without any.

    Raises ValueError if a plan has constrained rows and there is no source of masks.
    """
    rows = constrained_rows(plan)
    if rows is None:
        return None, 0
    if source is None:
        raise ValueError("a plan with constrained rows, and no source of masks")
    began = time.perf_counter_ns()
    masks = source(plan, len(rows))
    return MaskedRows(rows, masks), time.perf_counter_ns() - began


def mask_logits(logits: torch.Tensor, masked: MaskedRows, first: int = 0) -> None:
    """Makes the logits of tokens that the masks do not allow minus infinity, in place. NaN and
    infinity stay, so that a row with broken logits is found all the same.

    Args:
        logits: float32 [S, V] on a CPU, of the token ids from `first` on.
        masked: which rows of them, and their masks.
        first: the token id of the first column.
    """
    values = logits.numpy()
    last = first + values.shape[1]
    begin = first // 32
    words = np.ascontiguousarray(masked.masks[:, begin : (last + 31) // 32])
    for row, mask in zip(masked.rows.tolist(), words, strict=True):
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little").view(np.bool_)
        of_row = values[row]
        forbidden = ~allowed[first - 32 * begin : last - 32 * begin]
        forbidden &= of_row < np.inf  # false for NaN, too
        of_row[forbidden] = -np.inf
