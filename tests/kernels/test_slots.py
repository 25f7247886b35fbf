"""Growth of block tables and admissions, against plain torch."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from aioinfer.kernels.prepare import PreparedInputs, append_tokens, embed, prepare_inputs
from aioinfer.kernels.slots import grow_tables
from references import embed_reference, grow_tables_reference, prepare_inputs_reference
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


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("has_rotary", [False, True])
def test_rows_become_inputs_and_the_rest_padding(has_rotary: bool) -> None:
    slots, starts, lengths = int32(3, 1, 0, 2), int32(5, 0, 9, 0), int32(1, 150, 21, 0)
    tokens = torch.randint(0, 99, (4, 200), dtype=torch.int32)
    tables = torch.randint(-9, 99, (4, 60), dtype=torch.int32)  # negative: no block of a state
    ours, reference = (PreparedInputs.empty(4, 180, 60, "cpu") for _ in range(2))
    names = [field.name for field in fields(PreparedInputs)]
    options: dict[str, Any] = {"block_size": 4}
    if has_rotary:
        options["rotary_offsets"] = int32(0, -3, 7, -5)
        ours, reference = (
            replace(one, rotary=torch.zeros(3, 180, dtype=torch.int32)) for one in (ours, reference)
        )
    else:
        names.remove("rotary")
    for name in names:
        if name != "block_tables":
            getattr(ours, name).fill_(-77)
    rows = slots, starts, lengths, tokens, tables
    prepare_inputs(*rows, ours, max_length=150, **options)
    prepare_inputs_reference(*rows, reference, **options)
    for name in names:
        assert torch.equal(getattr(ours, name), getattr(reference, name)), name
    if has_rotary:
        assert ours.rotary is not None
        assert ours.rotary[:, 0].tolist() == [0, 0, 0]  # slot 3, position 5


def test_embedding_of_a_vocabulary_shard() -> None:
    weight, ids = torch.randn(10, 70), int32(3, 15, 7, 12, 2)
    assert torch.equal(embed(ids, weight, first=3), embed_reference(ids, weight, 3))


def test_sampled_tokens_are_appended_to_their_slots() -> None:
    tokens = torch.full((4, 10), 5, dtype=torch.int32)
    append_tokens(
        int32(9, -1, 8, 7), int32(3, 1, 2, 0), int32(1, 2, 3, 4), int32(1, 1, 0, 1), tokens
    )
    expected = torch.full((4, 10), 5, dtype=torch.int32)
    expected[3, 1], expected[1, 2], expected[0, 4] = 9, 0, 7
    assert torch.equal(tokens, expected)
