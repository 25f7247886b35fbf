"""Micro-batches of pipeline parallelism: which requests the next step takes, where the workers are
the stages of a pipeline.

A step passes through the stages one after the other, and each stage is to compute a step at any
time: with P stages, P steps are in flight and one more is posted ahead. A decoding request needs
its last token before the first stage can begin its next row, and that token is sampled by the last
stage. So the requests are divided among P micro-batches, and a request that is in step N is in step
N + P again: when the first stage comes to that step, the last one has just sampled its token, which
goes from device to device. The engine learns of it meanwhile, so at most two tokens of a request
are on their way.

No list of micro-batches is kept: a request is due for a step if P steps were posted since its last
one. A step takes at most its fair share of the decoding requests, the oldest first, and the
requests that are left over are due for the next one. So P steps of equal size follow each other
soon, however requests come and go. Chunks of prompts need no token, and go into any step.

After a step with lookahead a request is due when its result has come. If most of a micro-batch
waits for that, the few that are due wait, too, as long as each stage has a step: a step of few rows
takes a stage nearly as long as a whole one, and the micro-batch would stay divided.

If no request is due, requests whose last token is on its way are taken all the same: the pipeline
would be empty otherwise, and the first stage waits for tokens on the device, as with one stage.

`StepPlanner` has a `MicroBatches` if there are several stages. Imports neither torch nor aiohttp.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from aioinfer.scheduler.request import Request

#: The smallest part of a micro-batch that is computed while the rest waits for lookahead results.
_MIN_PART = 0.7


class MicroBatches:
    """Selects the rows of each step; `num_stages` and `plan_ahead` as in `SchedulerLimits`."""

    def __init__(self, num_stages: int, *, plan_ahead: bool = True):
        self._num_stages = num_stages
        self._plan_ahead = plan_ahead
        self._left = 0  # decode rows that the step may still take
        self._last_due = 0  # the last step of which a token is there in time

    def begin(self, step_id: int, num_decodes: int) -> None:
        """Begins a step; `num_decodes` requests have a token to compute, or will have when their
        last one is known."""
        self._left = max(1, -(-num_decodes // self._num_stages))
        self._last_due = step_id - self._num_stages if self._plan_ahead else -1

    def take_early(self) -> bool:
        """Lets the step take requests whose tokens are not there in time. Returns whether that is
        allowed."""
        self._last_due = 2**62
        return self._plan_ahead

    @property
    def num_left(self) -> int:
        """Decodes that the step may still take."""
        return self._left

    def is_due(self, request: Request) -> bool:
        """Whether the last token of a request is there in time, or on its way where that is
        allowed. After a step with lookahead its result has to come first: stages before the last
        one do not know how many tokens were kept."""
        pending = request.num_pending
        return not pending or (pending == 1 and request.sampled_step <= self._last_due)

    def awaits_lookahead(self, requests: Sequence[Request]) -> bool:
        """Whether a step with those that are due of the running requests should not be planned
        before the result of a step with lookahead has come."""
        if not any(request.num_lookahead for request in requests):
            return False
        num_due = 0
        for request in requests:
            if request.total - request.num_computed > 1:
                return False  # a prompt
            num_due += request.total < request.plan_limit and self.is_due(request)
        return num_due < _MIN_PART * self._left

    def takes(self, request: Request) -> bool:
        """Whether the step takes the next tokens of a request, and counts it if it decodes."""
        if not self.is_due(request):
            return False
        if request.total - request.num_computed > 1:
            return True
        if not self._left:
            return False
        self._left -= 1
        return True

    @staticmethod
    def end(step_id: int, sampled: Iterable[Request]) -> None:
        """Ends a step, which samples a token of these requests."""
        for request in sampled:
            request.sampled_step = step_id
