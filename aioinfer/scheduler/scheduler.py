"""The scheduler: which tokens of which requests the next step computes, and in which KV blocks.

There is no prefill or decode phase (the idea is vLLM V1's): every request has `total` tokens, of
which `num_computed` are in the cache, and each step spends a token budget to let the second catch
up with the first. Chunked prefill, prefix-cache hits, preemption with recompute and resumption all
follow from that.

Planning one step ahead. `schedule` may be called while the result of the step before is still out.
A request that was sampled there counts one token that nobody has seen: a placeholder in `total`.
The worker has the token in the request's slot, so it never travels back. What is unknown ahead is
only whether the token ends the request; then the row that was posted meanwhile is wasted, and
`update` drops its token.

Reuse of blocks and slots. Workers execute plans strictly in the order of posting, so what a posted
plan writes is written before a later plan reads or writes. Hence blocks and slots of a request that
ends, is aborted or is preempted go back to the pool at once, even while a posted step still names
them: the stale row can only write positions that the next owner computes itself before it reads
them. Blocks behind a sliding window go back while their request runs, by the same argument (see
`kv_cache`). A block enters the prefix index only when its tokens are known, so a stale row can
never write into an indexed one. It may be shared in the very step that fills it: workers write all
keys of a layer before they attend to any.

The engine is the only caller: `add`, `schedule`, `update`, `finish`, `hold`, `release`. Imports neither torch nor
aiohttp.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from aioinfer.ipc.kv_spec import AttentionSpec, KVGroup
from aioinfer.ipc.plan import StepPlan, StepResult
from aioinfer.scheduler.kv_cache import HeldBlocks, KVCacheManager, Prefix
from aioinfer.scheduler.plan_builder import PlanBuilder
from aioinfer.scheduler.request import Request, Status

#: A request's tokens are sent whole when it is admitted. Once a plan carries so many, the next
#: request waits for the
#: next plan; so a plan is never longer than 4 MiB and one request of the longest kind.
MAX_ADMITTED_TOKENS = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """What the scheduler may hand out.

    Attributes:
        num_blocks: KV blocks of each group of layers.
        block_size: tokens a KV block.
        max_num_seqs: slots, each for a running request.
        token_budget: the most tokens of a step.
        prefill_cap: the most prefill tokens of a step that also decodes.
        prefix_caching: whether KV blocks of finished requests are kept, where the groups allow it.
        by_priority: whether requests are ordered by priority before their arrival.
        groups: the groups of layers; one in which every token attends to all before it, if none
            are given.
    """

    num_blocks: tuple[int, ...]
    block_size: int
    max_num_seqs: int
    token_budget: int
    prefill_cap: int
    prefix_caching: bool = True
    by_priority: bool = False
    groups: tuple[KVGroup, ...] = (KVGroup(AttentionSpec(1, 1), (0,)),)


@dataclass(slots=True)
class SchedulerStats:
    """Totals since the start. `prefix_*` count prompt tokens of first admissions."""

    steps: int = 0
    preemptions: int = 0
    prefix_queried: int = 0
    prefix_hit: int = 0
    wasted_rows: int = 0


@dataclass(slots=True)
class StepOutput:
    """What a result brought: `requests[i]` got `tokens[i]`, the result's sampled row `rows[i]`.

    A request that ended with it has its `finish_reason` set; one whose row failed is there with
    token -1.
    """

    requests: list[Request]
    tokens: list[int]
    rows: list[int]


class Scheduler:
    """First come, first served, or by priority; preempts from the back."""

    def __init__(self, limits: SchedulerLimits):
        self.limits = limits
        self.kv_cache = KVCacheManager(
            limits.groups,
            limits.num_blocks,
            limits.block_size,
            max_chunk=limits.token_budget,
            prefix_caching=limits.prefix_caching,
        )
        self.stats = SchedulerStats()
        # sorted by key: who came first is served first and preempted last
        self.running: list[Request] = []
        # a heap by key; finished ones are dropped when they come up
        self._waiting: list[Request] = []
        self._num_waiting = 0
        self._num_waiting_tokens = 0
        self._num_prefill_tokens = 0
        self._free_slots = list(range(limits.max_num_seqs - 1, -1, -1))
        # whose prompts the last plan went on with: blocks may be behind a window now
        self._advanced: list[Request] = []
        # (step id, the requests it samples)
        self._posted: deque[tuple[int, list[Request]]] = deque()
        self._arrivals = count()
        self._step_id = 0

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a slot or for blocks."""
        return self._num_waiting

    @property
    def num_waiting_tokens(self) -> int:
        """Their prompt tokens."""
        return self._num_waiting_tokens

    @property
    def num_prefill_tokens(self) -> int:
        """Prompt tokens of all requests that no plan has had computed yet, without those that
        waiting ones expect in the cache."""
        return self._num_prefill_tokens

    @property
    def num_in_flight(self) -> int:
        """Posted steps whose results have not come."""
        return len(self._posted)

    @property
    def is_idle(self) -> bool:
        """Whether no request is left."""
        return not self.running and not self._num_waiting

    # ---------------------------------------------------------------- requests come and go

    def add(self, request: Request) -> None:
        """Queues a request. The caller has checked that its `max_len` fits (see `fits`)."""
        request.key = (request.priority if self.limits.by_priority else 0, next(self._arrivals))
        self._enqueue(request)

    def fits(self, max_len: int) -> bool:
        """Whether a request of this length could ever run.

        Its last token is sampled but never computed.
        """
        return self.kv_cache.fits(max_len - 1)

    def finish(self, request: Request, reason: str, stop_reason: int | str | None = None) -> None:
        """Ends a request now: its slot and blocks are free for the next plan.

        Does nothing if it has ended.
        """
        if request.status is Status.FINISHED:
            return
        self._end(request, reason, stop_reason)
        if request.slot < 0:
            self._count_out(request)
        else:
            self.running.remove(request)
            self._leave_slot(request)

    def hold(self, request: Request) -> HeldBlocks:
        """Returns the KV blocks of a running request. They stay allocated, past its end too, until
        `release`; who needs them meanwhile waits."""
        assert request.slot >= 0, f"request {request.request_id} has no blocks to hold"
        return self.kv_cache.hold(request)

    def release(self, held: HeldBlocks) -> None:
        """Gives up blocks that were held. Raises KeyError if they were released before.

        The caller plans the next step, since waiting requests may have been short of them.
        """
        self.kv_cache.release(held)

    # ---------------------------------------------------------------- planning

    def schedule(self) -> StepPlan | None:
        """Plans a step, or returns None if there is nothing to compute. The plan must be posted."""
        limits = self.limits
        builder = PlanBuilder(
            self._step_id, limits.token_budget, self._prefill_allowance(), limits.max_num_seqs
        )
        self._free_behind_windows()
        preempted = self._plan_running(builder)
        # what was preempted here must not come back before its posted results have
        if not preempted:
            self._plan_waiting(builder)
        if builder.is_empty:
            return None
        self._posted.append((self._step_id, builder.sampled_requests))
        self._step_id += 1
        self.stats.steps += 1
        return builder.to_plan()

    def _prefill_allowance(self) -> int:
        """Prefill tokens that this step may compute: decodes have the first call on the budget."""
        decodes = sum(r.total - r.num_computed == 1 and r.total < r.max_len for r in self.running)
        left = max(0, self.limits.token_budget - decodes)
        return min(left, self.limits.prefill_cap) if decodes else left

    def _free_behind_windows(self) -> None:
        """Frees what the prompt chunks of the last plan left behind their windows.

        A later plan may write to these blocks, the same one may not: its tokens are written before
        any of them is read.
        """
        for request in self._advanced:
            if request.slot >= 0:
                self.kv_cache.free_behind_windows(request, request.num_computed)
        self._advanced.clear()

    def _plan_running(self, builder: PlanBuilder) -> bool:
        """Plans the next tokens of the running requests, oldest first.

        Returns whether any was preempted.
        """
        block_size = self.limits.block_size
        preempted = False
        index = 0
        while index < len(self.running):  # preemption shortens the list from the back
            request = self.running[index]
            index += 1
            start, total = request.num_computed, request.total
            if total >= request.max_len:
                continue  # its last token is sampled and on its way
            tokens = builder.grant(total - start)
            if not tokens:
                continue
            missing = -((request.num_blocks * block_size - start - tokens) // block_size)
            if missing > 0:
                self.kv_cache.free_behind_windows(request, start)
                if not self.kv_cache.can_grow(missing):
                    preempted = True
                    if not self._preempt_for(request, missing):
                        break
                first = request.num_blocks
                self.kv_cache.grow(request, missing)
                builder.grow_tables(request, first)
            self._plan_row(builder, request, tokens)
        return preempted

    def _plan_row(self, builder: PlanBuilder, request: Request, tokens: int) -> None:
        """Gives a request `tokens` tokens of this step; its blocks are in place."""
        start = request.num_computed
        end = start + tokens
        samples = end == request.total
        builder.add_row(request, start, tokens, samples)
        request.num_computed = end
        if tokens > 1 or end <= request.prompt_len:
            self._num_prefill_tokens -= max(0, min(end, request.prompt_len) - start)
            request.num_prefill_steps += 1
            self.kv_cache.commit(request)
            if self.kv_cache.has_windows:
                self._advanced.append(request)
            if request.prefill_step < 0 and end >= request.prompt_len:
                request.prefill_step = builder.step_id
        if samples:
            request.total += 1

    def _plan_waiting(self, builder: PlanBuilder) -> None:
        """Admits waiting requests in order, while slots, budget and blocks last.

        Nobody overtakes the first that does not fit.
        """
        held_back = []
        while (
            self._waiting
            and self._free_slots
            and builder.prefill_left > 0
            and builder.num_admitted_tokens < MAX_ADMITTED_TOKENS
        ):
            request = self._waiting[0]
            if request.status is Status.FINISHED:
                heapq.heappop(self._waiting)
            elif self._awaits_leader(request, builder.step_id):
                held_back.append(heapq.heappop(self._waiting))
            elif not self._admit(builder, request):
                break
        for request in held_back:
            heapq.heappush(self._waiting, request)

    def _awaits_leader(self, request: Request, step_id: int) -> bool:
        """Whether a sibling is computing the prompt; this request then shares the blocks one step
        later."""
        leader = request.group.leader if request.group else None
        return (
            leader is not None
            and leader.status is Status.RUNNING
            and not 0 <= leader.prefill_step < step_id
        )

    def _admit(self, builder: PlanBuilder, request: Request) -> bool:
        """Gives the first waiting request a slot, shared blocks and its first tokens, if its known
        tokens fit."""
        if request.num_pending:
            return False  # preempted, and the result that holds its last token is still out
        prefix = self._find_prefix(request)
        if not self.kv_cache.can_admit(prefix, request.total):
            return False
        heapq.heappop(self._waiting)
        self._count_out(request)
        tokens = builder.grant(request.total - prefix.num_tokens, prefill=True)
        self.kv_cache.admit(request, prefix, prefix.num_tokens + tokens)
        self._enter_slot(request, prefix.num_tokens)
        builder.admit(request)
        builder.grow_tables(request, 0)
        for group, block in prefix.copied:
            builder.copy_block(group, block, request.blocks[group][prefix.num_blocks])
        self._plan_row(builder, request, tokens)
        return True

    def _find_prefix(self, request: Request) -> Prefix:
        """Returns the blocks with which a request begins: its leader's, or what is cached.

        At least one token is always computed, since its logits are needed: a prompt that is known
        to its end gives up its last block, and a fork computes the last token of the prompt in its
        copy of that block.
        """
        if request.group and not request.num_output and self.kv_cache.can_fork:
            leader = request.group.leader
            if leader is not None and leader.status is Status.RUNNING and leader.prefill_step >= 0:
                prefix = self.kv_cache.fork(leader, request.prompt_len - 1)
                if prefix is not None:
                    return prefix
            request.group.leader = request
        return self.kv_cache.find_prefix(request)

    def _enter_slot(self, request: Request, computed: int) -> None:
        """Makes a request RUNNING with `computed` tokens in the cache."""
        request.status = Status.RUNNING
        request.slot = self._free_slots.pop()
        request.num_computed = computed
        self._num_prefill_tokens += request.num_uncomputed
        if request.num_cached < 0:
            request.num_cached = computed
            self.stats.prefix_queried += request.prompt_len
            self.stats.prefix_hit += computed
        insort(self.running, request)

    # ---------------------------------------------------------------- preemption

    def _preempt_for(self, request: Request, blocks: int) -> bool:
        """Preempts from the back until `request` can get `blocks` more blocks.

        False if `request` itself had to go.
        """
        while not self.kv_cache.can_grow(blocks):
            victim = self.running.pop()
            self._leave_slot(victim)
            victim.num_preemptions += 1
            self.stats.preemptions += 1
            self._enqueue(victim)
            if victim is request:
                return False
        return True

    def _leave_slot(self, request: Request) -> None:
        self._num_prefill_tokens -= request.num_uncomputed
        self.kv_cache.free(request)
        self._free_slots.append(request.slot)
        request.slot = -1
        request.num_computed = 0
        request.prefill_step = -1

    def _enqueue(self, request: Request) -> None:
        request.status = Status.WAITING
        heapq.heappush(self._waiting, request)
        self._num_waiting += 1
        self._num_waiting_tokens += request.prompt_len
        self._num_prefill_tokens += request.prompt_len - request.num_expected

    def _count_out(self, request: Request) -> None:
        """Notes that a request waits no more."""
        self._num_waiting -= 1
        self._num_waiting_tokens -= request.prompt_len
        self._num_prefill_tokens -= request.prompt_len - request.num_expected

    # ---------------------------------------------------------------- results

    def update(self, result: StepResult) -> StepOutput:
        """Takes the result of the oldest posted step: appends its tokens and ends the requests that
        are done."""
        step_id, sampled = self._posted.popleft()
        assert result.step_id == step_id, (
            f"the result of step {result.step_id} came where {step_id} was due"
        )
        output = StepOutput([], [], [])
        ended = False
        for row, (request, token) in enumerate(zip(sampled, result.tokens.tolist(), strict=True)):
            if request.status is Status.FINISHED:
                self.stats.wasted_rows += 1
                continue
            output.requests.append(request)
            output.tokens.append(token)
            output.rows.append(row)
            ended |= self._take_token(request, token)
        if ended:
            self.running = [r for r in self.running if r.status is Status.RUNNING]
        return output

    def _take_token(self, request: Request, token: int) -> bool:
        """Appends a token. Returns whether the request ended with it."""
        if token < 0:
            self.kv_cache.forget(request)
            reason = "error"
        else:
            tokens = request.tokens
            tokens.append(token)
            length = len(tokens)
            if token in request.end_tokens:
                reason = "stop"
            elif length >= request.max_len:
                reason = "length"
            else:
                full = (request.num_committed + 1) * self.limits.block_size
                if length >= full and request.num_computed >= full:
                    self.kv_cache.commit(request)
                return False
        waiting = request.slot < 0  # preempted while its last token was on its way
        self._end(request, reason, token if reason == "stop" else None)
        if waiting:
            self._count_out(request)
        else:
            if reason != "error":
                self.kv_cache.commit(request)
            self._leave_slot(request)
        return True

    def _end(self, request: Request, reason: str, stop_reason: int | str | None) -> None:
        request.status = Status.FINISHED
        request.finish_reason = reason
        request.stop_reason = stop_reason

    # ---------------------------------------------------------------- checks

    def requests(self) -> Iterator[Request]:
        """Yields every request that has not ended."""
        yield from self.running
        yield from (r for r in self._waiting if r.status is Status.WAITING)

    def check_integrity(self) -> None:
        """Raises AssertionError unless blocks, slots and queues agree with the requests (for
        tests, and when idle)."""
        self.kv_cache.check_integrity(self.running)
        slots = [r.slot for r in self.running] + self._free_slots
        assert sorted(slots) == list(range(self.limits.max_num_seqs)), (
            "a slot was lost or given twice"
        )
        assert self.running == sorted(self.running), "the running requests are out of order"
        assert all(r.status is Status.RUNNING for r in self.running), (
            "a request that ended still runs"
        )
        waiting = [r for r in self._waiting if r.status is Status.WAITING]
        assert len(waiting) == self._num_waiting, "the waiting requests are miscounted"
        assert sum(r.prompt_len for r in waiting) == self._num_waiting_tokens, (
            "the waiting tokens are miscounted"
        )
        prefill = sum(r.prompt_len - r.num_expected for r in waiting) + sum(
            r.num_uncomputed for r in self.running
        )
        assert prefill == self._num_prefill_tokens, "the tokens to prefill are miscounted"
