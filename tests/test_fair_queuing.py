"""Fair queuing between flows: the order of one flow, the shares of several, and that none
starves."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioinfer.scheduler.request import Flow, Request, RequestStatus
from aioinfer.scheduler.waiting_queue import OUTPUT_COST, FairQueuing, WaitingQueue
from tests.test_scheduler import Harness, assert_complete, make_request


class Queue:
    """Requests by their keys, as the scheduler has them, served one by one."""

    def __init__(self) -> None:
        self.fair = FairQueuing()
        self.waiting: list[Request] = []
        self.arrivals = 0

    def arrive(self, flow: Flow, prompt: int = 10, new: int = 5, priority: int = 0) -> Request:
        request = make_request(f"{flow.name}{self.arrivals}", [1] * prompt, new, flow=flow)
        request.key = (priority, self.fair.arrive(request, priority), self.arrivals)
        self.arrivals += 1
        self.waiting.append(request)
        self.fair.check_integrity(len(self.waiting))
        return request

    def serve(self) -> Request:
        """Admits and ends the first request."""
        request = min(self.waiting)
        self.waiting.remove(request)
        self.fair.admit(request)
        self.fair.end(request)
        self.fair.check_integrity(len(self.waiting))
        return request

    def drop(self, request: Request) -> None:
        self.waiting.remove(request)
        self.fair.drop(request)
        self.fair.check_integrity(len(self.waiting))


def cost(request: Request) -> float:
    """What a request costs whose output is shorter than its flow's mean."""
    return request.prompt_len + OUTPUT_COST * (request.max_len - request.prompt_len)


A, B = Flow("a"), Flow("b")


def test_one_request_passes_a_thousand_of_another_flow() -> None:
    queue = Queue()
    thousand = [queue.arrive(A) for _ in range(1000)]
    assert [queue.serve() for _ in range(10)] == thousand[:10]
    one = queue.arrive(B)
    assert one in [queue.serve() for _ in range(2)]
    assert [queue.serve() for _ in range(989)] == thousand[11:]


@pytest.mark.parametrize(("prompt", "other", "share"), [(10, Flow("b", 3.0), 3), (90, B, 100 / 20)])
def test_shares_follow_weights_and_lengths(prompt: int, other: Flow, share: float) -> None:
    queue = Queue()
    for _ in range(400):
        queue.arrive(A, prompt)
        queue.arrive(other, 10)
    served = Counter(queue.serve().flow.name for _ in range(400))
    assert served["b"] / served["a"] == pytest.approx(share, rel=0.03)


def test_a_flow_that_rested_saves_nothing_up() -> None:
    queue = Queue()
    for _ in range(100):
        queue.arrive(A)
    queue.arrive(B)
    for _ in range(50):
        queue.serve()
    for _ in range(50):
        queue.arrive(B)
    served = Counter(queue.serve().flow.name for _ in range(40))
    assert served["a"] == pytest.approx(20, abs=1)


def test_what_vanished_unserved_is_not_charged() -> None:
    queue = Queue()
    for _ in range(50):
        queue.arrive(B)
    gone = [queue.arrive(A) for _ in range(100)]
    for request in gone:
        queue.drop(request)
    new = queue.arrive(A)
    assert new in [queue.serve() for _ in range(2)]


def test_flows_learn_how_long_their_outputs_are() -> None:
    queue = Queue()
    talkative, terse = Flow("talkative"), Flow("terse")
    for _ in range(100):
        for flow, output in ((talkative, 100), (terse, 1)):
            request = queue.arrive(flow, prompt=1, new=1000)
            request.tokens.extend([7] * output)
            queue.serve()
    for _ in range(300):
        queue.arrive(talkative, prompt=1, new=1000)
        queue.arrive(terse, prompt=1, new=1000)
    served = Counter(queue.serve().flow.name for _ in range(60))
    assert served["terse"] > 5 * served["talkative"]


def test_priorities_have_virtual_times_of_their_own() -> None:
    queue = Queue()
    backlog = [queue.arrive(A, priority=5) for _ in range(50)]
    for _ in range(50):
        queue.arrive(A, priority=0)
        assert queue.serve().key[0] == 0
    newcomer = queue.arrive(B, priority=5)
    assert newcomer in [queue.serve() for _ in range(2)]
    assert queue.serve() in backlog


MOVES = st.lists(
    st.tuples(
        st.sampled_from(["arrive", "arrive", "serve", "drop"]),
        st.integers(0, 5),
        st.integers(1, 50),
        st.integers(0, 1),
    ),
    max_size=120,
)


@settings(deadline=None)
@given(moves=MOVES)
def test_a_flow_alone_is_first_come_first_served(moves: list[tuple[str, int, int, int]]) -> None:
    """Whatever ends, is dropped or takes long: within a priority, no tag is before that of an
    earlier request that waits or runs."""
    queue, served = Queue(), []
    for move, which, size, priority in moves:
        if move == "arrive":
            request = queue.arrive(A, size, which + 1, priority)
            earlier = [r for r in (*queue.waiting, *served) if r.key[0] == priority]
            assert all(r.key <= request.key for r in earlier)
        elif queue.waiting and move == "serve":
            expected = min(queue.waiting, key=lambda request: (request.key[0], request.key[2]))
            assert queue.serve() is expected
            served.append(expected)
        elif queue.waiting:
            queue.drop(queue.waiting[which % len(queue.waiting)])


@settings(max_examples=200, deadline=None)
@given(
    weights=st.lists(st.sampled_from([0.25, 1.0, 2.0, 7.0]), min_size=2, max_size=4),
    sizes=st.lists(st.integers(1, 200), min_size=40, max_size=80),
)
def test_flows_that_wait_differ_by_no_more_than_a_request_each(
    weights: list[float], sizes: list[int]
) -> None:
    """The bound of start-time fair queuing, for flows that all wait, in tokens by weight."""
    queue = Queue()
    flows = [Flow(str(number), weight) for number, weight in enumerate(weights)]
    for size in sizes:
        for flow in flows:
            queue.arrive(flow, size)
    longest = max(map(cost, queue.waiting))
    served = dict.fromkeys(flows, 0.0)
    while {request.flow for request in queue.waiting} == set(flows):
        request = queue.serve()
        served[request.flow] += cost(request) / request.flow.weight
        for one in flows:
            for other in flows:
                bound = longest / one.weight + longest / other.weight
                assert abs(served[one] - served[other]) <= bound + 1e-6


@settings(deadline=None)
@given(
    backlog=st.integers(1, 30),
    before=st.integers(0, 20),
    weight=st.sampled_from([0.1, 1.0, 10.0]),
    size=st.integers(1, 100),
)
def test_nobody_starves(backlog: int, before: int, weight: float, size: int) -> None:
    """However many requests of a heavier flow keep coming, a request is served."""
    queue = Queue()
    rich, poor = Flow("rich", weight), Flow("poor", 0.1)
    for _ in range(before):
        queue.arrive(poor, size)
        queue.serve()
    for _ in range(backlog):
        queue.arrive(rich, 100)
    waiting = queue.arrive(poor, size)
    # its flow's last request costs no more, and one of the others is worth as many of the rich ones
    served = []
    for _ in range(backlog + int(weight / 0.1) + 2):
        queue.arrive(rich, 100)
        served.append(queue.serve())
    assert waiting in served, "it starves"


def test_the_scheduler_serves_flows_by_turns() -> None:
    harness = Harness(max_num_seqs=1, num_blocks=256)
    many = [make_request(f"a{i}", [i] * 8, 3, flow=A) for i in range(12)]
    harness.add(*many)
    for _ in range(3):
        harness.step()
    few = [make_request(f"b{i}", [50 + i] * 8, 3, flow=B) for i in range(3)]
    harness.add(*few)
    assert harness.scheduler.num_waiting_of("b") == 3
    order: list[str] = []
    while not harness.scheduler.is_idle:
        order += [r.request_id for r in harness.scheduler.running if r.request_id not in order]
        harness.step()
    places = [order.index(request.request_id) for request in few]
    assert places[0] <= 3
    assert [later - former for former, later in pairwise(places)] == [2, 2]
    left = [request.request_id for request in many[-len(order) + len(few) :]]
    assert [name for name in order if name[0] == "a"] == left
    for request in (*many, *few):
        assert_complete(request)
    assert harness.scheduler.num_waiting_of("b") == 0


def test_a_newcomer_is_not_preempted_by_those_it_passed() -> None:
    """Blocks are short: what was admitted earlier keeps its blocks, and what waits takes none."""
    harness = Harness(max_num_seqs=2, num_blocks=16, prefix_caching=False)
    harness.add(*(make_request(f"a{i}", [i] * 8, 20, flow=A) for i in range(20)))
    while len(harness.scheduler.running) < 2:
        harness.step()
    one = make_request("b", [60] * 8, 20, flow=B)
    harness.add(one)
    ended = 0
    while one.status is not RequestStatus.FINISHED:
        before = len(list(harness.scheduler.requests()))
        harness.step()
        ended += before - len(list(harness.scheduler.requests()))
    assert ended <= 5
    harness.run()


def test_restoring_counts_who_still_waits_and_keeps_the_order() -> None:
    queue = Queue()
    arrived = [queue.arrive(flow) for flow in (A, A, B, A, B)]
    queue.serve().num_cached = 0
    gone = queue.waiting.pop()  # ended without a word: with the workers, say
    order = sorted(queue.waiting)
    queue.fair.restore([arrived[0], *queue.waiting])
    queue.fair.check_integrity(len(queue.waiting))
    assert gone not in order
    assert [queue.serve() for _ in order] == order
    assert queue.fair.num_waiting("a") == queue.fair.num_waiting("b") == 0


def test_restoring_without_a_former_state_keeps_the_tags() -> None:
    queue = Queue()
    for flow in (A, A, B, B, A):
        queue.arrive(flow)
    order = sorted(queue.waiting)
    queue.fair = FairQueuing()
    queue.fair.restore(queue.waiting)
    queue.fair.check_integrity(5)
    assert [queue.serve() for _ in order] == order


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
