"""Which beams go on and which hypotheses are kept. That the results are those of transformers is
tested with models in functional/test_beam_search.py."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest

from aioinfer.engine.beam_search import BeamRun, BeamSearch, Decision
from aioinfer.errors import RequestError
from aioinfer.sampling_params import BeamSearch as Settings
from aioinfer.sampling_params import BeamSearchParams, SamplingParams
from aioinfer.scheduler.request import Beam, BeamGroup, Request

END = 9


def search(width: int = 2, max_tokens: int = 5, **fields: Any) -> BeamSearch:
    kept = {name: fields.pop(name) for name in ("min_tokens", "num_logprobs") if name in fields}
    return BeamSearch(Settings(width, **fields), frozenset([END]), max_tokens, **kept)


def advance(tested: BeamSearch, *rows: dict[int, float]) -> Decision | None:
    """`rows`: log-probabilities of the likeliest tokens of each beam, likeliest first."""
    tokens = np.array([list(row) for row in rows], np.int32)
    logprobs = np.array([list(row.values()) for row in rows], np.float32)
    return tested.advance(tokens, logprobs, lambda beam: [100 + beam])


def test_a_beam_goes_on_where_it_is() -> None:
    """And the place of one that does not is taken by another's second token."""
    tested = search()
    assert advance(tested, {1: -1.0, 2: -2.0, 3: -9.0}) == Decision([0, 0], [1, 2])
    rows = {1: -9.0, 2: -9.5, 3: -9.9}, {4: -0.5, 5: -0.6, 6: -9.0}
    assert advance(tested, *rows) == Decision([1, 1], [5, 4])


def test_an_end_counts_among_the_likeliest_of_all_alone() -> None:
    tested = search(max_tokens=2)
    assert advance(tested, {1: -1.0, 2: -2.0, END: -3.0}) == Decision([0, 0], [1, 2])
    assert not tested.hypotheses, "it was the third"
    assert advance(tested, {END: -1.0, 2: -7.0, 3: -8.0}, {1: -1.5, 3: -8.0, 4: -9.0}) is None
    found = [(one.tokens, one.end_token, float(one.score)) for one in tested.hypotheses]
    assert found == [([100, END], END, -1.0), ([101, 1], None, -1.75)]


def test_no_end_before_min_tokens() -> None:
    tested = search(min_tokens=1)
    assert advance(tested, {END: -0.1, 1: -1.0, 2: -2.0}) == Decision([0, 0], [1, 2])
    assert not tested.hypotheses


@pytest.mark.parametrize(("early", "rounds"), [(True, 3), (False, 4), ("never", 5)])
def test_early_stopping(early: Any, rounds: int) -> None:
    """There are two hypotheses after three rounds, the worse with -4.1 / 3. The best beam has
    -2.6 / 3 then, and after one more -6 / 4, or, at the maximum length, -6 / 5."""
    tested = search(early_stopping=early)
    hopeless = {1: -90.0, 2: -91.0, 3: -92.0}
    steps: list[tuple[dict[int, float], ...]] = [
        ({1: -1.0, 2: -1.2, END: -3.0},),
        ({END: -1.0, 3: -1.1, 4: -8.0}, {1: -7.0, 2: -8.0, 3: -9.0}),
        ({4: -0.5, END: -2.0, 5: -9.0}, {1: -9.0, 2: -9.1, 3: -9.2}),
        ({1: -3.4, 2: -8.0, 3: -9.0}, hopeless),
        (hopeless, hopeless),
    ]
    ends = [advance(tested, *rows) is None for rows in steps[:rounds]]
    assert ends == [False] * (rounds - 1) + [True]
    scores = [float(one.score) for one in tested.hypotheses]
    assert scores == pytest.approx([-1.0, -4.1 / 3])


def test_log_probabilities_follow_the_beams() -> None:
    tested = search(max_tokens=2, num_logprobs=1)
    advance(tested, {1: -1.0, 2: -2.0, 3: -9.0})
    advance(tested, {1: -9.0, 2: -9.5, 3: -9.9}, {4: -0.5, 5: -0.6, 6: -9.0})
    last = tested.hypotheses[1].last
    assert last is not None
    found = [(one.token, one.logprob, one.top) for one in last.chain()]
    assert found[0] == (2, -2.0, [(1, -1.0)])
    assert found[1][0] == 5
    assert found[1][2] == [(4, -0.5)]


def test_a_round_begins_anew_after_a_preemption() -> None:
    params = SamplingParams(beam_search=Settings(2))
    requests = [Request("x", array("i", [1, 2]), 2, params, 9) for _ in range(2)]
    group = BeamGroup([Beam(request) for request in requests], 3)
    run = BeamRun(search(), group)
    row = np.array([1, 2, 3, 4], np.int32), np.array([-1, -2, -3, -4], np.float32)
    assert run.take(requests[0], *row)
    assert run.advance() == Decision([0, 0], [1, 2])
    assert not run.take(requests[0], *row)
    group.detach()
    assert not run.take(requests[1], *row), "the first beam's row is of no use"
    assert run.take(requests[0], *row)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": 65}, "beam_width"),
        ({"beam_width": 2, "n": 3}, "n"),
        ({"beam_width": 2, "temperature": 0.7}, "temperature"),
        ({"beam_width": 2, "length_penalty": float("nan")}, "length_penalty"),
        ({"beam_width": 2, "early_stopping": "no"}, "early_stopping"),
        ({"beam_width": 2, "logprobs": 129}, "logprobs"),
        ({"beam_width": 2, "logprobs": -1}, "logprobs"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        BeamSearchParams(**fields).sampling_params()
    assert caught.value.param == param
