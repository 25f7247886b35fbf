"""Slots with requests in them, and what their rows sample: for the tests of the CPU sampler and of
the worker halves of features."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from aioinfer.ipc.plan import I32, Admission, Admissions, StepPlan
from aioinfer.ipc.sections import Section, array
from aioinfer.layers.embedding import Vocabulary
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.sampling_params import SamplingParams
from aioinfer.worker.features import Rank, StepCalls, StepWorks, WorkerFeature
from aioinfer.worker.model_runner import ModelRunner
from aioinfer.worker.sampling.sampler import sample
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
) -> torch.Tensor:
    return sample(logits, slots, np.array(slot_ids, np.int32), np.array(positions, np.int32))


def rank_of(
    slots: Slots, vocabulary: Vocabulary | None = None, *, uses_kernels: bool = False
) -> Rank:
    """A rank whose model has a vocabulary, by default a whole one, and nothing else."""
    if vocabulary is None:
        vocabulary = Vocabulary(slots.occurrences.rows.shape[1], ParallelGroup.single())
    model: Any = SimpleNamespace(vocabulary=vocabulary)
    return Rank(model, slots, uses_kernels=uses_kernels)


def rows_plan(
    slot_ids: Sequence[int] | I32, positions: Sequence[int] | I32, *sections: Section
) -> StepPlan:
    """A plan whose rows each sample the token at a position of a slot."""
    slots, ends = np.array(slot_ids, np.int32), np.array(positions, np.int32)
    ones, growth = np.ones_like(slots), [NONE] * 5
    return StepPlan(0, slots, ends - 1, ones, ones, *growth, sections)


@dataclass(frozen=True, slots=True)
class ShiftedRows(Section):
    """The section of `Shift`: int32 [S], by how many token ids the logits of each sampled row are
    shifted."""

    offsets: I32 = array(np.int32)  # noqa: RUF009


class Shift(WorkerFeature):
    """A logits processor: moves each row's logits to higher token ids.

    Attributes:
        seen: the rows and logits of each call.
    """

    section = ShiftedRows
    adjusts_logits = True

    def __init__(self, rank: Rank):
        super().__init__(rank)
        self.seen: list[tuple[np.ndarray, torch.Tensor]] = []

    def adjust(
        self, plan: StepPlan, section: ShiftedRows, logits: torch.Tensor, rows: np.ndarray
    ) -> None:
        assert logits.dtype == torch.float32
        self.seen.append((rows, logits.clone()))
        for of_row, row in zip(logits, rows.tolist(), strict=True):
            of_row.copy_(of_row.roll(int(section.offsets[row])))


class LogitsRunner(ModelRunner):
    """A runner of given logits in place of a model, for plans without admissions."""

    def __init__(self, rank: Rank, works: StepWorks, logits: torch.Tensor):
        super().__init__(rank.model, None, rank.slots, works)  # type: ignore[arg-type]
        self.logits = logits

    def _apply(self, plan: StepPlan) -> None:
        pass

    def _compute(self, plan: StepPlan, calls: StepCalls) -> torch.Tensor | None:
        return self.logits


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
