"""The engine on an event loop of its own in a background thread, for programs without one: the base
of `LLM` and `LLMEngine`.

Both work in scripts, in notebooks and inside other event loops alike.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from aioinfer.arguments import make_config
from aioinfer.config import Config
from aioinfer.engine.frontend import Frontend
from aioinfer.engine.model_control import Mode, Tag
from aioinfer.engine.served_model import find_model
from aioinfer.errors import EngineDeadError
from aioinfer.executor.torchrun import follow
from aioinfer.startup import StartupDisplay

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
#: How long a start that was interrupted may take to end its workers.
_INTERRUPT_S = 10.0


class BackgroundModel:
    """A model with methods that are called like functions. Close it, or use it as a context
    manager, to end its workers.

    Args:
        model: a value of `model.path`: a folder, a GGUF file, a hub id, or `package:NAME/FILE`.
        config: a TOML file to start from.
        settings: further configuration by dotted key, such as `{"cache.block_size": 32}`.
        progress: show progress bars and the start-up table (on stderr).
        arguments: keys by their last parts, and by vLLM's names: `tensor_parallel_size=2`,
            `max_model_len=4096`, `kv_cache_dtype="fp8"`.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        config: str | Path | None = None,
        settings: Mapping[str, Any] | None = None,
        progress: bool = True,
        **arguments: Any,
    ):
        made = make_config(model, config, settings, arguments)
        self._launch(made if made.paces_prefill else made.without_streams(), progress)

    @classmethod
    def of(cls, config: Config, *, progress: bool = True) -> Self:
        """Returns a model with a whole configuration as it is. Raises as the constructor does."""
        made = cls.__new__(cls)
        made._launch(config, progress)
        return made

    def _launch(self, config: Config, progress: bool) -> None:
        # in this thread: under torchrun, another rank than the first ends here
        follow(config, find_model)
        self.config = config
        self._progress = progress
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="aioinfer", daemon=True)
        self._thread.start()
        has_ended = threading.Event()

        async def launch() -> Frontend:
            try:
                return await Frontend.launch(self.config, display.on_progress)
            finally:
                has_ended.set()

        try:
            with StartupDisplay(quiet=not progress) as display:
                self.frontend: Frontend = self.run(launch())
        except BaseException:
            has_ended.wait(_INTERRUPT_S)
            _stop_loop(self._loop, self._thread)
            raise
        if progress:
            display.show(
                [engine.report for engine in self.frontend.engines], self.config.served_model_names
            )
        self._close = weakref.finalize(self, _close, self.frontend, self._loop, self._thread)
        # of a program that leaves its model open: when the finalizer's own time comes, at the exit,
        # no thread pool takes work any more
        threading._register_atexit(self._close)  # type: ignore[attr-defined]

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine on the engine's event loop, for programs built on `frontend`, and
        returns its result. Raises the coroutine's errors, and `EngineDeadError` after `close` or in
        a process that was forked behind the start; an interrupt here cancels it there."""
        if not self._thread.is_alive():
            work.close()
            state = "closed" if self._loop.is_closed() else "another process's"
            raise EngineDeadError(f"this {type(self).__name__} is {state}: make another one")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except ExceptionGroup as group:
            raise group.exceptions[0] from group
        except BaseException:
            future.cancel()
            raise

    def sleep(self, level: int = 1, mode: Mode = "keep") -> None:
        """Frees the device's memory of weights and KV cache until `wake_up`. Does nothing for a
        model that sleeps.

        Args:
            level: 1 keeps the weights in memory of the host, 2 drops them: they are loaded again
                when the model wakes up.
            mode: what happens to requests that run: "keep" has them go on after waking, "wait"
                finishes them first, "abort" ends them.

        Raises:
            WorkerCallError: a GPU's model was loaded without `model.sleep_mode`, or the host has
                too little memory.
        """
        self.run(self.frontend.control.sleep(level, mode))

    def wake_up(self, tags: Sequence[Tag] | None = None) -> None:
        """Takes memory again for "weights", "kv_cache" or, by default, both, and then goes on with
        the requests. After level 2 the weights are loaded again, unless there are tags: then an
        update brings them. Raises `WorkerCallError` where the device has no memory."""
        self.run(self.frontend.control.wake_up(tags))

    def update_weights(
        self, folder: str | Path, *, version: str | None = None, mode: Mode = "keep"
    ) -> None:
        """Loads the weights of a checkpoint of the same model.

        Args:
            folder: of the checkpoint.
            version: its name in `Output.weight_versions`; by default the number of updates.
            mode: what happens to requests that run, as for `sleep`.

        Raises:
            WorkerCallError: the checkpoint does not go with the model; nothing has changed.
        """
        update = self.frontend.control.update_from_disk(Path(folder), version=version, mode=mode)
        self.run(update)

    def load_weights(
        self, tensors: Iterable[tuple[str, torch.Tensor]], *, version: str | None = None
    ) -> None:
        """Loads weights, whole, by the names of a checkpoint. Workers that are processes get them
        through shared memory, on GPUs without a copy: all have to be on this host.

        Raises:
            WorkerCallError: a name or shape is wrong, and nothing has changed; or tensors of layers
                are missing, which keep their weights: the model is paused then.
        """

        async def load() -> None:
            control = self.frontend.control
            await control.begin_update()
            try:
                await control.update("load_weights", tensors=list(tensors))
            finally:
                await control.end_update(version)

        self.run(load())

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Returns the results of a method of `parallel.worker_extension` on every worker, called
        between two steps; or of a function that workers can import, with the worker as its first
        argument. What JSON has nothing like is returned as text.

        Raises:
            WorkerCallError: there is no such method, or it has failed.
            EngineDeadError: a worker has not answered after `timeout` seconds.
        """
        call = self.frontend.control.call_extension(method, args, kwargs, timeout_s=timeout)
        return self.run(call)

    @property
    def is_sleeping(self) -> bool:
        """Whether weights or KV cache have no memory on the device."""
        return self.frontend.control.sleep_level > 0

    def close(self) -> None:
        """Ends the requests and the workers. Safe to call twice."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _close(frontend: Frontend, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    if threading.current_thread() is thread:  # its garbage collection has found the model
        threading.Thread(target=_close, args=(frontend, loop, thread), name="closing").start()
        return
    if not thread.is_alive():  # this process was forked, and the model is its parent's
        return
    asyncio.run_coroutine_threadsafe(frontend.close(), loop).result()
    _stop_loop(loop, thread)


def _stop_loop(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
