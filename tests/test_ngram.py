"""Drafts by prompt lookup: found where a plain search finds them."""

from __future__ import annotations

import dataclasses
from array import array

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aioinfer.config import Config, ModelConfig, SpeculationConfig
from aioinfer.config_sections import DraftMethod
from aioinfer.features.speculation.ngram import (
    LONG,
    MAX_SUFFIX,
    MAX_TEXT,
    MIN_SUFFIX,
    NONE,
    SHORT,
    find_drafts,
    find_match,
    kind_of,
)
from aioinfer.features.speculation.sections import PredictedTexts
from aioinfer.features.speculation.worker import Work
from aioinfer.ipc.plan import Admission, Admissions
from aioinfer.ipc.sections import Section
from aioinfer.sampling_params import SamplingParams
from aioinfer.worker.features import ProposalRows
from tests.filled_slots import make_slots, rank_of, rows_plan


def search(tokens: list[int], count: int) -> list[int] | None:
    """The same by trying each suffix, the longest first, at each place, the latest first."""
    for size in range(MAX_SUFFIX, MIN_SUFFIX - 1, -1):
        suffix = tokens[-size:]
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == suffix and len(suffix) == size:
                text = list(tokens)
                while len(text) < end + count or len(text) < len(tokens) + count:
                    text.append(text[end + len(text) - len(tokens)])
                return text[len(tokens) :][:count]
    return None


def drafts_of(tokens: list[int], count: int) -> list[int] | None:
    """The drafts that `find_drafts` finds."""
    found = find_drafts(np.array(tokens, np.int32), count)
    return None if found is None else found.tolist()


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 7))
def test_drafts_equal_a_plain_search(tokens: list[int], count: int) -> None:
    assert drafts_of(tokens, count) == search(tokens, count)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=40))
def test_the_match_is_as_long_as_the_suffix_that_is_found(tokens: list[int]) -> None:
    length = next(
        (
            size
            for size in range(MAX_SUFFIX, MIN_SUFFIX - 1, -1)
            if any(tokens[i : i + size] == tokens[-size:] for i in range(len(tokens) - size))
        ),
        0,
    )
    assert find_match(array("i", tokens)) == length


def test_kinds_of_matches() -> None:
    """A drafter's drafts go before those of matches that are not as long as any."""
    kinds = [kind_of(size) for size in (0, MIN_SUFFIX, 3, 4, MAX_SUFFIX)]
    assert kinds == [NONE, SHORT, SHORT, LONG, LONG]
    kinds = [kind_of(size, MAX_SUFFIX) for size in (0, MIN_SUFFIX, MAX_SUFFIX - 1, MAX_SUFFIX)]
    assert kinds == [NONE, NONE, NONE, LONG]


def test_matches_are_looked_for_in_a_prediction_and_in_the_end_of_a_text() -> None:
    tokens = array("i", [1, 2, 3, 4, *range(9, 9 + MAX_TEXT), 1, 2, 3, 4])
    assert find_match(tokens) == 0
    assert find_match(tokens, np.array([2, 3, 4, 5], np.int32)) == 3
    assert find_match(tokens[4:]) == 0
    assert find_match(tokens[-MAX_TEXT:] + tokens[-6:]) == 6


def test_a_predicted_text_goes_before_the_tokens() -> None:
    """Unless the tokens have a longer match; it comes again behind its end."""
    tokens = np.array([7, 1, 2, 3, 50, 51, 7, 1, 2, 3], np.int32)

    def drafts(*predicted: int) -> list[int]:
        found = find_drafts(tokens, 4, np.array(predicted, np.int32))
        assert found is not None
        return found.tolist()

    assert drafts(9, 7, 1, 2, 3, 60, 61) == [60, 61, 60, 61]
    assert drafts(9, 9, 1, 2, 3, 60, 61) == [50, 51, 7, 1], "shorter"
    assert drafts(60, 61, 7, 1, 2, 3) == [50, 51, 7, 1], "nothing follows"
    assert drafts() == [50, 51, 7, 1]
    found = find_drafts(np.array([4, 5], np.int32), 2, np.array([4, 5, 6], np.int32))
    assert found is not None
    assert found.tolist() == [6, 6]


def test_the_longest_suffix_comes_before_the_latest() -> None:
    tokens = [9, 1, 2, 3, 4, 50, 51, 8, 3, 4, 60, 61, 1, 2, 3, 4]
    assert drafts_of(tokens, 3) == [50, 51, 8]


def test_a_repetition_goes_on() -> None:
    tokens = [7, 1, 2, 3, 1, 2, 3]
    assert drafts_of(tokens, 5) == [1, 2, 3, 1, 2]
    assert drafts_of([5, 5, 5], 4) == [5, 5, 5, 5]


def test_nothing_is_found_without_an_earlier_occurrence_of_two_tokens() -> None:
    for tokens in ([1], [1, 1], [1, 2, 3, 2], [3, 1, 2, 1]):
        assert drafts_of(tokens, 4) is None


def test_drafts_are_written_behind_the_last_known_token() -> None:
    """Three slots: drafts of a repetition, none wanted, and nothing found: no token of an earlier
    request stays a draft."""
    texts = [[4, 5, 6, 4, 5], [4, 5, 4, 5], [7, 8, 9]]
    slots = make_slots([SamplingParams()] * 3, 60, texts)
    for slot, text in enumerate(texts):
        slots.tokens[slot, len(text) :] = 33
    config = Config(model=ModelConfig(path=""), speculation=SpeculationConfig(method="ngram"))
    work = Work(dataclasses.replace(rank_of(slots), config=config))
    assert work.is_needed
    rows = [(0, 4, 0), (0, 4, 1), (0, 4, 2), (1, 3, 0), (2, 2, 0), (2, 2, 1), (2, 2, 2)]
    work.propose(ProposalRows(*torch.tensor(rows, dtype=torch.int32).T))
    assert slots.tokens[0, :8].tolist() == [*texts[0], 6, 4, 33]
    assert slots.tokens[1, :5].tolist() == [*texts[1], 33]
    assert slots.tokens[2, :6].tolist() == [*texts[2], 0, 0, 33]


@pytest.mark.parametrize("method", ["draft", "mtp", "eagle3"])
def test_long_matches_go_before_the_drafts_of_a_drafter(method: DraftMethod) -> None:
    """A match of seven tokens in the text, one of six, and one of seven in a predicted text; the
    drafter has left 33 as each draft. On a stage of a pipeline without the drafter, too."""
    texts = [[1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7], [9, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5],
             [1, 2, 3, 4, 5, 6, 7]]  # fmt: skip
    texts[1] += [6, 7]
    slots = make_slots([SamplingParams()] * 3, 60, texts)
    for slot, text in enumerate(texts):
        slots.tokens[slot, len(text) :] = 33
    speculation = SpeculationConfig(method=method, model="m")
    config = Config(model=ModelConfig(path=""), speculation=speculation)
    work = Work(dataclasses.replace(rank_of(slots), config=config))
    predicted = np.array([1, 2, 3, 4, 5, 6, 7, 50, 51], np.int32)
    ids = (np.array([given], np.int32) for given in (2, 9))
    work.begin(rows_plan([0], [1], PredictedTexts(*ids, predicted)))
    rows = [(slot, len(text) - 1, offset) for slot, text in enumerate(texts) for offset in range(3)]
    work.propose(ProposalRows(*torch.tensor(rows, dtype=torch.int32).T))
    found = [slots.tokens[slot, len(text) :][:3].tolist() for slot, text in enumerate(texts)]
    assert found == [[8, 1, 33], [33, 33, 33], [50, 51, 33]]


def test_predicted_texts_come_and_go_with_their_requests() -> None:
    """A text of two slots; then another request takes one of them."""
    texts = [[4, 5, 6], [4, 5, 6]]
    slots = make_slots([SamplingParams()] * 2, 60, texts)
    work = Work(rank_of(slots))
    rows = ProposalRows(
        *torch.tensor([(0, 2, 0), (0, 2, 1), (1, 2, 0), (1, 2, 1)], dtype=torch.int32).T
    )

    def proposed(*sections: Section) -> list[int]:
        work.begin(rows_plan([0], [1], *sections))
        work.propose(rows)
        return slots.tokens[:, 3].tolist()

    predicted = np.array([5, 6, 8, 9, 3, 5, 6, 7], np.int32)
    ids = (np.array(given, np.int32) for given in ([1, 0], [5, 3]))
    assert proposed(PredictedTexts(*ids, predicted)) == [7, 8]
    assert proposed() == [7, 8]
    admission = Admission(1, np.array(texts[1], np.int32), 3, SamplingParams(), 1)
    assert proposed(Admissions.of([admission])) == [7, 0]


def test_nothing_is_proposed_without_speculation() -> None:
    config = Config(model=ModelConfig(path=""), speculation=SpeculationConfig(method="none"))
    rank = dataclasses.replace(rank_of(make_slots([SamplingParams()], 60)), config=config)
    assert not Work(rank).is_needed
