"""Input preparation from slots, embedding and the write-back of sampled tokens."""

from __future__ import annotations

from dataclasses import fields

import torch
from aioinfer.kernels.prepare import (
    PreparedInputs,
    append_tokens,
    embed,
    prepare_inputs,
)
from references import embed_reference, prepare_inputs_reference


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_rows_become_inputs_and_the_rest_padding() -> None:
    slots, starts, lengths = int32(3, 1, 0, 2), int32(5, 0, 9, 0), int32(1, 150, 21, 0)
    tokens = torch.randint(0, 99, (4, 200), dtype=torch.int32)
    tables = torch.randint(0, 99, (4, 60), dtype=torch.int32)
    ours, reference = (PreparedInputs.empty(4, 180, 60, "cpu") for _ in range(2))
    for field in fields(PreparedInputs):
        if field.name != "block_tables":
            getattr(ours, field.name).fill_(-77)
    prepare_inputs(slots, starts, lengths, tokens, tables, ours, block_size=4, max_length=150)
    prepare_inputs_reference(slots, starts, lengths, tokens, tables, reference, block_size=4)
    for field in fields(PreparedInputs):
        assert torch.equal(getattr(ours, field.name), getattr(reference, field.name)), field.name


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
