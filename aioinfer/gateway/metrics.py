"""Metrics of a gateway: its own `/metrics`, beside the metrics of each replica."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from aioinfer.cluster.router import ClusterRouter

#: Bounds of the buckets.
_ROUTING_S = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 1e-2)
_READING_S = (1e-4, 1e-3, 5e-3, 1e-2, 5e-2, 0.1, 0.5, 1.0)


class GatewayMetrics:
    """The metrics of a gateway, as `/metrics` shows them."""

    def __init__(self, router: ClusterRouter):
        registry = self.registry = CollectorRegistry()

        def counter(name: str, text: str) -> Counter:
            return Counter(f"aioinfer:gateway_{name}", text, registry=registry)

        def seconds(name: str, text: str, bounds: Sequence[float]) -> Histogram:
            name = f"aioinfer:gateway_{name}_seconds"
            return Histogram(name, text, buckets=bounds, registry=registry)

        self.requests = counter("requests", "Requests that were routed to a replica.")
        self.retries = counter("refusals", "Requests that a replica refused unserved.")
        self.lost = counter("lost_requests", "Requests whose replica was lost.")
        self.resumed = counter(
            "resumed_requests",
            "Requests that were sent on to another replica when the first one was lost.",
        )
        self.tokens = counter("prompt_tokens", "Prompt tokens of routed requests.")
        self.expected = counter(
            "expected_cached_tokens", "Prompt tokens that the chosen replica was expected to hold."
        )
        self.decision = seconds("routing", "Choosing a replica.", _ROUTING_S)
        self.reading = seconds("reading", "Encoding a prompt.", _READING_S)
        gauges: dict[str, tuple[str, Callable[[], float]]] = {
            "replicas": ("Replicas that get requests.", lambda: len(router)),
            "fresh_replicas": ("Replicas whose last report counts.", lambda: router.num_fresh),
            "block_hashes": ("Block hashes that the router knows.", lambda: router.num_hashes),
        }
        for name, (text, source) in gauges.items():
            gauge = Gauge(f"aioinfer:gateway_{name}", text, registry=registry)
            gauge.set_function(source)
