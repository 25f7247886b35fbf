"""Sampling parameters refuse what makes no sense or would not survive the way to the sampler, and
name the field."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioinfer.errors import RequestError
from aioinfer.sampling_params import (
    GREEDY_TEMPERATURE,
    MAX_LOGIT_BIAS,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_N,
    MAX_STOP_CHARS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    PARAMETERS,
    GrammarSpec,
    Parameter,
    SamplingParams,
    round_to_float32,
)

TINY = float(np.finfo(np.float32).tiny)


def refused(**fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**fields)
    (field,) = fields
    assert caught.value.param == field
    assert field in str(caught.value)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0), ("n", MAX_N + 1), ("n", None), ("temperature", math.inf),
        ("presence_penalty", -math.inf),
        ("max_tokens", 2**31), ("min_tokens", 2**31), ("seed", -(2**63) - 1), ("temperature", -0.1),
        ("temperature", math.nan), ("temperature", "warm"), ("temperature", None),
        ("temperature", 1e39), ("temperature", 10**400), ("top_p", 0.0), ("top_p", 1.01),
        ("top_k", -2), ("top_k", 1.5), ("top_k", math.inf), ("min_p", 1.5),
        ("repetition_penalty", 0.0), ("repetition_penalty", 0.009), ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1), ("max_tokens", 0), ("min_tokens", -1), ("logprobs", -2),
        ("prompt_logprobs", -2), ("logprob_token_ids", [-1]),
        ("logprob_token_ids", range(MAX_LOGPROB_TOKEN_IDS + 1)),
        ("seed", 2**64), ("stop", [""]),
        ("stop", ["x"] * (MAX_STOPS + 1)),
        ("stop", ["x" * MAX_STOP_CHARS, "y"]),
        ("stop_token_ids", range(MAX_STOP_TOKEN_IDS + 1)),
        ("stop_token_ids", [-1]), ("stop_token_ids", [2**31]), ("stop_token_ids", ["5"]),
        ("logit_bias", {5: 101.0}), ("logit_bias", {5: math.nan}), ("logit_bias", {5: "much"}),
        ("logit_bias", {"5": 1.0}), ("logit_bias", {-1: 1.0}),
        ("logit_bias", dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0)), ("grammar", "a+"),
        ("allowed_token_ids", []), ("allowed_token_ids", [-1]), ("allowed_token_ids", [1.5]),
        ("allowed_token_ids", range(2**18 + 1)), ("bad_words", ["a", ""]),
        ("bad_words", ["a"] * 257), ("bad_words", ["a" * 4097]),
    ],
)  # fmt: skip
def test_wrong_values_are_named(field: str, value: Any) -> None:
    refused(**{field: value})


def test_the_largest_lists_pass() -> None:
    params = SamplingParams(
        stop=["x" * (MAX_STOP_CHARS // MAX_STOPS)] * MAX_STOPS,
        stop_token_ids=range(MAX_STOP_TOKEN_IDS),
        logit_bias=dict.fromkeys(range(MAX_LOGIT_BIAS), 100),
    )
    assert params.stop_token_ids == tuple(range(MAX_STOP_TOKEN_IDS))


def test_the_error_names_the_bound_of_a_list() -> None:
    message = str(refused(logit_bias=dict.fromkeys(range(49_152), 1.0)))
    assert message == f"logit_bias may hold at most {MAX_LOGIT_BIAS} token ids, not 49152"


@pytest.mark.parametrize("value", [1e-46, 1e-300, 5e-324, 1e-45, 1e-40])
@pytest.mark.parametrize("field", ["top_p", "repetition_penalty"])
def test_what_is_zero_where_it_is_used_is_refused_before_it_crosses(
    field: str, value: float
) -> None:
    """Positive as float64, 0 or a denormal as float32, which a GPU takes for 0."""
    assert "0.0 in float32" in str(refused(**{field: value}))


@pytest.mark.parametrize("value", [1e-46, 1e-40, -1e-46, -0.0])
def test_a_temperature_that_underflows_is_greedy(value: float) -> None:
    params = SamplingParams(temperature=value)
    assert params.greedy
    assert str(params.temperature) == "0.0"


def test_rounding_may_bring_a_value_to_its_bound() -> None:
    assert SamplingParams(top_p=1 + 1e-9).top_p == 1.0
    assert SamplingParams(top_p=1 - 1e-9).top_p == 1.0
    assert SamplingParams(min_p=1e-46).min_p == 0.0


@given(st.floats())
def test_rounding_gives_what_the_record_holds(value: float) -> None:
    rounded = round_to_float32(value)
    with np.errstate(over="ignore"):
        stored = float(np.float32(value))
    assert rounded == (0.0 if abs(stored) < TINY else stored) or math.isnan(value)
    assert round_to_float32(rounded) == rounded or math.isnan(value)


@given(st.sampled_from([p for p in PARAMETERS if p.is_float]), st.floats())
def test_what_passes_is_unchanged_by_the_record(parameter: Parameter, value: float) -> None:
    rounded = round_to_float32(value)
    if parameter.low < rounded <= parameter.high:
        params = SamplingParams(**{parameter.name: value})
        kept = getattr(params, parameter.name)
        assert kept == rounded == float(np.float32(kept))
        assert replace(params) == params
    elif rounded != parameter.low:
        refused(**{parameter.name: value})


def test_min_tokens_above_max_tokens() -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(min_tokens=5, max_tokens=4)
    assert caught.value.param == "min_tokens"


def test_one_stop_string_is_a_list_of_one() -> None:
    assert SamplingParams(stop="end").stop == ("end",)  # type: ignore[arg-type]


def test_minus_one_keeps_all_tokens_as_zero_does() -> None:
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)


def test_whole_numbers_may_come_as_floats() -> None:
    assert SamplingParams(top_k=50.0).top_k == 50  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("temperature", "greedy"),
    [(0.0, True), (1e-6, True), (1e-5, False), (0.01, False), (1.0, False)],
)
def test_greedy(temperature: float, greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).greedy is greedy


def test_host_and_device_agree_on_what_is_greedy() -> None:
    """The device compares float32 with float32."""
    assert float(np.float32(GREEDY_TEMPERATURE)) == GREEDY_TEMPERATURE == float(np.float32(1e-5))


def test_penalties_are_noticed() -> None:
    assert not SamplingParams().has_penalties
    for field in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        assert SamplingParams(**{field: 1.5}).has_penalties


class TestRestrictions:
    def test_what_restricts(self) -> None:
        assert not SamplingParams().is_restricted
        assert SamplingParams(allowed_token_ids=(1,)).is_restricted
        assert SamplingParams(bad_words="word").bad_words == ("word",)
        grammar = GrammarSpec("regex", "a")
        assert SamplingParams(grammar=grammar).is_restricted

    def test_grammars_are_equal_whatever_field_they_came_in(self) -> None:
        specs = {
            GrammarSpec("regex", "a"),
            GrammarSpec("regex", "a", param="structured_outputs.regex"),
        }
        assert len(specs) == 1
        assert GrammarSpec("regex", "a") != GrammarSpec("lark", "a")
        assert GrammarSpec("json_object") != GrammarSpec("json_object", whitespace="")

    @pytest.mark.parametrize(
        ("kind", "source"),
        [("xml", "a"), ("regex", "a" * (2**17 + 1)), ("lark", ""), ("json_schema", {})],
    )
    def test_wrong_grammars(self, kind: Any, source: Any) -> None:
        with pytest.raises(RequestError) as caught:
            GrammarSpec(kind, source, param="field")
        assert caught.value.param == "field"
