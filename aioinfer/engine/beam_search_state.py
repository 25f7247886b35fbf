"""The decisions of a beam search: which continuations of its beams go on, which results are kept.

A `BeamSearchState` knows nothing of requests and steps: `beam_search` brings it the likeliest next
tokens of all beams.

The search's rules are the same as in transformers' `generate(num_beams=...,
do_sample=False)`, in float32 as there, so that the results are the same token for token:

- of all continuations of all beams, the `width` likeliest that do not end go on;
- one that ends counts if it is among the `width` likeliest of all, and is kept if its score, the
  cumulative log-probability over length ** length_penalty, is one of the `width` best so far;
- the search ends at the maximum length, where the `width` likeliest continuations are complete as
  well, and as `BeamSearch.early_stopping` of the sampling parameters says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from aioinfer.ipc.sections import F32, I32
from aioinfer.sampling_params import BeamSearch as SearchSettings


@dataclass(slots=True)
class TokenChoice:
    """A token that a beam took, and the one before it.

    Attributes:
        token, logprob: the token, and its log-probability.
        top: (token, log-probability) of the likeliest tokens at its position.
        before: the choice of the token before it, or None for the first.
    """

    token: int
    logprob: float
    top: list[tuple[int, float]]
    before: TokenChoice | None

    def chain(self) -> list[TokenChoice]:
        """Returns all choices from the first token to this one."""
        choices: list[TokenChoice] = []
        choice: TokenChoice | None = self
        while choice is not None:
            choices.append(choice)
            choice = choice.before
        return choices[::-1]


@dataclass(slots=True)
class Hypothesis:
    """A complete output.

    Attributes:
        tokens: an end token included.
        cumulative_logprob: of all tokens.
        score: that, over its length to the power of the length penalty.
        end_token: the token that ended it, or None at the maximum length.
        last: how its last token was chosen, if log-probabilities are kept.
    """

    tokens: list[int]
    cumulative_logprob: float
    score: np.float32
    end_token: int | None
    last: TokenChoice | None


@dataclass(slots=True)
class Decision:
    """The next token of each beam: beam i continues beam `parents[i]` with `tokens[i]`. A beam that
    another one continues also continues itself."""

    parents: list[int]
    tokens: list[int]


class BeamSearchState:
    """One search.

    Attributes:
        width: beams.
        num_candidates: how many of the likeliest tokens of each beam the search needs.
        length: tokens that each beam has.
        hypotheses: the complete ones, the best first, at most `width`.
    """

    def __init__(
        self,
        settings: SearchSettings,
        end_tokens: frozenset[int],
        max_tokens: int,
        *,
        min_tokens: int = 0,
        num_logprobs: int | None = None,
    ):
        """Begins with one beam without tokens.

        Args:
            settings: how to search.
            end_tokens: complete a hypothesis.
            max_tokens: so do as many tokens.
            min_tokens: no end token counts before so many tokens.
            num_logprobs: keep the log-probabilities of all tokens, and of so many of the likeliest.
        """
        self.width = settings.width
        self.num_candidates = max(settings.width + len(end_tokens), num_logprobs or 0)
        self.length = 0
        self.hypotheses: list[Hypothesis] = []
        self._settings = settings
        self._ends = np.array(sorted(end_tokens), np.int32)
        self._max_tokens = max_tokens
        self._min_tokens = min_tokens
        self._num_logprobs = num_logprobs
        self._scores: F32 = np.zeros(1, np.float32)
        self._choices: list[TokenChoice | None] = [None]
        self._can_improve = True

    @property
    def num_rows(self) -> int:
        """The number of beams for which the next call of `advance` needs rows."""
        return len(self._scores)

    def advance(
        self, top_tokens: I32, top_logprobs: F32, output_of: Callable[[int], Sequence[int]]
    ) -> Decision | None:
        """Takes the likeliest next tokens of all beams. Returns the next token of each beam, or
        None at the end of the search.

        Args:
            top_tokens: int32 [beams, num_candidates], likeliest first.
            top_logprobs: float32 [beams, num_candidates], of `top_tokens`.
            output_of: returns the tokens of a beam so far.
        """
        self.length += 1
        totals: F32 = self._scores[:, None] + top_logprobs
        ends = np.isin(top_tokens, self._ends)
        if self.length <= self._min_tokens:
            totals = np.where(ends, np.float32(-np.inf), totals)
        is_last = self.length >= self._max_tokens
        if is_last:
            ends = np.ones_like(ends)
        flat_totals, flat_ends = totals.ravel(), ends.ravel()
        order = _descending(flat_totals, flat_ends, self.width)
        completed = [int(i) for i in order[: self.width] if flat_ends[i]]
        self._complete(completed, top_tokens, top_logprobs, flat_totals, output_of)
        going_on = [int(i) for i in order if not flat_ends[i]][: self.width]
        if is_last or self._is_over(flat_totals[going_on[0]]):
            return None
        return self._go_on(going_on, top_tokens, top_logprobs, flat_totals)

    def _complete(
        self,
        places: Sequence[int],
        top_tokens: I32,
        top_logprobs: F32,
        totals: F32,
        output_of: Callable[[int], Sequence[int]],
    ) -> None:
        """Keeps the hypotheses at `places` that are among the best."""
        if not self._can_improve or (self._settings.early_stopping is True and self._is_full):
            return
        for place in places:
            score = totals[place] / np.float32(self.length**self._settings.length_penalty)
            if self._is_full and score <= self.hypotheses[-1].score:
                continue
            beam, column = divmod(place, top_tokens.shape[1])
            token = int(top_tokens[beam, column])
            choice = self._choice(beam, column, top_tokens, top_logprobs)
            end = token if token in self._ends else None
            output = [*output_of(beam), token]
            found = Hypothesis(output, float(totals[place]), score, end, choice)
            self.hypotheses.append(found)
            self.hypotheses.sort(key=lambda one: -one.score)
            del self.hypotheses[self.width :]

    @property
    def _is_full(self) -> bool:
        return len(self.hypotheses) == self.width

    def _is_over(self, best: np.float32) -> bool:
        """Whether the search ends before the maximum length; `best` is the score of the best beam
        without its length."""
        if not self._is_full:
            return False
        early, penalty = self._settings.early_stopping, self._settings.length_penalty
        length = self._max_tokens if early == "never" and penalty > 0 else self.length
        if best / np.float32(length**penalty) <= self.hypotheses[-1].score:
            self._can_improve = False
        return early is True or not self._can_improve

    def _go_on(
        self,
        places: Sequence[int],
        top_tokens: I32,
        top_logprobs: F32,
        totals: F32,
    ) -> Decision:
        """Gives the continuations at `places` to the beams: the first of a beam stays with it."""
        at: list[int] = [-1] * self.width
        others: list[int] = []
        for place in places:
            parent = place // top_tokens.shape[1]
            if at[parent] < 0:
                at[parent] = place
            else:
                others.append(place)
        more = iter(others)
        at = [place if place >= 0 else next(more) for place in at]
        split = [divmod(place, top_tokens.shape[1]) for place in at]
        self._choices = [
            self._choice(beam, column, top_tokens, top_logprobs) for beam, column in split
        ]
        self._scores = totals[at]
        return Decision([beam for beam, _ in split], [int(top_tokens[each]) for each in split])

    def _choice(
        self, beam: int, column: int, top_tokens: I32, top_logprobs: F32
    ) -> TokenChoice | None:
        if self._num_logprobs is None:
            return None
        count = self._num_logprobs
        top = zip(
            top_tokens[beam, :count].tolist(), top_logprobs[beam, :count].tolist(), strict=True
        )
        return TokenChoice(
            int(top_tokens[beam, column]),
            float(top_logprobs[beam, column]),
            list(top),
            self._choices[beam],
        )

    def best_so_far(
        self, count: int, output_of: Callable[[int], Sequence[int]]
    ) -> list[Hypothesis]:
        """Returns the `count` best hypotheses, with beams that are not complete where there are too
        few."""
        found = self.hypotheses[:count]
        order: Any = np.argsort(-self._scores, kind="stable")[: count - len(found)]
        for beam in order.tolist():
            total, output = self._scores[beam], list(output_of(beam))
            score = total / np.float32(max(1, len(output)) ** self._settings.length_penalty)
            choice = self._choices[beam]
            found.append(Hypothesis(output, float(total), score, None, choice))
        return found


def _descending(totals: F32, ends: npt.NDArray[np.bool_], width: int) -> npt.NDArray[np.intp]:
    """Returns the places of the highest totals, the highest first: the `width` highest of all, and
    the `width` highest that do not end, as far as there are so many."""
    count = len(totals)
    going_on = np.where(ends, np.float32(-np.inf), totals)
    kept = min(count, width)
    highest = np.concatenate(
        [np.argpartition(-each, kept - 1)[:kept] for each in (totals, going_on)]
    )
    places = np.unique(highest)
    return places[np.argsort(-totals[places], kind="stable")]
