"""The waiting queue: its order, and that its counts follow requests that come, end and go."""

from __future__ import annotations

import pytest

from aioinfer.scheduler.request import Request, RequestStatus
from aioinfer.scheduler.waiting_queue import WaitingQueue
from tests.test_scheduler import make_request


def queued(*keys: tuple[int, int]) -> tuple[WaitingQueue, list[Request]]:
    """Returns a queue with a request of three tokens, one of them expected in the cache, for each
    key, and the requests."""
    queue, requests = WaitingQueue(), []
    for key in keys:
        request = make_request(str(key), [1, 2, 3], 4, num_expected=1)
        request.key = key
        queue.add(request)
        requests.append(request)
    return queue, requests


def counts(queue: WaitingQueue) -> tuple[int, int, int]:
    queue.check_integrity()
    return queue.num_requests, queue.num_tokens, queue.num_prefill_tokens


def test_requests_leave_in_the_order_of_their_keys() -> None:
    queue, (last, first, middle) = queued((1, 0), (0, 1), (0, 2))
    for left, request in ((2, first), (1, middle), (0, last)):
        assert queue.first() is request
        queue.pop()
        request.status = RequestStatus.RUNNING
        assert counts(queue) == (left, 3 * left, 2 * left)
    assert queue.first() is None


def test_a_request_that_ended_is_counted_out_and_never_first() -> None:
    queue, (first, second) = queued((0, 0), (0, 1))
    first.status = RequestStatus.FINISHED
    queue.drop(first)
    assert counts(queue) == (1, 3, 2)
    assert list(queue) == [second]
    assert queue.first() is second


def test_a_request_that_is_set_aside_still_counts() -> None:
    queue, (first, second) = queued((0, 0), (0, 1))
    assert queue.set_aside() is first
    assert queue.first() is second
    assert queue.num_requests == 2
    queue.put_back(first)
    assert queue.first() is first
    assert counts(queue) == (2, 6, 4)


def test_wrong_counts_are_found() -> None:
    queue, (first,) = queued((0, 0))
    first.status = RequestStatus.RUNNING
    with pytest.raises(AssertionError, match="miscounted"):
        queue.check_integrity()


@pytest.mark.parametrize("loads", [False, True])
def test_requests_that_ended_are_kept_no_longer_than_others_outnumber_them(loads: bool) -> None:
    queue, requests = queued(*((0, number) for number in range(9)))
    for request in requests[2:6]:  # behind the first
        request.status = RequestStatus.FINISHED
        queue.drop(request)
    assert len(queue._heap) == 9
    assert queue.first() is requests[0]
    if loads:
        queue.begin_load()
    else:
        queue.pop()
    # now half of the others have ended
    assert counts(queue) == (4 + loads, 12 + 3 * loads, 8 + 2 * loads)
    assert len(queue._heap) == 4
    for request in (requests[1], *requests[6:]):
        assert queue.first() is request
        queue.pop()
        queue.check_integrity()
