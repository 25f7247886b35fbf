"""Service-level objectives: limits on the latency of each request, and the goodput, which counts
the requests that kept them all.

Goodput is the notion of DistServe (Zhong et al., OSDI 2024): a server that answers many requests,
each too late for its user, has a throughput but no goodput. Called by `report` and `options`.
"""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchlib.client import Record

#: The measures that can be limited. Only a streamed reply has the first three.
STREAM_MEASURES = ("ttft", "itl", "tpot")
MEASURES = (*STREAM_MEASURES, "e2e")
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
#: A load's goodput counts as kept up where this share of the requests met the limits (DistServe's
#: choice).
ENOUGH = 0.9


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits in seconds by measure, one of `MEASURES`.

    `ttft`, `tpot` and `e2e` are the report's. `itl` is the 99th percentile of a request's own gaps
    between chunks (linear between neighbours), so that it limits stalls; `tpot` limits the mean.
    """

    limits: dict[str, float]

    @classmethod
    def parse(cls, text: str) -> Slo:
        """Reads "ttft=200ms,itl=30ms,e2e=5s". Raises `ArgumentTypeError`."""
        limits: dict[str, float] = {}
        for part in text.split(","):
            match = re.fullmatch(r"\s*(\w+)\s*=\s*(\d*\.?\d+)\s*(us|ms|s)\s*", part)
            if (
                match is None
                or match[1] not in MEASURES
                or match[1] in limits
                or float(match[2]) == 0
            ):
                raise ArgumentTypeError(
                    f"{part!r} is no limit: write one of {', '.join(MEASURES)} once, such as "
                    f"ttft=200ms,itl=30ms,e2e=5s"
                )
            limits[match[1]] = float(match[2]) * _UNITS[match[3]]
        return cls(limits)

    def __str__(self) -> str:
        return ",".join(f"{name}={limit * 1000:g}ms" for name, limit in self.limits.items())

    def missed(self, record: Record) -> list[str]:
        """Returns the measures of a successful request that are above their limits.

        A reply of a single chunk has no gap to be too long. One in which no text was seen misses a
        limit on `ttft`.
        """
        return [name for name, limit in self.limits.items() if _value(record, name) > limit]


def _value(record: Record, measure: str) -> float:
    """Returns a measure of a request in seconds."""
    if measure == "ttft":
        return float("inf") if record.ttft is None else record.ttft
    if measure == "itl":
        return (
            float(np.percentile(np.frombuffer(record.gaps, np.float64), 99)) if record.gaps else 0.0
        )
    return record.e2e if measure == "e2e" else record.tpot or 0.0


def goodput(records: Sequence[Record], duration_s: float, slo: Slo) -> dict[str, Any]:
    """Returns how many requests met all limits, as a share of all that were sent and per second.

    A failed request meets none.
    """
    missed = [slo.missed(record) for record in records if record.error is None]
    met = sum(not names for names in missed)
    return {
        "limits_ms": {name: limit * 1000 for name, limit in slo.limits.items()},
        "met": met,
        "share": met / len(records) if records else 0.0,
        "requests_per_s": met / duration_s if duration_s else 0.0,
        "missed": {name: sum(name in names for names in missed) for name in slo.limits},
    }
