"""The posted steps, whose results have not come, and the tokens that a result brings.

`Scheduler` owns the `PostedSteps` and returns a `StepOutput` for each result.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from aioinfer.errors import IntegrityError
from aioinfer.scheduler.request import Finish, Request

#: (place among the result's rows, its request, `BeamGroup.num_detached` when it was posted)
_BeamRow = tuple[int, Request, int]


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The tokens of a step: `requests[i]` got `tokens[i]`.

    A request may be there several times, its tokens behind each other, where a constraint forced
    some.

    Attributes:
        requests, tokens: of each new token; -1 in the place of a token that could not be sampled.
        rows: the row of the result that each token stands at, and which has its log-probabilities;
            for a forced token, the row of the token before it.
        finished: why the request at a place ended with its token there.
        beam_rows: (row, request) of the rows of beams, whose tokens are not among the others.
    """

    requests: Sequence[Request]
    tokens: Sequence[int]
    rows: Sequence[int]
    finished: Mapping[int, Finish] = field(default_factory=dict)
    beam_rows: Sequence[tuple[int, Request]] = ()


@dataclass(slots=True)
class PostedStep:
    """A posted step.

    Attributes:
        step_id: the number of its plan.
        sampled: the requests that it samples a token for, in the order of its result's rows; None
            where the token is dropped.
        num_forced: tokens that are dropped because a forced token took their place.
    """

    step_id: int
    sampled: list[Request | None]
    num_forced: int = 0
    _beams: Sequence[_BeamRow] = ()

    def beam_rows(self) -> Sequence[tuple[int, Request]]:
        """Returns the rows of beams: the place of each among the result's rows, and its request.

        Rows of groups that were preempted or have ended since are left out.
        """
        return [
            (row, request)
            for row, request, number in self._beams
            if request.beams is not None and request.beams.num_detached == number
        ]


class PostedSteps:
    """The posted steps, oldest first."""

    def __init__(self) -> None:
        self._steps: deque[PostedStep] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, step_id: int, sampled: Sequence[Request], *, has_beams: bool) -> None:
        """Records that a step is posted. The tokens of beams will be dropped."""
        step = PostedStep(step_id, list(sampled))
        if has_beams:
            rows = [(row, r, r.beams.num_detached) for row, r in enumerate(sampled) if r.beams]
            for row, _, _ in rows:
                step.sampled[row] = None
            step._beams = rows
        self._steps.append(step)

    def take(self, step_id: int) -> PostedStep:
        """Removes and returns the oldest step, as its result has come.

        Raises IntegrityError if that is not step `step_id`.
        """
        step = self._steps.popleft()
        if step.step_id != step_id:
            raise IntegrityError(f"the result of step {step_id} came where {step.step_id} was due")
        return step

    def drop_row(self, request: Request) -> None:
        """Drops the token that the oldest step with a row of this request samples for it."""
        step = next(step for step in self._steps if request in step.sampled)
        step.sampled[step.sampled.index(request)] = None
        step.num_forced += 1

    def clear(self) -> None:
        """Forgets all steps: their results will not come."""
        self._steps.clear()
