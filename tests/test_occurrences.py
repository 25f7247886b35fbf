"""The rows in which penalties count tokens: how they are given out, grow and shrink."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aioinfer.worker.sampling.occurrences import IN_PROMPT, Occurrences

CPU = torch.device("cpu")


def counted(occurrences: Occurrences, slot: int) -> list[int]:
    return occurrences.rows[occurrences.host_rows[slot]].tolist()


def test_prompt_and_output_are_counted_apart() -> None:
    occurrences = Occurrences(2, 6, CPU)
    row = occurrences.start(1)
    occurrences.fit()
    occurrences.count(row, torch.tensor([5, 5, 2, 2, 3, 2], dtype=torch.int32), 3)
    assert counted(occurrences, 1) == [0, 0, IN_PROMPT | 2, 1, 0, IN_PROMPT]


@given(
    st.integers(1, 40),
    st.lists(st.tuples(st.booleans(), st.integers(0, 39)), max_size=120),
)
def test_rows_keep_what_they_hold_and_memory_follows_their_number(
    max_num_seqs: int, changes: list[tuple[bool, int]]
) -> None:
    occurrences = Occurrences(max_num_seqs, 3, CPU)
    used: dict[int, int] = {}
    for number, (starts, slot) in enumerate(changes):
        slot %= max_num_seqs
        before = len(occurrences.rows)
        if starts:
            row = occurrences.start(slot)
            occurrences.fit()
            occurrences.rows[row] = number
            used[slot] = number
        else:
            occurrences.stop(slot)
            occurrences.fit()
            used.pop(slot, None)
        after = len(occurrences.rows)
        assert [counted(occurrences, slot) for slot in used] == [[n] * 3 for n in used.values()]
        assert len({int(occurrences.host_rows[slot]) for slot in used}) == len(used)
        assert after <= max_num_seqs
        copied = after + before if after != before else after
        assert copied * 12 <= Occurrences.max_bytes(max_num_seqs, 3)
    for slot in list(used):
        occurrences.stop(slot)
    occurrences.fit()
    assert len(occurrences.rows) < 8, "what they needed comes back"


@pytest.mark.parametrize("max_num_seqs", [8, 9, 64, 100])
def test_requests_that_come_and_go_reallocate_nothing(max_num_seqs: int) -> None:
    """Between growing and shrinking lies a factor of two."""
    occurrences = Occurrences(max_num_seqs, 3, CPU)
    for slot in range(max_num_seqs // 2 + 1):
        occurrences.start(slot)
    occurrences.fit()
    rows = occurrences.rows
    for slot in (max_num_seqs // 2, max_num_seqs // 2 - 1):
        occurrences.stop(slot)
        occurrences.fit()
        assert occurrences.rows is rows
        occurrences.start(slot)
        occurrences.fit()
        assert occurrences.rows is rows
