"""Measures how a plan gets to another host and a result back: over the stream of the Ray executor
(`aioinfer.ipc.host_link`) and over Ray's compiled graphs, between two Ray nodes on this machine, in
microseconds.

Both echo: the driver, on an asyncio loop, sends so many bytes, an actor on the other node answers
with 512. They take turns, round by round; printed are the medians of a round trip and the driver's
own CPU time in it, and the median ratio of a round.

    python scripts/bench_host_link.py [--bytes 2000] [--steps 500] [--rounds 5]
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

import ray
import uvloop
from ray.cluster_utils import Cluster
from ray.dag import InputNode
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from aioinfer.ipc.host_link import FrameKind, HostLink, HostListener, connect_to_driver

ANSWER = bytes(512)


class Echo:
    """The actor on the other node."""

    def answer(self, message: bytes) -> bytes:
        """Answers in a compiled graph."""
        return ANSWER

    def serve(self, address: tuple[str, int], secret: bytes) -> None:
        """Answers over a stream until the driver closes it."""
        asyncio.run(answer_frames(address, secret))


async def answer_frames(address: tuple[str, int], secret: bytes) -> None:
    """Answers each frame until the driver closes the stream."""
    over = asyncio.Event()
    connection = await connect_to_driver(address, secret, 0)
    link = HostLink(
        connection,
        lambda *frame: link.send(FrameKind.RESULT, 0, [memoryview(ANSWER)]),
        lambda reason: over.set(),
    )
    await over.wait()


async def measure(exchange: Callable[[], Awaitable[None]], steps: int) -> tuple[float, float]:
    """Returns the medians of a round trip and the CPU time per round trip, in microseconds."""
    times = []
    cpu = time.process_time()
    for _ in range(steps):
        began = time.perf_counter()
        await exchange()
        times.append(time.perf_counter() - began)
    return 1e6 * statistics.median(times), 1e6 * (time.process_time() - cpu) / steps


async def compare(actors: list[Any], options: argparse.Namespace) -> None:
    """Takes turns between both ways, and prints."""
    message = bytes(options.bytes)
    secret = secrets.token_bytes(32)
    listener = HostListener(ray.util.get_node_ip_address(), secret, 1)
    serving = actors[0].serve.remote(listener.address, secret)
    (connection,) = (await listener.wait()).values()
    answered = asyncio.Event()
    link = HostLink(connection, lambda *frame: answered.set(), print)
    with InputNode() as given:
        graph = actors[1].answer.bind(given).experimental_compile(enable_asyncio=True)

    async def over_stream() -> None:
        answered.clear()
        link.send(FrameKind.PLAN, 0, [memoryview(message)])
        await answered.wait()

    async def over_graph() -> None:
        future = await graph.execute_async(message)
        await future

    ways = {"stream": over_stream, "compiled graph": over_graph}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for number in range(options.rounds + 1):
        for name, way in ways.items():
            figures = await measure(way, options.steps)
            if number:  # the first warms up
                found[name].append(figures)
    for name, all_figures in found.items():
        trip, cpu = (statistics.median(each) for each in zip(*all_figures, strict=True))
        print(f"{name:15} round trip {trip:8.0f} us, CPU of the driver {cpu:8.0f} us")
    pairs = zip(*found.values(), strict=True)
    ratio = statistics.median(graph[0] / stream[0] for stream, graph in pairs)
    print(f"compiled graph / stream: {ratio:.2f}")
    link.close()
    graph.teardown()
    ray.get(serving)


def main() -> None:
    """Starts a cluster of two nodes, and ends it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--bytes", type=int, default=2000, help="of a plan")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    try:
        other = cluster.add_node(num_cpus=2)
        ray.init(cluster.address, log_to_driver=False)
        there = NodeAffinitySchedulingStrategy(other.node_id, soft=False)
        remote: Any = ray.remote
        actor = remote(num_cpus=1, scheduling_strategy=there)(Echo)
        actors = [actor.remote(), actor.remote()]
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(compare(actors, options))
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
