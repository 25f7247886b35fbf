"""Control of the model that is served: pause, sleep and waking, and new weights, on all engines
together.

`Frontend` owns one, and the admin endpoints and `LLM` call it. Calls are carried out one after the
other. What happens to requests at a pause or before sleep is the caller's to say (`Mode`):

- "keep": running requests stop where they are, and go on later with the text that they would have
  had; where their KV blocks are gone, their tokens are computed again, or the store of KV has them;
- "wait": requests that have begun are finished first, others wait;
- "abort": requests end with the tokens that they have, and "abort" as the finish reason.

New requests wait until the model goes on; while a model sleeps that was sent to sleep with "abort",
they are answered 503.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial, wraps
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, get_args

from aioinfer.engine.engine import Engine
from aioinfer.engine.held_engine import HeldEngine
from aioinfer.engine.output import FIRST_VERSION
from aioinfer.engine.recovery import OUTAGE_RETRY_S, EngineState
from aioinfer.errors import EngineDeadError, NotReadyError, RequestError, WorkerCallError
from aioinfer.executor.base import Executor

P = ParamSpec("P")
T = TypeVar("T")
Mode = Literal["keep", "wait", "abort"]
Tag = Literal["weights", "kv_cache"]
TAGS: tuple[Tag, ...] = get_args(Tag)
#: When a client should try again that was rejected because the model sleeps.
_RETRY_S = 5
_log = logging.getLogger(__name__)


def _whole(
    method: Callable[Concatenate[ModelControl, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[ModelControl, P], Coroutine[Any, Any, T]]:
    """Has a call carried out to its end, also if its caller is cancelled: a client that goes away
    must not leave workers half asleep. Other calls wait meanwhile; then requests go on, unless
    there is a reason that they do not."""

    @wraps(method)
    async def call(control: ModelControl, *args: P.args, **kwargs: P.kwargs) -> T:
        task = asyncio.ensure_future(control.carry_out(method(control, *args, **kwargs)))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(task)

    return call


class ModelControl:
    """All methods are called on the event loop.

    Attributes:
        is_paused: whether no step is planned until `resume`, or `wake_up`.
        sleep_level: 0 for a model that is awake; see `sleep`.
        asleep: what has no memory on the device.
        weights_folder: where new workers find their weights; None before the start.
        num_wakes: how often all of it has woken up.
    """

    def __init__(self, engines: Sequence[Engine]):
        self._engines = engines
        self._lock = asyncio.Lock()
        self._is_held = False  # whether `pause` was called, and not `resume`
        self._rejects = False
        self._resleeping: set[asyncio.Task[None]] = set()
        self.sleep_level = self.num_wakes = 0
        self.asleep: set[Tag] = set()
        self.weights_folder: Path | None = None
        # how often it was set, also to what it was; and by engine how often when the weights that
        # its workers have were
        self._num_folders = 0
        self._folder_of: dict[int, int] = {}
        self._is_updating = False  # between `begin_update` and `end_update`
        self._lacks_weights = False  # whether they were dropped, and not loaded again
        self._folder_version = FIRST_VERSION  # of the weights there
        self._num_updates = 0
        for engine in engines:
            engine.recovery.on_restart = partial(self._follow_restart, engine)
            engine.recovery.are_current = partial(self._are_current, engine)

    async def carry_out(self, call: Coroutine[Any, Any, T]) -> T:
        """Carries out a call of this object; see `_whole`."""
        async with self._lock:
            try:
                return await call
            finally:
                self._go_on_if_free()

    def _go_on_if_free(self) -> None:
        """Goes on with requests, unless `pause` was called, something sleeps or lacks its weights,
        or an update is under way."""
        if self.sleep_level and not self.asleep and not self._lacks_weights:
            self.sleep_level = 0
        if not (self._is_held or self.sleep_level or self._is_updating):
            self._go_on()

    @property
    def is_paused(self) -> bool:
        """See above."""
        return any(engine.is_paused for engine in self._engines)

    @property
    def is_held(self) -> bool:
        """Whether requests wait for `resume`, or for the end of an update."""
        return self._is_held or self._is_updating

    async def wait_free(self) -> None:
        """Returns when no engine is paused, and no engine's workers are being restarted, but for
        engines whose workers have been lost for too long."""
        while busy := [engine for engine in self._engines if _is_held_up(engine)]:
            busy[0].turn.clear()
            await busy[0].turn.wait()

    def check_admits(self) -> None:
        """Raises `NotReadyError` while new requests are not taken."""
        if self._rejects:
            raise NotReadyError("the model sleeps", retry_after_s=_RETRY_S)
        if self.outage is not None:
            raise NotReadyError(self.outage, retry_after_s=OUTAGE_RETRY_S)

    @property
    def outage(self) -> str | None:
        """Why requests cannot wait for an engine to serve again, though one lives; else None."""
        living = [each.recovery for each in self._engines if each.state is not EngineState.DEAD]
        reasons = [recovery.outage for recovery in living]
        return next(iter(reasons), None) if all(reasons) else None

    # ---------------------------------------------------------------- pause

    def pause_now(self) -> None:
        """Has no further step be planned until `resume`; steps that are in flight end."""
        self._is_held = True
        for engine in self._engines:
            engine.pause()

    @_whole
    async def pause(self, mode: Mode = "keep", *, clear_cache: bool = False) -> None:
        """Has no further step be planned until `resume`, and returns when none is in flight.

        Args:
            mode: what happens to requests.
            clear_cache: whether all KV blocks are forgotten: requests that go on compute their
                tokens again.
        """
        self._is_held = True
        await self._stop(mode)
        if clear_cache and not self.sleep_level:
            for engine in self._living:
                engine.scheduler.release_blocks()
                engine.scheduler.kv_cache.reset_prefix_cache()

    def resume(self) -> None:
        """Goes on with all requests. Raises `RequestError` while the model sleeps, or its weights
        are being updated."""
        if self.sleep_level:
            raise RequestError(
                "the model sleeps: wake it up first", status=409, code="model_sleeps"
            )
        if self._is_updating:
            raise RequestError(
                "the weights are being updated: /finish_weight_update comes first", status=409,
                code="update_under_way",
            )  # fmt: skip
        self._is_held = False
        if not self._lock.locked():  # else the call that is being carried out does
            self._go_on_if_free()

    def _go_on(self) -> None:
        self._rejects = False
        for engine in self._engines:
            engine.resume()

    async def _stop(self, mode: Mode) -> None:
        """Deals with the requests, and returns when no step is planned or in flight."""
        if mode == "abort":
            for engine in self._living:
                for output in engine.requests.outputs():
                    engine.cut_short(output)
        elif mode == "wait" and not self.is_paused:
            await asyncio.gather(*(HeldEngine(e).finish_running() for e in self._engines))
        for engine in self._engines:
            engine.pause()
        living = self._living
        while any(engine.scheduler.num_in_flight for engine in living):
            await asyncio.gather(*(HeldEngine(engine).settle() for engine in living))
            living = self._living
        for engine in living:
            engine.emission.emit_rest()

    @property
    def _living(self) -> list[Engine]:
        """The engines that serve. Engines whose workers are being restarted take no part: they
        begin with what the others have when their workers are there."""
        return [engine for engine in self._engines if engine.state is EngineState.SERVING]

    # ---------------------------------------------------------------- sleep

    @_whole
    async def sleep(self, level: int = 1, mode: Mode = "keep") -> None:
        """Frees the memory of weights and KV cache. Does nothing for a model that sleeps. Workers
        that have been lost for too long sleep once they have started.

        Args:
            level: 1 keeps the weights in memory of the host; 2 drops them: they are loaded again
                when the model wakes up.
            mode: what happens to requests.

        Raises:
            WorkerCallError: the workers cannot sleep; requests go on.
            EngineDeadError: workers died meanwhile.
        """
        if level not in (1, 2):
            raise RequestError("level must be 1 or 2", param="level")
        if self.sleep_level:
            return
        await self._stop(mode)
        in_outage = [engine for engine in self._engines if engine.recovery.outage is not None]
        for engine in in_outage:
            await engine.recovery.defer()
        if self._living or not in_outage:
            await self._put_to_sleep(level)
        self.sleep_level, self.asleep, self._lacks_weights = level, set(TAGS), level == 2
        self._rejects = mode == "abort"

    async def _put_to_sleep(self, level: int) -> None:
        try:
            for engine in self._living:
                await HeldEngine(engine).release_blocks()
            await self._call("sleep", level=level)
        except Exception:
            await self._wake_all()
            raise

    @_whole
    async def wake_up(self, tags: Sequence[Tag] | None = None) -> None:
        """Takes memory again for `tags`, by default for all; when nothing sleeps any more, requests
        go on, unless `pause` was called. Does nothing for what is awake.

        After level 2 the weights are loaded as well, unless tags are given: then an update has to
        bring them.

        Raises:
            RequestError: an unknown tag.
            WorkerCallError: there is no memory, and what had none still has none.
            EngineDeadError: workers died meanwhile.
        """
        for tag in tags or ():
            if tag not in TAGS:
                raise RequestError(f"tags are {' and '.join(TAGS)}, not {tag!r}", param="tags")
        if not self.sleep_level:
            return
        # workers that are being started are awake, with the weights of the folder
        are_new = not self._living and any(
            engine.state is EngineState.RESTARTING for engine in self._engines
        )
        if not are_new:
            await self._call("wake_up", tags=list(tags or TAGS))
        self.asleep.difference_update(tags or TAGS)
        self.num_wakes += not self.asleep
        if self._lacks_weights and tags is None:
            if not are_new:
                await self._call("update_from_disk", folder=str(self.weights_folder))
            self._lacks_weights = False
            self._note_version(self._folder_version)

    async def end_pause(self, *, wakes: bool = True) -> None:
        """Goes on with all requests, and wakes the model up before."""
        try:
            if wakes:
                await self.wake_up()
        finally:
            self._is_held = self._is_updating = False
            self._go_on_if_free()

    async def _wake_all(self) -> None:
        """Wakes up what has gone to sleep, after an error. Workers that were lost come back
        awake."""
        if not self._living:
            return
        try:
            await self._call("wake_up", tags=list(TAGS))
        except Exception as error:
            _log.error("after an error the workers could not wake up: %s", error)
            for engine in self._living:
                engine.handle_loss(EngineDeadError(f"the workers could not wake up: {error}"))

    def set_folder(self, folder: Path | None) -> None:
        """Notes where new workers find their weights."""
        self.weights_folder = folder
        self._num_folders += 1

    def note_start(self, number: int) -> Path | None:
        """Returns `weights_folder` for new workers of an engine, which are made now."""
        self._folder_of[number] = self._num_folders
        return self.weights_folder

    def _are_current(self, engine: Engine) -> bool:
        """See `Recovery.are_current`."""
        return self._folder_of.get(engine.number, self._num_folders) == self._num_folders

    def _follow_restart(self, engine: Engine) -> None:
        """Records which weights new workers have, and has them sleep if the others do: new workers
        are awake."""
        if engine.weight_version != self._folder_version:
            _log.warning(
                "the new workers have the weights of version %s again, no longer of version %s",
                self._folder_version, engine.weight_version,
            )  # fmt: skip
            _note_weights(engine, self._folder_version)
        if self.sleep_level:
            task = asyncio.ensure_future(self._sleep_again(engine))
            self._resleeping.add(task)
            task.add_done_callback(self._resleeping.discard)

    async def _sleep_again(self, engine: Engine) -> None:
        async with self._lock:
            if self.sleep_level and engine.state is EngineState.SERVING:
                try:
                    await HeldEngine(engine).call_workers(
                        "sleep", None, {"level": self.sleep_level}
                    )
                    if awake := [tag for tag in TAGS if tag not in self.asleep]:
                        await HeldEngine(engine).call_workers("wake_up", None, {"tags": awake})
                except EngineDeadError:
                    pass  # they are lost again: a message says so, and the next ones follow
                except Exception as error:
                    _log.error("restarted workers could not be sent to sleep: %s", error)

    # ---------------------------------------------------------------- weights

    @property
    def weight_version(self) -> str:
        """The version of the weights: of the first engine that serves."""
        engines = self._living or self._engines
        return engines[0].weight_version if engines else FIRST_VERSION

    def name_weights(self, version: str) -> None:
        """Gives the weights another version."""
        if self._folder_version == self.weight_version:
            self._folder_version = version
        for engine in self._engines:
            engine.weight_version = version

    @_whole
    async def update_from_disk(
        self, folder: Path, *, version: str | None = None, mode: Mode = "keep"
    ) -> None:
        """Loads the weights of a checkpoint; then requests go on, unless they were paused before.
        Where weights cannot be loaded again, as those of quantized checkpoints, new workers load
        them.

        Args:
            folder: of the checkpoint.
            version: its name in answers; by default the number of updates.
            mode: what happens to requests that run. Those that go on keep their KV blocks, unless
                there are new workers.

        Raises:
            WorkerCallError: the checkpoint does not go with the model; nothing has changed.
            RequestError: the weights sleep.
        """
        self._require_weights()
        await self._stop(mode)
        if all(await self._call("check_folder", folder=str(folder))):
            await self._load(folder)
        else:
            await self._replace_workers(folder)
        for engine in self._living:
            if not self._are_current(engine):  # its new workers began to start before, and serve
                engine.recovery.policy.take_back()
                engine.handle_loss(EngineDeadError("the weights were replaced meanwhile"))
        self._note_update(version, of_folder=True)

    async def _load(self, folder: Path) -> None:
        """Has the workers load the weights of a checkpoint. Raises `EngineDeadError` if those of
        all engines are lost; where those of some are, new ones have the weights of the others."""
        loading = self._executors()
        try:
            await self._call("update_from_disk", folder=str(folder))
        except EngineDeadError:
            if not any(each in loading for each in self._executors()):
                raise
        self.set_folder(folder)
        for number, executor in self._executors():
            if (number, executor) in loading:
                self._folder_of[number] = self._num_folders

    def _executors(self) -> list[tuple[int, Executor]]:
        """Returns the numbers and executors of the engines that serve."""
        return [(engine.number, engine.executor) for engine in self._living]

    @_whole
    async def begin_update(self) -> None:
        """Begins an update, tensor by tensor: no step is planned until `end_update`. One that was
        begun before is forgotten.

        Raises:
            WorkerCallError: the weights cannot be loaded again.
        """
        self._require_weights()
        await self._stop("keep")
        await self._call("begin_update")
        self._is_updating = True

    @_whole
    async def update(self, method: str, **arguments: Any) -> None:
        """Has the workers load tensors by one of their methods. Raises `RequestError` before
        `begin_update`, `WorkerCallError` for tensors that do not go with the model or do not
        come."""
        self._require_update()
        await self._call(method, **arguments)

    @_whole
    async def end_update(self, version: str | None = None) -> None:
        """Ends an update, and names its weights, as `update_from_disk` does; then requests go on,
        unless they were paused before.

        Raises:
            WorkerCallError: tensors of some layers are missing, which have their former weights;
                the model stays paused.
        """
        self._require_update()
        self._is_updating = False
        try:
            await self._call("end_update")
        except WorkerCallError:
            self._is_held = True
            raise
        finally:
            self._note_update(version)

    async def join_group(self, options: Mapping[str, Any], rank_offset: int = 1) -> None:
        """Has the workers join a process group with a trainer, between two steps, as the ranks from
        `rank_offset` on; `options` are the arguments of `UpdateGroup`. Raises `WorkerCallError` if
        it does not form."""
        await self.call_workers("join_update_group", rank_offset=rank_offset, options=dict(options))

    @_whole
    async def call_extension(
        self,
        method: str | Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> list[Any]:
        """Calls a method of `parallel.worker_extension` on all workers, or a function, which has
        the worker as its first argument; see `call_workers`. What was computed with weights that it
        has replaced is forgotten."""
        given: dict[str, Any] = {"args": list(args), "kwargs": dict(kwargs or {})}
        await self._stop("keep")
        try:
            if callable(method):
                return await self._call("call_function", timeout_s, function=method, **given)
            return await self._call("call_extension", timeout_s, method=method, **given)
        finally:
            if self._living and any(await self._call("has_new_weights")):
                self._forget_computed()

    @_whole
    async def call_workers(
        self, name: str, *, timeout_s: float | None = None, **arguments: Any
    ) -> list[Any]:
        """Returns the results of a method of all workers, called between two steps, by rank.

        Raises:
            WorkerCallError: it failed on a worker.
            EngineDeadError: a worker died, or did not answer in time; new ones are started.
        """
        await self._stop("keep")
        return await self._call(name, timeout_s, **arguments)

    def _require_update(self) -> None:
        if not self._is_updating:
            raise RequestError(
                "no update was begun: /start_weight_update comes first", status=409,
                code="no_update",
            )  # fmt: skip

    def _require_weights(self) -> None:
        if "weights" in self.asleep:
            raise RequestError(
                'the weights sleep: wake them up first, with tags "weights"', status=409,
                code="model_sleeps",
            )  # fmt: skip

    def _note_update(self, version: str | None, *, of_folder: bool = False) -> None:
        """Names the new weights, and forgets what was computed with the old ones; requests that run
        keep their KV blocks."""
        self._num_updates += 1
        version = str(self._num_updates) if version is None else version
        self._lacks_weights = False
        if of_folder:
            self._folder_version = version
        self._note_version(version)

    def _note_version(self, version: str) -> None:
        for engine in self._living:
            _note_weights(engine, version)
        self._forget_computed()

    def _forget_computed(self) -> None:
        """Forgets what former weights have computed; requests that run keep their KV blocks."""
        for engine in self._living:
            engine.scheduler.kv_cache.reset_prefix_cache()
            for feature in engine.features:
                feature.forget_results()

    async def _replace_workers(self, folder: Path) -> None:
        """Starts new workers, with the weights in `folder`, for all engines. If they cannot be
        started, new ones with the former weights take their place."""
        before = self.weights_folder
        self.set_folder(folder)
        engines = self._living
        for engine in engines:
            await HeldEngine(engine).release_blocks()
        replacing = [engine.recovery.replace_workers() for engine in engines]
        found = await asyncio.gather(*replacing, return_exceptions=True)
        error = next(filter(None, found), None)
        if error is None:
            return
        self.set_folder(before)
        for engine in engines:
            if engine.state is not EngineState.DEAD:  # it was closed
                engine.recovery.state = EngineState.SERVING
                engine.handle_loss(EngineDeadError(f"new workers could not be started: {error}"))
        raise WorkerCallError(f"the weights in {folder} cannot be loaded: {error}") from error

    # ---------------------------------------------------------------- the workers

    async def _call(self, name: str, timeout_s: float | None = None, **arguments: Any) -> list[Any]:
        """Calls a method of the workers of all engines, and returns their results, engine by
        engine. Raises the first error once all have answered."""
        calls = [
            HeldEngine(engine).call_workers(name, timeout_s, arguments) for engine in self._living
        ]
        if not calls:
            dead = (engine.dead_reason for engine in self._engines)
            raise EngineDeadError(next(filter(None, dead), "the workers are being restarted"))
        results: list[Any] = []
        for answer in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(answer, BaseException):
                raise answer
            results += answer
        return results


def _is_held_up(engine: Engine) -> bool:
    """Whether an engine that lives is paused, or its workers are being restarted and have not been
    lost for too long."""
    if engine.is_paused:
        return engine.state is not EngineState.DEAD
    return engine.state is EngineState.RESTARTING and engine.recovery.outage is None


def _note_weights(engine: Engine, version: str) -> None:
    """Notes of which version the weights are that an engine's workers have from now on."""
    if engine.weight_version != version:
        engine.weight_version = version
        for output in engine.requests.outputs():
            output.note_weights(version)
