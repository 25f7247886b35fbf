"""Replicas and gateways on a Ray cluster of three nodes, all of which are this machine: several
gateways, replicas that are added and removed by the load, and that nothing of Ray is left."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

import psutil
import pytest
from yarl import URL

from tests.functional.test_lifecycle import events
from tests.functional.test_serve import SETTINGS, Driver, text
from tests.gpu.random_models import random_model
from tests.serve_cluster_driver import NODES
from tests.test_torchrun import free_port

#: Ray takes a minute to start on a machine that does other work.
pytestmark = [pytest.mark.extended, pytest.mark.timeout(400)]
_SCALING_S = 90.0


def wait_until_ready(url: URL) -> None:
    """Returns when a gateway has found a replica: it asks for them each second."""
    deadline = time.monotonic() + 30
    while True:
        connection = HTTPConnection(url.host or "", url.port or 0, timeout=10)
        connection.request("GET", "/health/ready")
        status = connection.getresponse().status
        connection.close()
        if status == 200:
            return
        assert time.monotonic() < deadline
        time.sleep(0.1)


class Cluster(Driver):
    """The process that deploys, and a client of its gateways in turn."""

    def __init__(self, folder: Path) -> None:
        # the last value of a key counts
        settings = [*SETTINGS, "scheduler.max_num_seqs=4", f"server.port={free_port()}"]
        super().__init__("tests.serve_cluster_driver", folder, settings)
        try:
            self.urls = [URL(url) for url in self.read().split()]
            for url in self.urls:
                wait_until_ready(url)
        except BaseException:
            self.close()
            raise

    def replica_nodes(self) -> list[str]:
        return self.ask("").split()

    def wait_for_replicas(self, count: int) -> list[str]:
        """Returns the nodes of the replicas, once so many run."""
        deadline = time.monotonic() + _SCALING_S
        while len(nodes := self.replica_nodes()) != count:
            assert time.monotonic() < deadline, nodes
            time.sleep(0.5)
        return nodes

    def complete(self, url: URL, prompt: list[int], max_tokens: int, **body: Any) -> HTTPResponse:
        connection = HTTPConnection(url.host or "", url.port or 0, timeout=60)
        usual = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        headers = {"Content-Type": "application/json", "Connection": "close"}
        connection.request("POST", "/v1/completions", json.dumps(usual | body), headers)
        response = connection.getresponse()
        assert response.status == 200, response.read()
        return response

    def close(self) -> list[str]:
        """Has the process take everything down, and returns the command lines of what is left."""
        children = psutil.Process(self.popen.pid).children(recursive=True)
        assert self.popen.stdin is not None
        assert self.popen.stdout is not None
        self.popen.stdin.close()
        try:
            self.popen.wait(120)
        finally:
            self.popen.stdout.close()
            if self.popen.poll() is None:
                self.popen.kill()
            _, left = psutil.wait_procs(children, timeout=30)
        lines = [" ".join(process.cmdline()) for process in left]
        for process in left:
            process.kill()
        return lines


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = random_model(
        tmp_path_factory.mktemp("model"), vocab_size=512, max_position_embeddings=8192
    )
    cluster = Cluster(folder)
    yield cluster
    assert cluster.close() == []


def test_gateways_on_several_nodes(cluster: Cluster) -> None:
    """They listen on two nodes at one port; each knows of the prefixes that came by the other."""
    assert len({url.host for url in cluster.urls}) == 2
    assert {url.host for url in cluster.urls} <= set(NODES)
    assert len({url.port for url in cluster.urls}) == 1
    prompt = text(9, 320)
    texts = []
    for url in cluster.urls:
        reply = json.loads(cluster.complete(url, prompt, 8).read())
        texts.append(reply["choices"][0]["text"])
        time.sleep(0.5)  # until the replica's report has come
    assert texts[0] == texts[1]
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] > 300


def test_replicas_follow_the_load(cluster: Cluster) -> None:
    """From one to three, on both nodes that have room, and back to one; no request fails."""
    assert len(cluster.replica_nodes()) == 1
    stop, failures, answered = threading.Event(), list[str](), Counter[str]()

    def ask(client: int) -> None:
        for number in itertools.count():
            if stop.is_set():
                return
            url = cluster.urls[(client + number) % 2]
            try:
                response = cluster.complete(url, text(client * 31 + number, 40), 200, stream=True)
                *_, done = events(response)
                assert done == "[DONE]"
                answered[response.headers["X-Aioinfer-Replica"]] += 1
            except Exception as error:  # whatever it is, the test reports it
                failures.append(repr(error))

    clients = [threading.Thread(target=ask, args=(client,)) for client in range(8)]
    for client in clients:
        client.start()
    try:
        nodes = cluster.wait_for_replicas(3)
        deadline = time.monotonic() + 30
        while len(answered) < 3 and not failures and time.monotonic() < deadline:
            time.sleep(0.1)
    finally:
        stop.set()
        for client in clients:
            client.join()
    assert failures == []
    assert set(nodes) == {address for address, cpus in NODES.items() if cpus}
    assert len(answered) == 3
    cluster.wait_for_replicas(1)
    for url in cluster.urls:
        reply = json.loads(cluster.complete(url, text(3, 20), 4).read())
        assert reply["usage"]["completion_tokens"] == 4
