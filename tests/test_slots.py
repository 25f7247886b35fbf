"""The slots: what a plan writes into them, and that nothing of a former owner stays; how rows in
which penalties count tokens are given out, grow and shrink."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aioinfer.ipc.lookahead import SKIPPED
from aioinfer.ipc.plan import Admission, Admissions, FreedSlots, StepPlan
from aioinfer.ipc.request_record import AppendedTokens
from aioinfer.sampling_params import MAX_END_TOKENS, MAX_LOGIT_BIAS, SamplingParams
from aioinfer.worker.adjustments import adjust_logits, count_sampled
from aioinfer.worker.slots import (
    BANNED,
    BIASED,
    FILTERED,
    IN_PROMPT,
    PENALIZED,
    RANDOM,
    LookaheadTensors,
    Occurrences,
    SamplingRows,
    Slots,
)
from tests import plans
from tests.filled_slots import apply, sample
from tests.plans import ids

VOCAB = 50
CPU = torch.device("cpu")


def make_plan(
    *admissions: Admission,
    growth: list[tuple[int, int, int]] | None = None,
    freed_slots: tuple[int, ...] = (),
) -> StepPlan:
    """A plan without rows. `growth`: (row, index, block)."""
    sections = [FreedSlots(ids(*freed_slots))] if freed_slots else []
    return plans.make_plan(growth=growth or (), sections=[*sections, Admissions.of(admissions)])


def admit(
    slot: int,
    tokens: list[int] | None = None,
    prompt_len: int = 1,
    banned: tuple[int, ...] = (),
    seed: int = 0,
    **params: Any,
) -> Admission:
    return Admission(
        slot, ids(*(tokens or [1])), prompt_len, SamplingParams(**params), seed, banned
    )


def make_slots(max_num_seqs: int = 4) -> Slots:
    return Slots(max_num_seqs, 20, 8, VOCAB, CPU)


def adjusted(slots: Slots, slot: int, position: int) -> torch.Tensor:
    """What the sampler makes of logits that are all 1."""
    return adjusted_logits(slots, torch.ones(1, VOCAB), slot, position)[0]


def adjusted_logits(slots: Slots, logits: torch.Tensor, slot: int, position: int) -> torch.Tensor:
    rows = SamplingRows(ids(slot), ids(position), 0)
    adjust_logits(logits, slots, rows, slots.current_flags(rows.slot_ids, rows.positions))
    return logits


def test_shapes_and_dtypes() -> None:
    slots = make_slots()
    assert slots.tokens.shape == (4, 21)
    assert slots.tokens.dtype == torch.int32
    assert slots.block_tables.shape == (4, 3)
    assert slots.block_tables.dtype == torch.int32
    for name in ("top_k", "banned_until", "num_bias", "num_banned"):
        assert slots.params[name].dtype == torch.int32
        assert slots.params[name].is_contiguous()
    for name in (
        "temperature",
        "top_p",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
    ):
        assert slots.params[name].dtype == torch.float32
        assert slots.params[name].is_contiguous()


def test_an_admission_is_written_whole() -> None:
    slots = make_slots()
    params: dict[str, Any] = {
        "temperature": 0.5, "top_k": 5, "top_p": 0.75, "min_p": 0.125,
        "repetition_penalty": 1.5, "presence_penalty": -1.0, "frequency_penalty": 0.25,
        "min_tokens": 3,
    }  # fmt: skip
    apply(
        slots,
        make_plan(
            admit(
                2, [7, 8, 9, 8], prompt_len=2, seed=2**64 - 2, banned=(6,), logit_bias={4: 1.0},
                **params,
            ),
        ),
    )  # fmt: skip
    assert slots.tokens[2, :4].tolist() == [7, 8, 9, 8]
    assert slots.seeds[2] == -2
    assert slots.params["banned_until"][2] == 5
    for name, value in params.items():
        if name != "min_tokens":
            assert slots.params[name][2] == value, name
    found = slots.sampling_flags.tolist()
    assert found == [0, 0, RANDOM | FILTERED | BIASED | PENALIZED | BANNED, 0]
    assert slots.current_flags(ids(2), ids(4)) & BANNED
    assert not slots.current_flags(ids(2), ids(5)) & BANNED


def test_a_plan_decoded_from_the_ring_serves_as_well() -> None:
    """Its arrays are read-only views into a buffer that is overwritten after the step."""
    plan = make_plan(
        admit(1, [4, 5, 6], prompt_len=2, frequency_penalty=1.0, logit_bias={3: -2.0}, seed=2**63),
        growth=[(1, 2, 9)],
    )
    message = bytearray(b"".join(plan.encode()))
    decoded = StepPlan.decode(bytes(message))
    slots = make_slots()
    apply(slots, decoded)
    overwritten = make_slots()
    apply(overwritten, StepPlan.decode(message))
    message[:] = bytes(len(message))
    for some in (slots, overwritten):
        assert some.tokens[1, :3].tolist() == [4, 5, 6]
        assert some.block_tables[1, 2] == 9
        assert some.seeds[1] == -(2**63)
        expected = torch.ones(VOCAB)
        expected[3], expected[6] = -1.0, 0.0
        assert adjusted(some, 1, 3).equal(expected)


def test_block_tables_grow_before_admissions_and_survive_them() -> None:
    slots = make_slots()
    apply(slots, make_plan(growth=[(0, 0, 5), (0, 1, 6), (3, 2, 7)]))
    apply(slots, make_plan(admit(3), growth=[(3, 0, 8), (0, 2, 4)]))
    assert slots.block_tables.tolist() == [[5, 6, 4], [0, 0, 0], [0, 0, 0], [8, 0, 7]]


def test_nothing_of_the_former_owner_acts_on_the_next() -> None:
    slots = make_slots()
    former = admit(
        1, [9, 9, 8], banned=(2, 3), min_tokens=10, temperature=0.9, top_k=3, top_p=0.5, min_p=0.5,
        logit_bias={7: 50.0}, repetition_penalty=2.0, presence_penalty=1.0, frequency_penalty=1.0,
    )  # fmt: skip
    apply(slots, make_plan(former))
    assert adjusted(slots, 1, 3).ne(1).nonzero()[:, 0].tolist() == [2, 3, 7, 8, 9]
    apply(slots, make_plan(admit(1, temperature=0)))
    assert adjusted(slots, 1, 1).eq(1).all()
    assert slots.sampling_flags[1] == 0
    logits = torch.zeros(1, VOCAB)
    logits[0, 2] = 1
    assert sample(logits, slots, ids(1), ids(1)).tolist() == [2]


def test_a_new_owner_with_the_same_parameters_starts_afresh() -> None:
    slots = make_slots()
    sampling_flags: dict[str, Any] = {"frequency_penalty": 1.0, "min_tokens": 2}
    apply(
        slots,
        make_plan(
            admit(
                0, [9, 9, 9], logit_bias={1: 5.0, 2: 5.0, 3: 5.0}, banned=(4, 5, 6),
                **sampling_flags,
            )
        ),
    )  # fmt: skip
    apply(slots, make_plan(admit(0, [9, 7], logit_bias={8: 1.0}, banned=(4,), **sampling_flags)))
    expected = torch.ones(VOCAB)
    expected[7], expected[8], expected[4] = 0.0, 2.0, -torch.inf
    assert adjusted(slots, 0, 2).equal(expected)


def test_longer_lists_leave_those_of_others_alone() -> None:
    slots = make_slots()
    apply(slots, make_plan(admit(0, logit_bias={1: 1.0})))
    apply(slots, make_plan(admit(1, logit_bias=dict.fromkeys(range(30), 2.0))))
    apply(slots, make_plan(admit(2, logit_bias={3: 3.0, 4: 4.0})))
    expected = torch.ones(VOCAB)
    expected[1] += 1
    assert adjusted(slots, 0, 1).equal(expected)
    assert adjusted(slots, 1, 1).tolist() == [3.0] * 30 + [1.0] * 20
    expected = torch.ones(VOCAB)
    expected[3], expected[4] = 4.0, 5.0
    assert adjusted(slots, 2, 1).equal(expected)


def test_counts_are_kept_only_for_slots_with_penalties_and_their_rows_are_used_again() -> None:
    slots = make_slots(16)
    assert len(slots.occurrences.rows) == 0
    for step in range(6):
        for slot in range(3):
            apply(slots, make_plan(admit(slot, [1, 8 * step + slot], frequency_penalty=1.0)))
            assert adjusted(slots, slot, 2).ne(1).nonzero()[:, 0].tolist() == [8 * step + slot]
        apply(slots, make_plan(*(admit(slot) for slot in range(3))))
    assert len(slots.occurrences.rows) == 4
    apply(slots, make_plan(*(admit(slot, [1, slot], frequency_penalty=1.0) for slot in range(16))))
    assert len(slots.occurrences.rows) == 16
    for slot in range(16):
        assert adjusted(slots, slot, 2).ne(1).nonzero()[:, 0].tolist() == [slot]


def test_memory_of_counts_comes_back_when_their_requests_have_gone() -> None:
    slots = make_slots(16)
    apply(slots, make_plan(*(admit(slot, [1, slot], frequency_penalty=1.0) for slot in range(16))))
    assert slots.occurrences.rows.nbytes == 16 * VOCAB * 4
    apply(slots, make_plan(freed_slots=tuple(range(1, 16))))
    assert len(slots.occurrences.rows) == 4
    assert adjusted(slots, 0, 2).ne(1).nonzero()[:, 0].tolist() == [0], "the one that stays"
    apply(slots, make_plan(admit(5, [1, 9], frequency_penalty=1.0), freed_slots=(5,)))
    assert adjusted(slots, 5, 2).ne(1).nonzero()[:, 0].tolist() == [9]


def test_the_worst_case_of_the_memory_profile_is_not_exceeded() -> None:
    """Counting what is there while a tensor is copied into a larger one."""
    for max_num_seqs in (1, 2, 3, 7, 16, 33):
        slots, before = make_slots(max_num_seqs), 0
        bound = Slots.max_sampling_bytes(max_num_seqs, VOCAB)
        for slot in range(max_num_seqs):
            apply(slots, make_plan(admit(slot, [1, 2], presence_penalty=1.0)))
            rows = slots.occurrences.rows.nbytes
            assert (rows if rows == before else rows + before) <= bound
            before = rows
        assert before == max_num_seqs * VOCAB * 4


def test_the_longest_lists_fit() -> None:
    slots = Slots(2, 20, 8, 2000, CPU)
    biases = dict.fromkeys(range(MAX_LOGIT_BIAS), 2.0)
    ends = tuple(range(1999, 1999 - MAX_END_TOKENS, -1))
    apply(slots, make_plan(admit(1, logit_bias=biases, min_tokens=5, banned=ends)))
    logits = adjusted_logits(slots, torch.ones(1, 2000), 1, 1)
    assert logits[0].eq(3).nonzero()[:, 0].tolist() == list(range(MAX_LOGIT_BIAS))
    assert logits[0].isneginf().nonzero()[:, 0].tolist() == sorted(ends)


def test_sampled_tokens_are_written_and_counted() -> None:
    slots = make_slots()
    apply(
        slots,
        make_plan(
            admit(0, [1, 2]), admit(1, frequency_penalty=1.0), admit(3, presence_penalty=1.0)
        ),
    )
    rows = SamplingRows(ids(3, 0, 1), ids(1, 2, 1), 0)
    tokens = torch.tensor([30, 31, -1], dtype=torch.int32)
    slots.append(rows.slot_ids, rows.positions, tokens)
    flags = slots.current_flags(rows.slot_ids, rows.positions)
    count_sampled(tokens, slots, rows, flags, has_later_rows=False)
    assert slots.tokens[3, 1] == 30
    assert slots.tokens[0, 2] == 31
    assert slots.tokens[1, 1] == 0, "a row that failed leaves an id that can be embedded"
    assert adjusted(slots, 3, 2)[30] == 0
    assert not slots.occurrences.rows[slots.occurrences.host_rows[1]][0]
    assert adjusted(slots, 0, 3).eq(1).all()


def test_reset_leaves_no_trace() -> None:
    slots = make_slots()
    sampling_flags: dict[str, Any] = {
        "logit_bias": {1: 1.0}, "frequency_penalty": 1.0, "min_tokens": 4, "logprobs": 2,
        "top_p": 0.5,
    }  # fmt: skip
    apply(
        slots,
        make_plan(admit(1, [5, 6, 7], banned=(3,), seed=9, **sampling_flags), growth=[(1, 0, 3)]),
    )
    slots.reset()
    for name, fresh in vars(make_slots()).items():
        kept = getattr(slots, name)
        if isinstance(fresh, torch.Tensor):
            assert kept.equal(fresh), name
        elif isinstance(fresh, np.ndarray):
            assert (kept == fresh).all(), name
    assert len(slots.occurrences.rows) == 0


def test_appended_tokens_are_entered_and_counted() -> None:
    """Several of one slot at once; what was sampled as well is not counted again."""
    slots = make_slots()
    penalized = admit(0, [4, 7], presence_penalty=1.0)
    apply(slots, make_plan(penalized, admit(1, [4, 7])))
    columns = [0, 0, 0, 1], [2, 3, 4, 2], [9, 9, 8, 9], [0, 1, 1, 1]
    appended = AppendedTokens(*(np.array(column, np.int32) for column in columns))
    plan = make_plan()
    plan.sections = [appended]
    apply(slots, plan)
    assert slots.tokens[:2, :5].tolist() == [[4, 7, 9, 9, 8], [4, 7, 9, 0, 0]]
    counts = slots.occurrences.rows[slots.occurrences.host_rows[0]]
    assert (counts[9], counts[8], counts[7]) == (1, 1, 1)
    assert slots.occurrences.host_rows[1] == -1


# ---------------------------------------------------------------- occurrences


def counted(occurrences: Occurrences, slot: int) -> list[int]:
    return occurrences.rows[occurrences.host_rows[slot]].tolist()


def test_prompt_and_output_are_counted_apart() -> None:
    occurrences = Occurrences(2, 6, CPU)
    row = occurrences.start(1)
    occurrences.fit()
    occurrences.count(row, torch.tensor([5, 5, 2, 2, 3, 2], dtype=torch.int32), 3)
    assert counted(occurrences, 1) == [0, 0, IN_PROMPT | 2, 1, 0, IN_PROMPT]


@given(st.integers(1, 40), st.lists(st.tuples(st.booleans(), st.integers(0, 39)), max_size=120))
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


@given(st.data())
def test_drafts_are_kept_as_long_as_they_equal_the_sampled_tokens(data: st.DataObject) -> None:
    """Tokens of a vocabulary of two, and rows that failed."""
    slots = make_slots(3)
    slots.tokens.fill_(9)
    numbers: list[int] = []
    expected: list[int] = []
    rows: list[tuple[int, int, int, int, int]] = []
    starts: dict[int, int] = {}
    for slot in data.draw(st.permutations([0, 1, 2])):
        base, count = data.draw(st.integers(0, 5)), data.draw(st.integers(1, 4))
        agrees = True
        for offset in range(count):
            draft, token = data.draw(st.integers(0, 1)), data.draw(st.integers(-1, 1))
            agrees = agrees and (offset == 0 or draft == rows[-1][4])
            rows.append((slot, base + offset + 1, offset, draft, token))
            expected.append(token if agrees else SKIPPED)
            if agrees:
                starts[slot] = base + offset + 1
                numbers.append(max(token, 0))
    at, positions, offsets, drafts, sampled = (ids(*column) for column in zip(*rows, strict=True))
    lookahead = LookaheadTensors(torch.from_numpy(offsets), torch.from_numpy(drafts))
    tokens = torch.from_numpy(sampled.copy())
    slots.accept(at, positions, lookahead, tokens)
    assert tokens.tolist() == expected
    assert {slot: int(slots.next_start[slot]) for slot in starts} == starts
    kept = [row[:2] for row, token in zip(rows, expected, strict=True) if token != SKIPPED]
    assert [int(slots.tokens[where]) for where in kept] == numbers
    assert int((slots.tokens != 9).sum()) == len(kept)
