"""Metrics of a gateway: its own `/metrics`, beside the metrics of each replica."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from aioinfer.cluster.router import ClusterRouter


class GatewayMetrics:
    """The metrics of a gateway, as `/metrics` shows them."""

    def __init__(self, router: ClusterRouter):
        self.registry = CollectorRegistry()
        registry = self.registry
        self.requests = Counter(
            "aioinfer:gateway_requests",
            "Requests that were routed to a replica.",
            registry=registry,
        )
        self.retries = Counter(
            "aioinfer:gateway_refusals",
            "Requests that a replica refused unserved.",
            registry=registry,
        )
        self.lost = Counter(
            "aioinfer:gateway_lost_requests", "Requests whose replica was lost.", registry=registry
        )
        self.resumed = Counter(
            "aioinfer:gateway_resumed_requests",
            "Requests that were sent on to another replica when the first one was lost.",
            registry=registry,
        )
        self.tokens = Counter(
            "aioinfer:gateway_prompt_tokens", "Prompt tokens of routed requests.", registry=registry
        )
        self.expected = Counter(
            "aioinfer:gateway_expected_cached_tokens",
            "Prompt tokens that the chosen replica was expected to hold.",
            registry=registry,
        )
        bounds = [1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 1e-2]
        self.decision = Histogram(
            "aioinfer:gateway_routing_seconds",
            "Choosing a replica.",
            buckets=bounds,
            registry=registry,
        )
        bounds = [1e-4, 1e-3, 5e-3, 1e-2, 5e-2, 0.1, 0.5, 1.0]
        self.reading = Histogram(
            "aioinfer:gateway_reading_seconds",
            "Encoding a prompt.",
            buckets=bounds,
            registry=registry,
        )
        Gauge(
            "aioinfer:gateway_replicas", "Replicas that get requests.", registry=registry
        ).set_function(lambda: len(router))
        Gauge(
            "aioinfer:gateway_fresh_replicas",
            "Replicas whose last report counts.",
            registry=registry,
        ).set_function(lambda: router.num_fresh)
        Gauge(
            "aioinfer:gateway_block_hashes",
            "Block hashes that the router knows.",
            registry=registry,
        ).set_function(lambda: router.num_hashes)
