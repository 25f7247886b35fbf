"""Growth of block tables and admissions, against plain torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from aioinfer.kernels.slots import grow_tables
from references import grow_tables_reference
from slot_cases import NONE, apply_with_kernels, kernels_agree, make_plan

from aioinfer.ipc.plan import Admission, StepPlan
from aioinfer.sampling_params import SamplingParams
from aioinfer.worker.slots import Slots
from aioinfer.worker.step_buffers import Staging

CPU = torch.device("cpu")


def test_block_tables_grow_where_a_row_is_named() -> None:
    entries = torch.tensor([[3, 0, -1, 3, 1], [0, 7, 2, 1, 0], [5, 6, 7, 8, 9]], dtype=torch.int32)
    ours = torch.full((4, 8), -5, dtype=torch.int32)
    reference = ours.clone()
    grow_tables(*entries, ours)
    grow_tables_reference(*entries, reference)
    assert torch.equal(ours, reference)
    assert (ours != -5).sum() == 4


@pytest.mark.parametrize("seed", range(3))
def test_kernels_leave_the_slots_as_plain_torch_does(seed: int) -> None:
    assert kernels_agree(seed, CPU) > 0


def test_an_admission_touches_no_other_slot() -> None:
    slots = Slots(4, 40, 16, 100, CPU, uses_kernels=True)
    for tensor in (slots.tokens, slots.records, slots.seeds, slots.bias_ids, slots.banned_ids):
        tensor.fill_(-7)
    params = SamplingParams(logit_bias={4: 1.0}, min_tokens=1)
    plan = make_plan(Admission(2, np.arange(9, dtype=np.int32), 9, params, 5, (3,)))
    apply_with_kernels(slots, plan, Staging(CPU))
    others = [0, 1, 3]
    assert slots.tokens[2, :9].tolist() == list(range(9))
    assert (slots.tokens[2, 9:] == -7).all()
    assert (slots.records[:, others] == -7).all()
    for tensor in (slots.tokens, slots.seeds, slots.bias_ids, slots.banned_ids):
        assert (tensor[others] == -7).all()


def test_a_plan_without_admissions_uploads_nothing() -> None:
    slots = Slots(2, 40, 16, 100, CPU)
    assert slots.stage(StepPlan(0, *[NONE] * 9)) == []
    assert slots.stage(make_plan(freed_slots=(1,))) == []


def test_admissions_neither_copy_pageable_memory_nor_call_bincount(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both wait for a GPU; the staged upload is the only way from the host."""
    slots, staging = Slots(2, 40, 16, 100, CPU, uses_kernels=True), Staging(CPU)
    params = SamplingParams(logit_bias={4: 1.0}, min_tokens=1, frequency_penalty=1.0)
    plan = make_plan(Admission(1, np.arange(9, dtype=np.int32), 5, params, 5, (3,)))
    staging.begin()
    staged = staging.upload(slots.stage(plan))

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("this waits for the GPU")

    for name in ("tensor", "bincount", "from_numpy", "as_tensor"):
        monkeypatch.setattr(torch, name, refuse)
    slots.apply(plan, staged)
    monkeypatch.undo()
    counts = slots.occurrences.rows[0]
    assert counts[:10].tolist() == [1 << 30] * 5 + [1] * 4 + [0]
