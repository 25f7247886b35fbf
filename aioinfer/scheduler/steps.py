"""The posted steps, whose results have not come, and the tokens that a result brings.

`Scheduler` owns the `PostedSteps` and returns a `StepOutput` for each result.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from aioinfer.errors import IntegrityError
from aioinfer.scheduler.request import Finish, Request


class Row(NamedTuple):
    """A row of a step that concerns a feature.

    Attributes:
        request, use: whose row it is.
        start, end: the tokens that it computes.
        place: its place among the sampled rows, in the order of the result; -1 if it samples none.
    """

    request: Request
    use: Any
    start: int
    end: int
    place: int


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The tokens of a step: `requests[i]` got `tokens[i]`.

    A request may be there several times, its tokens behind each other, where a feature appended
    some.

    Attributes:
        requests, tokens: of each new token; -1 in the place of a token that could not be sampled.
        rows: the row of the result that each token stands at, and which has its log-probabilities;
            for an appended token, the row of the token before it.
        finished: why the request at a place ended with its token there.
    """

    requests: Sequence[Request]
    tokens: Sequence[int]
    rows: Sequence[int]
    finished: Mapping[int, Finish] = field(default_factory=dict)

    def places(self, rows: Sequence[Row]) -> list[int]:
        """Returns the places among `tokens` of the tokens that these rows sampled; -1 for a row
        that sampled none, or whose token was dropped, since its request had ended or was given
        another token in its place."""
        place_of = {row: place for place, row in reversed([*enumerate(self.rows)])}
        return [place_of.get(row.place, -1) for row in rows]


@dataclass(slots=True)
class PostedStep:
    """A posted step.

    Attributes:
        step_id: the number of its plan.
        sampled: the requests that it samples a token for, in the order of its result's rows; None
            where the token is dropped.
        rows: the rows that concern features, by the feature's name.
        has_lookahead: whether requests may have several rows.
        num_decodes: its rows, if all are decodes; else 0.
        num_prefill: tokens of its other rows.
        posted: when it was planned, in seconds of the scheduler's clock. These are kept for a
            feature that looks ahead and for the store of KV.
        num_dropped: tokens that are dropped because an appended token took their place.
    """

    step_id: int
    sampled: list[Request | None]
    rows: Mapping[str, Sequence[Row]] = field(default_factory=dict)
    has_lookahead: bool = False
    num_decodes: int = 0
    num_prefill: int = 0
    posted: float = 0.0
    num_dropped: int = 0


class PostedSteps:
    """The posted steps, oldest first."""

    def __init__(self) -> None:
        self._steps: deque[PostedStep] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def last(self) -> PostedStep:
        """The step that was posted last."""
        return self._steps[-1]

    def add(self, step: PostedStep) -> None:
        """Records that a step is posted."""
        self._steps.append(step)

    def take(self, step_id: int) -> PostedStep:
        """Removes and returns the oldest step, as its result has come.

        Raises IntegrityError if that is not step `step_id`.
        """
        step = self._steps.popleft()
        if step.step_id != step_id:
            raise IntegrityError(f"the result of step {step_id} came where {step.step_id} was due")
        return step

    def drop_rows(self, request: Request) -> int:
        """Drops the tokens that the oldest step with rows of this request samples for it. Returns
        how many rows these are."""
        step = next(step for step in self._steps if request in step.sampled)
        rows = [row for row, sampled in enumerate(step.sampled) if sampled is request]
        for row in rows:
            step.sampled[row] = None
        step.num_dropped += len(rows)
        return len(rows)

    def clear(self) -> None:
        """Forgets all steps: their results will not come."""
        self._steps.clear()
