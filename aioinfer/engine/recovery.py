"""What becomes of an engine whose workers have died or hung: its states, and how often and how soon
its workers are started anew.

`Engine` owns a `RestartPolicy` and goes through the states.
"""

from __future__ import annotations

import enum
import time

#: So many seconds of service make up for the restarts before them.
STABLE_S = 600.0
_FIRST_DELAY_S = 1.0
_MAX_DELAY_S = 60.0
#: A request that was running so many times when workers were lost may be the cause.
MAX_INTERRUPTIONS = 2
#: The end of killed workers may take so long; a new start so long, or `SLOWEST_START` times as long
#: as the first one. What takes longer hangs.
MAX_END_S = 60.0
MAX_START_S = 300.0
SLOWEST_START = 5.0


class EngineState(enum.Enum):
    """Whether an engine serves.

    STARTING: not yet. SERVING: its workers execute steps. RESTARTING: its workers were lost and
    come back; it takes requests, which wait. DEAD: it serves no more requests.
    """

    STARTING = "starting"
    SERVING = "serving"
    RESTARTING = "restarting"
    DEAD = "dead"


class RestartPolicy:
    """Bounds the consecutive restarts of an engine's workers, with delays that double.

    `STABLE_S` seconds of service reset the count. (A bound on the restarts in a span of time would
    never be reached where each attempt takes longer than the span allows.)

    Attributes:
        max_restarts: consecutive ones that are allowed.
        num_restarts: consecutive ones that were begun, the one under way included.
    """

    def __init__(self, max_restarts: int):
        """`max_restarts` consecutive ones; 0 allows none."""
        self.max_restarts = max_restarts
        self.num_restarts = 0
        self._serving_since: float | None = None

    def begin_service(self) -> None:
        """Records that the workers serve from now on."""
        self._serving_since = time.monotonic()

    def next_delay_s(self) -> float | None:
        """Returns the seconds to wait before the next restart, which is counted, or None if there
        may be no more."""
        since, self._serving_since = self._serving_since, None
        if since is not None and time.monotonic() - since >= STABLE_S:
            self.num_restarts = 0
        if self.num_restarts >= self.max_restarts:
            return None
        self.num_restarts += 1
        return min(_FIRST_DELAY_S * 2.0 ** (self.num_restarts - 1), _MAX_DELAY_S)
