"""The running requests: their slots and KV blocks, how far they are computed, and which request is
preempted when blocks run out.

`StepPlanner` admits requests to them and plans their rows, and `Scheduler` ends them.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from itertools import pairwise

from aioinfer.errors import IntegrityError
from aioinfer.ipc.kv_spec import NULL_BLOCK
from aioinfer.scheduler.kv_cache import KVCacheManager
from aioinfer.scheduler.kv_store import KVStore
from aioinfer.scheduler.limits import SchedulerLimits
from aioinfer.scheduler.plan_builder import PlanBuilder
from aioinfer.scheduler.request import Request, RequestStatus
from aioinfer.scheduler.waiting_queue import WaitingQueue

#: Appended tokens that a plan takes: 16 bytes each.
MAX_APPENDED_TOKENS = 16_384
#: Block table entries that forks change in a plan: 12 bytes each.
MAX_FORKED_ENTRIES = 65_536


@dataclass(slots=True)
class _Changes:
    """The changes of a running request that the next plan brings to the workers.

    Attributes:
        appended: (first position, tokens, how many of them were sampled) of appended tokens.
        copied: (group, source, target) of blocks to copy.
        first_entry: from which entry on the block tables have changed, or None.
    """

    appended: list[tuple[int, int, int]] = field(default_factory=list)
    copied: list[tuple[int, int, int]] = field(default_factory=list)
    first_entry: int | None = None


@dataclass(slots=True)
class SchedulerStats:
    """Totals since the start. `prefix_*` count prompt tokens of first admissions; `loads` and
    `loaded_tokens`, prefixes that the store of KV has brought and their tokens."""

    steps: int = 0
    preemptions: int = 0
    prefix_queried: int = 0
    prefix_hit: int = 0
    wasted_rows: int = 0
    loads: int = 0
    loaded_tokens: int = 0


class RunningRequests:
    """The requests that have slots.

    Attributes:
        requests: sorted by key: the request that is served first is preempted last.
        kv_cache: which blocks they have.
        free_slots: slots that no request has.
        num_prefill: prompt tokens that they have to compute.
        result_bytes: bytes that they may add to a result beside their tokens.
        freed_slots: slots that the next plan names in its `FreedSlots`.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        waiting: WaitingQueue,
        stats: SchedulerStats,
        store: KVStore | None = None,
    ):
        """`waiting` takes the requests that are preempted, `store` has further KV blocks."""
        self.kv_cache = KVCacheManager(
            limits.groups,
            limits.num_blocks,
            limits.block_size,
            max_chunk=limits.token_budget,
            prefix_caching=limits.prefix_caching,
            store=store,
        )
        self._max_num_seqs = limits.max_num_seqs
        self._waiting = waiting
        self._stats = stats
        self.requests: list[Request] = []
        self.free_slots = list(range(limits.max_num_seqs - 1, -1, -1))
        self.num_prefill = 0
        self.result_bytes = 0
        self.freed_slots: list[int] = []
        # requests that began a block in the last plan: others may not be read any more
        self._advanced: dict[Request, None] = {}
        self._changes: dict[Request, _Changes] = {}
        self._num_appended = self._num_forked_entries = 0

    # ---------------------------------------------------------------- requests come and go

    def enter(self, request: Request, num_computed: int) -> None:
        """Makes a request RUNNING with `num_computed` tokens in the cache."""
        request.status = RequestStatus.RUNNING
        request.slot = self.free_slots.pop()
        request.num_computed = request.num_settled = num_computed
        self.num_prefill += request.num_uncomputed
        if request.uses:
            self.result_bytes += request.result_bytes
        insort(self.requests, request)

    def remove(self, request: Request) -> None:
        """Removes a request, and frees its slot and blocks."""
        self.requests.remove(request)
        self.free(request)

    def remove_ended(self) -> None:
        """Removes the requests that have ended, after `free`."""
        self.requests = [r for r in self.requests if r.status is RequestStatus.RUNNING]

    def free(self, request: Request) -> None:
        """Frees the slot and the blocks of a request. The caller removes it from `requests`."""
        self.num_prefill -= request.num_uncomputed
        if self._changes:  # if it is admitted again, then with all of its tokens
            self._changes.pop(request, None)
        self._advanced.pop(request, None)
        if request.uses:
            self.result_bytes -= request.result_bytes
        self.kv_cache.free(request)
        self.free_slots.append(request.slot)
        if request.params.has_penalties:
            self.freed_slots.append(request.slot)
        request.slot = -1
        request.num_computed = request.num_settled = 0
        request.prefill_step = -1
        request.asked_connectors = 0

    def preempt(self, request: Request) -> None:
        """Takes a request's slot and blocks away; it waits again, with all tokens known so far."""
        self.remove(request)
        request.num_preemptions += 1
        self._stats.preemptions += 1
        self._waiting.add(request)

    def preempt_for(self, request: Request, num_blocks: int) -> bool:
        """Preempts from the back until `request` can get `num_blocks` more blocks.

        False if `request` itself had to go.
        """
        while not self.kv_cache.can_grow(request, num_blocks):
            victim = self.requests[-1]
            self.preempt(victim)
            if victim is request:
                return False
        return True

    # ---------------------------------------------------------------- planning

    def plan_decode(self, builder: PlanBuilder, request: Request, lookahead: int) -> None:
        """Gives a request that generates the row of its last token, and `lookahead` rows behind it;
        its blocks are in place."""
        first, settled = request.min_computed, not request.num_lookahead
        for offset in range(1 + lookahead):
            start = first + offset
            builder.add_decode(request, start, offset, settled=settled)
            if request.uses:
                builder.add_uses(request, start, start + 1, True)
        request.num_settled = first + 1
        request.num_computed += 1 + lookahead
        request.total += 1 + lookahead
        request.num_lookahead += lookahead
        self.kv_cache.commit(request)  # of states, those behind drafts that were kept

    def plan_row(self, builder: PlanBuilder, request: Request, tokens: int) -> None:
        """Gives a request `tokens` tokens of the step; its blocks are in place."""
        start = request.num_computed
        end = start + tokens
        samples = end == request.total
        builder.add_row(request, start, tokens, samples)
        is_behind = request.num_settled < start
        request.num_computed = request.num_settled = end
        if is_behind:  # the step writes the states behind drafts that were kept
            self.kv_cache.commit(request)
        if tokens > 1 or end <= request.prompt_len:
            self.num_prefill -= max(0, min(end, request.prompt_len) - start)
            request.num_prefill_steps += 1
            # Decode attention writes the key of a row of one token in the launch in which it reads
            # other such rows' keys, so a block that such a row fills is committed after the step.
            if tokens > 1:
                self.kv_cache.commit(request)
            if self.kv_cache.frees_early:
                self.note_advance(request)
            if request.prefill_step < 0 and end >= request.prompt_len:
                request.prefill_step = builder.step_id
        if request.uses:
            builder.add_uses(request, start, end, samples)
        if samples:
            request.total += 1

    def note_advance(self, request: Request) -> None:
        """Has the next plan free the blocks that no step reads behind the row of a request."""
        self._advanced[request] = None

    def free_unread(self) -> None:
        """Frees the blocks that no step reads behind the rows of the last plan that began blocks.

        A later plan may write to these blocks, the same plan may not: its tokens are written before
        any of them is read.
        """
        advanced, self._advanced = self._advanced, {}
        for request in advanced:
            self.kv_cache.free_unread(request, request.min_computed)
            if request.num_settled < request.num_computed and len(request.states) > 1:
                self._advanced[request] = None  # a step may still read the former state

    def can_append(self, count: int) -> bool:
        """Whether the next plan has room for so many more appended tokens."""
        return self._num_appended + count <= MAX_APPENDED_TOKENS

    def append(self, request: Request, first: int, count: int, num_sampled: int) -> None:
        """Has the next plan bring `count` tokens of a request from position `first` on; see
        `PlanBuilder.append`."""
        changes = self._changes.setdefault(request, _Changes())
        changes.appended.append((first, count, num_sampled))
        self._num_appended += count

    def fork(self, request: Request, source: Request, num_tokens: int) -> None:
        """Gives a request the blocks of the first `num_tokens` tokens of `source`, which may be
        itself, in the place of its own: full blocks are shared, the block behind them is copied by
        the next plan. Where that cannot be, the request is preempted."""
        kv_cache = self.kv_cache
        prefix = kv_cache.fork(source, num_tokens)
        if prefix is None:
            self.preempt(request)
            return
        self.num_prefill -= request.num_uncomputed
        first = kv_cache.replace(request, prefix)
        self.num_prefill += request.num_uncomputed
        # a block of the source may itself be a copy that the next plan makes
        of_source = self._changes[source].copied if source in self._changes else ()
        origins = {(group, target): block for group, block, target in of_source}
        self._changes[request] = changes = _Changes(first_entry=first)
        self._num_forked_entries += (request.num_blocks - first) * len(request.blocks)
        if self._num_forked_entries > MAX_FORKED_ENTRIES:
            self.preempt(request)
            return
        if not prefix.copied:
            return
        if not kv_cache.can_grow(request, 1) and not self.preempt_for(request, 1):
            return
        kv_cache.grow(request, 1)
        changes.copied = [
            (group, origins.get((group, block), block), request.blocks[group][prefix.num_blocks])
            for group, block in prefix.copied
        ]

    def send_changes(self, builder: PlanBuilder) -> None:
        """Adds the changes beside rows to a plan that will be posted: of forked and appended
        tokens, the replacement blocks of tables with blocks behind windows, and where tables of
        states have no blocks."""
        for request, group, table_index, block in self.kv_cache.take_replacement_blocks():
            builder.set_entry(request, group, table_index, block)
        for request, group, table_index in self.kv_cache.take_gaps():
            builder.set_entry(request, group, table_index, NULL_BLOCK)
        for request, changes in self._changes.items():
            for copy in changes.copied:
                builder.copy_block(*copy)
            if changes.first_entry is not None:
                builder.grow_tables(request, changes.first_entry)
            for appended in changes.appended:
                builder.append(request, *appended)
        self._changes.clear()
        self._num_appended = self._num_forked_entries = 0

    # ---------------------------------------------------------------- checks

    def check_integrity(self) -> None:
        """Raises IntegrityError unless blocks, slots and counts agree with the requests."""
        self.kv_cache.check_integrity(self.requests, self._waiting.loading)
        slots = [r.slot for r in self.requests] + self.free_slots
        if sorted(slots) != list(range(self._max_num_seqs)):
            raise IntegrityError("a slot was lost or given twice")
        if any(later < earlier for earlier, later in pairwise(self.requests)):
            raise IntegrityError("the running requests are out of order")
        if any(r.status is not RequestStatus.RUNNING for r in self.requests):
            raise IntegrityError("a request that ended still runs")
        if sum(request.num_uncomputed for request in self.requests) != self.num_prefill:
            raise IntegrityError("the tokens to prefill are miscounted")
        if sum(request.result_bytes for request in self.requests) != self.result_bytes:
            raise IntegrityError("the bytes that requests may add to a result are miscounted")
