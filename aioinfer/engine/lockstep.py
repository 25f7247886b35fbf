"""Data-parallel sync: keeps engines in step if their workers compute together
(`parallel.data_parallel_attention`).

Their ranks exchange tokens in every layer, so the n-th step of one engine needs the n-th step of
all others. Each engine plans for itself: its own scheduler decides on the rows of a step. An engine
that has posted fewer steps than another posts steps without rows until it has caught up, so that no
engine waits longer than for a turn of the event loop; when no engine has anything to compute, none
posts anything. No engine waits without end: the steps that it has posted end once the others have
posted as many, and it posts further ones as its results come.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from aioinfer.engine.recovery import EngineState
from aioinfer.errors import EngineDeadError


class SteppingEngine(Protocol):
    """The part of an engine that a lockstep uses. See `Engine`."""

    number: int
    state: EngineState

    def plan_soon(self) -> None: ...

    def handle_loss(self, error: Exception) -> None: ...


class Lockstep:
    """Counts the steps that the engines have posted since their workers started together."""

    def __init__(self, engines: Sequence[SteppingEngine]):
        self._engines = engines
        self._posted = [0] * len(engines)

    def is_behind(self, engine: SteppingEngine) -> bool:
        """Whether another engine has posted more steps."""
        return self._posted[engine.number] < max(self._posted)

    def record_post(self, engine: SteppingEngine) -> None:
        """Records that an engine has posted a step, and makes the engines that are behind plan
        soon."""
        self._posted[engine.number] += 1
        for other in self._engines:
            if self.is_behind(other):
                other.plan_soon()

    def lose(self, engine: SteppingEngine, error: Exception) -> None:
        """Records that an engine that served has lost its workers. The other engines' workers
        cannot go on without them: all workers are restarted, or given up."""
        self._posted = [0] * len(self._engines)
        reason = str(error).partition("\n")[0]
        for other in self._engines:
            if other is not engine and other.state is EngineState.SERVING:
                message = f"it shares experts with engine {engine.number}: {reason}"
                other.handle_loss(EngineDeadError(message))
