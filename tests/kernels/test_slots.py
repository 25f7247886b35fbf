"""Growth of block tables and admissions, against plain torch."""

from __future__ import annotations

import numpy as np
import torch
from aioinfer.kernels.slots import (
    RECORD_FIELDS,
    SlotTensors,
    admit_requests,
    admit_requests_reference,
    grow_tables,
    grow_tables_reference,
)


def test_block_tables_grow_where_a_slot_is_named() -> None:
    entries = torch.tensor([[3, 0, -1, 3, 1], [0, 7, 2, 1, 0], [5, 6, 7, 8, 9]], dtype=torch.int32)
    ours = torch.full((4, 8), -5, dtype=torch.int32)
    reference = ours.clone()
    grow_tables(*entries, ours)
    grow_tables_reference(*entries, reference)
    assert torch.equal(ours, reference)
    assert (ours != -5).sum() == 4


def test_admissions_fill_their_slots_and_no_others() -> None:
    lengths = [3, 1500, 1]
    packed = torch.randint(0, 9999, (sum(lengths),), dtype=torch.int32)
    records = np.zeros((3, RECORD_FIELDS), np.int32)
    records[:, 0], records[:, 1], records[:, 2] = [4, 0, 2], [0, 3, 1503], lengths
    records[:, 3:5] = np.array([2**64 - 2, 5, 2**63 + 1], np.uint64).view(np.int32).reshape(3, 2)
    records[:, 5:7] = np.arange(6).reshape(3, 2)
    records[:, 7:] = np.linspace(-1, 1, 18, dtype=np.float32).view(np.int32).reshape(3, 6)
    ours, reference = (
        SlotTensors(
            torch.full((5, 1600), -1, dtype=torch.int32),
            torch.full((5,), -1),
            torch.full((2, 5), -1, dtype=torch.int32),
            torch.full((6, 5), -1.0),
        )
        for _ in range(2)
    )
    admit_requests(torch.from_numpy(records), packed, ours, max(lengths))
    admit_requests_reference(torch.from_numpy(records), packed, reference)
    for name in ("tokens", "seeds", "integers", "numbers"):
        assert torch.equal(getattr(ours, name), getattr(reference, name)), name
    assert ours.seeds.tolist() == [5, -1, -(2**63) + 1, -1, -2]
    assert (ours.tokens[[1, 3]] == -1).all()
