"""Routing cost of a request, in tokens of prefill: shared by the router of engines in one process
(`engine.router`) and the router of a cluster's replicas (`cluster.router`)."""

from __future__ import annotations

#: The cost of a request to the other requests of its engine, in tokens of prefill. In a large
#: decode step a further row takes about as long as a further token of prefill does, and a request
#: is in as many steps as it generates tokens; how many steps that will be is not known, so a usual
#: number is assumed.
REQUEST_COST = 256


def route_cost(prefill_tokens: int, uncached_tokens: int, num_requests: int) -> int:
    """Returns the cost of a request on an engine, in tokens of prefill.

    Args:
        prefill_tokens: tokens that the engine has yet to prefill: the request waits for them.
        uncached_tokens: tokens of the prompt that the engine would compute: the request and all
            others wait for them, so they count twice.
        num_requests: sequences of the engine: each adds a row to every later step.
    """
    return prefill_tokens + 2 * uncached_tokens + REQUEST_COST * num_requests
