"""Outputs of prompt rows on their way back: which requests the rows of posted steps belong to, and
where what comes of them is entered.

The step loop calls `expect` for a plan that has such rows, and `accept` for a result with sections,
before the tokens of that step are emitted: so a request's last token never comes before them.
"""

from __future__ import annotations

from collections.abc import Sequence

from aioinfer.ipc.plan import StepResult
from aioinfer.ipc.prompt_rows import PooledStates, PromptLogprobs
from aioinfer.scheduler.prompt_rows import PromptPool, PromptScores

#: What a posted step will bring: (whose scores, first token, tokens) and whose pooled states, in
#: the order of its result.
_Expected = tuple[Sequence[tuple[PromptScores, int, int]], Sequence[PromptPool]]


class PromptOutputs:
    """The posted steps with prompt rows that have outputs."""

    def __init__(self) -> None:
        self._expected: dict[int, _Expected] = {}

    def expect(
        self,
        step_id: int,
        scored: Sequence[tuple[PromptScores, int, int]],
        pooled: Sequence[PromptPool],
    ) -> None:
        """Notes what a posted plan will bring; see `PlanBuilder`."""
        self._expected[step_id] = scored, pooled

    def accept(self, result: StepResult) -> None:
        """Enters what a result brings. Does nothing for a step without such rows."""
        expected = self._expected.pop(result.step_id, None)
        if expected is None:
            return
        scored, pooled = expected
        found, first = result.section(PromptLogprobs), 0
        if found is not None:
            for scores, start, count in scored:
                scores.take(start, found, first, count)
                first += count
        states = result.section(PooledStates)
        if states is not None:
            for row, pool in enumerate(pooled):
                pool.take(states, row)

    def clear(self) -> None:
        """Forgets the posted steps, whose results will not come."""
        self._expected.clear()
