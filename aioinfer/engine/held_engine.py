"""An engine whose steps have been stopped: what has begun is finished or settled, its KV blocks are
released, and its workers are called. `ModelControl` holds engines so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aioinfer.engine.engine import Engine
from aioinfer.engine.recovery import EngineState
from aioinfer.errors import EngineDeadError

#: Copying the weights of a large model takes less, also where the host's memory is slow.
_CALL_TIMEOUT_S = 300.0


class HeldEngine:
    """An engine that is about to stop, or has stopped.

    Args:
        engine: of which no other caller plans steps by itself.
    """

    def __init__(self, engine: Engine):
        self._engine = engine

    async def finish_running(self) -> None:
        """Returns when the requests that have begun have ended, on new workers where these were
        lost; others wait until `Engine.resume`."""
        engine = self._engine
        engine.scheduler.set_admission(is_open=False)
        engine.plan_soon()
        while engine.state is not EngineState.DEAD and any(
            request.has_begun for request in engine.scheduler.requests()
        ):
            engine.turn.clear()
            await engine.turn.wait()

    async def settle(self) -> None:
        """Returns when no step is in flight, after `Engine.pause`, and all tokens are emitted."""
        self._engine.plan_soon()
        await self._await_turn(lambda: not self._engine.scheduler.num_in_flight)
        self._engine.emission.emit_rest()

    async def _await_turn(self, is_reached: Callable[[], bool]) -> None:
        """Returns when a state is reached, or the workers are lost."""
        engine = self._engine
        while engine.state is EngineState.SERVING and not is_reached():
            engine.turn.clear()
            await engine.turn.wait()

    async def release_blocks(self) -> None:
        """Takes all KV blocks of the device away, after `settle`. What a store of KV can keep is
        saved before; requests that have begun go on later with their tokens."""
        engine, scheduler = self._engine, self._engine.scheduler
        while (
            engine.state is EngineState.SERVING and (plan := scheduler.schedule_saves()) is not None
        ):
            engine.post(plan)
            await self._await_turn(lambda: not scheduler.num_in_flight)
        scheduler.release_blocks()

    async def call_workers(
        self, name: str, timeout_s: float | None, arguments: Mapping[str, Any]
    ) -> Sequence[Any]:
        """Calls a method of every worker, after `settle`; see `Executor.call`. Raises
        `EngineDeadError` while there are no workers."""
        engine = self._engine
        if engine.state is not EngineState.SERVING:
            raise EngineDeadError(engine.dead_reason or "the workers are being restarted")
        return await engine.executor.call(name, arguments, timeout_s or _CALL_TIMEOUT_S)
