"""Growth of block tables and admissions, against plain torch."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from aioinfer.kernels.slots import grow_tables, grow_tables_reference

from aioinfer.ipc.plan import Admission, Admissions, StepPlan, Vacated
from aioinfer.sampling_params import MAX_END_TOKENS, MAX_LOGIT_BIAS, SamplingParams
from aioinfer.worker.slots import Slots
from aioinfer.worker.staging import Staging

CPU = torch.device("cpu")
VOCAB = 1300
NONE = np.empty(0, np.int32)


def test_block_tables_grow_where_a_row_is_named() -> None:
    entries = torch.tensor([[3, 0, -1, 3, 1], [0, 7, 2, 1, 0], [5, 6, 7, 8, 9]], dtype=torch.int32)
    ours = torch.full((4, 8), -5, dtype=torch.int32)
    reference = ours.clone()
    grow_tables(*entries, ours)
    grow_tables_reference(*entries, reference)
    assert torch.equal(ours, reference)
    assert (ours != -5).sum() == 4


def make_plan(*admissions: Admission, vacated: tuple[int, ...] = ()) -> StepPlan:
    """A plan without rows, as a worker reads it from the ring."""
    sections = [Vacated(np.array(vacated, np.int32)), Admissions.of(admissions)]
    plan = StepPlan(0, NONE, NONE, NONE, NONE, NONE, NONE, NONE, NONE, NONE, sections)
    return StepPlan.decode(b"".join(plan.encode()))


def apply_with_kernels(slots: Slots, plan: StepPlan, staging: Staging) -> None:
    """What the GPU model runner does: one upload, behind other arrays of the step."""
    staging.begin()
    _, *staged = staging.upload([np.arange(7, dtype=np.int32), *slots.stage(plan)])
    slots.apply_staged(plan, staged)


def visible(slots: Slots) -> dict[str, torch.Tensor]:
    """All that a step can read of the slots; lists as far as they count."""
    found = {name: values for name, values in slots.params.items() if not name.startswith("first")}
    found |= {"tokens": slots.tokens, "seeds": slots.seeds}
    for slot in range(len(slots.tokens)):
        biases, banned = (int(slots.params[name][slot]) for name in ("num_bias", "num_banned"))
        found[f"bias ids {slot}"] = slots.bias_ids[slot, :biases]
        found[f"bias values {slot}"] = slots.bias_values[slot, :biases]
        found[f"banned {slot}"] = slots.banned_ids[slot, :banned]
        row = int(slots.occurrences.host_rows[slot])
        if row >= 0:
            assert slots.occurrences.row_of_slot[slot] == row
            found[f"occurrences {slot}"] = slots.occurrences.rows[row]
    for name in ("sampling_flags", "num_logprobs", "_banned_until"):
        found[name] = torch.from_numpy(getattr(slots, name))
    return found


def random_admission(slot: int, choice: random.Random) -> Admission:
    fields: dict[str, Any] = {
        "temperature": choice.choice([0.0, 0.7]),
        "top_k": choice.choice([0, 5]),
    }
    if choice.random() < 0.5:
        ids = choice.sample(range(VOCAB), choice.choice([1, 2, 65, MAX_LOGIT_BIAS]))
        fields["logit_bias"] = {token: choice.uniform(-100, 100) for token in ids}
    if choice.random() < 0.5:
        fields |= {"repetition_penalty": 1.3, "presence_penalty": -0.5, "frequency_penalty": 2.0}
    if choice.random() < 0.3:
        fields["logprobs"] = choice.randint(0, 20)
    banned: tuple[int, ...] = ()
    if choice.random() < 0.5:
        fields["min_tokens"] = choice.randint(1, 9)
        banned = tuple(choice.sample(range(VOCAB), choice.choice([1, 3, MAX_END_TOKENS])))
    tokens = np.array(
        [choice.randrange(VOCAB) for _ in range(choice.choice([1, 30, 1500]))], np.int32
    )
    return Admission(
        slot, tokens, choice.randint(1, len(tokens)), SamplingParams(**fields),
        choice.getrandbits(64), banned,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
def test_kernels_leave_the_slots_as_plain_torch_does(seed: int) -> None:
    choice = random.Random(seed)
    plain, ours = (Slots(5, 1600, 16, VOCAB, CPU) for _ in range(2))
    staging, penalized = Staging(CPU), 0
    for _ in range(4):
        slots = choice.sample(range(5), choice.randint(0, 4))
        plan = make_plan(
            *(random_admission(slot, choice) for slot in slots),
            vacated=tuple(choice.sample(range(5), 2)),
        )
        plain.apply(plan)
        apply_with_kernels(ours, plan, staging)
        expected, found = visible(plain), visible(ours)
        assert found.keys() == expected.keys()
        for name, values in expected.items():
            assert torch.equal(found[name], values), name
        penalized += sum(name.startswith("occurrences") for name in found)
    assert penalized


def test_an_admission_touches_no_other_slot() -> None:
    slots = Slots(4, 40, 16, VOCAB, CPU)
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
    slots = Slots(2, 40, 16, VOCAB, CPU)
    assert slots.stage(StepPlan(0, *[NONE] * 9)) == []
    assert slots.stage(make_plan(vacated=(1,))) == []


def test_admissions_neither_copy_pageable_memory_nor_call_bincount(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both wait for a GPU; the staged upload is the only way from the host."""
    slots, staging = Slots(2, 40, 16, VOCAB, CPU), Staging(CPU)
    params = SamplingParams(logit_bias={4: 1.0}, min_tokens=1, frequency_penalty=1.0)
    plan = make_plan(Admission(1, np.arange(9, dtype=np.int32), 5, params, 5, (3,)))
    staging.begin()
    staged = staging.upload(slots.stage(plan))

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("this waits for the GPU")

    for name in ("tensor", "bincount", "from_numpy", "as_tensor"):
        monkeypatch.setattr(torch, name, refuse)
    slots.apply_staged(plan, staged)
    monkeypatch.undo()
    counts = slots.occurrences.rows[0]
    assert counts[:10].tolist() == [1 << 30] * 5 + [1] * 4 + [0]
