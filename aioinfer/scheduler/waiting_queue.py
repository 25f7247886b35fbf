"""The requests that wait for a slot or for blocks, in the order of their keys.

The scheduler is the only caller. A request that ends while it waits is counted out at once. It
leaves the heap when it comes to the front, or when as many have ended as wait: then the heap is
rebuilt, which costs O(1) for each request that has ended. So the memory of the queue is bounded by
the waiting requests, whatever stands at its front and for however long.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from aioinfer.errors import IntegrityError
from aioinfer.scheduler.request import Request, Status


class WaitingQueue:
    """A heap of requests by key.

    Attributes:
        num_requests: requests that wait; a beam search counts as many times as it has beams, as n
            sequences of a prompt do.
        num_tokens: their prompt tokens; a beam search counts its prompt once for each beam.
        num_prefill_tokens: their prompt tokens that are not expected in the cache.
    """

    def __init__(self) -> None:
        self.num_requests = 0
        self.num_tokens = 0
        self.num_prefill_tokens = 0
        self._heap: list[Request] = []
        self._num_ended = 0  # ended requests in the heap

    def __iter__(self) -> Iterator[Request]:
        """Yields the requests that wait, in no order."""
        return (request for request in self._heap if request.status is Status.WAITING)

    def add(self, request: Request) -> None:
        """Makes a request WAITING and queues it."""
        request.status = Status.WAITING
        heapq.heappush(self._heap, request)
        self.num_requests += request.num_slots
        self.num_tokens += request.num_slots * request.prompt_len
        self.num_prefill_tokens += request.prompt_len - request.num_expected

    def first(self) -> Request | None:
        """Returns the request with the lowest key, or None if none waits."""
        while self._heap and self._heap[0].status is Status.FINISHED:
            heapq.heappop(self._heap)
            self._num_ended -= 1
        return self._heap[0] if self._heap else None

    def set_aside(self) -> Request:
        """Takes the first request off the heap; it counts as waiting until `put_back`."""
        return heapq.heappop(self._heap)

    def put_back(self, request: Request) -> None:
        """Queues a request that was set aside."""
        heapq.heappush(self._heap, request)

    def pop(self) -> None:
        """Removes the first request, which gets its slot."""
        self._count_out(heapq.heappop(self._heap))
        self._shrink()

    def drop(self, request: Request) -> None:
        """Forgets a waiting request that has ended."""
        self._count_out(request)
        self._num_ended += 1
        self._shrink()

    def _shrink(self) -> None:
        """Rebuilds the heap if at least half of it has ended."""
        if self._num_ended and 2 * self._num_ended >= len(self._heap):
            self._heap = list(self)
            heapq.heapify(self._heap)
            self._num_ended = 0

    def _count_out(self, request: Request) -> None:
        self.num_requests -= request.num_slots
        self.num_tokens -= request.num_slots * request.prompt_len
        self.num_prefill_tokens -= request.prompt_len - request.num_expected

    def check_integrity(self) -> None:
        """Raises IntegrityError unless the counts agree with the requests, and fewer ended
        requests are kept than waiting ones."""
        waiting = list(self)
        num_ended = len(self._heap) - len(waiting)
        if num_ended != self._num_ended or num_ended >= max(1, len(waiting)):
            raise IntegrityError("the ended requests in the waiting queue are miscounted")
        if sum(request.num_slots for request in waiting) != self.num_requests:
            raise IntegrityError("the waiting requests are miscounted")
        if sum(request.num_slots * request.prompt_len for request in waiting) != self.num_tokens:
            raise IntegrityError("the waiting tokens are miscounted")
        prefill = sum(request.prompt_len - request.num_expected for request in waiting)
        if prefill != self.num_prefill_tokens:
            raise IntegrityError("the waiting tokens to prefill are miscounted")
