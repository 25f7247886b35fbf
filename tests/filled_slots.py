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

from aioinfer.ipc.kv_spec import AttentionSpec, KVGroup
from aioinfer.ipc.plan import I32, Admission, Admissions, StepPlan
from aioinfer.ipc.sections import Section, array
from aioinfer.layers.embedding import Vocabulary
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.sampling_params import SamplingParams
from aioinfer.worker.adjustments import Adjust
from aioinfer.worker.device import CpuDevice
from aioinfer.worker.features import Rank, WorkerFeature
from aioinfer.worker.kv_tensors import KVTensors
from aioinfer.worker.runner import ModelRunner
from aioinfer.worker.sampler import Sampler
from aioinfer.worker.slots import SamplingRows, Slots
from aioinfer.worker.step_works import StepWorks
from tests.plans import make_plan

CPU = torch.device("cpu")


def device_without_layers(slots: Slots) -> CpuDevice:
    """A device whose KV cache has no layers."""
    group = KVGroup(AttentionSpec(1, 1), ())
    return CpuDevice(slots, KVTensors([group], [1], slots.block_size, torch.float32, CPU))


def apply(slots: Slots, plan: StepPlan) -> None:
    """Applies a plan to slots, as the runner does."""
    device = device_without_layers(slots)
    device.begin(plan)
    device.apply(plan, None)


def make_slots(
    params: list[SamplingParams],
    vocab_size: int,
    tokens: list[list[int]] | None = None,
    *,
    max_len: int = 64,
    uses_kernels: bool = False,
    **admission: Any,
) -> Slots:
    """Slots 0, 1, ... with requests of these parameters; by default their prompt is the one token
    0."""
    slots = Slots(len(params), max_len, 16, vocab_size, CPU, uses_kernels=uses_kernels)
    prompts = tokens or [[0]] * len(params)
    common = {"prompt_len": 1, "seed": 7} | admission
    admissions = (
        Admission(slot, np.array(prompt, np.int32), params=p, **common)
        for slot, (p, prompt) in enumerate(zip(params, prompts, strict=True))
    )
    apply(slots, make_plan(sections=[Admissions.of(admissions)]))
    return slots


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
    """The tokens, int32 [S], that the sampler samples from logits at `positions` of `slot_ids`, and
    enters in the slots."""
    results = torch.zeros(1, len(logits), dtype=torch.int32)
    flags, rows = slots.current_flags(slot_ids, positions), SamplingRows(slot_ids, positions, 0)
    sampler = Sampler(slots, vocabulary or whole_vocabulary(slots), results)
    sampler.sample(logits, rows, flags, adjust=adjust, in_place=in_place)
    return results[0]


def sample_rows(
    logits: torch.Tensor, slots: Slots, slot_ids: list[int], positions: list[int]
) -> torch.Tensor:
    return sample(logits, slots, np.array(slot_ids, np.int32), np.array(positions, np.int32))


def whole_vocabulary(slots: Slots) -> Vocabulary:
    return Vocabulary(slots.occurrences.rows.shape[1], ParallelGroup.single())


def rank_of(slots: Slots, vocabulary: Vocabulary | None = None) -> Rank:
    """A rank whose model has a vocabulary, by default a whole one, and nothing else."""
    vocabulary = vocabulary or whole_vocabulary(slots)
    model: Any = SimpleNamespace(vocabulary=vocabulary, scores_tokens=True, tower=None)
    return Rank(model, slots)


def rows_plan(
    slot_ids: Sequence[int] | I32, positions: Sequence[int] | I32, *sections: Section
) -> StepPlan:
    """A plan whose rows each sample the token at a position of a slot."""
    places = zip(slot_ids, positions, strict=True)
    return make_plan(rows=[(slot, end - 1, 1, 1) for slot, end in places], sections=sections)


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


def logits_runner(rank: Rank, works: StepWorks, logits: torch.Tensor) -> ModelRunner:
    """A runner whose model gives the sampled rows of a step these logits."""
    model: Any = SimpleNamespace(
        vocabulary=rank.model.vocabulary,
        scores_tokens=True,
        plan=lambda step: None,
        begin=lambda step, out, received: None,
        finish=lambda step, stream: torch.zeros(len(logits), 1),
        logits=lambda hidden, *_: logits,
    )
    return ModelRunner(model, device_without_layers(rank.slots), works)


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
