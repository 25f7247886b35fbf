"""The running requests: their slots and KV blocks, how far they are computed, and which request is
preempted when blocks run out.

`StepPlanner` admits requests to them and plans their rows, `BeamPlanner` the rows of beams, and
`Scheduler` ends them.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from itertools import pairwise

from aioinfer.errors import IntegrityError
from aioinfer.scheduler.kv_cache import KVCacheManager
from aioinfer.scheduler.limits import SchedulerLimits
from aioinfer.scheduler.plan_builder import PlanBuilder
from aioinfer.scheduler.request import Request, Status
from aioinfer.scheduler.waiting_queue import WaitingQueue

#: Forced tokens that a plan takes: 16 bytes each.
MAX_FORCED_TOKENS = 16_384


@dataclass(slots=True)
class SchedulerStats:
    """Totals since the start. `prefix_*` count prompt tokens of first admissions."""

    steps: int = 0
    preemptions: int = 0
    prefix_queried: int = 0
    prefix_hit: int = 0
    wasted_rows: int = 0


class RunningRequests:
    """The requests that have slots. Of the beams of a search only the leader is among them; the
    other beams take and lose their slots together with it.

    Attributes:
        requests: sorted by key: the request that is served first is preempted last.
        kv_cache: which blocks they have.
        free_slots: slots that no request has.
        num_prefill: prompt tokens that they, and all beams, have to compute.
        num_constrained: requests with rows that wait for masks.
        num_requesting: requests with `Request.requested`.
        held_bytes: bytes that the requests may add to a result beside their tokens.
        freed_slots: slots that the next plan names in its `FreedSlots`.
    """

    def __init__(self, limits: SchedulerLimits, waiting: WaitingQueue, stats: SchedulerStats):
        """`waiting` takes the requests that are preempted."""
        self.kv_cache = KVCacheManager(
            limits.groups,
            limits.num_blocks,
            limits.block_size,
            max_chunk=limits.token_budget,
            prefix_caching=limits.prefix_caching,
        )
        self._max_num_seqs = limits.max_num_seqs
        self._has_stages = limits.num_stages > 1
        self._waiting = waiting
        self._stats = stats
        self.requests: list[Request] = []
        self.free_slots = list(range(limits.max_num_seqs - 1, -1, -1))
        self.num_prefill = 0
        self.num_constrained = 0
        self.num_requesting = 0
        self.held_bytes = 0
        self.freed_slots: list[int] = []
        # requests with a prompt chunk in the last plan: blocks may be behind a window now
        self._advanced: list[Request] = []
        # for the next plan: (request, first position, forced tokens, how many of them were sampled)
        self._forced: list[tuple[Request, int, int, int]] = []
        self._num_forced = 0

    # ---------------------------------------------------------------- requests come and go

    def enter(self, request: Request, num_computed: int) -> None:
        """Makes a request RUNNING with `num_computed` tokens in the cache."""
        request.status = Status.RUNNING
        if self._has_stages:
            request.plan_limit = 0  # each of its rows is up to `MicroBatches`
        request.slot = self.free_slots.pop()
        request.num_computed = num_computed
        self.num_prefill += request.num_uncomputed
        self.num_constrained += request.is_constrained
        self.num_requesting += request.requested is not None
        self.held_bytes += request.held_bytes
        insort(self.requests, request)

    def remove(self, request: Request) -> None:
        """Removes a request, and frees its slot and blocks."""
        self.requests.remove(request)
        self.free(request)

    def remove_ended(self) -> None:
        """Removes the requests that have ended, after `free`."""
        self.requests = [r for r in self.requests if r.status is Status.RUNNING]

    def free(self, request: Request) -> None:
        """Frees the slot and the blocks of a request, and of the beams that it leads. The caller
        removes it from `requests`."""
        self.num_prefill -= request.num_uncomputed
        self.num_constrained -= request.is_constrained
        if self._forced:  # if it is admitted again, then with all of its tokens
            self._forced = [forced for forced in self._forced if forced[0] is not request]
        self.num_requesting -= request.requested is not None
        self.held_bytes -= request.held_bytes
        self.kv_cache.free(request)
        self.free_slots.append(request.slot)
        if request.params.has_penalties:
            self.freed_slots.append(request.slot)
        request.slot = -1
        request.num_computed = 0
        request.prefill_step = -1
        if request.beams is not None:
            self._free_beams(request)

    def _free_beams(self, leader: Request) -> None:
        """Frees the slots and blocks of all other beams, once their leader has lost its own."""
        group = leader.beams
        assert group is not None
        for beam in group.beams[1:]:
            request = beam.request
            request.status = Status.WAITING
            self.free_slots.append(request.slot)
            if beam.is_placed:
                self.num_prefill -= request.num_uncomputed
                self.kv_cache.free(request)
        group.detach()

    def preempt_for(self, request: Request, num_blocks: int) -> bool:
        """Preempts from the back until `request` can get `num_blocks` more blocks.

        False if `request` itself had to go.
        """
        while not self.kv_cache.can_grow(num_blocks):
            victim = self.requests.pop()
            self.free(victim)
            victim.num_preemptions += 1
            self._stats.preemptions += 1
            self._waiting.add(victim)
            if victim is request:
                return False
        return True

    # ---------------------------------------------------------------- planning

    def plan_row(self, builder: PlanBuilder, request: Request, tokens: int) -> None:
        """Gives a request `tokens` tokens of the step; its blocks are in place."""
        start = request.num_computed
        end = start + tokens
        samples = end == request.total
        builder.add_row(request, start, tokens, samples)
        request.num_computed = end
        if tokens > 1 or end <= request.prompt_len:
            self.num_prefill -= max(0, min(end, request.prompt_len) - start)
            request.num_prefill_steps += 1
            self.kv_cache.commit(request)
            if self.kv_cache.has_windows:
                self._advanced.append(request)
            if request.prefill_step < 0 and end >= request.prompt_len:
                request.prefill_step = builder.step_id
            if request.prompt_rows is not None:
                builder.add_prompt_row(request, start, end)
        if samples:
            request.total += 1

    def free_behind_windows(self) -> None:
        """Frees the blocks that the prompt chunks of the last plan left behind their windows.

        A later plan may write to these blocks, the same plan may not: its tokens are written before
        any of them is read.
        """
        for request in self._advanced:
            if request.slot >= 0:
                self.kv_cache.free_behind_windows(request, request.num_computed)
        self._advanced.clear()

    def can_force(self, count: int) -> bool:
        """Whether the next plan has room for so many more forced tokens."""
        return self._num_forced + count <= MAX_FORCED_TOKENS

    def force(self, request: Request, first: int, count: int, num_sampled: int) -> None:
        """Queues `count` tokens of a request from position `first` on for the next plan; see
        `PlanBuilder.force`."""
        self._forced.append((request, first, count, num_sampled))
        self._num_forced += count

    def send_changes(self, builder: PlanBuilder) -> None:
        """Adds the changes beside rows to a plan that will be posted: forced tokens, and the
        replacement blocks of tables with blocks behind windows."""
        for request, group, table_index, block in self.kv_cache.take_replacement_blocks():
            builder.set_entry(request, group, table_index, block)
        for forced in self._forced:
            builder.force(*forced)
        self._forced.clear()
        self._num_forced = 0

    # ---------------------------------------------------------------- checks

    def check_integrity(self) -> None:
        """Raises IntegrityError unless blocks, slots and counts agree with the requests."""
        beams = self._check_beams()
        placed = self.requests + [beam for beam in beams if beam.blocks]
        self.kv_cache.check_integrity(placed)
        slots = [r.slot for r in self.requests + beams] + self.free_slots
        if sorted(slots) != list(range(self._max_num_seqs)):
            raise IntegrityError("a slot was lost or given twice")
        if any(later < earlier for earlier, later in pairwise(self.requests)):
            raise IntegrityError("the running requests are out of order")
        if any(r.status is not Status.RUNNING for r in self.requests):
            raise IntegrityError("a request that ended still runs")
        if sum(request.num_uncomputed for request in placed) != self.num_prefill:
            raise IntegrityError("the tokens to prefill are miscounted")
        if sum(request.is_constrained for request in self.requests) != self.num_constrained:
            raise IntegrityError("the constrained requests are miscounted")

    def _check_beams(self) -> list[Request]:
        """Raises IntegrityError unless the beams of the running groups go with their leaders.
        Returns the beams that are no leaders."""
        followers: list[Request] = []
        for leader in self.requests:
            group = leader.beams
            if group is None:
                continue
            if group.leader is not leader or not group.beams[0].is_placed:
                raise IntegrityError("a beam stands among the running requests")
            for beam in group.beams:
                request = beam.request
                if request.slot < 0 or request.status is not Status.RUNNING:
                    raise IntegrityError("a beam runs without its slot")
                if len(request.tokens) != len(leader.tokens):
                    raise IntegrityError("the beams of a search differ in length")
                if beam.is_placed != bool(request.blocks):
                    raise IntegrityError("a beam has blocks without tokens in them")
            followers += (beam.request for beam in group.beams[1:])
        return followers
