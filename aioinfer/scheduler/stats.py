"""What a scheduler counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class SchedulerStats:
    """Totals since the start. `prefix_*` count prompt tokens of first admissions."""

    steps: int = 0
    preemptions: int = 0
    prefix_queried: int = 0
    prefix_hit: int = 0
    wasted_rows: int = 0
