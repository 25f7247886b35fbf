"""The log of the last steps, for clients that watch the engine: how many tokens each step computed,
and how long its phases took.

`EngineMetrics` owns the log. The step loop feeds it only while it is watched: otherwise a step
costs two tests of an integer. `api.page` reads it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from aioinfer.ipc.plan import StepPlan, StepResult

#: Steps that are kept: a little more than a page shows.
LOG_LENGTH = 128


class Step(NamedTuple):
    """A step after its result has been handled.

    Attributes:
        step_id: the number of its plan.
        prefill_tokens: tokens computed in rows that bring prompts (or, after a preemption, whole
            texts) into the cache.
        decode_tokens: rows of one token from which the next one is sampled.
        sampled: rows that sampled a token, including rows of requests that had ended meanwhile.
        worker_us: microseconds that the first rank spent on the step.
        result_us, update_us, plan_us, post_us, emit_us: microseconds that the event loop spent on
            reading the result from the ring, updating the scheduler, planning the step, posting
            it, and emitting the text of the former step (the text of this step is emitted last, and
            the time is not known yet when the step is recorded).
    """

    step_id: int
    prefill_tokens: int
    decode_tokens: int
    sampled: int
    worker_us: int
    result_us: int
    update_us: int
    plan_us: int
    post_us: int
    emit_us: int


class StepLog:
    """A ring of the last `LOG_LENGTH` steps, filled while `watched`."""

    def __init__(self) -> None:
        self.num_watchers = 0
        # (step id, prefill, decode, plan and post seconds)
        self._posted: deque[tuple[int, int, int, float, float]] = deque()
        self._steps: deque[Step] = deque(maxlen=LOG_LENGTH)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Records steps until the end of the block.

        Blocks may overlap; when the last one ends, the log is emptied.
        """
        self.num_watchers += 1
        try:
            yield
        finally:
            self.num_watchers -= 1
            if not self.num_watchers:
                self._posted.clear()
                self._steps.clear()

    def record_plan(self, plan: StepPlan, plan_s: float, post_s: float) -> None:
        """Records a step that was posted."""
        decodes = int(np.count_nonzero((plan.lengths == 1) & (plan.samples == 1)))
        self._posted.append((plan.step_id, plan.num_tokens - decodes, decodes, plan_s, post_s))

    def forget_posted(self) -> None:
        """Forgets the posted steps: their results will not come."""
        self._posted.clear()

    def record_result(self, result: StepResult, update_s: float, emit_s: float) -> None:
        """Records the end of a step. A step that was posted before the log was watched is left
        out."""
        if not self._posted or self._posted[0][0] != result.step_id:
            return
        step_id, prefills, decodes, plan_s, post_s = self._posted.popleft()
        loop_us = (round(seconds * 1e6) for seconds in (update_s, plan_s, post_s, emit_s))
        self._steps.append(
            Step(
                step_id,
                prefills,
                decodes,
                len(result.tokens),
                result.busy_ns // 1000,
                result.take_ns // 1000,
                *loop_us,
            )
        )

    def since(self, step_id: int) -> list[Step]:
        """Returns the kept steps that come after `step_id`, oldest first."""
        return [step for step in self._steps if step.step_id > step_id]
