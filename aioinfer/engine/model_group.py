"""The models of a server: one of them is awake at a time, and has the devices; the others sleep.

The HTTP server has a `ModelGroup`, also of one model; then nothing here runs beside requests. Each
model is a `Frontend` of its own. Requests for a model that sleeps wait in its scheduler's queue,
where they can be aborted as any other, and the group swaps the models:

- once the model that is awake has been so for `MIN_STAY_S`, it takes no further requests
  into slots, finishes the running ones, and sleeps (`ModelControl.sleep`, with "wait");
- of the models for which requests wait, the one that has waited longest wakes up. Requests that
  still wait for the former one put it last in the order of waiting.

So each model has its turn after at most a stay and a drain of every other one, no stream is cut,
and requests in turns for two models cause no more swaps than the stay allows. As Ollama and
llama.cpp's router do, the group swaps whole models; these start a process for a model instead.

Workers that are lost while their model sleeps are started when it is its turn: until then another
model has the devices' memory. A model that is dead ends the server.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from functools import partial

from aioinfer.config import Config
from aioinfer.engine.frontend import Frontend
from aioinfer.engine.recovery import no_progress
from aioinfer.errors import ConfigError, EngineDeadError, WorkerCallError
from aioinfer.executor.base import ProgressCallback
from aioinfer.executor.factory import can_restart

#: Seconds after which a model that could not be put to sleep is asked again, at least.
_RETRY_S = 1.0
#: Seconds that a model stays awake at least, before another one that requests wait for takes its
#: place: about as long as a large model takes to wake up.
MIN_STAY_S = 5.0
_log = logging.getLogger(__name__)


class ModelGroup:
    """The models of a server, of which one is awake. All methods are called on the event loop.

    Attributes:
        awake: the model that has the devices, or is about to.
        is_swapping: whether none computes, since another one takes its place.
        min_stay_s: seconds that a model stays awake at least.
    """

    def __init__(self, frontends: Sequence[Frontend]):
        """`frontends`: of each model; all but the first sleep. Requests that name no model are for
        the first."""
        self._frontends = list(frontends)
        self._by_name = {
            name: each for each in frontends for name in each.config.served_model_names
        }
        self.awake = self.first
        self.is_swapping = False
        self._awake_since = time.monotonic()
        self.min_stay_s = MIN_STAY_S
        #: models that requests wait for, the one that has waited longest first
        self._wanted: dict[Frontend, None] = {}
        self._is_wanted = asyncio.Event()
        self._turns = [asyncio.Event() for _ in self._frontends]  # set while a model is awake
        self._task: asyncio.Task[None] | None = None
        if len(self._frontends) > 1:
            self._take_turns()

    def _take_turns(self) -> None:
        for each, turn in zip(self._frontends, self._turns, strict=True):
            each.on_request_asleep = partial(self._want, each)
            for engine in each.engines:
                engine.recovery.until_may_restart = turn.wait
        self._turns[0].set()
        self._task = asyncio.ensure_future(self._swap_forever())

    @classmethod
    async def launch(
        cls, configs: Sequence[Config], on_progress: ProgressCallback = no_progress
    ) -> ModelGroup:
        """Starts the models one after the other, the first one last: each while the others that
        have started sleep, so that it finds the devices' memory free. Raises what `Frontend.launch`
        does."""
        if len(configs) > 1 and not can_restart(configs[0]):
            raise ConfigError("[[models]]: under torchrun a server has one model")
        launched: list[Frontend] = []
        try:
            for config in reversed(configs):
                if launched:
                    await launched[-1].control.sleep()
                report = on_progress if len(configs) == 1 else _named(config, on_progress)
                launched.append(await Frontend.launch(config, report))
        except BaseException:
            await asyncio.gather(*(each.close() for each in launched))
            raise
        return cls(launched[::-1])

    @property
    def first(self) -> Frontend:
        """The model of requests that name none."""
        return self._frontends[0]

    def __iter__(self) -> Iterator[Frontend]:
        return iter(self._frontends)

    def __len__(self) -> int:
        return len(self._frontends)

    def find(self, name: str) -> Frontend | None:
        """Returns the model that has a name, or a variant of this name; None if none has."""
        if (found := self._by_name.get(name)) is not None:
            return found
        return next((each for each in self._frontends if each.variants.find(name)), None)

    def names(self) -> list[str]:
        """Returns the names that a request's `model` may have, those of variants included."""
        return [name for each in self._frontends for name in each.model_names()]

    # ---------------------------------------------------------------- life

    @property
    def dead_reason(self) -> str | None:
        """Why no request can be served any more, or None."""
        if self._task is not None and self._task.done():
            return "the swapping of models has failed"
        return next((each.dead_reason for each in self._frontends if each.dead_reason), None)

    def is_healthy(self) -> bool:
        """Whether every model lives; see `Frontend.is_healthy`."""
        turns = self._task is None or not self._task.done()
        return turns and all(each.is_healthy() for each in self._frontends)

    async def wait_dead(self) -> None:
        """Returns when a model is dead; `dead_reason` describes it."""
        waits = [asyncio.ensure_future(each.wait_dead()) for each in self._frontends]
        try:
            turns = [] if self._task is None else [self._task]
            await asyncio.wait([*waits, *turns], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()

    async def end_pauses(self) -> None:
        """Goes on with requests of models that are paused. A single model wakes up; several have
        their turns."""
        for each in self._frontends:
            control, alone = each.control, self._task is None
            if control.is_held or (alone and control.is_paused):
                _log.warning("the pause ends: the server is shutting down, and answers what waits")
                await control.end_pause(wakes=alone)

    async def close(self) -> None:
        """Ends running requests with an error, and ends the workers."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await asyncio.gather(*(each.close() for each in self._frontends))

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
            _log.error("another model cannot take the place of %s: %s", _name(before), error)
            self._awake_since = time.monotonic() + max(0.0, _RETRY_S - self.min_stay_s)
        finally:
            self.is_swapping = False

    async def _wake(self, frontend: Frontend) -> None:
        """Wakes a model up; one that cannot wake up gets new workers, which are awake."""
        try:
            await frontend.control.wake_up()
        except (WorkerCallError, EngineDeadError) as error:
            loss = EngineDeadError(f"the model {_name(frontend)} cannot wake up: {error}")
            for engine in frontend.engines:
                engine.handle_loss(loss)
            if frontend.is_healthy():  # else the server ends
                await frontend.control.wake_up()
        self._turns[self._frontends.index(frontend)].set()


def _named(config: Config, on_progress: ProgressCallback) -> ProgressCallback:
    """Returns a callback that names the model of a phase."""
    name = config.served_model_names[0]
    return lambda phase, done, total: on_progress(f"{name}: {phase}", done, total)


def _has_requests(frontend: Frontend) -> bool:
    return any(not engine.is_idle for engine in frontend.engines)


def _name(frontend: Frontend) -> str:
    return frontend.config.served_model_names[0]
