"""What the planning halves of features have of their engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from aioinfer.config import Config
from aioinfer.executor.base import Executor
from aioinfer.ipc.sections import Section
from aioinfer.scheduler.request import Request
from aioinfer.scheduler.scheduler import Scheduler


class FeatureMetrics(Protocol):
    """Takes a feature's own measurements; `/metrics` shows those of other packages as
    `aioinfer:feature_NAME`."""

    def count(self, name: str, times: int = 1) -> None:
        """Adds to a counter."""

    def observe(self, name: str, value: float) -> None:
        """Adds a value, in seconds, to a histogram."""


@dataclass(frozen=True, slots=True)
class Host:
    """An engine as its features see it.

    Attributes:
        scheduler: returns the scheduler.
        executor: returns the executor of the workers, another one after a restart.
        fail: ends the request of a sequence with an error; the others go on.
        tell: hands a section to the workers at once, behind what was posted before; it is dropped
            where no workers serve.
        go_on: plans and posts steps, after `StepFeature.is_waiting` has become false.
        metrics: of the engine.
        config: the whole configuration.
    """

    scheduler: Callable[[], Scheduler]
    executor: Callable[[], Executor]
    fail: Callable[[Request, Exception], None]
    tell: Callable[[Section], None]
    go_on: Callable[[], None]
    metrics: FeatureMetrics
    config: Config
