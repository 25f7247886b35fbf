"""Sampling parameters refuse what makes no sense, and name the field."""

from __future__ import annotations

import math

import pytest

from aioinfer.errors import RequestError
from aioinfer.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_k", -2),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("logprobs", 21),
        ("seed", 2**64),
        ("stop", [""]),
        ("stop", ["x"] * 65),
        ("logit_bias", {5: 101.0}),
    ],
)
def test_wrong_values_are_named(field, value):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field
    assert field in str(caught.value)


def test_min_tokens_above_max_tokens():
    with pytest.raises(RequestError) as caught:
        SamplingParams(min_tokens=5, max_tokens=4)
    assert caught.value.param == "min_tokens"


def test_one_stop_string_is_a_list_of_one():
    assert SamplingParams(stop="end").stop == ("end",)


@pytest.mark.parametrize(
    ("temperature", "greedy"), [(0.0, True), (1e-6, True), (0.01, False), (1.0, False)]
)
def test_greedy(temperature, greedy):
    assert SamplingParams(temperature=temperature).greedy is greedy


def test_penalties_are_noticed():
    assert not SamplingParams().has_penalties
    for field in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        assert SamplingParams(**{field: 1.5}).has_penalties
