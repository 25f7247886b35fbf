"""The ring: every reader gets every message in order, a full ring is refused, and nothing is left
behind."""

from __future__ import annotations

import gc
import multiprocessing
import os
import select
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioinfer.ipc.ring import Ring, RingFullError
from tests.waiting import new_shared_files, shared_files


def write(ring: Ring, *parts: bytes) -> None:
    ring.write([memoryview(part) for part in parts])


def read_all(ring: Ring, reader: int = 0) -> list[bytes]:
    messages = []
    for _ in range(ring.announced(reader)):
        messages.append(bytes(ring.read(reader)))
        ring.release(reader)
    return messages


def wait(ring: Ring, reader: int = 0) -> None:
    poll = select.poll()
    poll.register(ring.event_fd(reader), select.POLLIN)
    assert poll.poll(20_000)


def open_descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def ring() -> Ring:
    return Ring(1, slot_bytes=32, num_slots=12)


def test_laps_and_messages_over_many_slots(ring: Ring) -> None:
    for number in range(100):
        message = bytes([number]) * (number * 7 % (ring.max_message_bytes + 1))
        write(ring, message[:5], message[5:])
        write(ring, b"next")
        assert read_all(ring) == [message, b"next"]
    ring.close()


def test_three_of_the_longest_fit_wherever_the_lap_ends(ring: Ring) -> None:
    longest = b"x" * ring.max_message_bytes
    for _ in range(ring.num_slots):
        write(ring, b"shift")
        assert read_all(ring) == [b"shift"]
        for _ in range(3):
            write(ring, longest)
        assert read_all(ring) == [longest] * 3
    ring.close()


def test_the_event_is_set_while_messages_are_not_announced(ring: Ring) -> None:
    poll = select.poll()
    poll.register(ring.event_fd(0), select.POLLIN)
    assert poll.poll(0) == []
    write(ring, b"a")
    write(ring, b"b")
    assert poll.poll(0)
    assert ring.announced(0) == 2
    assert poll.poll(0) == []
    ring.close()


def test_a_full_ring_is_refused_and_stays_whole() -> None:
    ring = Ring(2, slot_bytes=32, num_slots=12)
    for _ in range(12):
        write(ring, b"m")
    read_all(ring, 0)
    with pytest.raises(RingFullError, match=r"reader 1 .* 12 slots, and 1 are needed"):
        write(ring, b"one more")
    assert read_all(ring, 1) == [b"m"] * 12
    write(ring, b"one more")
    assert read_all(ring, 0) == read_all(ring, 1) == [b"one more"]
    ring.close()


def test_a_message_that_is_too_long_is_refused(ring: Ring) -> None:
    with pytest.raises(RingFullError, match=rf"too long: the limit is {ring.max_message_bytes}"):
        write(ring, b"x" * (ring.max_message_bytes + 1))
    assert read_all(ring) == []
    ring.close()


def test_a_view_holds_until_its_release(ring: Ring) -> None:
    for _ in range(12):
        write(ring, b"old")
    ring.announced(0)
    view = ring.read(0)
    with pytest.raises(RingFullError):
        write(ring, b"new")
    assert view == b"old"
    ring.release(0)
    write(ring, b"new")
    ring.close()


@given(
    st.integers(1, 3), st.lists(st.one_of(st.binary(max_size=150), st.integers(0, 2)), max_size=80)
)
def test_any_sequence_of_writes_and_reads_keeps_the_order(
    readers: int, actions: list[bytes | int]
) -> None:
    """Bytes are written; a number is a reader that takes what there is.

    What a full ring refuses leaves no trace.
    """
    ring = Ring(readers, slot_bytes=16, num_slots=24)
    expected: list[deque[bytes]] = [deque() for _ in range(readers)]
    for action in actions:
        if isinstance(action, int):
            reader = action % readers
            assert read_all(ring, reader) == list(expected[reader])
            expected[reader].clear()
            continue
        try:
            write(ring, action[:10], action[10:])
        except RingFullError:
            assert len(action) > ring.max_message_bytes or any(
                sum(len(m) + 24 for m in queue) > 6 * 16 for queue in expected
            )
        else:
            for queue in expected:
                queue.append(action)
    assert [read_all(ring, reader) for reader in range(readers)] == [
        list(queue) for queue in expected
    ]
    ring.close()


def echo(plans: Ring, results: Ring) -> None:
    """A process that sends each message back, reversed, until an empty one comes."""
    while True:
        wait(plans, 1)
        for message in read_all(plans, 1):
            if not message:
                return
            write(results, message[::-1])


@pytest.mark.slow
def test_through_a_spawned_process() -> None:
    names, descriptors = shared_files(), None
    for _ in range(2):  # the first round also starts what multiprocessing keeps
        plans, results = (
            Ring(2, slot_bytes=1024, num_slots=24),
            Ring(1, slot_bytes=1024, num_slots=24),
        )
        process = multiprocessing.get_context("spawn").Process(target=echo, args=(plans, results))
        process.start()
        for number in range(1, 100):
            message = bytes(range(number)) * 60
            write(plans, message)
            assert read_all(plans, 0) == [message]
            wait(results)
            assert read_all(results) == [message[::-1]]
        write(plans)
        process.join(20)
        assert process.exitcode == 0
        process.close()
        plans.close()
        plans.close()
        results.close()
        descriptors = descriptors or open_descriptors()
    assert open_descriptors() == descriptors
    assert new_shared_files(names) == set()


def test_a_ring_without_processes_gives_its_descriptors_back() -> None:
    before = open_descriptors()
    ring = Ring(4)
    assert open_descriptors() > before
    ring.close()
    del ring
    assert open_descriptors() == before
