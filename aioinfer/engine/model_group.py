"""The models of a server. Those that have a GPU in common take turns (`ModelTurns`); others are
awake side by side.

The HTTP server has a `ModelGroup`, also of one model; then nothing here runs beside requests. Each
model is a `Frontend` of its own. A model that is dead ends the server.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence

from aioinfer.config import Config, divide_by_gpus
from aioinfer.engine.frontend import Frontend
from aioinfer.engine.model_turns import ModelTurns
from aioinfer.engine.recovery import no_progress
from aioinfer.errors import ConfigError
from aioinfer.executor.base import ProgressCallback
from aioinfer.executor.factory import can_restart

_log = logging.getLogger(__name__)


class ModelGroup:
    """The models of a server. All methods are called on the event loop.

    Attributes:
        turns: of the models that have a GPU in common.
    """

    def __init__(self, frontends: Sequence[Frontend]):
        """`frontends`: of each model; of those that have a GPU in common all but the first sleep.
        Requests that name no model are for the first."""
        self._frontends = list(frontends)
        self._by_name = {
            name: each for each in frontends for name in each.config.served_model_names
        }
        divided = divide_by_gpus([each.config for each in frontends])
        self.turns = [ModelTurns([self._frontends[n] for n in numbers]) for numbers in divided]

    @classmethod
    async def launch(
        cls, configs: Sequence[Config], on_progress: ProgressCallback = no_progress
    ) -> ModelGroup:
        """Starts the models one after the other, the first one last: each while the others on its
        GPUs that have started sleep, so that it finds the devices' memory free. Raises what
        `Frontend.launch` does."""
        if len(configs) > 1 and not can_restart(configs[0]):
            raise ConfigError("[[models]]: under torchrun a server has one model")
        launched: dict[int, Frontend] = {}
        try:
            for numbers in reversed(divide_by_gpus(configs)):
                before: Frontend | None = None
                for number in reversed(numbers):
                    if before is not None:
                        await before.control.sleep()
                    config = configs[number]
                    report = on_progress if len(configs) == 1 else _named(config, on_progress)
                    before = launched[number] = await Frontend.launch(config, report)
        except BaseException:
            await asyncio.gather(*(each.close() for each in launched.values()))
            raise
        return cls([launched[number] for number in range(len(configs))])

    @property
    def first(self) -> Frontend:
        """The model of requests that name none."""
        return self._frontends[0]

    @property
    def awake(self) -> list[Frontend]:
        """The models that have their devices, or are about to."""
        return [turns.awake for turns in self.turns]

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
        if self._has_failed:
            return "the swapping of models has failed"
        return next((each.dead_reason for each in self._frontends if each.dead_reason), None)

    def is_healthy(self) -> bool:
        """Whether every model lives; see `Frontend.is_healthy`."""
        return not self._has_failed and all(each.is_healthy() for each in self._frontends)

    @property
    def _has_failed(self) -> bool:
        return any(turns.task is not None and turns.task.done() for turns in self.turns)

    async def wait_dead(self) -> None:
        """Returns when a model is dead; `dead_reason` describes it."""
        waits = [asyncio.ensure_future(each.wait_dead()) for each in self._frontends]
        try:
            tasks = [turns.task for turns in self.turns if turns.task is not None]
            await asyncio.wait([*waits, *tasks], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()

    async def end_pauses(self) -> None:
        """Goes on with requests of models that are paused. A single model wakes up; several have
        their turns."""
        for each in self._frontends:
            control, alone = each.control, len(self._frontends) == 1
            if control.is_held or (alone and control.is_paused):
                _log.warning("the pause ends: the server is shutting down, and answers what waits")
                await control.end_pause(wakes=alone)

    async def close(self) -> None:
        """Ends running requests with an error, and ends the workers."""
        await asyncio.gather(*(turns.close() for turns in self.turns))
        await asyncio.gather(*(each.close() for each in self._frontends))


def _named(config: Config, on_progress: ProgressCallback) -> ProgressCallback:
    """Returns a callback that names the model of a phase."""
    name = config.name
    return lambda phase, done, total: on_progress(f"{name}: {phase}", done, total)
