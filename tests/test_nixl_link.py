"""KV blocks that one server reads from another over NIXL: what comes is what was there, and
whatever goes wrong is a block that comes by plain TCP or is missing. UCX uses its software over TCP
here, in the place of RDMA."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from aioinfer.ipc import nixl_link, peer_link
from aioinfer.ipc.nixl_link import NixlChannel
from aioinfer.ipc.peer_link import PeerLink
from aioinfer.worker import kv_peers
from tests.test_kv_peers import KEY, MODEL, NAMES, Pair

pytestmark = pytest.mark.slow


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    monkeypatch.setattr(peer_link, "unix_name", lambda address: "\0aioinfer-kv nowhere")
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setattr(nixl_link, "has_rdma", lambda: True)
    found = Pair()
    yield found
    found.reader.close()
    found.server.close()


def channels(pair: Pair) -> list[NixlChannel | None]:
    return [link.channel for links in pair.reader._links.values() for link in links]


def process_of(connector: kv_peers.PeerConnector) -> int:
    """Returns the process that has NIXL's agent."""
    process = connector._nixl._process
    assert process is not None
    assert process.poll() is None
    return process.pid


def test_blocks_of_all_groups_come_as_they_are(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_link, "_TRANSFER_BYTES", 3 * len(pair.there.bytes_of(0, 0)))
    for group in (0, 1, 0):
        pair.here.groups[group].zero_()
        assert pair.read(40, group) == 40
        assert pair.has(40, group)
        assert not pair.here.groups[group][:10].any()
        assert not pair.here.groups[group][50:].any()
    assert channels(pair)
    assert None not in channels(pair)
    processes = [process_of(each) for each in (pair.server, pair.reader)]
    # missing blocks, and new weights
    monkeypatch.setattr(kv_peers, "_MAX_WAIT_S", 0.05)
    pair.server.delete(0, NAMES[21])
    assert pair.read(40) == 21
    pair.model = b"n" * 16
    for each in (pair.server, pair.reader):
        each.delete(-1, bytes(16))
    assert pair.read(1) == 0
    pair.server.save(0, 0, NAMES[0], lambda: None)
    assert pair.read(1) == 1
    assert None not in channels(pair)
    assert processes == [process_of(each) for each in (pair.server, pair.reader)], "once each"
    pair.reader.close()
    with pytest.raises(ProcessLookupError):
        os.kill(processes[1], 0)


def test_a_place_that_gets_another_block_meanwhile_is_a_miss(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = NixlChannel.read

    def overwrite(channel: NixlChannel, *args: object) -> None:
        pair.there.overwrite(0, 5)
        pair.there.groups[0][5].fill_(99)
        read(channel, *args)

    monkeypatch.setattr(NixlChannel, "read", overwrite)
    assert pair.read(16) == 5
    assert pair.has(5)
    assert bool((pair.here.groups[0][15] == 99).all()), "it was read"


def test_a_stalled_transfer_is_given_up_and_writes_nothing_later(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest comes by plain TCP."""
    assert pair.read(4) == 4
    monkeypatch.setattr(nixl_link, "STALL_S", 0.5)
    for links in pair.reader._links.values():
        for link in links:
            link.channel._connection.settimeout(0.5)
    stopped, reading = process_of(pair.server), process_of(pair.reader)
    os.kill(stopped, signal.SIGSTOP)
    try:
        assert pair.read(40) == 40
    finally:
        pair.here.groups[0].zero_()
        os.kill(stopped, signal.SIGCONT)
    with pytest.raises(ProcessLookupError):
        os.kill(reading, 0)
    assert None in channels(pair)
    time.sleep(0.5)
    assert not pair.here.groups[0].any()
    assert pair.read(40) == 40
    assert pair.has(40)


def test_a_process_of_nixl_that_is_lost_is_started_again(pair: Pair) -> None:
    for connector in (pair.server, pair.reader):
        assert pair.read(40) == 40
        assert None not in channels(pair)
        os.kill(process_of(connector), signal.SIGKILL)
        connector._nixl._process.wait()
        pair.here.groups[0].zero_()
        assert pair.read(40) == 40, "by plain TCP"
        assert pair.has(40)
        pair.reader._plain.clear()
        pair.reader._close_links()


@pytest.mark.parametrize("broken", ["server", "reader"])
def test_a_side_whose_memory_cannot_be_registered_uses_tcp(
    pair: Pair, broken: str, tmp_path: Path
) -> None:
    nixl = getattr(pair, broken)._nixl
    folder = os.open(tmp_path, os.O_RDONLY)
    nixl._descriptors = (*nixl._descriptors, folder)
    try:
        assert pair.read(40) == 40
        assert nixl.offer() == b""
    finally:
        os.close(folder)
    assert pair.has(40)
    assert set(channels(pair)) == {None}


def test_ucx_without_a_transport_uses_tcp(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "none_of_these")
    assert pair.read(40) == 40
    assert pair.has(40)
    assert set(channels(pair)) == {None}


def test_nonsense_and_strangers_get_nothing(pair: Pair) -> None:
    with contextlib.closing(PeerLink(pair.address, KEY, MODEL, pair.reader._nixl)) as link:
        channel = link.channel
        assert channel is not None
        out = pair.here.bytes_of(0, 0)
        for group, first in ((2, 0), (0, 64 * len(out)), (1, 1 << 40)):
            with pytest.raises(peer_link.PeerError, match="beyond"):
                channel.read([(group, first, out)], time.monotonic() + 5)
    with pytest.raises(peer_link.PeerError):
        pair.reader._nixl.connect(b"\0\0\0\1nonsense")
    assert pair.read(4) == 4


def test_hosts_without_rdma_or_the_package_use_tcp(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def offers() -> bool:
        bases = [memory.data_ptr() for memory in pair.here.groups]
        link = nixl_link.NixlLink(pair.here.descriptors, bases)
        with contextlib.closing(link):
            return link.offer() != b""

    assert offers()
    monkeypatch.undo()
    for devices in (tmp_path / "none", tmp_path):
        monkeypatch.setattr(nixl_link, "_RDMA_DEVICES", devices)
        assert not offers()
    (tmp_path / "mlx5_0").mkdir()
    assert offers()
    monkeypatch.setattr(nixl_link, "PACKAGES", ())
    assert not offers()


def serve_blocks(connection: Connection) -> None:
    """Runs in a process of its own: serves the blocks of a `Pair`, and says which process has the
    agent, once there is one."""
    nixl_link.has_rdma = lambda: True
    pair = Pair()
    connection.send(pair.address)
    while not pair.server._nixl.offer():
        time.sleep(0.01)
    connection.send(process_of(pair.server))
    time.sleep(600)


def test_a_server_that_is_killed_in_mid_transfer_is_a_miss(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=serve_blocks, args=(theirs,))
    server.start()
    try:
        address, agent = "{}:{}".format(*ours.recv()), ours.recv()
        assert pair.read(40, address=address) == 40
        assert None not in channels(pair)
        os.kill(agent, signal.SIGSTOP)
        asked, ask = threading.Event(), NixlChannel._ask

        def note(channel: NixlChannel, data: bytes) -> None:
            asked.set()
            ask(channel, data)

        monkeypatch.setattr(NixlChannel, "_ask", note)

        def kill() -> None:
            asked.wait(20)
            time.sleep(0.2)
            server.kill()
            os.kill(agent, signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        pair.here.groups[0].zero_()
        assert pair.read(40, address=address) == 0
        killer.join()
    finally:
        server.kill()
        server.join()
    assert pair.read(40) == 40, "of another server"
    assert pair.has(40)
