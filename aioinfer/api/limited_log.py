"""Rate-limited logging of events that clients can cause at will: at most one line in some
seconds."""

from __future__ import annotations

import asyncio
import logging


class LimitedLog:
    """Counts events of one kind and logs them: the first at once, later ones together, one line in
    `interval_s` seconds.

    Used on the event loop. A line holds a number and the detail of the last event.
    """

    def __init__(self, logger: logging.Logger, kind: str, interval_s: float = 10.0):
        """`kind` names the events in the plural, such as "malformed requests"."""
        self._logger = logger
        self._kind = kind
        self._interval_s = interval_s
        self._number = 0
        self._detail = ""
        self._timer: asyncio.TimerHandle | None = None

    def count(self, detail: str) -> None:
        """Counts an event. `detail` must hold no text of the client's."""
        self._number += 1
        self._detail = detail
        if self._timer is None:
            self._write()

    def close(self) -> None:
        """Logs the events counted since the last line."""
        if self._timer is not None:
            self._timer.cancel()
            self._write()

    def _write(self) -> None:
        """Logs the counted events, and waits for more."""
        self._timer = None
        if self._number:
            self._logger.warning("%s: %d, the last %s", self._kind, self._number, self._detail)
            self._number = 0
            self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._write)
