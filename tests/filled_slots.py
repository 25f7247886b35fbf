"""Slots with requests in them, and what their rows sample: for the tests of the CPU sampler."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from aioinfer.ipc.plan import Admission, Admissions, StepPlan
from aioinfer.sampling_params import SamplingParams
from aioinfer.worker.sampler import Sampled, sample
from aioinfer.worker.slots import Slots

NONE = np.empty(0, np.int32)
CPU = torch.device("cpu")


def plan_of(*admissions: Admission) -> StepPlan:
    """A plan that admits requests and computes nothing."""
    return StepPlan(
        0, NONE, NONE, NONE, NONE, NONE, NONE, NONE, NONE, NONE, [Admissions.of(admissions)]
    )


def make_slots(
    params: list[SamplingParams],
    vocab_size: int,
    tokens: list[list[int]] | None = None,
    **admission: Any,
) -> Slots:
    """Slots 0, 1, ... with requests of these parameters; by default their prompt is the one token
    0."""
    slots = Slots(len(params), 64, 16, vocab_size, CPU)
    prompts = tokens or [[0]] * len(params)
    common = {"prompt_len": 1, "seed": 7} | admission
    slots.apply(
        plan_of(
            *(
                Admission(slot, np.array(prompt, np.int32), params=p, **common)
                for slot, (p, prompt) in enumerate(zip(params, prompts, strict=True))
            )
        )
    )
    return slots


def sample_rows(
    logits: torch.Tensor, slots: Slots, slot_ids: list[int], positions: list[int]
) -> Sampled:
    return sample(
        logits.clone(), slots, np.array(slot_ids, np.int32), np.array(positions, np.int32)
    )


def assert_fits(observed: np.ndarray, expected: np.ndarray) -> None:
    """Pearson's chi-square test at one in a million; its quantile by Wilson and Hilferty."""
    assert (observed[expected == 0] == 0).all()
    observed, expected = observed[expected > 0], expected[expected > 0]
    assert expected.min() >= 5, "too few samples for the test"
    degrees = len(expected) - 1
    if degrees == 0:
        return
    statistic = ((observed - expected) ** 2 / expected).sum()
    limit = degrees * (1 - 2 / (9 * degrees) + 4.75 * math.sqrt(2 / (9 * degrees))) ** 3
    assert statistic < limit, f"chi-square {statistic:.1f} where at most {limit:.1f} is likely"
