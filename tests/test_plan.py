"""Plans and results survive their flat layout, whatever is in them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioinfer.features.logprobs.sections import LogprobRows, Logprobs
from aioinfer.ipc.plan import (
    GROWTH_BYTES,
    I32,
    MAX_FIXED_BYTES,
    MAX_PLAN_BYTES,
    Admission,
    Admissions,
    FreedSlots,
    StepPlan,
    StepResult,
    max_sequence_tokens,
)
from aioinfer.ipc.ring import Ring
from aioinfer.ipc.sections import Section, array
from aioinfer.sampling_params import MAX_END_TOKENS, MAX_LOGIT_BIAS, SamplingParams

INT32 = st.integers(0, 2**31 - 1)
STEP_IDS = st.integers(-1, 2**63 - 1)
FLOAT32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


def ids(values: list[int]) -> I32:
    return np.array(values, np.int32)


def columns(draw: st.DrawFn, count: int, max_rows: int) -> list[I32]:
    rows = draw(st.lists(st.tuples(*[INT32] * count), max_size=max_rows))
    return [ids([row[column] for row in rows]) for column in range(count)]


@st.composite
def admissions(draw: st.DrawFn) -> Admission:
    params = SamplingParams(
        temperature=draw(st.floats(0, 2, width=32)),
        top_k=draw(st.integers(0, 1000)),
        top_p=draw(st.floats(0.125, 1, width=32)),
        min_p=draw(st.floats(0, 1, width=32)),
        repetition_penalty=draw(st.floats(0.5, 2, width=32)),
        presence_penalty=draw(st.floats(-2, 2, width=32)),
        frequency_penalty=draw(st.floats(-2, 2, width=32)),
        logprobs=draw(st.none() | st.integers(0, 20)),
        logit_bias=draw(
            st.dictionaries(st.integers(0, 2**18), st.floats(-100, 100, width=32), max_size=5)
        ),
    )
    tokens = draw(st.lists(INT32, min_size=1, max_size=40))
    seed = draw(st.integers(0, 2**64 - 1))
    banned = tuple(draw(st.lists(INT32, max_size=4)))
    return Admission(
        draw(INT32), ids(tokens), draw(st.integers(1, len(tokens))), params, seed, banned
    )


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    groups, *copies = columns(draw, 3, 6)
    sections: list[Section] = []
    if admitted := draw(st.lists(admissions(), max_size=3)):
        sections.append(Admissions.of(admitted))
    if draw(st.booleans()):
        sections.insert(0, FreedSlots(ids(draw(st.lists(INT32, max_size=3)))))
    if draw(st.booleans()):
        sections.append(LogprobRows(*columns(draw, 3, 4), ids(draw(st.lists(INT32, max_size=5)))))
    return StepPlan(
        draw(STEP_IDS), *columns(draw, 4, 6), *columns(draw, 3, 6), *copies, sections, groups
    )


@st.composite
def results(draw: st.DrawFn) -> StepResult:
    sampled, num_top = (draw(st.integers(0, most)) for most in (5, 20))

    def integers(*shape: int) -> I32:
        count = int(np.prod(shape))
        values = draw(st.lists(st.integers(-1, 2**31 - 1), min_size=count, max_size=count))
        return ids(values).reshape(shape)

    def floats(*shape: int) -> Any:
        count = int(np.prod(shape))
        values = draw(st.lists(FLOAT32, min_size=count, max_size=count))
        return np.array(values, np.float32).reshape(shape)

    sections: list[Section] = []
    if draw(st.booleans()):
        rows, named = (draw(st.integers(0, most)) for most in (sampled, 7))
        sections = [
            Logprobs(
                integers(rows), floats(rows), integers(rows, num_top), floats(rows, num_top),
                integers(rows), floats(named),
            )
        ]  # fmt: skip
    return StepResult(draw(STEP_IDS), integers(sampled), sections, draw(st.integers(0, 2**63 - 1)))


def same(one: Any, other: Any) -> bool:
    """Whether two plans, sections or results are equal, field by field."""
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    if isinstance(one, Sequence):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, StepPlan | StepResult | Section):
        fields = dataclasses.fields(one)
        return all(same(getattr(one, each.name), getattr(other, each.name)) for each in fields)
    return bool(one == other)


@given(plans())
def test_any_plan_survives(plan: StepPlan) -> None:
    assert same(StepPlan.decode(b"".join(plan.encode())), plan)
    assert plan.num_tokens == sum(plan.lengths.tolist())


@given(results())
def test_any_result_survives(result: StepResult) -> None:
    message = bytearray(b"".join(result.encode()))
    decoded = StepResult.decode(message)
    message[:] = bytes(len(message))  # a result has arrays of its own
    assert same(decoded, result)


@pytest.mark.parametrize("kind", [StepPlan, StepResult])
def test_another_version_is_refused(kind: type[StepPlan] | type[StepResult]) -> None:
    with pytest.raises(ValueError, match="version 99"):
        kind.decode(np.array([99] + [0] * 15, np.int32).tobytes())


def test_an_unknown_section_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A section of a feature that the other side of a ring has not imported."""

    @dataclasses.dataclass(frozen=True, slots=True)
    class Unheard(Section):
        rows: I32 = array(np.int32)  # noqa: RUF009

    kind = Unheard.kind
    nothing = [ids([])] * 9
    plan = StepPlan(5, *nothing, [Unheard(ids([1]))])
    result = StepResult(5, ids([1]), sections=[Unheard(ids([1]))])
    assert same(StepPlan.decode(b"".join(plan.encode())), plan)
    assert same(StepResult.decode(b"".join(result.encode())), result)
    monkeypatch.delitem(Section._kinds, kind)
    message = rf"a plan with a section of kind {kind}; known are .*Admissions, .*Logprobs"
    with pytest.raises(ValueError, match=message):
        StepPlan.decode(b"".join(plan.encode()))
    with pytest.raises(ValueError, match=rf"a result with a section of kind {kind}; known are "):
        StepResult.decode(b"".join(result.encode()))


def test_two_sections_have_two_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kind is derived from the class's module and name. A class whose hash another one has is
    refused, and so no message can be read as another one."""
    assert FreedSlots.kind != Admissions.kind != LogprobRows.kind
    assert all(0 <= kind < 2**31 for kind in Section._kinds)
    monkeypatch.setattr("aioinfer.ipc.sections.zlib.crc32", lambda _: FreedSlots.kind)
    with pytest.raises(TypeError, match=r"Clashing and FreedSlots have one hash: rename one"):
        type("Clashing", (Section,), {})
    assert Section._kinds[FreedSlots.kind] is FreedSlots


@pytest.mark.parametrize("block_size", [1, 16, 128])
def test_the_longest_admission_fits_the_ring_twice(block_size: int) -> None:
    """A request of the greatest length, with all that it may bring, whose block table grows whole,
    beside the longest fixed part: a ring of the usual size holds two such plans, wherever the lap
    ends."""
    ring = Ring(1)
    try:
        assert ring.max_message_bytes > 1.3 * MAX_PLAN_BYTES
        length = max_sequence_tokens(block_size)
        params = SamplingParams(
            min_tokens=1, logit_bias=dict.fromkeys(range(MAX_LOGIT_BIAS), 1.0), logprobs=20
        )
        admission = Admission(
            0, np.zeros(length, np.int32), length, params, 0, range(MAX_END_TOKENS)
        )
        fixed = np.zeros(MAX_FIXED_BYTES // GROWTH_BYTES, np.int32)
        growth = np.concatenate([fixed, np.zeros(-(-length // block_size), np.int32)])
        plan = StepPlan(
            0, *[ids([])] * 4, *[growth] * 3, *[ids([])] * 2, [Admissions.of([admission])]
        )
        size = sum(map(len, plan.encode()))
        assert 0.9 * MAX_PLAN_BYTES < size <= MAX_PLAN_BYTES
        for _ in range(7):
            ring.write(plan.encode())
            ring.write(plan.encode())
            for _ in range(2):
                assert len(ring.read(0)) == size
                ring.release(0)
    finally:
        ring.close()
