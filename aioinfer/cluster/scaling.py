"""The desired number of replicas, by their load.

Pure Python; `deploy.scaling` is what Ray Serve calls.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def wanted_replicas(utilizations: Sequence[float], target: float, current: int) -> int:
    """Returns the number of replicas at which each would have the utilization `target`.

    A change within a tenth of the target is none: it would be reverted at once.

    Args:
        utilizations: of the replicas that report, each `ReplicaLoad.utilization`.
        target: above 0.
        current: replicas that are wanted now.
    """
    if not utilizations:
        return current
    mean = math.fsum(utilizations) / len(utilizations)
    serving = max(1, len(utilizations))
    if abs(mean - target) <= 0.1 * target:
        return current
    return max(1, math.ceil(serving * mean / target))
