"""Calls of the workers' methods while no step is in flight; see `Executor.call`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from aioinfer.errors import EngineDeadError, WorkerCallError


class CalledHost(Protocol):
    """A host with some of the ranks; see `HostRanks.call`."""

    def call(self, method: str, arguments: Mapping[str, Any]) -> None: ...


class CalledRanks(Protocol):
    """What calls need of a `WorkerExecutor`, which documents it."""

    @property
    def hosts(self) -> Sequence[CalledHost]: ...

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def answers(self) -> Sequence[Sequence[Any]]: ...

    async def gather(self, kind: str) -> list[Any]: ...

    def fail(self, error: Exception) -> None: ...


class WorkerCalls:
    """The calls of the ranks of a `WorkerExecutor`, one after the other. It does not refer to the
    executor, whose memory is freed at once when nothing refers to it."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def call(
        self, executor: CalledRanks, method: str, arguments: Mapping[str, Any], timeout_s: float
    ) -> Sequence[Any]:
        """See `Executor.call`. If the caller is cancelled, the next call waits for the answers."""
        return await asyncio.shield(self._call(executor, method, arguments, timeout_s))

    async def _call(
        self, executor: CalledRanks, method: str, arguments: Mapping[str, Any], timeout_s: float
    ) -> Sequence[Any]:
        async with self._lock:
            for host in executor.hosts:
                host.call(method, arguments)
            try:
                async with asyncio.timeout(timeout_s):
                    answers = await executor.gather("answer")
            except TimeoutError:
                late = zip(executor.names, executor.answers, strict=True)
                names = ", ".join(name for name, answers in late if not answers)
                error = EngineDeadError(f"{method} did not end on {names} in {timeout_s:g} s")
                executor.fail(error)
                raise error from None
        for name, (is_done, result) in zip(executor.names, answers, strict=True):
            if not is_done:
                raise WorkerCallError(f"{method} failed on worker {name}: {result}")
        return [result for _, result in answers]
