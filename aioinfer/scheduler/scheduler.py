"""The scheduler: decides which tokens of which requests the next step computes, and in which KV
blocks.

There is no prefill or decode phase (the idea is vLLM V1's): every request has `total` tokens, of
which `num_computed` are in the cache, and each step spends a token budget to let the second catch
up with the first. Chunked prefill, prefix-cache hits, preemption with recompute and resumption all
follow from that.

Planning one step ahead. `schedule` may be called while the result of the former step is pending.
A request that was sampled there counts one token that is not known here yet: a placeholder in
`total`. The worker has the token in the request's slot, so it never travels back. Only whether the
token ends the request is unknown ahead; if it does, the row that was posted meanwhile is wasted,
and `update` drops its token.

Reuse of blocks and slots. Workers execute plans strictly in the order of posting, so the writes of
a posted plan are done before a later plan reads or writes. Hence blocks and slots of a request that
ends, is aborted or is preempted go back to the pool at once, even while a posted step still names
them: the stale row can only write positions that the next owner computes itself before it reads
them. Blocks behind a sliding window go back while their request runs, by the same argument (see
`kv_cache`). A block enters the prefix index only when its tokens are known, so a stale row can
never write into an indexed one. It may be shared in the very step that fills it: workers write all
keys of a layer before they attend to any.

The parts. `WaitingQueue` has the requests without a slot, `RunningRequests` the requests with one,
`StepPlanner` divides a step's budget among them, `StepFeatures` has what requests ask of a step
beside tokens, `PostedSteps` the steps whose results have not come. `Scheduler` itself begins and
ends requests and takes results.

The engine is the only caller: `add`, `schedule`, `update`, `finish`; and features, which may
`append` tokens, `fork` requests and `finish` them.
Imports neither torch nor aiohttp.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count

from aioinfer.ipc.lookahead import SKIPPED
from aioinfer.ipc.plan import StepPlan, StepResult, max_sequence_tokens
from aioinfer.scheduler.features import StepFeatures
from aioinfer.scheduler.kv_store import KVStore
from aioinfer.scheduler.limits import SchedulerLimits
from aioinfer.scheduler.plan_builder import PlanBuilder
from aioinfer.scheduler.prefill_pacing import NO_PREFILL, PrefillPacing
from aioinfer.scheduler.request import Finish, Request, RequestStatus
from aioinfer.scheduler.running import RunningRequests, SchedulerStats
from aioinfer.scheduler.step_planner import StepPlanner
from aioinfer.scheduler.steps import PostedStep, PostedSteps, Row, StepOutput
from aioinfer.scheduler.waiting_queue import FairQueuing, WaitingQueue


class Scheduler:
    """By priority, then first come, first served, and fairly between flows; preempts from the
    back."""

    def __init__(
        self,
        limits: SchedulerLimits,
        clock: Callable[[], float] = time.perf_counter,
        features: StepFeatures | None = None,
    ):
        """Makes a scheduler without requests.

        Args:
            limits: of slots, blocks and steps.
            clock: returns seconds.
            features: all that requests may use.
        """
        self.stats = SchedulerStats()
        self.features = features or StepFeatures()
        self.pacing = PrefillPacing(limits)
        self._clock = clock
        self._posted = PostedSteps()
        self._arrivals = count()
        self._tickets = count()
        self._fair_queuing = FairQueuing()
        self._step_id = 0
        self._is_open = True
        self._last_came = 0.0  # when the last result came; kept for a feature that looks ahead
        self._clear(limits)
        limits.check_plan_bytes(self.kv_cache.max_replacement_blocks)

    def _clear(self, limits: SchedulerLimits) -> None:
        """Makes all slots and blocks free, the prefix index and the queues empty."""
        self.limits = limits
        self._waiting = WaitingQueue()
        store = (
            KVStore(limits.num_stored, self._tickets, limits.connectors(), self._clock)
            if limits.num_stored
            else None
        )
        self._running = RunningRequests(limits, self._waiting, self.stats, store)
        self.kv_cache = self._running.kv_cache
        self._planner = StepPlanner(
            limits, self._running, self._waiting, self.features, self._fair_queuing, self.pacing,
            self.stats,
        )  # fmt: skip
        self._planner.is_open = self._is_open

    def set_admission(self, *, is_open: bool) -> None:
        """Has requests that have not begun wait, or be admitted again."""
        self._is_open = self._planner.is_open = is_open

    @property
    def running(self) -> Sequence[Request]:
        """The requests that have slots, sorted by key: the request that is served first is
        preempted last."""
        return self._running.requests

    @property
    def num_free_slots(self) -> int:
        """Slots that no request has."""
        return len(self._running.free_slots)

    @property
    def num_running(self) -> int:
        """Sequences that have slots."""
        return len(self._running.requests)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a slot or for blocks."""
        return self._waiting.num_requests

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens of the requests that wait for a slot or for blocks."""
        return self._waiting.num_tokens

    def num_waiting_of(self, flow: str) -> int:
        """Returns how many requests of a flow were never admitted and have not ended."""
        return self._fair_queuing.num_waiting(flow)

    @property
    def num_prefill_tokens(self) -> int:
        """Prompt tokens of all requests that no plan computes yet, without the tokens that waiting
        requests expect in the cache."""
        return self._running.num_prefill + self._waiting.num_prefill_tokens

    @property
    def num_in_flight(self) -> int:
        """Posted steps whose results have not come."""
        return len(self._posted)

    @property
    def is_idle(self) -> bool:
        """Whether no request is left."""
        return not self.running and not self.num_waiting

    # ---------------------------------------------------------------- requests come and go

    def add(self, request: Request) -> None:
        """Queues a request.

        A request that another scheduler has admitted before, and that was detached there, goes
        before requests that were never admitted, as after a preemption. The caller has checked that
        the request's `max_len` fits (see `fits`).
        """
        if request.num_cached < 0:
            start = self._fair_queuing.arrive(request, request.priority)
        else:
            start = self._fair_queuing.virtual_time(request.priority)
        request.key = (request.priority, start, next(self._arrivals))
        self._waiting.add(request)
        self.features.expect(request)

    def fits(self, max_len: int) -> bool:
        """Whether a request of this length could ever run.

        Its last token is sampled but never computed.
        """
        limits = self.limits
        sendable = max_sequence_tokens(limits.block_size, len(limits.groups))
        if limits.computes_whole_prompts:
            sendable = min(sendable, limits.token_budget + 1)  # the last token is never computed
        return max_len <= sendable and self.kv_cache.fits(max_len - 1)

    def fits_forks(self, prompt_len: int, max_len: int, count: int) -> bool:
        """Whether `count` sequences of one prompt, each of `max_len` tokens, could run at the same
        time."""
        if count > self.limits.max_num_seqs or not self.fits(max_len):
            return False
        return self.kv_cache.fits_forks(prompt_len, max_len - 1, count)

    def finish(self, request: Request, reason: str, stop_reason: int | str | None = None) -> None:
        """Ends a request now: its slot and blocks are free for the next plan.

        Does nothing if it has ended.
        """
        if request.status is RequestStatus.FINISHED:
            return
        if request.status is RequestStatus.LOADING:
            assert self.kv_cache.loads is not None
            self.kv_cache.loads.drop(request)
        self._end(request, Finish(reason, stop_reason))
        if request.slot < 0:
            self._waiting.drop(request)
        else:
            self._running.remove(request)

    def restart(self, limits: SchedulerLimits, requests: Iterable[Request]) -> None:
        """Goes on with workers that hold nothing: posted steps count as never posted, and
        `requests` are queued at the places that they had, to be recomputed.

        Args:
            limits: of the new workers.
            requests: all that have not ended. Others that are queued are forgotten.
        """
        self.forget_posted()
        self._requeue(limits, requests)

    def forget_posted(self) -> None:
        """Forgets the posted steps: their results will not come."""
        self._posted.clear()
        self.pacing.clear()

    def rebuild(self, kept: Iterable[Request], ended: Iterable[Request]) -> None:
        """Rebuilds all records, after they were found to contradict each other. The workers go on:
        results of posted steps still come, and their tokens are dropped.

        Args:
            kept: requests that wait and have no posted step.
            ended: all others, which end with an error.
        """
        for request in ended:
            has_ended = request.status is RequestStatus.FINISHED
            request.detach()
            request.end(Finish("error"))
            if not has_ended:
                self.features.drop(request)
        former = self.kv_cache.store
        self._requeue(self.limits, kept)
        if former is not None and self.kv_cache.store is not None:
            self.kv_cache.store.succeed(former)
        self._running.freed_slots = list(range(self.limits.max_num_seqs))

    def _requeue(self, limits: SchedulerLimits, requests: Iterable[Request]) -> None:
        """Queues `requests`, and nothing else, with none of their tokens computed."""
        self._clear(limits)
        requeued = list(requests)
        self._fair_queuing.restore(requeued)
        for request in requeued:
            request.detach()
            self._waiting.add(request)

    def release_blocks(self) -> None:
        """Takes all KV blocks of the device away, while no step is in flight: running requests wait
        again, with all tokens known so far, and nothing is cached there. The store keeps its
        blocks."""
        for request in reversed([*self.running]):
            self._running.preempt(request)
        if self.kv_cache.loads is not None:
            for request in [*self._waiting.loading]:
                self.kv_cache.loads.drop(request)
                self._waiting.end_load(request)
        self.kv_cache.forget_device()

    def append(
        self, request: Request, tokens: Sequence[int], num_kept: int = 0
    ) -> tuple[int, Finish | None]:
        """Appends tokens to a running request that need not be sampled, as if a result had brought
        them; the next plan sends them and computes them in one row.

        Returns how many were taken, fewer if the request ends with one of them and none if they
        cannot be planned in one row, and why the request ended, if it did.

        If a posted step samples the first of them, its results for the request are dropped. With
        lookahead it samples one more for each draft that it keeps, and has computed these: the
        first `num_kept` of `tokens`. It must not sample more than `tokens`. A row of several tokens
        begins with the state in memory, which is never behind a draft: where states are kept, these
        are computed again, and without a posted step behind kept drafts nothing is taken.
        """
        if request.slot < 0 or not self._running.can_append(len(tokens)):
            return 0, None
        first, num_sampled, keeps_states = len(request.tokens), 0, self.limits.keeps_states
        if request.num_pending:
            num_sampled, lookahead = 1 + num_kept, self._posted.drop_rows(request) - 1
            request.settle(lookahead, lookahead - (0 if keeps_states else num_kept))
        elif keeps_states and request.num_settled < request.num_computed:
            return 0, None
        request.total = first
        for number, token in enumerate(tokens, 1):
            request.total += 1
            if (finish := self._take_token(request, token)) is not None:
                self._running.remove_ended()
                return number, finish
        self._running.append(request, first, len(tokens), num_sampled)
        return len(tokens), None

    def fork(self, request: Request, source: Request, num_tokens: int, token: int) -> None:
        """Makes a request go on with `token` behind the first `num_tokens` tokens of `source`,
        which may be itself, and lets one more token of it be sampled (as in a beam search).

        The request shares the full KV blocks of these tokens, and the block behind them is copied
        before the next step computes anything (copy-on-write). What cannot be shared is recomputed.
        Neither of the two has a pending token, and both have these tokens of output, computed or
        not. A request is forked once between two steps; the source may have been forked before.
        """
        full = num_tokens // self.limits.block_size
        if source is request:
            del request.tokens[num_tokens:], request.block_hashes[full:]
        else:
            request.tokens, request.block_hashes = (
                source.tokens[:num_tokens],
                source.block_hashes[:full],
            )
        request.tokens.append(token)
        request.total = len(request.tokens)
        request.plan_limit = min(request.max_len, request.total + 1)
        if request.slot >= 0 and (source is not request or request.num_computed > num_tokens):
            if source.slot >= 0 and source.num_computed >= num_tokens:
                self._running.fork(request, source, num_tokens)
            else:
                self._running.preempt(request)
        if request.slot >= 0:
            self._running.append(request, num_tokens, 1, 0)

    # ---------------------------------------------------------------- steps

    def schedule(self) -> StepPlan | None:
        """Plans a step, or returns None if there is nothing to compute. The plan must be posted."""
        running = self._running
        builder = self._planner.plan(self._step_id, len(self._posted))
        if builder.is_empty and not (
            self._has_transfers() or self.features.need_step(is_idle=not self._posted)
        ):
            return None
        running.send_changes(builder)
        rows = builder.feature_rows()
        plan = builder.to_plan(running.freed_slots, self.features.plan(rows))
        running.freed_slots.clear()
        self._record(builder, rows)
        self.stats.steps += 1
        return plan

    def _has_transfers(self) -> bool:
        """Whether a plan without rows is to be posted for the store of KV: to begin loads; and,
        where no result is on its way, to wait for loads and to save what is left to be saved."""
        store = self.kv_cache.store
        if store is None:
            return False
        store.is_awaited = store.is_loading and not self._posted
        return store.has_loads or store.is_awaited or (store.has_saves and not self._posted)

    def schedule_nothing(self) -> StepPlan:
        """Plans a step without rows, which the workers of other engines wait for. It must be
        posted, like any other."""
        builder = PlanBuilder(self._step_id, 0, NO_PREFILL, self.limits.max_num_seqs)
        self._record(builder, {})
        return builder.to_plan()

    def schedule_saves(self) -> StepPlan | None:
        """Plans a step without rows that saves blocks to the store; None if all are saved. It must
        be posted, like any other."""
        store = self.kv_cache.store
        if store is None:
            return None
        self.kv_cache.publish()
        if not store.has_saves:
            return None
        builder = PlanBuilder(self._step_id, 0, NO_PREFILL, self.limits.max_num_seqs)
        plan = builder.to_plan((), self.features.plan({}))
        self._record(builder, {})
        return plan

    def _record(self, builder: PlanBuilder, rows: Mapping[str, Sequence[Row]]) -> None:
        """Records a step that will be posted."""
        sampled: list[Request | None] = [*builder.sampled_requests]
        step = PostedStep(builder.step_id, sampled, rows, builder.has_lookahead)
        has_store, is_paced = self.kv_cache.store is not None, self.pacing.is_active
        if self.features.ahead is not None:
            step.num_decodes = builder.num_decodes
        if self.features.ahead is not None or has_store:
            step.posted = self._clock()
        if has_store or is_paced:
            work = builder.work()
            step.num_prefill = work.prefill_tokens
            if is_paced:
                self.pacing.post(work, self._clock())
        self._posted.add(step)
        self._step_id += 1

    def confirm_post(self) -> None:
        """Notes that the last plan has been posted."""
        step = self._posted.last
        if step.rows:
            self.features.confirm_post(step.step_id, step.rows)

    def update(self, result: StepResult, came: float | None = None) -> StepOutput:
        """Takes the result of the oldest posted step: appends its tokens, ends the requests that
        are done, and hands the result to the features. `came` is when it came by the scheduler's
        clock, if not now."""
        step = self._posted.take(result.step_id)
        if self.pacing.is_active:
            self.pacing.finish(self._clock() if came is None else came)
        if self.features.ahead is not None or self.kv_cache.store is not None:
            self._note_step(step, self._clock() if came is None else came)
        self.stats.wasted_rows += step.num_dropped
        requests: list[Request] = []
        tokens: list[int] = []
        rows: list[int] = []
        finished: dict[int, Finish] = {}
        result_tokens = result.tokens.tolist()
        if step.has_lookahead:
            self._settle(step.sampled, result_tokens)
        for row, (request, token) in enumerate(zip(step.sampled, result_tokens, strict=True)):
            if request is None or token == SKIPPED:
                continue
            if request.status is RequestStatus.FINISHED:
                self.stats.wasted_rows += 1
                continue
            if (finish := self._take_token(request, token)) is not None:
                finished[len(requests)] = finish
            requests.append(request)
            tokens.append(token)
            rows.append(row)
        if finished:
            self._running.remove_ended()
        output = StepOutput(requests, tokens, rows, finished)
        if step.rows or result.sections:
            output = self.features.take(step.rows, result, output)
        return output

    def _note_step(self, step: PostedStep, came: float) -> None:
        """Tells the feature that looks ahead, and the store of KV, how long a step took: from when
        workers could begin with it, which is when they had it and the step before was done."""
        began, self._last_came = max(step.posted, self._last_came), came
        if self.kv_cache.store is not None:
            self.kv_cache.store.rates.prefill.add(step.num_prefill, began, came)
        if step.num_decodes and self.features.ahead is not None:
            self.features.ahead.note_step(step.num_decodes, came - began, step.has_lookahead)

    def _settle(self, sampled: Sequence[Request | None], tokens: Sequence[int]) -> None:
        """Takes in how much of the lookahead of a step was kept, for each request with any.

        Args:
            sampled, tokens: of the step's sampled rows; rows of one request are adjacent.
        """
        last = 0
        for row in range(1, len(sampled) + 1):
            request = sampled[last]
            if row < len(sampled) and sampled[row] is request:
                continue
            if request is not None and row - last > 1:
                skipped = tokens[last:row].count(SKIPPED)
                request.settle(row - last - 1, skipped)
                if self.features.ahead is not None:
                    self.features.ahead.take_lookahead(
                        request, row - last - 1, row - last - 1 - skipped
                    )
            last = row

    def _take_token(self, request: Request, token: int) -> Finish | None:
        """Appends a token. Returns why the request ended with it, if it did."""
        if token < 0:
            self.kv_cache.forget(request)
            finish = Finish("error")
        else:
            tokens = request.tokens
            tokens.append(token)
            length = len(tokens)
            if token in request.end_tokens:
                finish = Finish("stop", token)
            elif length >= request.max_len:
                finish = Finish("length")
            else:
                full = (request.num_committed + 1) * self.limits.block_size
                # `Request.min_computed` without a call for each token
                if length >= full and request.num_computed - request.num_lookahead >= full:
                    self.kv_cache.commit(request)
                return None
        waiting = request.slot < 0  # preempted while its last token was on its way
        self._end(request, finish)
        if waiting:
            self._waiting.drop(request)
        else:
            if token >= 0:
                self.kv_cache.commit(request)
            self._running.free(request)
        return finish

    def _end(self, request: Request, finish: Finish) -> None:
        request.end(finish)
        self.features.drop(request)
        if request.num_cached < 0:
            self._fair_queuing.drop(request)
        else:
            self._fair_queuing.end(request)

    # ---------------------------------------------------------------- checks

    def requests(self) -> Iterator[Request]:
        """Yields every request that has not ended."""
        yield from self.running
        yield from self._waiting

    def check_integrity(self) -> None:
        """Raises IntegrityError unless blocks, slots and queues agree with the requests."""
        self._running.check_integrity()
        self._waiting.check_integrity()
        self._fair_queuing.check_integrity(
            sum(request.num_cached < 0 for request in self.requests())
        )
