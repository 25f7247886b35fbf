"""The autoscaling policy that Ray Serve's controller calls."""

from __future__ import annotations

from typing import Any

from ray.serve.config import AutoscalingContext

from aioinfer.cluster.reports import wanted_replicas

#: The metric that replicas record: `ReplicaLoad.utilization`.
UTILIZATION = "utilization"


class UtilizationPolicy:
    """Keeps the mean utilization of the replicas near a target: the part of their slots and KV
    tokens that requests use or wait for. Serve applies its delays and bounds to the number that it
    returns."""

    def __init__(self, target: float = 0.6):
        self._target = target

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Returns the number of replicas that there should be, and no state."""
        recorded = (context.aggregated_metrics or {}).get(UTILIZATION, {})
        current = context.target_num_replicas
        return wanted_replicas([*recorded.values()], self._target, current), {}
