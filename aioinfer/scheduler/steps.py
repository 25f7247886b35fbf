"""Steps whose plans are posted and whose results have not come, and what a result brings.

`Scheduler` owns the `PostedSteps` and returns a `StepOutput` for each result.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from aioinfer.errors import IntegrityError
from aioinfer.sampling_params import SamplingParams
from aioinfer.scheduler.request import Request, Status

#: In the place of a request whose row was sampled in vain.
NOBODY = Request("", array("i"), 0, SamplingParams(), 0, status=Status.FINISHED)
#: In the place of a beam, whose token is not the one that was sampled: the engine decides on it.
BEAM = Request("", array("i"), 0, SamplingParams(), 0, status=Status.FINISHED)

#: (place among the result's rows, whose row it is, `BeamGroup.num_detached` when it was posted)
_BeamRow = tuple[int, Request, int]


@dataclass(slots=True)
class StepOutput:
    """What a result brought: `requests[i]` got `tokens[i]`, the one that stands at `rows[i]` of the
    result's tokens, row by row (with one token a row, that is the row).

    A request that ended with its last token here has its `finish_reason` set; one whose row failed
    is there with token -1. `has_several` tells whether a request may be there more than once, its
    tokens behind each other. `beam_rows` are the rows of beams, which are not among the requests,
    and whose they are.
    """

    requests: list[Request]
    tokens: list[int]
    rows: list[int]
    has_several: bool = False
    beam_rows: Sequence[tuple[int, Request]] = ()


@dataclass(slots=True)
class PostedStep:
    """A posted step.

    Attributes:
        step_id: the plan's.
        sampled: of which requests it samples a token, in the order of its result's rows. `NOBODY`
            and `BEAM` stand for requests whose tokens are dropped.
    """

    step_id: int
    sampled: list[Request]
    _beams: Sequence[_BeamRow] = ()

    def beam_rows(self) -> Sequence[tuple[int, Request]]:
        """Returns the rows of beams: the place of each among the result's rows, and whose it is.

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

    @property
    def last_sampled(self) -> Sequence[Request]:
        """The `sampled` requests of the last posted step."""
        return self._steps[-1].sampled

    def add(self, step_id: int, sampled: list[Request], *, has_beams: bool) -> None:
        """Records that a step is posted. The tokens of beams will be dropped."""
        step = PostedStep(step_id, sampled)
        if has_beams:
            rows = [(row, r, r.beams.num_detached) for row, r in enumerate(sampled) if r.beams]
            for row, _, _ in rows:
                sampled[row] = BEAM
            step._beams = rows
        self._steps.append(step)

    def take(self, step_id: int) -> PostedStep:
        """Removes and returns the oldest step, whose result has come.

        Raises IntegrityError if that is not step `step_id`.
        """
        step = self._steps.popleft()
        if step.step_id != step_id:
            raise IntegrityError(f"the result of step {step_id} came where {step.step_id} was due")
        return step

    def drop_row(self, request: Request) -> None:
        """Has the token dropped that the oldest step with a row of this request samples for it."""
        sampled = next(step.sampled for step in self._steps if request in step.sampled)
        sampled[sampled.index(request)] = NOBODY

    def clear(self) -> None:
        """Forgets all steps, whose results will not come."""
        self._steps.clear()
