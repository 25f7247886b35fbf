"""Progress of the prompt: how much of it is computed, after each step that has computed some."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from aioinfer.ipc.plan import StepResult
from aioinfer.scheduler.features import StepFeature, SubmittedRequest
from aioinfer.scheduler.request import Use
from aioinfer.scheduler.steps import Row, StepOutput


class PromptProgress(Use):
    """The requested progress of the prompt.

    Attributes:
        prompt_len: tokens of the prompt.
        report: called when `num_computed` has grown.
        num_computed: tokens that are computed or were in the cache.
    """

    __slots__ = ("num_computed", "prompt_len", "report")
    feature: ClassVar[str] = "prompt_progress"

    def __init__(self, prompt_len: int, report: Callable[[], None] | None = None):
        self.prompt_len = prompt_len
        self.report = report
        self.num_computed = 0

    def covers(self, start: int, end: int, samples: bool) -> bool:
        """See `Use.covers`."""
        return start < self.prompt_len

    def take(self, end: int) -> None:
        """Notes the result of a row that ended before token `end`. After a preemption `end` is less
        than before, and nothing is reported."""
        end = min(end, self.prompt_len)
        if end > self.num_computed:
            self.num_computed = end
            if self.report is not None:
                self.report()


class Planning(StepFeature):
    """Reports the rows of prompts once their results have come; the workers know nothing of it."""

    name = "prompt_progress"

    @classmethod
    def use_of(cls, submitted: SubmittedRequest, index: int) -> Use | None:
        """See `StepFeature.use_of`; the first sequence reports."""
        params = submitted.params
        has_outputs = params.pooling is not None or params.prompt_logprobs is not None
        if not params.reports_progress or has_outputs or index:
            return None
        return PromptProgress(len(submitted.tokens), submitted.report)

    def take(self, rows: Sequence[Row], result: StepResult, output: StepOutput) -> StepOutput:
        """See `StepFeature.take`."""
        for row in rows:
            row.use.take(row.end)
        return output
