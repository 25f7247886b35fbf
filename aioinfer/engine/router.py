"""Routes a request to the engine on which it costs the least, by prefix cache and load.

All schedulers live in this process, so no load is estimated: each KV cache reports how much of the
prompt is cached, and each scheduler how much it has to compute. The router only has to weigh the
one against the other. SGLang's cache-aware router follows the longest prefix until the loads are
out of balance by some thresholds; Preble (Srivatsa et al., 2024) adds up the cost of both. Here,
too, there is one cost, in tokens of prefill:

    tokens that the engine has yet to prefill             (the request waits for them)
    + 2 x tokens of the prompt that it would compute      (the request and all others wait for them)
    + 256 x sequences of the engine                       (each adds a row to every later step)

(`cluster.router.route_cost`). The router of a cluster's replicas is another one, because it knows
only what replicas report: its records of reports would be in vain where schedulers can be asked.

An engine that has no free slot, or too few free blocks, comes after all engines that have both.

A prompt that was routed a moment ago is in no cache yet. Its blocks count as if they were, as long
as its request has still to compute them: they are promised. So the requests of a burst with a
common prefix follow the first one, until the engine has so many of them that the prefix is worth
computing on another engine as well.

`relocate` moves the requests of an engine that is dead, or has long been without workers, to
others. A request that has produced nothing is added there. One that has produced tokens is resumed
by recompute: its tokens so far are recomputed, as after a preemption, and since the sampler's noise
is a function of the request's seed and the position, its text goes on as it would have. All
sequences of a request go to one engine, which the router picks by the tokens that are left to
compute.

`Frontend` is the only caller.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from weakref import ref

from aioinfer.cluster.router import route_cost
from aioinfer.config import SchedulerConfig
from aioinfer.engine.engine import Engine
from aioinfer.engine.output import OutputSequence, RequestOutput
from aioinfer.engine.recovery import EngineState
from aioinfer.errors import EngineDeadError, OverloadedError
from aioinfer.scheduler.request import Request, RequestStatus
from aioinfer.scheduler.scheduler import Scheduler

#: Blocks promised by an engine; beyond that the oldest are forgotten. An entry takes about 100
#: bytes.
MAX_PROMISED = 16_384


@dataclass(frozen=True, slots=True)
class Route:
    """The engine that a request goes to, and the prefix hit there.

    Attributes:
        engine: the number of the engine.
        num_blocks: leading blocks of the prompt that it has or that were promised.
        num_tokens: tokens of the prompt that need not be computed, thanks to them.
    """

    engine: int
    num_blocks: int = 0
    num_tokens: int = 0


class Router:
    """Routes requests by the state of the engines' schedulers.

    With one engine nothing is computed.
    """

    def __init__(
        self,
        schedulers: Sequence[Scheduler],
        state_of: Callable[[int], EngineState] = lambda engine: EngineState.SERVING,
    ):
        """`state_of` returns the state of an engine. One that serves is preferred to one that will
        serve, and one that is dead gets no requests."""
        self._schedulers = schedulers
        self._state_of = state_of
        self._promises = [_Promises() for _ in schedulers]
        self._next = 0

    def route(self, prompt_len: int, hashes: Sequence[bytes], n: int = 1) -> Route:
        """Returns the cheapest route. Equal costs: fewest requests, then one after the other.
        O(blocks of the prompt) an engine.

        Args:
            prompt_len: tokens of the prompt.
            hashes: of its full blocks; empty without prefix caching.
            n: sequences of the request, all on one engine.
        """
        count = len(self._schedulers)
        if count == 1:
            return Route(0)
        best: tuple[tuple[bool, bool, int, int, int], Route] | None = None
        for engine, scheduler in enumerate(self._schedulers):
            state = self._state_of(engine)
            if state is EngineState.DEAD:
                continue
            num_blocks = self._promises[engine].count(
                hashes, scheduler.kv_cache.prefixes.count_cached(hashes)
            )
            route = Route(
                engine, num_blocks, min(num_blocks * scheduler.limits.block_size, prompt_len - 1)
            )
            requests = scheduler.num_running + scheduler.num_waiting
            cost = route_cost(scheduler.num_prefill_tokens, prompt_len - route.num_tokens, requests)
            rank = (
                state is not EngineState.SERVING,
                not _has_room(scheduler, prompt_len, n),
                cost,
                requests,
                (engine - self._next) % count,
            )
            if best is None or rank < best[0]:
                best = rank, route
        if best is None:
            raise EngineDeadError("no engine lives")
        self._next = best[1].engine + 1
        return best[1]

    def promise(self, route: Route, request: Request) -> None:
        """Records that a request, which was routed by `route`, will compute the blocks of its
        prompt that are not cached yet."""
        if len(self._schedulers) > 1:
            self._promises[route.engine].add(request.block_hashes[route.num_blocks :], request)


def _has_room(scheduler: Scheduler, prompt_len: int, n: int) -> bool:
    """Whether a request would find slots and blocks beside all that have come before it."""
    slots = scheduler.num_free_slots - scheduler.num_waiting
    tokens = scheduler.num_prefill_tokens + prompt_len
    return slots >= n and scheduler.kv_cache.has_room(tokens)


class _Promises:
    """The blocks that one engine's requests have yet to compute, by hash, oldest first.

    A promise ends when its request has computed its prompt or has finished. That is not looked for:
    such a promise is skipped when it would count, and removed when it is the oldest. So a promise
    does not keep its request alive: its prompt may be far longer than the promised block.
    """

    def __init__(self) -> None:
        self._owners: OrderedDict[bytes, ref[Request]] = OrderedDict()

    def add(self, hashes: Iterable[bytes], request: Request) -> None:
        """Records that `request` will compute these blocks."""
        owners, owner = self._owners, ref(request)
        for block_hash in hashes:
            owners[block_hash] = owner
            owners.move_to_end(block_hash)
        while owners and (len(owners) > MAX_PROMISED or _is_void(next(iter(owners.values())))):
            owners.popitem(last=False)

    def count(self, hashes: Sequence[bytes], start: int) -> int:
        """Returns the length of the longest run of known blocks, of which the first `start` are
        cached."""
        for index in range(start, len(hashes)):
            owner = self._owners.get(hashes[index])
            if owner is None or _is_void(owner):
                return index
        return len(hashes)


def _is_void(owner: ref[Request]) -> bool:
    """Whether a request has computed its prompt (its blocks are in the pool's index then) or will
    not."""
    request = owner()
    return request is None or request.prefill_step >= 0 or request.status is RequestStatus.FINISHED


def relocate(
    lost: Engine, engines: Sequence[Engine], router: Router, limits: SchedulerConfig, reason: str
) -> tuple[int, int]:
    """Moves the requests of an engine that has no workers, for `reason`, in the order in which it
    would have served them, as far as they can be resumed and the queue of the other living engines
    has room. Ends the other requests with an error.

    Returns how many requests were moved, and how many had to end.
    """
    num_requests = lost.num_requests
    outputs: dict[RequestOutput, list[OutputSequence]] = {}
    for sequence in lost.recovery.export_requests():
        outputs.setdefault(sequence.output, []).append(sequence)
    others = [each for each in engines if each is not lost and each.state is not EngineState.DEAD]
    moved = 0
    for output, sequences in outputs.items():
        error = _find_obstacle(others, sequences, limits, reason)
        if error is not None:
            lost.requests.fail(output, error)
            continue
        _move(lost, engines, router, sequences)
        moved += 1
    return moved, num_requests - moved


def _move(
    lost: Engine, engines: Sequence[Engine], router: Router, sequences: list[OutputSequence]
) -> None:
    """Moves the sequences of a request to the engine where they cost the least."""
    first = sequences[0].request
    longest = max(len(sequence.request.tokens) for sequence in sequences)
    route = router.route(longest, first.block_hashes, len(sequences))
    first.num_expected = min(route.num_tokens, first.prompt_len - 1)
    lost.requests.export(sequences)
    engines[route.engine].import_requests(sequences)
    router.promise(route, first)


def _find_obstacle(
    others: Sequence[Engine],
    sequences: Sequence[OutputSequence],
    limits: SchedulerConfig,
    reason: str,
) -> Exception | None:
    """Returns why the sequences of a request cannot go to another engine, or None.

    The bounds of the queue are the bounds for new requests.
    """
    living = [engine.scheduler for engine in others]
    cause = reason.partition("\n")[0]  # without a traceback
    first, count = sequences[0].request, len(sequences)
    length, is_search = first.max_len, sequences[0].is_beam
    if not all(
        s.fits_forks(first.prompt_len, length, count) if is_search else s.fits(length)
        for s in living
    ):
        return EngineDeadError(f"no engine that lives can hold the request: {cause}")
    excess = find_excess(living, limits, count)
    return None if excess is None else OverloadedError(f"{cause}; {excess}")


def find_excess(
    living: Sequence[Scheduler],
    limits: SchedulerConfig,
    more: int,
    coming: int = 0,
) -> str | None:
    """Returns why the queue has no room for requests, or None: it is bounded by
    `scheduler.max_waiting_requests`, of all living engines together, beside free slots.

    Args:
        living: the schedulers of these engines.
        limits: the bound.
        more: the requests.
        coming: requests that count as waiting beside the ones in the queue.
    """
    waiting = sum(scheduler.num_waiting for scheduler in living) + coming
    bound = limits.max_waiting_requests
    if bound is not None and waiting + more > bound + sum(s.num_free_slots for s in living):
        return f"{waiting} requests wait, {more} more are too many"
    return None
