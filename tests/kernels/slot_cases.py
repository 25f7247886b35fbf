"""Random admissions, applied to slots by kernels and by plain torch: for tests on both devices."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from aioinfer.ipc.plan import Admission, Admissions, FreedSlots, StepPlan
from aioinfer.ipc.request_record import AppendedTokens
from aioinfer.sampling_params import MAX_END_TOKENS, MAX_LOGIT_BIAS, SamplingParams
from aioinfer.worker.slots import Slots
from aioinfer.worker.step_buffers import Staging
from tests import plans

VOCAB = 1300
NONE = np.empty(0, np.int32)


def make_plan(
    *admissions: Admission,
    freed_slots: tuple[int, ...] = (),
    appended: tuple[AppendedTokens, ...] = (),
) -> StepPlan:
    """A plan without rows, as a worker reads it from the ring."""
    sections = [FreedSlots(np.array(freed_slots, np.int32)), Admissions.of(admissions), *appended]
    plan = plans.make_plan(sections=sections)
    return StepPlan.decode(b"".join(plan.encode()))


def apply_with_kernels(slots: Slots, plan: StepPlan, staging: Staging) -> None:
    """What a GPU does: one upload, behind other arrays of the step."""
    assert slots.uses_kernels
    staging.begin()
    _, *staged = staging.upload([np.arange(7, dtype=np.int32), *slots.stage(plan)])
    slots.apply(plan, staged)


def apply_plainly(slots: Slots, plan: StepPlan) -> None:
    """The same in plain torch."""
    assert not slots.uses_kernels
    slots.apply(plan, [torch.tensor(array, device=slots.device) for array in slots.stage(plan)])


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
    for name in ("sampling_flags", "_banned_until"):
        found[name] = torch.from_numpy(getattr(slots, name))
    return found


def random_admission(slot: int, rng: random.Random) -> Admission:
    fields: dict[str, Any] = {"temperature": rng.choice([0.0, 0.7]), "top_k": rng.choice([0, 5])}
    if rng.random() < 0.5:
        ids = rng.sample(range(VOCAB), rng.choice([1, 2, 65, MAX_LOGIT_BIAS]))
        fields["logit_bias"] = {token: rng.uniform(-100, 100) for token in ids}
    if rng.random() < 0.5:
        fields |= {"repetition_penalty": 1.3, "presence_penalty": -0.5, "frequency_penalty": 2.0}
    banned: tuple[int, ...] = ()
    if rng.random() < 0.5:
        fields["min_tokens"] = rng.randint(1, 9)
        banned = tuple(rng.sample(range(VOCAB), rng.choice([1, 3, MAX_END_TOKENS])))
    tokens = np.array([rng.randrange(VOCAB) for _ in range(rng.choice([1, 30, 1500]))], np.int32)
    return Admission(
        slot, tokens, rng.randint(1, len(tokens)), SamplingParams(**fields),
        rng.getrandbits(64), banned,
    )  # fmt: skip


def random_appended(rng: random.Random) -> AppendedTokens:
    """Tokens of any slots, some of them more than once."""
    places = rng.sample([(slot, position) for slot in range(5) for position in range(20)], 30)
    tokens = [rng.randrange(9) for _ in places]
    counted = [rng.randint(0, 1) for _ in places]
    columns = *zip(*places, strict=True), tokens, counted
    return AppendedTokens(*(np.array(column, np.int32) for column in columns))


def kernels_agree(seed: int, device: torch.device) -> int:
    """Applies four random plans in both ways, and checks that what a step can read is the same.

    Returns how often the occurrences of a request were compared.
    """
    rng = random.Random(seed)
    plain, ours = (
        Slots(5, 1600, 16, VOCAB, device, uses_kernels=kernels) for kernels in (False, True)
    )
    staging, penalized = Staging(device), 0
    for _ in range(4):
        slots = rng.sample(range(5), rng.randint(0, 4))
        plan = make_plan(
            *(random_admission(slot, rng) for slot in slots),
            freed_slots=tuple(rng.sample(range(5), 2)),
            appended=(random_appended(rng),) * rng.randint(0, 1),
        )
        apply_plainly(plain, plan)
        apply_with_kernels(ours, plan, staging)
        expected, found = visible(plain), visible(ours)
        assert found.keys() == expected.keys()
        for name, values in expected.items():
            assert torch.equal(found[name], values), name
        penalized += sum(name.startswith("occurrences") for name in found)
    return penalized
