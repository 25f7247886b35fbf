"""Rendezvous of the hosts on which torchrun has started processes, and the agent in the first
process of each host but the leader's (`torchrun`).

They meet in torchrun's own store, at MASTER_ADDR and MASTER_PORT: each host says that it is there,
and rank 0, the leader, says where it listens, on which host each rank is, and a secret of this
start. Behind that everything is as with Ray: a stream to each host (`ipc.host_link`), whose sides
prove that they know the secret, and an agent there (`host_agent`).

The store has no authentication, so the secret keeps out only clients that cannot reach torchrun's
port. Nothing is lost by that: torchrun itself unpickles what it finds in its store
(`torch.distributed.elastic.rendezvous`, backend c10d), so whoever reaches that port can already run
code on every host. What is read here is JSON.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from aioinfer.config import Config
from aioinfer.errors import AioinferError, ConfigError, EngineDeadError
from aioinfer.executor.host_agent import HostAgent
from aioinfer.executor.remote_host import open_store
from aioinfer.executor.torchrun_rendezvous import JOIN_TIMEOUT_S, ProcessRendezvous, TorchrunPlace
from aioinfer.executor.worker_executor import parallel_groups
from aioinfer.ipc.host_link import HostListener, LinkError
from aioinfer.ipc.placement import RankSpec, place_on_hosts

_POLL_S = 0.1
_CONNECT_TIMEOUT_S = 60.0  # from the leader's message until all hosts have connected to it
_LEADER = "leader"
#: Sections of the configuration that the ranks read.
_SECTIONS = ("model", "cache", "scheduler", "parallel", "pooling")


class _TorchrunStore:
    """Torchrun's store, of which only this start's part is read: messages in JSON, by name.

    `read` raises `EngineDeadError` if torchrun is gone or nothing comes, and returns None once
    `cancelled` is set.
    """

    def __init__(self, place: TorchrunPlace):
        from torch.distributed import PrefixStore, TCPStore

        # torchrun keeps the store itself unless that was switched off; then rank 0 does
        is_own = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        try:
            store = TCPStore(
                place.address,
                int(place.port),
                is_master=is_own and place.rank == 0,
                wait_for_workers=False,
                timeout=timedelta(seconds=JOIN_TIMEOUT_S),
            )
        except RuntimeError as error:
            raise EngineDeadError(f"torchrun's store cannot be reached: {error}") from error
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._store = PrefixStore(f"aioinfer/{start}", store)
        self.cancelled = threading.Event()

    def write(self, key: str, /, **values: Any) -> None:
        self._store.set(key, json.dumps(values))

    def read(self, key: str, whom: str) -> dict[str, Any] | None:
        deadline = time.monotonic() + JOIN_TIMEOUT_S
        try:
            while not self._store.check([key]):
                if self.cancelled.wait(_POLL_S):
                    return None
                if time.monotonic() > deadline:
                    raise EngineDeadError(f"{whom} has not come within {JOIN_TIMEOUT_S:g} s")
            found: dict[str, Any] = json.loads(self._store.get(key))
        except RuntimeError as error:
            raise EngineDeadError(f"torchrun's store was lost: {error}") from error
        return found


def config_digest(config: Config) -> str:
    """Returns a digest of the parts of a configuration that the ranks read: it has to be the same
    on all hosts, since each reads its own file."""
    sections = [dataclasses.asdict(getattr(config, name)) for name in _SECTIONS]
    return hashlib.sha256(repr(sections).encode()).hexdigest()


class HostRendezvous:
    """The leader's side: waits for the other hosts, tells them their part, and connects them."""

    def __init__(self, config: Config, place: TorchrunPlace):
        self._config, self._place = config, place
        self._store: _TorchrunStore | None = None
        self._listener: HostListener | None = None
        self._world_store: Any = None
        self._is_cancelled = False

    async def gather(
        self, groups: Sequence[tuple[str, int]]
    ) -> tuple[list[RankSpec], list[tuple[str, list[int], socket.socket]]]:
        """Returns the places of all ranks, and the other hosts: the name of each in errors, its
        ranks, and a connection to its agent.

        Raises:
            ConfigError: the hosts' configurations differ, or a tensor-parallel group of GPUs is on
                several hosts.
            EngineDeadError: a host has not come.
        """
        hosts = await asyncio.to_thread(self._wait_for_hosts)
        host_of = [number for number, host in enumerate(hosts) for _ in range(host["size"])]
        _check_groups(self._config, host_of)
        address = _own_address(self._place)
        self._world_store, port = await asyncio.to_thread(open_store, address)
        places = place_on_hosts(groups, host_of, (address, port))
        secret = secrets.token_bytes(32)
        self._listener = HostListener(address, secret, len(hosts) - 1)
        assert self._store is not None
        self._store.write(
            _LEADER, address=self._listener.address, secret=secret.hex(), hosts=host_of,
            master=[address, port],
        )  # fmt: skip
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                connections = await self._listener.wait()
        except TimeoutError:
            raise EngineDeadError(
                f"not all hosts have connected to {address} within {_CONNECT_TIMEOUT_S:g} s"
            ) from None
        names = [f"host {number} ({host['name']})" for number, host in enumerate(hosts)]
        ranks = [
            [rank for rank, host in enumerate(host_of) if host == n] for n in range(len(hosts))
        ]
        return places, [(names[n], ranks[n], connections[n - 1]) for n in range(1, len(hosts))]

    def _wait_for_hosts(self) -> list[dict[str, Any]]:
        """Returns the message of each host about itself; runs in a thread."""
        self._store = store = _TorchrunStore(self._place)
        if self._is_cancelled:
            store.cancelled.set()
        own = config_digest(self._config)
        hosts = [{"name": socket.gethostname(), "size": self._place.local_size}]
        for number in range(1, self._place.num_hosts):
            host = store.read(f"host{number}", f"torchrun's host {number}")
            if host is None:
                raise EngineDeadError("the start was cancelled")
            if "error" in host:
                raise EngineDeadError(f"host {number} ({host['name']}): {host['error']}")
            if host["config"] != own:
                raise ConfigError(
                    f"host {number} ({host['name']}) has another configuration than rank 0's: "
                    f"the sections {', '.join(_SECTIONS)} have to be the same on all hosts"
                )
            hosts.append(host)
        return hosts

    def cancel(self) -> None:
        """Makes `gather` stop waiting."""
        self._is_cancelled = True
        if self._store is not None:
            self._store.cancelled.set()

    def close(self) -> None:
        """Ends the rendezvous. Safe to call twice."""
        self.cancel()
        if self._listener is not None:
            self._listener.close()
        self._world_store = None


def _check_groups(config: Config, host_of: Sequence[int]) -> None:
    """Raises `ConfigError` if GPUs of several hosts would sum over ranks: they do so through each
    other's memory. On CPUs a group may be divided."""
    import torch

    size = config.parallel.tensor_parallel_size
    groups = [set(host_of[first : first + size]) for first in range(0, len(host_of), size)]
    uses_gpus = config.parallel.device_type != "cpu" and torch.cuda.is_available()
    if uses_gpus and any(len(group) > 1 for group in groups):
        raise ConfigError(
            f"parallel.tensor_parallel_size = {size} would divide a group of GPUs between hosts: "
            "set it to the ranks of a host or a divisor of them, and "
            "parallel.pipeline_parallel_size to the rest"
        )


def _own_address(place: TorchrunPlace) -> str:
    """Returns the address at which the other hosts reach this one: torchrun's. Raises
    `ConfigError`."""
    try:
        found = socket.getaddrinfo(place.address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(found[0], socket.SOCK_STREAM) as probe:
            probe.bind(found[4])
    except OSError as error:
        raise ConfigError(
            f"torchrun's address {place.address} is none of rank 0's host ({error}): name it by "
            "--master-addr, or with --rdzv-backend c10d by --local-addr"
        ) from error
    return str(found[4][0])


def serve_host(config: Config, place: TorchrunPlace, find: Callable[[Config], Path]) -> None:
    """Serves the leader as the agent of this host, until the leader ends it. Called in the process
    of the host's first rank.

    Raises:
        ConfigError: the model is not on this host.
        EngineDeadError: the leader has not come, or ended otherwise than in order.
    """
    store, key = _TorchrunStore(place), f"host{place.host}"
    name = socket.gethostname()
    try:
        folder = find(config)
    except AioinferError as error:
        store.write(key, name=name, error=str(error))
        raise
    store.write(key, name=name, size=place.local_size, config=config_digest(config))
    told = store.read(_LEADER, "rank 0")
    assert told is not None
    # as with workers: the leader lets running requests finish, and then ends this
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    places = place_on_hosts(parallel_groups(config), told["hosts"], tuple(told["master"]))
    own = places[place.rank : place.rank + place.local_size]
    rendezvous, failures = ProcessRendezvous(place), list[Exception]()

    def serve() -> None:
        agent = HostAgent(config, folder, 0, own, launch=rendezvous.launch)
        address, secret = tuple(told["address"]), bytes.fromhex(told["secret"])
        try:
            asyncio.run(agent.run(address, secret, place.host - 1))
            if agent.is_killed:
                raise EngineDeadError("rank 0, or a rank of this host, was lost")
        except LinkError as error:
            failures.append(EngineDeadError(str(error)))
        except Exception as error:
            failures.append(error)

    # a loop may run in this thread, which waits here
    thread = threading.Thread(target=serve, name="aioinfer-agent")
    thread.start()
    try:
        thread.join()
    finally:
        rendezvous.cancel()
        rendezvous.close()
    if failures:
        raise failures[0]
