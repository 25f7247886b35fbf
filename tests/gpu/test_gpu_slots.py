"""Admissions on a GPU: what the kernels write, and that nothing waits for the device."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from aioinfer.kernels.penalties import add_biases, apply_penalties, ban_tokens
from slot_cases import (
    VOCAB,
    apply_plainly,
    apply_with_kernels,
    kernels_agree,
    make_plan,
    random_admission,
)

from aioinfer.worker.adjustments import adjust_logits
from aioinfer.worker.slots import SamplingRows, Slots
from aioinfer.worker.step_buffers import Staging

GPU = torch.device("cuda")


def test_kernels_leave_the_slots_as_plain_torch_does() -> None:
    assert sum(kernels_agree(seed, GPU) for seed in range(5)) > 0


# torch says on the first use of the debug mode that it does not find every such operation
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_admissions_do_not_wait_for_the_gpu() -> None:
    """After the kernels are compiled, and while the counts grow and shrink."""
    rng, staging = random.Random(7), Staging(GPU)
    slots = Slots(16, 1600, 16, VOCAB, GPU, uses_kernels=True)
    plans = [
        make_plan(
            *(random_admission(slot, rng) for slot in range(16)), freed_slots=tuple(range(16))
        )
        for _ in range(3)
    ]
    for plan in plans:
        apply_with_kernels(slots, plan, staging)
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        for plan in [*plans, make_plan(freed_slots=tuple(range(16)))]:
            apply_with_kernels(slots, plan, staging)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(slots.occurrences.rows) == 4


@pytest.mark.parametrize("seed", range(3))
def test_adjusted_logits_are_those_of_plain_torch(seed: int) -> None:
    rng = random.Random(seed)
    slots = Slots(8, 1600, 16, VOCAB, GPU)
    plan = make_plan(*(random_admission(slot, rng) for slot in range(8)))
    apply_plainly(slots, plan)
    slot_ids = np.arange(8, dtype=np.int32)
    positions = plan.admissions.records["num_tokens"].astype(np.int32)
    logits = torch.randn(8, VOCAB, device=GPU)
    expected = logits.cpu()
    on_host = Slots(8, 1600, 16, VOCAB, torch.device("cpu"))
    apply_plainly(on_host, plan)
    flags = on_host.current_flags(slot_ids, positions)
    adjust_logits(expected, on_host, SamplingRows(slot_ids, positions, 0), flags)
    there, at, params = torch.from_numpy(slot_ids).cuda(), torch.from_numpy(positions), slots.params
    add_biases(logits, there, slots.bias_ids, slots.bias_values, params["num_bias"])
    ban_tokens(
        logits, there, slots.banned_ids, params["num_banned"],
        positions=at.cuda(), until=params["banned_until"],
    )  # fmt: skip
    kinds = ("repetition", "presence", "frequency")
    apply_penalties(
        logits, there, slots.occurrences.row_of_slot, slots.occurrences.rows,
        *(params[f"{kind}_penalty"] for kind in kinds),
    )  # fmt: skip
    torch.testing.assert_close(logits.cpu(), expected, rtol=1e-5, atol=1e-4)
