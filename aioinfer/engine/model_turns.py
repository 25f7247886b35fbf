"""Models on the same devices: one of them is awake at a time, and has the devices; the others
sleep.

Requests for a model that sleeps wait in its scheduler's queue, where they can be aborted as any
other, and the models swap:

- once the model that is awake has been so for `MIN_STAY_S`, it takes no further requests
  into slots, finishes the running ones, and sleeps (`ModelControl.sleep`, with "wait");
- of the models for which requests wait, the one that has waited longest wakes up. Requests that
  still wait for the former one put it last in the order of waiting.

So each model has its turn after at most a stay and a drain of every other one, no stream is cut,
and requests in turns for two models cause no more swaps than the stay allows. As Ollama and
llama.cpp's router do, whole models are swapped; these start a process for a model instead.

Workers that are lost while their model sleeps are started when it is its turn: until then another
model has the devices' memory. A model whose workers do not come back in its turn makes way, unless
it is paused.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from functools import partial

from aioinfer.engine.frontend import Frontend
from aioinfer.errors import EngineDeadError, WorkerCallError
from aioinfer.tasks import end_tasks

#: Seconds after which a model that could not be put to sleep is asked again, at least.
_RETRY_S = 1.0
#: Seconds that a model stays awake at least, before another one that requests wait for takes its
#: place: about as long as a large model takes to wake up.
MIN_STAY_S = 5.0
_log = logging.getLogger(__name__)


class ModelTurns:
    """Models of which one is awake. All methods are called on the event loop.

    Attributes:
        awake: the model that has the devices, or is about to.
        is_swapping: whether none computes, since another one takes its place.
        min_stay_s: seconds that a model stays awake at least.
        task: swaps the models, and ends only if that has failed; None for one model.
    """

    def __init__(self, frontends: Sequence[Frontend]):
        """`frontends`: of each model; all but the first sleep."""
        self._frontends = list(frontends)
        self.awake = self._frontends[0]
        self.is_swapping = False
        self._awake_since = time.monotonic()
        self.min_stay_s = MIN_STAY_S
        #: models that requests wait for, the one that has waited longest first
        self._wanted: dict[Frontend, None] = {}
        self._is_wanted = asyncio.Event()
        self._turns = [asyncio.Event() for _ in self._frontends]  # set while a model is awake
        self.task: asyncio.Task[None] | None = None
        if len(self._frontends) > 1:
            self._take_turns()

    def _take_turns(self) -> None:
        for each, turn in zip(self._frontends, self._turns, strict=True):
            each.on_request_asleep = partial(self._want, each)
            for engine in each.engines:
                engine.recovery.until_may_restart = turn.wait
        self._turns[0].set()
        self.task = asyncio.ensure_future(self._swap_forever())

    async def close(self) -> None:
        """Ends the turns; the models stay as they are."""
        if self.task is not None:
            await end_tasks([self.task])

    # ---------------------------------------------------------------- turns

    def _want(self, frontend: Frontend) -> None:
        """Enters a model that sleeps and has got a request."""
        self._wanted.setdefault(frontend)
        self._is_wanted.set()

    def _next(self) -> Frontend | None:
        """Returns the model that has waited longest, of those for which a request still waits."""
        for frontend in list(self._wanted):
            if frontend is not self.awake and _has_requests(frontend):
                return frontend
            del self._wanted[frontend]
        return None

    async def _swap_forever(self) -> None:
        try:
            while True:
                await self._is_wanted.wait()
                self._is_wanted.clear()
                while self._next() is not None:
                    left_s = self._awake_since + self.min_stay_s - time.monotonic()
                    if left_s > 0:
                        await asyncio.sleep(left_s)
                    else:
                        await self._swap()
        except Exception:
            _log.exception("the swapping of models has failed")
            raise

    async def _swap(self) -> None:
        """Drains the model that is awake and has it sleep, and wakes the next one up; the former
        one again, if meanwhile nothing waits for another."""
        before = self.awake
        await before.control.wait_free()
        self.is_swapping = True
        try:
            await before.control.sleep(mode="wait")
            self._turns[self._frontends.index(before)].clear()
            self.awake = self._next() or before
            self._wanted.pop(self.awake, None)
            if before is not self.awake and _has_requests(before):
                self._want(before)
            await self._wake(self.awake)
            self._awake_since = time.monotonic()
        except (WorkerCallError, EngineDeadError) as error:
            if isinstance(error, WorkerCallError):
                _log.error("%s cannot make way for another model: %s", before.config.name, error)
            elif before.is_healthy():  # else the server ends; the loss itself is logged
                _log.warning("%s makes way once its workers serve again", before.config.name)
            self._awake_since = time.monotonic() + max(0.0, _RETRY_S - self.min_stay_s)
        finally:
            self.is_swapping = False

    async def _wake(self, frontend: Frontend) -> None:
        """Wakes a model up; workers that cannot wake up are replaced by new ones, which are awake,
        as those are that take the place of lost ones."""
        while frontend.is_healthy():  # else the server ends
            try:
                await frontend.control.wake_up()
                break
            except EngineDeadError:
                continue  # one engine fewer has workers to wake up
            except WorkerCallError as error:
                loss = EngineDeadError(f"the model {frontend.config.name} cannot wake up: {error}")
                for engine in frontend.engines:
                    engine.handle_loss(loss)
        self._turns[self._frontends.index(frontend)].set()


def _has_requests(frontend: Frontend) -> bool:
    return any(not engine.is_idle for engine in frontend.engines)
