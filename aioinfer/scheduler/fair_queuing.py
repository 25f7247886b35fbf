"""The order of requests of several flows: each flow (an API key) gets its share of the server.

Start-time fair queuing (Goyal, Vin, Cheng: "Start-time Fair Queueing", 1996). A request gets a
start tag when it arrives, in tokens: where its flow's former request ends, or the virtual time,
whichever is later. The virtual time is the start tag of the last request that was admitted.
Requests are served by their tags. So the flows that wait advance side by side, each by
its weight, and a flow that has not waited begins beside them: behind one request of each, however
many they have. The difference between two flows is bounded by one request of each, as the paper
shows. A flow alone is served in the order of arrival.

A request's cost is its prompt tokens that are not expected in the cache, and twice its output, as
in "Fairness in Serving Large Language Models" (Sheng et al., 2024). How long the output will be is
unknown, so the mean of the flow's last requests stands for it, as in that paper's variant with
prediction. The tag is all that the scheduler compares: a step costs what it costs without flows.

Each priority has a virtual time of its own. The scheduler is the only caller.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from aioinfer.errors import IntegrityError
from aioinfer.scheduler.request import Request

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
        num_waiting: requests that were never admitted and have not ended; a beam search counts as
            many times as it has beams.
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
        backlog.num_waiting += request.num_slots
        clock.num_waiting += request.num_slots
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
            backlog.num_waiting += request.num_slots
            clock.num_waiting += request.num_slots
        for priority, clock in list(self._clocks.items()):
            for backlog in clock.backlogs.values():
                self._settle(priority, clock, backlog)

    def _leave(self, request: Request, clock: _Clock, backlog: _Backlog) -> None:
        backlog.num_waiting -= request.num_slots
        clock.num_waiting -= request.num_slots
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
        output = request.num_slots * min(mean, request.max_len - request.prompt_len)
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
