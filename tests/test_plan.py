"""Plans and results survive their flat layout, whatever is in them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioinfer.ipc.plan import I32, Admission, StepPlan, StepResult
from aioinfer.sampling_params import SamplingParams

INT32 = st.integers(0, 2**31 - 1)
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
    return StepPlan(
        draw(st.integers(-1, 2**31 - 1)),
        *columns(draw, 4, 6),
        *columns(draw, 3, 6),
        *columns(draw, 2, 6),
        draw(st.lists(admissions(), max_size=3)),
    )


@st.composite
def results(draw: st.DrawFn) -> StepResult:
    sampled, k, wanted = draw(st.integers(0, 5)), draw(st.integers(0, 20)), draw(st.booleans())
    if not wanted:
        return StepResult(
            draw(INT32),
            ids(draw(st.lists(st.integers(-1, 2**31 - 1), max_size=5))),
            busy_ns=draw(st.integers(0, 2**61)),
        )

    def floats(count: int) -> Any:
        return np.array(draw(st.lists(FLOAT32, min_size=count, max_size=count)), np.float32)

    tokens = draw(st.lists(INT32, min_size=sampled * (k + 1), max_size=sampled * (k + 1)))
    top = ids(tokens[sampled:]).reshape(sampled, k)
    return StepResult(
        draw(INT32),
        ids(tokens[:sampled]),
        floats(sampled),
        top,
        floats(sampled * k).reshape(sampled, k),
        draw(st.integers(0, 2**61)),
    )


def same(one: Any, other: Any) -> bool:
    """Whether two plans, admissions or results are equal, field by field."""
    if isinstance(one, np.ndarray):
        if not one.size:
            return not other.size
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, StepPlan | StepResult | Admission):
        return all(same(getattr(one, name), getattr(other, name)) for name in one.__slots__)
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


def test_a_long_prompt_survives_with_all_that_a_request_may_want() -> None:
    prompt = np.random.default_rng(0).integers(0, 2**17, 200_000).astype(np.int32)
    params = SamplingParams(
        temperature=0.5,
        min_tokens=7,
        max_tokens=9,
        logprobs=20,
        logit_bias=dict.fromkeys(range(300), 1.5),
    )
    admission = Admission(255, prompt, 199_990, params, 2**64 - 1, (0, 2, 151_645))
    none = ids([])
    plan = StepPlan(
        3, ids([255]), ids([0]), ids([8192]), ids([0]), none, none, none, none, none, [admission]
    )
    [decoded] = StepPlan.decode(b"".join(plan.encode())).admissions
    assert np.array_equal(decoded.tokens, prompt)
    assert (decoded.slot, decoded.prompt_len, decoded.seed) == (255, 199_990, 2**64 - 1)
    assert decoded.banned_until_min_tokens == (0, 2, 151_645)
    assert decoded.params.logit_bias == params.logit_bias
    assert (decoded.params.min_tokens, decoded.params.logprobs) == (7, 20)


@pytest.mark.parametrize("kind", [StepPlan, StepResult])
def test_another_version_is_refused(kind: type[StepPlan] | type[StepResult]) -> None:
    with pytest.raises(ValueError, match="version 99"):
        kind.decode(np.array([99, 0, 0, 0, 0, 0, 0], np.int32).tobytes())
