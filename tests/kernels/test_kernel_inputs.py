"""Input preparation from slots, embedding and the write-back of sampled tokens."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from aioinfer.kernels.prepare import PreparedInputs, append_tokens, embed, prepare_inputs
from references import embed_reference, prepare_inputs_reference


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
