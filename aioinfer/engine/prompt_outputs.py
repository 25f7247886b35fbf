"""Outputs of prompt rows on their way back: the requests to which the rows of posted steps belong,
and in which their results are entered.

The step loop calls `expect` for a plan that has such rows, and `accept` for a result with sections,
before the tokens of that step are emitted: so a request's last token never comes before them.
"""

from __future__ import annotations

from collections.abc import Sequence

from aioinfer.ipc.plan import StepResult
from aioinfer.ipc.prompt_rows import PooledStates, PromptLogprobs, TokenStates
from aioinfer.scheduler.prompt_rows import (
    PromptPool,
    PromptProgress,
    PromptScores,
    PromptStates,
)

#: The outputs of a posted step: (scores, first token, tokens), pooled states, and (states, first
#: token, tokens), of each request in the order of its result; and (progress, end).
_Expected = tuple[
    Sequence[tuple[PromptScores, int, int]],
    Sequence[PromptPool],
    Sequence[tuple[PromptStates, int, int]],
    Sequence[tuple[PromptProgress, int]],
]


class PromptOutputs:
    """The posted steps with prompt rows that have outputs."""

    def __init__(self) -> None:
        self._expected: dict[int, _Expected] = {}

    def expect(
        self,
        step_id: int,
        scored: Sequence[tuple[PromptScores, int, int]],
        pooled: Sequence[PromptPool],
        stated: Sequence[tuple[PromptStates, int, int]] = (),
        advanced: Sequence[tuple[PromptProgress, int]] = (),
    ) -> None:
        """Notes the outputs that a posted plan will bring, if any; see `PlanBuilder`."""
        if scored or pooled or stated or advanced:
            self._expected[step_id] = scored, pooled, stated, advanced

    def accept(self, result: StepResult) -> None:
        """Enters the outputs of a result. Does nothing for a step without such rows."""
        if not self._expected:
            return
        expected = self._expected.pop(result.step_id, None)
        if expected is None:
            return
        scored, pooled, stated, advanced = expected
        for progress, end in advanced:
            progress.take(end)
        found, first = result.section(PromptLogprobs), 0
        if found is not None:
            for scores, start, count in scored:
                scores.take(start, found, first, count)
                first += count
        states = result.section(PooledStates)
        if states is not None:
            for row, pool in enumerate(pooled):
                pool.take(states, row)
        of_tokens, first = result.section(TokenStates), 0
        if of_tokens is not None:
            for rows, start, count in stated:
                rows.take(start, of_tokens, first, count)
                first += count

    def clear(self) -> None:
        """Forgets the posted steps: their results will not come."""
        self._expected.clear()
