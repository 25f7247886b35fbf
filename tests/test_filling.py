"""The masks of a request's rows: each is that of the text with its drafts, up to the first draft
that is forbidden, ends the output, or leaves no mask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from aioinfer.features.masks.filling import RequestRows, fill_rows
from aioinfer.features.masks.planning import PlainFiller
from aioinfer.text.constraints import Constraint, Mask, mask_words
from tests.automata import Residues

VOCAB_SIZE = 70
ANYTHING = -1 * np.ones(mask_words(VOCAB_SIZE), np.int32)


def follow(automaton: Residues, count: int) -> list[int]:
    """Returns tokens that an automaton allows."""
    tokens: list[int] = []
    mask = np.zeros(mask_words(VOCAB_SIZE), np.int32)
    for _ in range(count):
        automaton.fill(mask)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        tokens.append(int(np.flatnonzero(bits)[len(tokens)]))
        automaton.accept(tokens[-1:])
    return tokens


def filled(*requests: RequestRows) -> Mask:
    rows = max(each.first + len(each.drafts) + 1 for each in requests)
    masks = np.zeros((rows, mask_words(VOCAB_SIZE)), np.int32)
    fill_rows(PlainFiller(), requests, masks)
    return masks


def behind(tokens: Sequence[int]) -> Mask:
    mask = np.zeros(mask_words(VOCAB_SIZE), np.int32)
    automaton = Residues(VOCAB_SIZE)
    automaton.accept(tokens)
    automaton.fill(mask)
    return mask


def test_each_row_has_the_mask_behind_its_drafts() -> None:
    """Of two requests, one without drafts; the constraints stay where they are."""
    drafts = follow(Residues(VOCAB_SIZE), 3)
    constraint, other = Residues(VOCAB_SIZE), Residues(VOCAB_SIZE)
    other.accept(drafts[:1])
    masks = filled(RequestRows(constraint, 0, drafts), RequestRows(other, 4))
    for count in range(4):
        assert (masks[count] == behind(drafts[:count])).all()
    assert (masks[4] == behind(drafts[:1])).all()
    assert constraint.tokens == []
    assert other.tokens == drafts[:1]


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_rows_behind_a_forbidden_draft_have_any_mask(wrong: int) -> None:
    drafts = follow(Residues(VOCAB_SIZE), 3)
    allowed = np.unpackbits(behind(drafts[:wrong]).view(np.uint8), bitorder="little")
    drafts[wrong] = int(np.flatnonzero(allowed[:VOCAB_SIZE] == 0)[0])
    request = RequestRows(Residues(VOCAB_SIZE), 0, drafts)
    masks = filled(request)
    for count in range(4):
        expected = behind(drafts[:count]) if count <= wrong else ANYTHING
        assert (masks[count] == expected).all()
    assert request.error is None


def test_rows_behind_a_complete_output_have_any_mask() -> None:
    drafts = follow(Residues(VOCAB_SIZE), 3)
    masks = filled(RequestRows(Residues(VOCAB_SIZE, length=2), 0, drafts))
    assert (masks[1] == behind(drafts[:1])).all()
    assert (masks[2:] == ANYTHING).all()


def test_which_row_could_not_be_filled() -> None:
    drafts = follow(Residues(VOCAB_SIZE), 3)

    class Wrong(Residues):
        """Does not take the second token, which its mask allows."""

        def accept(self, tokens: Any) -> None:
            super().accept(tokens)
            if len(self.tokens) == 2:
                raise ValueError("out of order")

    class Failing(PlainFiller):
        def fill(
            self, rows: Sequence[tuple[Constraint, int]], masks: Mask
        ) -> list[Exception | None]:
            raise RuntimeError("no memory")

    for constraint, row, kind in (
        (Residues(VOCAB_SIZE, fails_at=0), 0, "the automaton fails"),
        (Residues(VOCAB_SIZE, fails_at=2), 2, "the automaton fails"),
        (Wrong(VOCAB_SIZE), 2, "out of order"),
    ):
        request = RequestRows(constraint, 0, drafts)
        masks = filled(request)
        assert (request.failed, str(request.error)) == (row, kind)
        assert (masks[3] == ANYTHING).all()
    request = RequestRows(Residues(VOCAB_SIZE), 0, drafts)
    fill_rows(Failing(), [request], np.zeros((4, mask_words(VOCAB_SIZE)), np.int32))
    assert (request.failed, str(request.error)) == (0, "no memory")
