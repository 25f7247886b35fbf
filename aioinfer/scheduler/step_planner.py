"""Plans a step: the rows of the running requests first, then waiting ones, until the token budget
is spent.

A request that is admitted gets a slot, the KV blocks of a cached prefix or of a sibling, and new
blocks. `Scheduler` owns a `StepPlanner`. Imports neither torch nor aiohttp.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

from aioinfer.scheduler.features import MAX_RESULT_BYTES, StepFeatures
from aioinfer.scheduler.limits import SchedulerLimits
from aioinfer.scheduler.micro_batches import MicroBatches
from aioinfer.scheduler.plan_builder import PlanBuilder
from aioinfer.scheduler.prefill_pacing import (
    NO_PREFILL,
    PrefillAllowance,
    PrefillPacing,
    fill_tiles,
)
from aioinfer.scheduler.prefix_loads import PrefixLoads
from aioinfer.scheduler.prefix_search import Prefix
from aioinfer.scheduler.request import ForkGroup, Request, RequestStatus
from aioinfer.scheduler.running import RunningRequests, SchedulerStats
from aioinfer.scheduler.step_time import StepWork
from aioinfer.scheduler.waiting_queue import FairQueuing, WaitingQueue


class _Begun(enum.Enum):
    """What became of the load of a waiting request's prefix.

    HERE: it has begun, or was refused; the next waiting request follows. ELSEWHERE: another request
    is loading a part of it. NO_ROOM: the device has too few free blocks.
    """

    HERE = enum.auto()
    ELSEWHERE = enum.auto()
    NO_ROOM = enum.auto()


class StepPlanner:
    """Divides the budget of each step among the requests of a scheduler.

    Attributes:
        is_open: whether requests are admitted that have not begun.
    """

    is_open = True

    def __init__(
        self,
        limits: SchedulerLimits,
        running: RunningRequests,
        waiting: WaitingQueue,
        features: StepFeatures,
        fair_queuing: FairQueuing,
        pacing: PrefillPacing,
        stats: SchedulerStats,
    ):
        self._limits = limits
        self._running = running
        self._kv_cache = running.kv_cache
        self._loads = self._kv_cache.loads
        self._store = self._kv_cache.store
        self._waiting = waiting
        self._features = features
        self._fair_queuing = fair_queuing
        self._pacing = pacing
        self._stats = stats
        self._micro_batches: MicroBatches | None = None
        # with several stages as many steps are in flight, and the last one has nothing to do until
        # the others have computed the first of them
        self._max_prefill = -(-limits.token_budget // limits.num_stages)
        if limits.num_stages > 1:
            self._micro_batches = MicroBatches(limits.num_stages, plan_ahead=limits.plan_ahead)

    def plan(self, step_id: int, num_in_flight: int) -> PlanBuilder:
        """Returns the rows of the next step, behind so many that are in flight; none if there is
        nothing to compute."""
        if self._micro_batches is None:
            return self._plan(step_id)
        return self._plan_micro_batch(step_id, num_in_flight, self._micro_batches)

    def _plan_micro_batch(
        self, step_id: int, num_in_flight: int, micro_batches: MicroBatches
    ) -> PlanBuilder:
        micro_batches.begin(step_id, self._num_decodes())
        is_busy = num_in_flight >= self._limits.num_stages and not self._waiting.num_requests
        if is_busy and micro_batches.awaits_lookahead(self._running.requests):
            return self._new_builder(step_id)
        builder = self._plan(step_id)
        if builder.is_empty and micro_batches.take_early():
            self._plan_running(builder)
        micro_batches.end(step_id, builder.sampled_requests)
        return builder

    def _plan(self, step_id: int) -> PlanBuilder:
        builder = self._new_builder(step_id)
        self._running.free_unread()
        self._end_loads()
        self._kv_cache.publish()
        # a request that was preempted here must not come back before its posted results have
        preempted = self._plan_running(builder)
        if preempted and builder.is_empty:
            # the request that took the budget has gone beside idle ones: it may come back, since
            # there may be no result on its way that has the next step planned
            builder, preempted = self._new_builder(step_id), False
        if not preempted:
            self._plan_waiting(builder)
            while builder.is_empty and self._preempt_idle():
                self._plan_waiting(builder)
        return builder

    def _new_builder(self, step_id: int) -> PlanBuilder:
        limits = self._limits
        return PlanBuilder(
            step_id, limits.token_budget, self._prefill_allowance(), limits.max_num_seqs,
            limits.max_lookahead, limits.block_size,
        )  # fmt: skip

    def _preempt_idle(self) -> bool:
        """Preempts the last request if requests wait and all running ones are idle: sequences that
        are forked from each other then hold the slots or blocks that another one of them needs, or
        a request that goes before it. Returns whether one was preempted."""
        running = self._running.requests
        if not running or not all(r.is_idle and not r.num_pending for r in running):
            return False
        waiting = [r for r in self._waiting.queued() if self.is_open or r.has_begun]
        if all(request.is_idle for request in waiting) or min(waiting).num_pending:
            return False
        self._running.preempt(running[-1])
        return True

    def _prefill_allowance(self) -> PrefillAllowance:
        """Returns the prefill allowance of this step: decodes have the first call on the budget."""
        num_decodes = self._num_decodes()
        if num_decodes == len(self._running.requests) and not self._waiting.num_requests:
            return NO_PREFILL
        left = min(max(0, self._limits.token_budget - num_decodes), self._max_prefill)
        if not num_decodes:
            return PrefillAllowance(left)
        if not self._pacing.is_active:
            in_step = -(-num_decodes // self._limits.num_stages)
            return PrefillAllowance(fill_tiles(min(left, self._limits.prefill_cap), in_step))
        running = self._running.requests
        keys = [r.total for r in running if r.total - r.num_computed == 1 and not r.is_idle]
        free_slots = len(self._running.free_slots)
        num_prompts = len(running) - num_decodes + min(self._waiting.num_requests, free_slots)
        return self._pacing.allow(left, StepWork(num_decodes, sum(keys)), num_prompts)

    def _num_decodes(self) -> int:
        """Returns how many running requests have one token to compute."""
        running = self._running.requests
        return sum(r.total - r.num_computed == 1 and r.total < r.plan_limit for r in running)

    def _plan_running(self, builder: PlanBuilder) -> bool:
        """Plans the next tokens of the running requests, oldest first.

        Returns whether any was preempted.
        """
        running, kv_cache, block_size = self._running, self._kv_cache, self._limits.block_size
        requests, micro_batches = running.requests, self._micro_batches
        ahead = self._lookahead(builder)
        builder.looks_ahead = ahead is not None
        preempted = False
        index = 0
        while index < len(requests):  # preemption shortens the list from the back
            request = requests[index]
            index += 1
            start, total = request.num_computed, request.total
            if total >= request.plan_limit:
                continue  # its last token is known or on its way
            if micro_batches is not None and not micro_batches.takes(request):
                continue
            wanted = total - start
            if request.uses:
                wanted = self._features.limit(request, wanted, builder.rows, start)
            tokens = self._grant(builder, request, wanted, start)
            if not tokens:
                continue
            lookahead = 0
            if ahead and tokens == 1:
                lookahead = self._grant_lookahead(builder, request, ahead.get(request, 0))
            end = start + tokens + lookahead
            missing = -((request.num_blocks * block_size - end) // block_size)
            if builder.looks_ahead and end >= total:
                missing = self._with_reserve(request, end, missing)
            if missing > 0:
                kv_cache.free_unread(request, start - request.num_lookahead)
                if not kv_cache.can_grow(request, missing):
                    if request.num_lookahead and self._limits.keeps_states:
                        continue  # its position is not known yet, and neither is the block
                    preempted = True
                    if not running.preempt_for(request, missing):
                        break
                first = request.num_blocks
                if tokens > 1:
                    kv_cache.prefixes.want_shared(request, self._waiting.next_few())
                kv_cache.grow(request, missing)
                builder.grow_tables(request, first)
                if kv_cache.frees_early:
                    running.note_advance(request)
            if lookahead or request.num_lookahead:
                running.plan_decode(builder, request, lookahead)
            else:
                running.plan_row(builder, request, tokens)
        return preempted

    def _grant(
        self, builder: PlanBuilder, request: Request, wanted: int, start: int, *,
        prefill: bool = False,
    ) -> int:  # fmt: skip
        """Takes up to `wanted` tokens of a request off the budget, as far as its features can have
        them computed, and returns how many."""
        granted = builder.grant(wanted, start, prefill=prefill)
        if not request.uses or not granted:
            return granted
        more, rows = builder.budget_left, builder.rows
        tokens, extra = self._features.fit(request, granted, start, more, rows)
        if tokens != granted or extra:
            builder.correct(granted, tokens, extra, start)
        return tokens

    def _lookahead(self, builder: PlanBuilder) -> Mapping[Request, int] | None:
        """Returns how many lookahead rows requests should have in the step, if any should."""
        feature = self._features.ahead
        if feature is None or not builder.lookahead_left:
            return None
        decodes = [
            request
            for request in self._running.requests
            if request.total - request.num_computed == 1
            and request.prompt_len <= request.num_computed
            and request.total < request.plan_limit
            and (self._micro_batches is None or self._micro_batches.is_due(request))
        ]
        if self._micro_batches is not None:
            decodes = decodes[: self._micro_batches.num_left]
        return feature.lookahead(decodes)

    def _with_reserve(self, request: Request, end: int, missing: int) -> int:
        """Returns how many blocks a request should get whose step computes tokens up to `end`, and
        which needs `missing`: more where blocks are free, for the tokens that the step drafts."""
        feature = self._features.ahead
        if feature is None or not feature.reserve or self._limits.keeps_states:
            return missing
        end = min(end + feature.reserve, request.plan_limit)
        more = -((request.num_blocks * self._limits.block_size - end) // self._limits.block_size)
        return more if more > missing and self._kv_cache.can_grow(request, more) else missing

    def _grant_lookahead(self, builder: PlanBuilder, request: Request, asked: int) -> int:
        """Returns how many lookahead rows a request gets of those asked for: as many as the step,
        the request's length and the KV blocks allow without preempting any."""
        start, size = request.num_computed, self._limits.block_size
        wanted = min(asked, request.plan_limit - request.total - 1)
        if wanted <= 0:
            return 0
        if self._limits.keeps_states:  # a state may be kept in any of the blocks
            wanted = min(wanted, (request.num_blocks + 1) * size - start - 1)
        missing = -((request.num_blocks * size - start - 1 - wanted) // size)
        if missing > 0 and not self._kv_cache.can_grow(request, missing):
            wanted = min(wanted, request.num_blocks * size - start - 1)
        return builder.grant_lookahead(max(0, wanted))

    def _plan_waiting(self, builder: PlanBuilder) -> None:
        """Admits waiting requests in order, while slots, budget, bytes and blocks last.

        No request overtakes the first that does not fit.
        """
        held_back = []
        num_following = 0
        waiting = self._waiting
        while waiting.num_requests and self._running.free_slots and builder.prefill_left > 0:
            request = waiting.first()
            if request is None:
                break  # all that wait were set aside
            waits = request.is_idle or self._awaits_leader(request, builder.step_id)
            waits = waits or not (self.is_open or request.has_begun)
            if waits or (request.uses and self._features.hold(request)):
                held_back.append(self._waiting.set_aside())
            elif self._loads is not None and (begun := self._begin_load(request, self._loads)):
                if begun is _Begun.ELSEWHERE:
                    held_back.append(self._waiting.set_aside())
                elif begun is _Begun.NO_ROOM:
                    break
            elif self._kv_cache.prefixes.computes_state(request):
                held_back.append(self._waiting.set_aside())
                num_following += 1
                if num_following >= len(self._running.free_slots):
                    break  # the next plan has work enough
            elif not self._fits_plan(builder, request) or not self._admit(builder, request):
                break
        for request in held_back:
            self._waiting.put_back(request)

    def _begin_load(self, request: Request, loads: PrefixLoads) -> _Begun | None:
        """Has blocks of the first waiting request read from a connector, or loaded from the host.
        Returns None, and nothing is changed, if there are none that are worth it."""
        if request.num_pending or self._store is None:
            return None
        prefix, rates = self._find_prefix(request), self._store.rates
        found = loads.find_beyond(request, prefix)
        if found is not None and found[0].pays(rates.prefill):
            if loads.is_arriving(request, found[1]):
                return _Begun.ELSEWHERE
            if loads.begin_read(request, *found):
                self._waiting.begin_load()
            return _Begun.HERE
        length = loads.find_stored(request, prefix)
        if not length or not rates.loads.pays(rates.prefill):
            return None
        if loads.is_arriving(request, length):
            return _Begun.ELSEWHERE
        num_tokens = length * self._limits.block_size - prefix.num_tokens
        if not loads.begin(request, length, num_tokens):
            return _Begun.NO_ROOM
        self._waiting.begin_load()
        self._stats.loads += 1
        self._stats.loaded_tokens += num_tokens
        return _Begun.HERE

    def _end_loads(self) -> None:
        """Lets the requests whose blocks have been loaded wait for their admission."""
        if self._loads is None or self._store is None:
            return
        for request in self._store.take_loaded():
            self._loads.end(request)
            self._waiting.end_load(request)

    def _fits_plan(self, builder: PlanBuilder, request: Request) -> bool:
        """Whether the plan and later results have the bytes for a request, and where prompts are
        computed whole the tokens; the first always fits (see `fits`)."""
        if request.uses:
            more = request.result_bytes
            if more and 0 < self._running.result_bytes > MAX_RESULT_BYTES - more:
                return False
            least = request.total if self._limits.computes_whole_prompts else 1
            start = request.num_computed
            if self._features.limit(request, least, builder.rows, start) < least:
                return False
        if self._limits.computes_whole_prompts and request.total > builder.prefill_left:
            return False
        return builder.has_bytes(self._admission_bytes(builder, request))

    def _admission_bytes(self, builder: PlanBuilder, request: Request) -> int:
        blocks = -(-request.total // self._limits.block_size)
        return builder.admission_bytes(request, blocks * len(self._limits.groups))

    def _awaits_leader(self, request: Request, step_id: int) -> bool:
        """Whether a sibling is computing the prompt; this request then shares the blocks one step
        later, or once the features that it has to wait for are done."""
        group = request.group
        if group is None:
            return False
        if any(not use.is_done and use not in request.uses for use in group.awaited):
            return True
        leader = group.leader
        if leader is None:
            return False
        if leader.status is RequestStatus.LOADING:
            return leader is not request
        return leader.status is RequestStatus.RUNNING and not 0 <= leader.prefill_step < step_id

    def _admit(self, builder: PlanBuilder, request: Request) -> bool:
        """Gives the first waiting request a slot, shared blocks and its first tokens, if its known
        tokens fit."""
        if request.num_pending:
            return False  # preempted, and the result that holds its last token is still out
        prefix = self._find_prefix(request)
        if not self._kv_cache.can_admit(prefix, request.total):
            return False
        wanted = request.total - prefix.num_tokens
        if request.uses:
            wanted = self._features.limit(request, wanted, builder.rows, prefix.num_tokens)
        tokens = self._grant(builder, request, wanted, prefix.num_tokens, prefill=True)
        if not tokens:
            return False
        self._waiting.pop()
        size = self._admission_bytes(builder, request)
        waiting = self._waiting.next_few()
        self._kv_cache.admit(request, prefix, prefix.num_tokens + tokens, waiting)
        self._running.enter(request, prefix.num_tokens)
        if request.num_cached < 0:
            self._count_first(request)
        builder.admit(request, size)
        if request.uses:
            self._features.admit(request)
        builder.grow_tables(request, 0)
        for group, block in prefix.copied:
            builder.copy_block(group, block, request.blocks[group][prefix.num_blocks])
        self._running.plan_row(builder, request, tokens)
        return True

    def _count_first(self, request: Request) -> None:
        """Records that a request runs for the first time."""
        self._fair_queuing.admit(request)
        request.begin()
        self._stats.prefix_queried += request.prompt_len
        self._stats.prefix_hit += request.num_cached

    def _find_prefix(self, request: Request) -> Prefix:
        """Returns the blocks with which a request begins: its leader's blocks, or cached ones.

        At least one token is always computed, since its logits are needed: a prompt that is known
        to its end gives up its last block, and a fork computes the last token of the prompt in its
        copy of that block.
        """
        group, kv_cache = request.group, self._kv_cache
        if group is not None and not (request.num_output and kv_cache.prefix_caching):
            source, num_tokens = group.leader, request.prompt_len - 1
            if request.num_output:  # the tokens behind the prompt differ
                source = self._find_sibling(group)
                num_tokens -= num_tokens % self._limits.block_size
            if source is not None and _has_prompt(source):
                prefix = kv_cache.fork(source, num_tokens)
                if prefix is not None:
                    return prefix
                if not kv_cache.forks_anywhere:
                    return kv_cache.prefixes.find(
                        request
                    )  # a snapshot of the prompt, if there is one
            group.leader = request
        return kv_cache.prefixes.find(request)

    def _find_sibling(self, group: ForkGroup) -> Request | None:
        """Returns a running sequence that has the keys of its group's whole prompt, or None."""
        siblings = (request for request in self._running.requests if request.group is group)
        return next(filter(_has_prompt, siblings), None)


def _has_prompt(request: Request) -> bool:
    return request.status is RequestStatus.RUNNING and request.prefill_step >= 0
