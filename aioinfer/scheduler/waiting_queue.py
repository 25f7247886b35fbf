"""The requests that wait for a slot or for blocks, in the order of their keys, and the keys of
several flows: each flow (an API key) gets its share of the server. The scheduler is the only
caller.

A request that ends while it waits is counted out at once. It leaves the heap when it comes to the
front, or when as many have ended as wait: then the heap is rebuilt, which costs O(1) for each
request that has ended. So the memory of the queue is bounded by the waiting requests, whatever
stands at its front and for however long.

Flows are ordered by start-time fair queuing (Goyal, Vin, Cheng: "Start-time Fair Queueing", 1996).
A request gets a start tag when it arrives, in tokens: where its flow's former request ends, or the
virtual time, whichever is later. The virtual time is the start tag of the last request that was
admitted. Requests are served by their tags. So the flows that wait advance side by side, each by
its weight, and a flow that has not waited begins beside them: behind one request of each, however
many they have. The difference between two flows is bounded by one request of each, as the paper
shows. A flow alone is served in the order of arrival.

A request's cost is its prompt tokens that are not expected in the cache, and twice its output, as
in "Fairness in Serving Large Language Models" (Sheng et al., 2024). How long the output will be is
unknown, so the mean of the flow's last requests stands for it, as in that paper's variant with
prediction. The tag is all that the scheduler compares: a step costs what it costs without flows.
Each priority has a virtual time of its own.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from aioinfer.errors import IntegrityError
from aioinfer.scheduler.request import Request, RequestStatus

#: Requests that `next_few` looks at.
_FEW = 8


class WaitingQueue:
    """A heap of requests by key.

    Attributes:
        num_requests: requests that wait.
        num_tokens: their prompt tokens.
        num_prefill_tokens: their prompt tokens that are not expected in the cache.
        loading: those whose blocks are being loaded. They count as waiting and are not in the heap.
    """

    def __init__(self) -> None:
        self.num_requests = 0
        self.num_tokens = 0
        self.num_prefill_tokens = 0
        self._heap: list[Request] = []
        self._num_ended = 0  # ended requests in the heap
        self.loading: dict[Request, None] = {}

    def __iter__(self) -> Iterator[Request]:
        """Yields the requests that wait, in no order, those that are LOADING first."""
        yield from self.loading
        yield from self.queued()

    def queued(self) -> Iterator[Request]:
        """Yields the requests that wait and load nothing, in no order."""
        return (request for request in self._heap if request.status is RequestStatus.WAITING)

    def add(self, request: Request) -> None:
        """Makes a request WAITING and queues it."""
        request.status = RequestStatus.WAITING
        heapq.heappush(self._heap, request)
        self.num_requests += 1
        self.num_tokens += request.prompt_len
        self.num_prefill_tokens += request.prompt_len - request.num_expected

    def next_few(self) -> Sequence[Request]:
        """Returns some of the requests that are served next."""
        return [r for r in self._heap[:_FEW] if r.status is RequestStatus.WAITING]

    def first(self) -> Request | None:
        """Returns the request with the lowest key, or None if none waits."""
        while self._heap and self._heap[0].status is RequestStatus.FINISHED:
            heapq.heappop(self._heap)
            self._num_ended -= 1
        return self._heap[0] if self._heap else None

    def set_aside(self) -> Request:
        """Takes the first request off the heap; it counts as waiting until `put_back`."""
        return heapq.heappop(self._heap)

    def put_back(self, request: Request) -> None:
        """Queues a request that was set aside."""
        heapq.heappush(self._heap, request)

    def begin_load(self) -> None:
        """Makes the first request LOADING."""
        request = heapq.heappop(self._heap)
        request.status = RequestStatus.LOADING
        self.loading[request] = None
        self._shrink()

    def end_load(self, request: Request) -> None:
        """Makes a request that was LOADING wait at its place again."""
        del self.loading[request]
        request.status = RequestStatus.WAITING
        heapq.heappush(self._heap, request)

    def pop(self) -> None:
        """Removes the first request, which gets its slot."""
        self._count_out(heapq.heappop(self._heap))
        self._shrink()

    def drop(self, request: Request) -> None:
        """Forgets a waiting request that has ended."""
        self._count_out(request)
        if request in self.loading:
            del self.loading[request]
            return
        self._num_ended += 1
        self._shrink()

    def _shrink(self) -> None:
        """Rebuilds the heap if at least half of it has ended."""
        if self._num_ended and 2 * self._num_ended >= len(self._heap):
            self._heap = list(self.queued())
            heapq.heapify(self._heap)
            self._num_ended = 0

    def _count_out(self, request: Request) -> None:
        self.num_requests -= 1
        self.num_tokens -= request.prompt_len
        self.num_prefill_tokens -= request.prompt_len - request.num_expected

    def check_integrity(self) -> None:
        """Raises IntegrityError unless the counts agree with the requests, and fewer ended
        requests are kept than waiting ones."""
        waiting = list(self.queued())
        num_ended = len(self._heap) - len(waiting)
        if num_ended != self._num_ended or num_ended >= max(1, len(waiting)):
            raise IntegrityError("the ended requests in the waiting queue are miscounted")
        if any(request.status is not RequestStatus.LOADING for request in self.loading):
            raise IntegrityError("a request that loads nothing counts as one that does")
        waiting += self.loading
        if len(waiting) != self.num_requests:
            raise IntegrityError("the waiting requests are miscounted")
        if sum(request.prompt_len for request in waiting) != self.num_tokens:
            raise IntegrityError("the waiting tokens are miscounted")
        prefill = sum(request.prompt_len - request.num_expected for request in waiting)
        if prefill != self.num_prefill_tokens:
            raise IntegrityError("the waiting tokens to prefill are miscounted")


#: Cost of an output token, in prompt tokens.
OUTPUT_COST = 2.0
#: Output tokens that are expected of a flow before any of its requests has ended.
_FIRST_MEAN = 128.0
#: Weight of the last request in the mean of a flow's output tokens.
_LEARNING_RATE = 1 / 16


@dataclass(slots=True)
class _Backlog:
    """A flow's requests of one priority.

    Attributes:
        finish: the tag at which its last request ends.
        served: the same of the last one that was admitted.
        num_waiting: requests that were never admitted and have not ended.
    """

    finish: float
    served: float
    num_waiting: int = 0


@dataclass(slots=True)
class _Clock:
    """The virtual time of one priority."""

    time: float
    num_waiting: int = 0
    backlogs: dict[str, _Backlog] = field(default_factory=dict)


class FairQueuing:
    """Gives requests their start tags. A request passes `arrive`, then `admit` and `end`, or `drop`
    if it ends before it was ever admitted."""

    def __init__(self) -> None:
        self._clocks: dict[int, _Clock] = {}  # by priority, while requests wait
        self._start = 0.0  # of new clocks: no tag that was given before is later
        self._mean_output: dict[str, float] = {}  # tokens, by flow

    def num_waiting(self, flow: str) -> int:
        """Returns how many requests of a flow were never admitted and have not ended."""
        backlogs = (clock.backlogs.get(flow) for clock in self._clocks.values())
        return sum(backlog.num_waiting for backlog in backlogs if backlog is not None)

    def arrive(self, request: Request, priority: int) -> float:
        """Returns the start tag of a new request of the class `priority`."""
        clock = self._clocks.get(priority)
        if clock is None:
            clock = self._clocks[priority] = _Clock(self._start)
        flow = request.flow
        backlog = clock.backlogs.get(flow.name)
        if backlog is None:
            backlog = clock.backlogs[flow.name] = _Backlog(clock.time, clock.time)
        start = max(clock.time, backlog.finish)
        request.finish_tag = backlog.finish = start + self._cost(request) / flow.weight
        backlog.num_waiting += 1
        clock.num_waiting += 1
        return start

    def virtual_time(self, priority: int) -> float:
        """Returns a start tag that goes before all requests that were never served."""
        clock = self._clocks.get(priority)
        return self._start if clock is None else clock.time

    def admit(self, request: Request) -> None:
        """Advances the virtual time: a request is served for the first time."""
        priority, start, _ = request.key
        clock = self._clocks[priority]
        clock.time = max(clock.time, start)
        backlog = clock.backlogs[request.flow.name]
        backlog.served = max(backlog.served, request.finish_tag)
        self._leave(request, clock, backlog)

    def drop(self, request: Request) -> None:
        """Forgets a request that was never served. Its flow is not charged for it once no request
        of the flow waits; until then the flow's next requests stay behind its waiting ones."""
        clock = self._clocks[request.key[0]]
        self._leave(request, clock, clock.backlogs[request.flow.name])

    def end(self, request: Request) -> None:
        """Learns from a request that was served how long the outputs of its flow are."""
        mean = self._mean(request.flow.name)
        mean += (request.num_output - mean) * _LEARNING_RATE
        self._mean_output[request.flow.name] = mean

    def restore(self, requests: Iterable[Request]) -> None:
        """Recounts the waiting requests: the ones among `requests` that were never admitted, with
        the tags that they have. All others have ended."""
        waiting = [request for request in requests if request.num_cached < 0]
        for request in waiting:
            self._clocks.setdefault(request.key[0], _Clock(request.key[1]))
        for clock in self._clocks.values():
            clock.num_waiting = 0
            for backlog in clock.backlogs.values():
                backlog.num_waiting = 0
        for request in waiting:
            clock = self._clocks[request.key[0]]
            begin = _Backlog(clock.time, clock.time)
            backlog = clock.backlogs.setdefault(request.flow.name, begin)
            backlog.finish = max(backlog.finish, request.finish_tag)
            backlog.num_waiting += 1
            clock.num_waiting += 1
        for priority, clock in list(self._clocks.items()):
            for backlog in clock.backlogs.values():
                self._settle(priority, clock, backlog)

    def _leave(self, request: Request, clock: _Clock, backlog: _Backlog) -> None:
        backlog.num_waiting -= 1
        clock.num_waiting -= 1
        self._settle(request.key[0], clock, backlog)

    def _settle(self, priority: int, clock: _Clock, backlog: _Backlog) -> None:
        """Forgets the state of a flow, or of a priority, in which no request waits any more."""
        if not backlog.num_waiting:
            backlog.finish = backlog.served
        # all flows begin from scratch: no request waits
        if not clock.num_waiting and priority in self._clocks:
            served = max(backlog.served for backlog in clock.backlogs.values())
            self._start = max(self._start, clock.time, served)
            del self._clocks[priority]

    def _cost(self, request: Request) -> float:
        """Returns the cost of a request in prompt tokens; at least 1, so that tags advance."""
        mean = self._mean(request.flow.name)
        output = min(mean, request.max_len - request.prompt_len)
        return max(1.0, request.prompt_len - request.num_expected + OUTPUT_COST * output)

    def _mean(self, flow: str) -> float:
        return self._mean_output.get(flow, _FIRST_MEAN)

    def check_integrity(self, num_waiting: int) -> None:
        """Raises IntegrityError unless so many requests in all were never admitted and have not
        ended."""
        found = sum(clock.num_waiting for clock in self._clocks.values())
        if found != num_waiting:
            raise IntegrityError("the waiting requests of the flows are miscounted")
        if any(
            not clock.num_waiting == sum(b.num_waiting for b in clock.backlogs.values()) > 0
            for clock in self._clocks.values()
        ):
            raise IntegrityError("the waiting requests of a flow are miscounted")
