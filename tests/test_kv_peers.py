"""KV blocks that one server reads from another: what comes is what was there, and whatever goes
wrong is a block that is missing."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from aioinfer.errors import ConfigError
from aioinfer.ipc import nixl_link, peer_link
from aioinfer.ipc.kv_spec import AttentionSpec, KVGroup
from aioinfer.ipc.peer_link import PeerError, PeerLink, read_key
from aioinfer.worker import kv_peers
from aioinfer.worker.host_blocks import HostBlocks, make_host_blocks
from aioinfer.worker.kv_peers import PeerConnector
from aioinfer.worker.kv_tensors import KVTensors

KEY, MODEL = b"k" * 32, b"m" * 16
GROUPS = (KVGroup(AttentionSpec(1, 64), (0,)), KVGroup(AttentionSpec(2, 64, window=8), (1,)))
NAMES = [bytes([number]) * 16 for number in range(64)]


def make_host(*, shared: bool = False, places: int = 64) -> HostBlocks:
    kv = KVTensors(GROUPS, (4, 4), 16, torch.float32, torch.device("cpu"))
    host = make_host_blocks(kv, places * kv.nbytes // 4, shared=shared)
    for group in host.groups:
        group.zero_()
    return host


def free_address() -> tuple[str, int]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[:2]


class Pair:
    """A server whose host has a block of ones in place 0 of each group, and so on, and a reader."""

    def __init__(self) -> None:
        self.address = free_address()
        self.there, self.here = make_host(shared=True), make_host(shared=True)
        self.server = PeerConnector(self.there, KEY, lambda: self.model, self.address)
        self.reader = PeerConnector(self.here, KEY, lambda: self.model, None)
        for number, name in enumerate(NAMES):
            for group in (0, 1):
                self.there.groups[group][number].fill_(number + 1)
                self.server.save(group, number, name, lambda: None)

    is_near = False
    model = MODEL

    def read(self, count: int = 40, group: int = 0, address: str | None = None) -> int:
        """Reads blocks into places from 10 on; returns how many came."""
        blocks = [(group, 10 + number, NAMES[number]) for number in range(count)]
        source = address or "{}:{}".format(*self.address)
        self.reader.read(1, blocks, lambda: None, source)
        ended: list[tuple[int, int]] = []
        ends = time.monotonic() + 20
        while not ended:
            assert time.monotonic() < ends
            ended = self.reader.take_read(1.0)
        return ended[0][1]

    def has(self, count: int, group: int = 0) -> bool:
        expected = torch.arange(1, count + 1, dtype=torch.uint8)
        return bool((self.here.groups[group][10 : 10 + count] == expected[:, None]).all())


def only_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without NIXL."""
    monkeypatch.setattr(peer_link, "unix_name", lambda address: "\0aioinfer-kv nowhere")
    monkeypatch.setattr(nixl_link, "PACKAGES", ())


@pytest.fixture(params=["near", "far"])
def pair(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    if request.param == "far":
        only_tcp(monkeypatch)
    found = Pair()
    found.is_near = request.param == "near"
    yield found
    found.reader.close()
    found.server.close()


def test_blocks_of_all_groups_come_as_they_are(pair: Pair) -> None:
    for group in (0, 1, 0):
        pair.here.groups[group].zero_()
        assert pair.read(40, group) == 40
        assert pair.has(40, group)
    links = next(iter(pair.reader._links.values()))
    assert len(links) <= kv_peers._READERS, "connections are used again"
    assert {link.is_shared for link in links} == {pair.is_near}
    assert {link.channel for link in links} == {None}


def test_nothing_counts_behind_a_missing_block(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_peers, "_MAX_WAIT_S", 0.05)
    pair.server.delete(0, NAMES[21])
    assert pair.read(40) == 21
    assert pair.has(21)
    pair.server.delete(-1, bytes(16))
    assert pair.read(1) == 0


def test_a_block_that_is_about_to_be_saved_is_waited_for(pair: Pair) -> None:
    pair.server.delete(0, NAMES[3])
    saved = threading.Event()

    def save() -> None:
        pair.server.save(0, 3, NAMES[3], lambda: saved.wait(10) and None)
        time.sleep(0.1)
        saved.set()

    threading.Timer(0.1, save).start()
    assert pair.read(8) == 8
    assert saved.is_set()


def test_a_place_that_gets_another_block_meanwhile_is_a_miss(pair: Pair) -> None:
    """The block is overwritten when its bytes have been found, and before the reader has them."""
    original = pair.server._index.is_whole
    seen: list[int] = []

    def overwrite(group: int, place: int, version: int) -> bool:
        if place == 5 and seen.count(5):
            pair.there.overwrite(0, 5)
        seen.append(place)
        return original(group, place, version)

    pair.server._index.is_whole = overwrite  # called when found, and when sent
    assert pair.read(16) == 5


def test_a_place_has_one_block(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_peers, "_MAX_WAIT_S", 0.05)
    pair.there.overwrite(0, 0)
    pair.server.save(0, 0, b"x" * 16, lambda: None)
    assert (0, NAMES[0]) not in pair.server._index._blocks
    assert pair.read(1) == 0


@pytest.mark.parametrize(("key", "model"), [(b"other" * 8, MODEL), (KEY, b"o" * 16)])
def test_another_key_or_model_is_sent_away(pair: Pair, key: bytes, model: bytes) -> None:
    with pytest.raises(PeerError):
        PeerLink(pair.address, key, model)
    assert pair.read(1) == 1


def test_a_server_with_another_key_is_not_believed(pair: Pair) -> None:
    pair.server._server._key = b"other" * 8
    with pytest.raises(PeerError, match=r"connection ended|does not know"):
        PeerLink(pair.address, KEY, MODEL)


def test_a_lost_server_is_a_miss_and_is_not_asked_for_a_while(pair: Pair) -> None:
    assert pair.read(4) == 4
    pair.server.close()
    for link in next(iter(pair.reader._links.values())):
        link._connection.shutdown(socket.SHUT_RDWR)
    assert pair.read(4) == 0
    with socket.create_server(pair.address) as successor:
        successor.setblocking(False)
        assert pair.read(4) == 0
        with pytest.raises(BlockingIOError):
            successor.accept()


def test_new_weights_while_a_block_is_waited_for(pair: Pair) -> None:
    def change() -> None:
        time.sleep(0.2)
        pair.model = b"n" * 16
        pair.server.delete(-1, bytes(16))
        pair.server.save(0, 0, NAMES[0], lambda: None)

    pair.server.delete(0, NAMES[0])
    with ThreadPoolExecutor() as pool:
        pool.submit(change)
        assert pair.read(1) == 0


def test_new_weights_end_connections_and_are_not_mixed_with_old_ones(pair: Pair) -> None:
    """One side has them first: until the other has them, too, nothing is read."""
    assert pair.read(4) == 4
    pair.model = b"n" * 16
    pair.server.delete(-1, bytes(16))
    pair.server.save(0, 0, NAMES[0], lambda: None)
    assert pair.read(1) == 0
    pair.reader.delete(-1, bytes(16))
    pair.reader._paused.clear()
    assert pair.read(1) == 1


@pytest.mark.parametrize("address", ["127.0.0.1:65535", "nowhere.invalid:1", "\0:1", "x", ":1"])
def test_an_address_that_cannot_be_is_a_miss(pair: Pair, address: str) -> None:
    pair.reader._rank = 1
    assert pair.read(4, address=address) == 0


def test_a_long_read_has_many_parts(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_peers, "_MIN_PART", 2)
    monkeypatch.setattr(kv_peers, "_MAX_PART", 3)
    assert pair.read(40) == 40
    assert pair.has(40)


def test_an_ended_connection_is_opened_again(pair: Pair) -> None:
    assert pair.read(4) == 4
    for link in next(iter(pair.reader._links.values())):
        link._connection.shutdown(socket.SHUT_RDWR)
    assert pair.read(4) == 4


def test_nonsense_is_cut_off(pair: Pair) -> None:
    def is_cut_off(data: bytes) -> bool:
        link = PeerLink(pair.address, KEY, MODEL)
        with contextlib.closing(link), contextlib.suppress(OSError):
            link._connection.sendall(data)
            return link._connection.recv(1) == b""
        return True

    assert is_cut_off(struct.pack("=I", peer_link.MAX_BLOCKS + 1))
    assert is_cut_off(struct.pack("=I", 0))
    assert is_cut_off(struct.pack("=II16s", 1, 2, b"x"))  # there is no group 2
    assert pair.read(4) == 4


def test_a_silent_server_costs_a_few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """It accepts and answers nothing; or less than the block."""
    monkeypatch.setattr(peer_link, "STALL_S", 0.2)
    only_tcp(monkeypatch)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        pair = Pair()
        began = time.monotonic()
        assert pair.read(40, address=f"127.0.0.1:{silent.getsockname()[1]}") == 0
        assert time.monotonic() - began < 5
        pair.reader.close()
        pair.server.close()


def test_a_server_that_dies_in_mid_transfer_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    only_tcp(monkeypatch)
    pair = Pair()
    sent = threading.Event()
    send = kv_peers.send_head

    def die(connection: socket.socket, *, is_there: bool, value: int) -> None:
        if sent.is_set():
            connection.shutdown(socket.SHUT_RDWR)
        sent.set()
        send(connection, is_there=is_there, value=value)

    monkeypatch.setattr(kv_peers, "send_head", die)
    assert pair.read(8) == 0
    pair.reader.close()
    pair.server.close()


def serve_blocks(connection: Connection, heads: int) -> None:
    """Runs in a process of its own: serves the blocks of a `Pair` until the process is killed,
    which it does itself before it has sent so many heads."""
    pair, send = Pair(), kv_peers.send_head

    def count(peer: socket.socket, *, is_there: bool, value: int) -> None:
        nonlocal heads
        heads -= 1
        if not heads:
            os.kill(os.getpid(), signal.SIGKILL)
        send(peer, is_there=is_there, value=value)

    kv_peers.send_head = count
    connection.send(pair.address)
    time.sleep(600)


@pytest.mark.parametrize(
    ("pair", "heads"), [("far", 1), ("near", 23), ("far", 10_000)], indirect=["pair"]
)
def test_a_server_that_is_killed_in_mid_transfer_is_a_miss(pair: Pair, heads: int) -> None:
    """What has come before counts only if its part is whole, and is what was there."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve_blocks, args=(theirs, heads))
    process.start()
    try:
        address = "{}:{}".format(*ours.recv())
        count = pair.read(40, address=address)
        assert count == 40 if heads > 40 else count <= heads
        assert pair.has(count)
        if heads <= 40:
            process.join(20)
            assert process.exitcode == -signal.SIGKILL
    finally:
        process.kill()
        process.join()
    if heads > 40:  # connections of before
        pair.here.groups[0].zero_()
        assert pair.read(40, address=address) == 0
    assert pair.read(40) == 40, "of another server"
    assert pair.has(40)


def test_a_closed_server_has_no_threads_and_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also not for the readers that are connected: they are cut off."""
    for is_near in (True, False):
        before = set(threading.enumerate())
        pair = Pair()
        link = PeerLink(pair.address, KEY, MODEL)
        assert link.is_shared == is_near
        assert pair.read(4) == 4
        pair.server.close()
        pair.reader.close()
        assert set(threading.enumerate()) == before
        assert link._connection.recv(1) == b""
        link.close()
        PeerConnector(pair.there, KEY, lambda: MODEL, pair.address).close()
        only_tcp(monkeypatch)


def test_a_listener_survives_a_shortage_of_descriptors(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`accept` fails for a while; the next reader is served all the same."""
    failures = iter([OSError(24, "Too many open files")] * 3)
    accept = socket.socket.accept

    def fail(listener: socket.socket) -> tuple[socket.socket, object]:
        found = accept(listener)
        if (error := next(failures, None)) is not None:
            found[0].close()
            raise error
        return found

    monkeypatch.setattr(socket.socket, "accept", fail)
    counts = []
    for _ in range(6):
        pair.reader._close_links()
        pair.reader._paused.clear()
        counts.append(pair.read(4))
    assert 0 in counts
    assert counts[-1] == 4


def test_a_key_has_to_be_there_and_long(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_key(str(tmp_path / "none"))
    (tmp_path / "short").write_text("abc\n")
    with pytest.raises(ConfigError, match="16 bytes"):
        read_key(str(tmp_path / "short"))
    (tmp_path / "key").write_text("0123456789abcdef\n")
    assert read_key(str(tmp_path / "key")) == b"0123456789abcdef"
