"""Routes a request to the replica on which it costs the least, by what replicas report of their
prefix caches and loads.

The cost is that of `engine.router`, in tokens of prefill (`route_cost`). The two routers share it
and no more, because the schedulers are elsewhere here: a replica's state is its last report and
what this router has sent since, and what keeps that, and keeps a decision cheap for many replicas,
would be in vain for engines whose state is there to be read. A report does not say which requests
it counts; requests that were routed less than `grace_s` before it came count beside it, so a
request may count twice for that long. A replica that has not reported for `stale_s` is known by
this router's own requests alone, and nothing is known of its prefixes: where no report is fresh,
the least loaded gets the request. Several routers know of each other only by the reports.

The cost of a decision hardly depends on the number of replicas. The load of a replica does not
depend on the request, so replicas are kept in buckets by load (in steps of `_STEP` tokens), each a
set of bits, and the least loaded of any set is found by intersecting it with the buckets in order.
The sets to look at come from `PrefixIndex.levels`: the replicas that hold the first block of the
prompt, the replicas that hold more of it, and so on; and all of them.

Imports neither torch nor ray nor aiohttp. The gateway and `scripts/simulate_cluster.py` are the
callers.
"""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from aioinfer.cluster.prefix_index import PrefixIndex
from aioinfer.cluster.reports import ReplicaLoad, Report

#: The cost of a request to the other requests of its engine, in tokens of prefill. In a large
#: decode step a further row takes about as long as a further token of prefill does, and a request
#: is in as many steps as it generates tokens; how many steps that will be is not known, so a usual
#: number is assumed.
REQUEST_COST = 256
#: Loads that differ by less, in tokens of prefill, count as equal.
_STEP = 128
#: Added to the load of a replica without a free slot or free KV blocks: it comes after all others.
_FULL = 1 << 40
#: Sets of up to so many replicas are looked through one by one.
_FEW = 12
#: Seconds for which a prompt that was routed counts as held: longer than its prefill takes. What
#: was computed is reported by then.
PROMISE_S = 10.0
#: Hashes that a router remembers; each takes 160 to 280 bytes, by the number of replicas.
MAX_HASHES = 1_000_000
#: Hashes of prompts that were routed and may not be computed yet.
MAX_PROMISED = 131_072


def route_cost(prefill_tokens: int, uncached_tokens: int, num_requests: int) -> int:
    """Returns the cost of a request on an engine, in tokens of prefill.

    Args:
        prefill_tokens: tokens that the engine has yet to prefill: the request waits for them.
        uncached_tokens: tokens of the prompt that the engine would compute: the request and all
            others wait for them, so they count twice.
        num_requests: sequences of the engine: each adds a row to every later step.
    """
    return prefill_tokens + 2 * uncached_tokens + REQUEST_COST * num_requests


@dataclass(slots=True, eq=False)
class Choice:
    """The routing decision for a request.

    Attributes:
        replica: its name.
        num_tokens: tokens of the prompt that the replica is expected not to compute.
        cost: in tokens of prefill.
        added: the request's part of the replica's load, in tokens of prefill.
        sent: when, by the router's clock.
    """

    replica: str
    num_tokens: int
    cost: int
    added: int
    sent: float


@dataclass(slots=True, eq=False)
class _Replica:
    """The router's state of a replica.

    Attributes:
        number: of its bit.
        unreported: requests that its last report does not count, oldest first.
        ended: requests that its last report counts and that have ended since.
        own: requests of this router that have not ended.
        tokens: of `unreported`, in tokens of prefill.
        bucket: of its load.
    """

    name: str
    number: int
    load: ReplicaLoad = field(default_factory=ReplicaLoad)
    unreported: deque[Choice] = field(default_factory=deque)
    ended: int = 0
    own: int = 0
    tokens: int = 0
    block_size: int = 0
    is_fresh: bool = False
    bucket: int = -1

    @property
    def bit(self) -> int:
        return 1 << self.number

    @property
    def cost(self) -> int:
        """The load that every new request waits for, in tokens of prefill."""
        if not self.is_fresh:
            return REQUEST_COST * self.own
        load = self.load
        requests = max(0, load.running + load.waiting - self.ended)
        cost = route_cost(load.prefill_tokens, 0, requests) + self.tokens
        slots = load.max_requests - requests - len(self.unreported)
        is_full = load.waiting > 0 or slots <= 0
        if is_full or load.used_tokens + load.waiting_tokens + self.tokens > load.max_tokens:
            cost += _FULL
        return cost


class ClusterRouter:
    """Routes requests to replicas that join, report and leave."""

    def __init__(
        self,
        *,
        max_hashes: int = MAX_HASHES,
        stale_s: float = 3.0,
        grace_s: float = 0.1,
        clock: Callable[[], float] = time.monotonic,
    ):
        """`clock` returns seconds; see the module for `grace_s` and `stale_s`."""
        self._clock, self._stale_s, self._grace_s = clock, stale_s, grace_s
        self._replicas: dict[str, _Replica] = {}
        self._by_number: list[_Replica | None] = []
        self._index = PrefixIndex(max_hashes, MAX_PROMISED)
        # names by the time of their last report, oldest first
        self._reported: OrderedDict[str, float] = OrderedDict()
        self._fresh = self._all = 0
        self._buckets: dict[int, int] = {}
        self._order: list[int] = []
        self._next = 0
        self._block_size = 0

    def __len__(self) -> int:
        return len(self._replicas)

    @property
    def names(self) -> Collection[str]:
        """The replicas that get requests."""
        return self._replicas.keys()

    @property
    def num_hashes(self) -> int:
        """Block hashes that are remembered."""
        return len(self._index)

    @property
    def num_fresh(self) -> int:
        """Replicas whose last report counts."""
        self._expire(self._clock())
        return self._fresh.bit_count()

    # ---------------------------------------------------------------- replicas

    def join(self, name: str) -> None:
        """From now on routes requests to a replica, too. A replica that is known already starts
        from scratch."""
        self.leave(name)
        busy = self._index.unswept
        number = next(
            (
                n
                for n, replica in enumerate(self._by_number)
                if replica is None and not busy >> n & 1
            ),
            len(self._by_number),
        )
        if number == len(self._by_number):
            self._by_number.append(None)
        replica = _Replica(name, number)
        self._replicas[name] = self._by_number[number] = replica
        self._all |= replica.bit
        self._place(replica)

    def leave(self, name: str) -> None:
        """Routes no more requests to a replica. Nothing if it is not known."""
        replica = self._replicas.pop(name, None)
        if replica is None:
            return
        self._take_out(replica)
        self._by_number[replica.number] = None
        self._all &= ~replica.bit
        self._fresh &= ~replica.bit
        self._reported.pop(name, None)
        self._index.forget(replica.bit)

    def report(self, name: str, report: Report) -> None:
        """Takes a replica's report; one that leaves gets no more requests."""
        self._index.sweep()
        if report.is_leaving:
            self.leave(name)
            return
        if report.is_first and name in self._replicas and self._reported.get(name) is not None:
            self.join(name)  # under another bit: its old entries are void
        replica = self._replicas.get(name)
        if replica is None:
            return
        now = self._clock()
        self._index.of_snapshots = report.of_snapshots  # all replicas have one model
        self._index.add(report.added, replica.bit)
        self._index.remove(report.removed, replica.bit)
        replica.load, replica.block_size = report.load, report.block_size
        self._block_size = max(self._block_size, report.block_size)
        replica.ended = 0
        waiting = replica.unreported
        while waiting and waiting[0].sent <= now - self._grace_s:
            replica.tokens -= waiting.popleft().added
        replica.is_fresh = True
        self._fresh |= replica.bit
        self._reported[name] = now
        self._reported.move_to_end(name)
        self._place(replica)

    # ---------------------------------------------------------------- requests

    def route(
        self, prompt_len: int, hashes: Sequence[bytes] = (), avoid: Collection[str] = ()
    ) -> Choice | None:
        """Routes a request; `end` has to follow. Returns None if there is no replica.

        Args:
            prompt_len: tokens of the prompt.
            hashes: of its full blocks, as replicas report them.
            avoid: replicas that get it only if there is no other; such as have refused it.
        """
        now = self._clock()
        self._expire(now)
        usable = self._all
        for name in avoid:
            if (avoided := self._replicas.get(name)) is not None:
                usable &= ~avoided.bit
        usable = usable or self._all
        if not usable:
            return None
        best, num_blocks, levels = (
            self._least(usable),
            0,
            self._index.levels(hashes, usable & self._fresh),
        )
        cost, least = best.cost + 2 * prompt_len, best.cost - _STEP
        for count, holders in reversed(levels):
            if least + 2 * (prompt_len - count * self._block_size) >= cost:
                break  # nor can a level with fewer blocks be any better
            replica = self._least(holders)
            saved = min(count * replica.block_size, prompt_len - 1)
            if (found := replica.cost + 2 * (prompt_len - saved)) < cost:
                best, cost, num_blocks = replica, found, count
        cached = max(0, min(num_blocks * best.block_size, prompt_len - 1))
        choice = Choice(best.name, cached, cost, prompt_len - cached + REQUEST_COST, now)
        best.unreported.append(choice)
        best.own += 1
        best.tokens += choice.added
        self._place(best)
        self._next = best.number + 1
        if hashes:
            self._index.touch(hashes[:num_blocks])
            self._index.promise(hashes[num_blocks:], best.bit, now + PROMISE_S)
        return choice

    def end(self, choice: Choice) -> None:
        """Records that a routed request has ended, however it did."""
        replica = self._replicas.get(choice.replica)
        if replica is None:
            return
        replica.own = max(0, replica.own - 1)
        if choice in replica.unreported:
            replica.unreported.remove(choice)
            replica.tokens -= choice.added
        else:
            replica.ended += 1
        self._place(replica)

    # ---------------------------------------------------------------- loads

    def _expire(self, now: float) -> None:
        """Forgets the reports of replicas that have not reported for too long."""
        while self._reported:
            name, reported = next(iter(self._reported.items()))
            if reported > now - self._stale_s:
                break
            del self._reported[name]
            replica = self._replicas[name]
            replica.is_fresh = False
            self._fresh &= ~replica.bit
            self._place(replica)
        self._index.expire(now)

    def _place(self, replica: _Replica) -> None:
        """Puts a replica into the bucket of its load."""
        bucket = replica.cost // _STEP
        if bucket == replica.bucket:
            return
        self._take_out(replica)
        replica.bucket = bucket
        if bucket not in self._buckets:
            insort(self._order, bucket)
            self._buckets[bucket] = 0
        self._buckets[bucket] |= replica.bit

    def _take_out(self, replica: _Replica) -> None:
        if replica.bucket < 0:
            return
        left = self._buckets[replica.bucket] & ~replica.bit
        if left:
            self._buckets[replica.bucket] = left
        else:
            del self._buckets[replica.bucket]
            del self._order[bisect_left(self._order, replica.bucket)]
        replica.bucket = -1

    def _least(self, replicas: int) -> _Replica:
        """Returns the least loaded of a set that is not empty; of equal ones one after the
        other."""
        if replicas.bit_count() <= _FEW:
            return self._least_of_few(replicas)
        for bucket in self._order:
            found = self._buckets[bucket] & replicas
            if found:
                break
        later = found >> self._next
        number = self._next + _lowest(later) if later else _lowest(found)
        return self._at(number)

    def _least_of_few(self, replicas: int) -> _Replica:
        found = []
        while replicas:
            number = _lowest(replicas)
            found.append(self._at(number))
            replicas ^= 1 << number
        return min(found, key=lambda r: (r.bucket, r.number < self._next, r.number))

    def _at(self, number: int) -> _Replica:
        replica = self._by_number[number]
        assert replica is not None, "sets hold replicas that have not left"
        return replica


def _lowest(mask: int) -> int:
    """Returns the number of the lowest bit that is set."""
    return (mask & -mask).bit_length() - 1
