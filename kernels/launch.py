"""What launches of kernels have in common: the properties of the card, the choice of a
configuration, and the start of a kernel as a programmatic dependent.

With programmatic dependent launch (PDL) a kernel starts while the one before it on the stream still
runs. It may load weights at once, and must wait before it reads what that kernel writes.
"""
# ruff: noqa: N803  (compile-time constants are written in capitals)

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import TypeVar

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

Config = TypeVar("Config")


@triton.jit
def wait_for_kernel(PDL: tl.constexpr):
    """With PDL waits for the end of the preceding kernel, and lets the following one start."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def is_last_of(ticket, PROGRAMS: tl.constexpr):
    """Whether this program is the last of PROGRAMS to come here: it sees what the others have
    written. The ticket is reset to 0 then."""
    tl.debug_barrier()  # every thread has written before one thread counts them
    is_last = tl.atomic_add(ticket, 1, sem="acq_rel") == PROGRAMS - 1
    if is_last:
        tl.store(ticket, 0)
    return is_last


@cache
def multiprocessors(device: torch.device) -> int:
    """Returns the number of a card's multiprocessors; 1 for a CPU, whose programs take turns."""
    if device.type == "cpu":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def is_hopper(device: torch.device) -> bool:
    """Whether a device is a Hopper GPU, on which the kernels in Gluon run."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def pad_rows(rows: int) -> int:
    """Returns the length of vectors over all rows of a step: 256, 1024, 4096 and so on, at least
    `rows`. A kernel is compiled separately for each length, so there are few."""
    padded = 256
    while padded < rows:
        padded *= 4
    return padded


def first_bound(table: Iterable[tuple[float | None, Config]], size: float) -> Config:
    """Returns the first entry of a table of configurations whose bound is at least `size`; the last
    bound may be None."""
    return next(config for bound, config in table if bound is None or size <= bound)
