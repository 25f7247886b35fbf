"""The scheduler: which tokens of which requests the next step computes, and in which KV blocks.

There is no prefill or decode phase (the idea is vLLM V1's): every request has `total` tokens, of
which `num_computed` are in the cache, and each step spends a token budget to let the second catch
up with the first. Chunked prefill, prefix-cache hits, preemption with recompute and resumption all
follow from that.

Planning one step ahead. `schedule` may be called while the result of the former step is pending.
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

Requests that cannot be planned yet. One that waits for something else than slots and blocks (a
grammar that is compiled, keys from another host) is BLOCKED: it is in no queue and holds nobody up,
and `unblock` puts it where it belongs by its key. One whose rows may take any number of tokens,
or that needs its last token before the next is sampled, is not planned ahead
(`Request.plans_ahead`): only it waits for its result, not the others.

The engine is the only caller: `add`, `unblock`, `schedule`, `update`, `finish`, `hold`, `release`.
Imports neither torch nor aiohttp.
"""

from __future__ import annotations

from array import array
from bisect import insort
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, pairwise

from aioinfer.errors import IntegrityError
from aioinfer.ipc.plan import StepPlan, StepResult, max_sequence_tokens
from aioinfer.ipc.prompt_rows import MAX_POOLED_BYTES
from aioinfer.sampling_params import SamplingParams
from aioinfer.scheduler.beams import BeamPlanner
from aioinfer.scheduler.fair_queuing import FairQueuing
from aioinfer.scheduler.kv_cache import HeldBlocks, KVCacheManager, Prefix
from aioinfer.scheduler.limits import SchedulerLimits
from aioinfer.scheduler.plan_builder import PlanBuilder
from aioinfer.scheduler.prompt_rows import PromptPool, PromptScores
from aioinfer.scheduler.request import BeamGroup, Request, Status
from aioinfer.scheduler.waiting_queue import WaitingQueue

#: A request is sent whole when it is admitted. A plan takes admissions up to so many bytes (one
#: admission at least), and the next request waits for the next plan: encoding and copying a plan is
#: not to delay the step.
MAX_ADMITTED_BYTES = 4 * 2**20

#: Forced tokens that a plan takes: 16 bytes each.
MAX_FORCED_TOKENS = 16_384
#: In the place of a request whose row was sampled in vain, and of a beam, whose token is not the
#: one that was sampled.
_NOBODY = Request("", array("i"), 0, SamplingParams(), 0, status=Status.FINISHED)
_BEAM = Request("", array("i"), 0, SamplingParams(), 0, status=Status.FINISHED)


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
    """What a result brought: `requests[i]` got `tokens[i]`, the one that stands at `rows[i]` of the
    result's tokens, row by row (with one token a row, that is the row).

    A request that ended with its last token here has its `finish_reason` set; one whose row failed
    is there with token -1. `has_several` tells whether a request may be there more than once, its
    tokens behind each other. `beam_rows` are the rows of beams, which are not among the requests,
    and whose they are.
    """

    requests: list[Request]
    tokens: list[int]
    rows: list[int]
    has_several: bool = False
    beam_rows: Sequence[tuple[int, Request]] = ()


class Scheduler:
    """First come, first served, or by priority, and fairly between flows; preempts from the
    back."""

    def __init__(self, limits: SchedulerLimits):
        self.stats = SchedulerStats()
        # slots that the next plan names in its `Vacated`
        self._vacated: list[int] = []
        # (step id, the requests it samples)
        self._posted: deque[tuple[int, list[Request]]] = deque()
        self._arrivals = count()
        self._fair_queuing = FairQueuing()
        self._step_id = 0
        self._beams = BeamPlanner(self, MAX_ADMITTED_BYTES)
        # what the last plan will bring beside tokens: see `PlanBuilder`
        self.last_scored: Sequence[tuple[PromptScores, int, int]] = ()
        self.last_pooled: Sequence[PromptPool] = ()
        self._clear(limits)
        limits.check_plan_bytes(self.kv_cache.max_stand_ins)

    def _clear(self, limits: SchedulerLimits) -> None:
        """Makes all slots and blocks free, the prefix index and the queues empty."""
        self.limits = limits
        self.kv_cache = KVCacheManager(
            limits.groups,
            limits.num_blocks,
            limits.block_size,
            max_chunk=limits.token_budget,
            prefix_caching=limits.prefix_caching,
        )
        # sorted by key: who is served first is preempted last
        self.running: list[Request] = []
        self._waiting = WaitingQueue()
        self._blocked: dict[Request, None] = {}
        self.num_running_prefill = 0  # prompt tokens that the running requests have to compute
        self._num_constrained = 0  # running requests whose rows wait for masks
        # what running requests may add to a result beside their tokens
        self._held_bytes = 0
        self.free_slots = list(range(limits.max_num_seqs - 1, -1, -1))
        # whose prompts the last plan went on with: blocks may be behind a window now
        self._advanced: list[Request] = []
        # for the next plan: (request, first position, forced tokens, how many of them were sampled)
        self._forced: list[tuple[Request, int, int, int]] = []
        self._num_forced = 0

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a slot or for blocks."""
        return self._waiting.num_requests

    @property
    def num_blocked(self) -> int:
        """Requests that wait for something else (see `Request.blocked_on`)."""
        return len(self._blocked)

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens of the requests that wait for a slot or for blocks."""
        return self._waiting.num_tokens

    def num_waiting_of(self, flow: str) -> int:
        """Returns how many requests of a flow were never admitted and have not ended."""
        return self._fair_queuing.num_waiting(flow)

    @property
    def num_prefill_tokens(self) -> int:
        """Prompt tokens of all requests that no plan has had computed yet, without those that
        waiting ones expect in the cache."""
        return self.num_running_prefill + self._waiting.num_prefill_tokens

    @property
    def num_in_flight(self) -> int:
        """Posted steps whose results have not come."""
        return len(self._posted)

    @property
    def last_sampled(self) -> Sequence[Request]:
        """The requests of which the last posted step samples a token, in the order of its result's
        rows."""
        return self._posted[-1][1]

    @property
    def is_idle(self) -> bool:
        """Whether no request is left."""
        return not self.running and not self._waiting.num_requests and not self._blocked

    # ---------------------------------------------------------------- requests come and go

    def add(self, request: Request) -> None:
        """Queues a request, or keeps it until `unblock` if it is blocked on something.

        One that another scheduler has admitted before, and that was detached there, goes before
        those that were never admitted, as after a preemption. The caller has checked that the
        request's `max_len` fits (see `fits`).
        """
        priority = request.priority if self.limits.by_priority else 0
        if request.num_cached < 0:
            start = self._fair_queuing.arrive(request, priority)
        else:
            start = self._fair_queuing.virtual_time(priority)
        request.key = (priority, start, next(self._arrivals))
        if request.blocked_on is None:
            self._waiting.add(request)
        else:
            request.status = Status.BLOCKED
            self._blocked[request] = None

    def unblock(self, request: Request) -> None:
        """Queues a request that was blocked, at its place by its key. Nothing if it has ended."""
        request.blocked_on = None
        if request.status is Status.BLOCKED:
            del self._blocked[request]
            self._waiting.add(request)

    def fits(self, max_len: int) -> bool:
        """Whether a request of this length could ever run.

        Its last token is sampled but never computed.
        """
        limits = self.limits
        sendable = max_sequence_tokens(limits.block_size, len(limits.groups))
        return max_len <= sendable and self.kv_cache.fits(max_len - 1)

    def fits_beams(self, prompt_len: int, max_len: int, width: int) -> bool:
        """Whether a beam search of this width could ever run, with beams of this length."""
        if width > self.limits.max_num_seqs or not self.fits(max_len):
            return False
        return self.kv_cache.fits_beams(prompt_len, max_len - 1, width)

    def fits_request(self, request: Request) -> bool:
        """Whether a request could ever run, with the other beams of its search if it has any."""
        if request.beams is None:
            return self.fits(request.max_len)
        return self.fits_beams(request.prompt_len, request.max_len, len(request.beams.beams))

    def finish(self, request: Request, reason: str, stop_reason: int | str | None = None) -> None:
        """Ends a request now: its slot and blocks are free for the next plan.

        Does nothing if it has ended.
        """
        if request.status is Status.FINISHED:
            return
        was_blocked = request.status is Status.BLOCKED
        self._end(request, reason, stop_reason)
        if was_blocked:
            del self._blocked[request]
        elif request.slot < 0:
            self._waiting.count_out(request)
        else:
            self.running.remove(request)
            self._leave_slot(request)

    def restart(self, limits: SchedulerLimits, requests: Iterable[Request]) -> None:
        """Goes on with workers that hold nothing: posted steps count as never posted, and
        `requests` are queued at the places that they had, to be computed anew.

        Args:
            limits: of the new workers.
            requests: all that have not ended. Others that are queued are forgotten.
        """
        self._posted.clear()
        self._beams.clear()
        self._vacated.clear()
        self._requeue(limits, requests)

    def rebuild(self, kept: Iterable[Request], ended: Iterable[Request]) -> None:
        """Makes all records anew, after they were found to contradict each other. The workers go
        on: results of posted steps still come, and their tokens are dropped.

        Args:
            kept: requests that wait and have no posted step.
            ended: all others, which end with an error.
        """
        for request in ended:
            request.detach()
            self._mark_finished(request, "error", None)
        self._requeue(self.limits, kept)
        self._vacated = list(range(self.limits.max_num_seqs))

    def _requeue(self, limits: SchedulerLimits, requests: Iterable[Request]) -> None:
        """Queues `requests`, and nothing else, with none of their tokens computed."""
        self.kv_cache.lose_held()
        self._clear(limits)
        requeued = list(requests)
        self._fair_queuing.restore(requeued)
        for request in requeued:
            request.detach()
            if request.status is Status.BLOCKED:
                self._blocked[request] = None
            else:
                self._waiting.add(request)

    def force(self, request: Request, tokens: Sequence[int]) -> int:
        """Appends tokens to a running request that need not be sampled, as if a result had brought
        them; the next plan sends them, and has them computed in one row. Returns how many were
        taken: fewer if the request ends with one of them, none if there are too many in a plan.

        If a posted step samples the first of them, that row's result is dropped.
        """
        if request.slot < 0 or self._num_forced + len(tokens) > MAX_FORCED_TOKENS:
            return 0
        first, num_sampled = len(request.tokens), request.num_pending
        if num_sampled:
            step = next(step for _, step in self._posted if request in step)
            step[step.index(request)] = _NOBODY
        request.total = first
        for number, token in enumerate(tokens, 1):
            request.total += 1
            if self._take_token(request, token):
                self.running.remove(request)
                return number
        self._forced.append((request, first, len(tokens), num_sampled))
        self._num_forced += len(tokens)
        return len(tokens)

    def hold(self, request: Request) -> HeldBlocks:
        """Returns the KV blocks of a running request. They stay allocated, past its end too, until
        `release`; who needs them meanwhile waits.

        They do not outlive the workers: after a `restart` or `rebuild` they are gone, and
        `HeldBlocks.blocks` raises `KVBlocksGoneError`.
        """
        if request.slot < 0:
            raise IntegrityError(f"request {request.request_id} has no blocks to hold")
        return self.kv_cache.hold(request)

    def release(self, held: HeldBlocks) -> None:
        """Gives up blocks that were held; does nothing if they are gone with the workers. Raises
        KeyError if they were released before.

        The caller plans the next step, since waiting requests may have been short of them.
        """
        self.kv_cache.release(held)

    def held_requests(self) -> list[Request]:
        """Returns the requests that have not ended and whose blocks are held."""
        return [r for r in self.kv_cache.holders() if r.status is not Status.FINISHED]

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
        for request, group, table_index, block in self.kv_cache.take_stand_ins():
            builder.set_entry(request, group, table_index, block)
        for forced in self._forced:
            builder.force(*forced)
        self._forced.clear()
        self._num_forced = 0
        sampled = builder.sampled_requests
        self._beams.take_rows(self._step_id, sampled, _BEAM)
        self._posted.append((self._step_id, sampled))
        self._step_id += 1
        self.stats.steps += 1
        self.last_scored, self.last_pooled = builder.scored, builder.pooled
        constrained: list[int] = []
        if self._num_constrained:
            constrained = [row for row, r in enumerate(sampled) if r.is_constrained]
        plan = builder.to_plan(self._vacated, constrained)
        self._vacated.clear()
        return plan

    def _prefill_allowance(self) -> int:
        """Prefill tokens that this step may compute: decodes have the first call on the budget."""
        decodes = sum(r.total - r.num_computed == 1 and r.total < r.max_len for r in self.running)
        left = max(0, self.limits.token_budget - decodes)
        return min(left, self.limits.prefill_cap) if decodes else left

    def _free_behind_windows(self) -> None:
        """Frees what the prompt chunks of the last plan left behind their windows.

        A later plan may write to these blocks, the same one may not: its tokens are written before
        any of them is read. A row that may take no token has its last one computed again.
        """
        for request in self._advanced:
            if request.slot >= 0:
                start = request.num_computed - (not request.plans_ahead)
                self.kv_cache.free_behind_windows(request, start)
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
            if total >= request.plan_limit:
                if request.beams is not None:
                    preempted |= self._beams.plan(builder, request)
                    continue
                if request.awaits_result:
                    continue  # its last token, or the one that the next depends on, is on its way
            tokens = builder.grant(total - start)
            if not tokens:
                continue
            missing = -((request.num_blocks * block_size - start - tokens) // block_size)
            if missing > 0:
                self.kv_cache.free_behind_windows(request, start)
                if not self.kv_cache.can_grow(missing):
                    preempted = True
                    if not self.preempt_for(request, missing):
                        break
                first = request.num_blocks
                self.kv_cache.grow(request, missing)
                builder.grow_tables(request, first)
            self.plan_row(builder, request, tokens)
        return preempted

    def plan_row(self, builder: PlanBuilder, request: Request, tokens: int) -> None:
        """Gives a request `tokens` tokens of this step; its blocks are in place."""
        start = request.num_computed
        end = start + tokens
        samples = end == request.total
        builder.add_row(request, start, tokens, samples)
        request.num_computed = end
        if tokens > 1 or end <= request.prompt_len:
            self.num_running_prefill -= max(0, min(end, request.prompt_len) - start)
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

    def _plan_waiting(self, builder: PlanBuilder) -> None:
        """Admits waiting requests in order, while slots, budget, bytes and blocks last.

        Nobody overtakes the first that does not fit.
        """
        held_back = []
        while self.free_slots and builder.prefill_left > 0:
            request = self._waiting.first()
            if request is None:
                break
            if self._awaits_leader(request, builder.step_id):
                held_back.append(self._waiting.set_aside())
            elif not self._fits_plan(builder, request) or not self._admit(builder, request):
                break
        for request in held_back:
            self._waiting.put_back(request)

    def _fits_plan(self, builder: PlanBuilder, request: Request) -> bool:
        """Whether the plan has the bytes for a request, and later results have them; the first
        always fits (see `fits`)."""
        rows = request.prompt_rows
        if rows is not None and 0 < self._held_bytes > MAX_POOLED_BYTES - rows.held_bytes:
            return False
        size = self._admission_bytes(builder, request)
        return not builder.admitted_bytes or builder.admitted_bytes + size <= MAX_ADMITTED_BYTES

    def _admission_bytes(self, builder: PlanBuilder, request: Request) -> int:
        blocks = -(-request.total // self.limits.block_size)
        return builder.admission_bytes(request, blocks * len(self.limits.groups))

    def _awaits_leader(self, request: Request, step_id: int) -> bool:
        """Whether a sibling is computing the prompt; this request then shares the blocks one step
        later, or once the outputs of the prompt's rows have come."""
        if request.group and request.prompt_rows is None:
            rows = request.group.prompt_rows
            if rows is not None and not rows.is_done:
                return True
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
        if request.beams is not None and not self._beams.can_admit(request, prefix):
            return False
        self._waiting.pop()
        size = self._admission_bytes(builder, request)
        tokens = builder.grant(request.total - prefix.num_tokens, prefill=True)
        self.kv_cache.admit(request, prefix, prefix.num_tokens + tokens)
        self._enter_slot(request, prefix.num_tokens)
        builder.admit(request, size)
        builder.grow_tables(request, 0)
        for group, block in prefix.copied:
            builder.copy_block(group, block, request.blocks[group][prefix.num_blocks])
        self.plan_row(builder, request, tokens)
        if request.beams is not None:
            self._beams.enter(builder, request)
        return True

    def _find_prefix(self, request: Request) -> Prefix:
        """Returns the blocks with which a request begins: its leader's, or what is cached.

        At least one token is always computed, since its logits are needed: a prompt that is known
        to its end gives up its last block, and a fork computes the last token of the prompt in its
        copy of that block.
        """
        if request.group and not request.num_output and not self.kv_cache.has_states:
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
        request.slot = self.free_slots.pop()
        request.num_computed = computed
        self.num_running_prefill += request.num_uncomputed
        self._num_constrained += request.is_constrained
        if request.prompt_rows is not None:
            self._held_bytes += request.prompt_rows.held_bytes
        if request.num_cached < 0:
            self._fair_queuing.admit(request)
            request.num_cached = computed
            self.stats.prefix_queried += request.prompt_len
            self.stats.prefix_hit += computed
        insort(self.running, request)

    # ---------------------------------------------------------------- preemption

    def preempt_for(self, request: Request, blocks: int) -> bool:
        """Preempts from the back until `request` can get `blocks` more blocks.

        False if `request` itself had to go.
        """
        while not self.kv_cache.can_grow(blocks):
            victim = self.running.pop()
            self._leave_slot(victim)
            victim.num_preemptions += 1
            self.stats.preemptions += 1
            self._waiting.add(victim)
            if victim is request:
                return False
        return True

    def _leave_slot(self, request: Request) -> None:
        self.num_running_prefill -= request.num_uncomputed
        self._num_constrained -= request.is_constrained
        if self._forced:  # if it is admitted anew, then with all of its tokens
            self._forced = [forced for forced in self._forced if forced[0] is not request]
        if request.prompt_rows is not None:
            self._held_bytes -= request.prompt_rows.held_bytes
        self.kv_cache.free(request)
        self.free_slots.append(request.slot)
        if request.params.has_penalties:
            self._vacated.append(request.slot)
        request.slot = -1
        request.num_computed = 0
        request.prefill_step = -1
        if request.beams is not None:
            self._beams.leave(request)

    # ---------------------------------------------------------------- results

    def update(self, result: StepResult) -> StepOutput:
        """Takes the result of the oldest posted step: appends its tokens and ends the requests that
        are done."""
        step_id, sampled = self._posted.popleft()
        if result.step_id != step_id:
            raise IntegrityError(
                f"the result of step {result.step_id} came where {step_id} was due"
            )
        output = StepOutput([], [], [])
        ended = False
        if result.tokens.shape[1] > 1 or len(result.num_taken):
            output.has_several = True
            ended = self._take_rows(sampled, result, output)
        else:  # the same for one token a row
            tokens = result.tokens[:, 0].tolist()
            for row, (request, token) in enumerate(zip(sampled, tokens, strict=True)):
                if request.status is Status.FINISHED:
                    self.stats.wasted_rows += request is not _BEAM
                    continue
                output.requests.append(request)
                output.tokens.append(token)
                output.rows.append(row)
                ended |= self._take_token(request, token)
        if ended:
            self.running = [r for r in self.running if r.status is Status.RUNNING]
        output.beam_rows = self._beams.rows_of(step_id)
        return output

    def advance(self, beams: BeamGroup, parents: Sequence[int], tokens: Sequence[int]) -> None:
        """Appends the tokens that a search has decided on to its beams; see
        `BeamPlanner.advance`."""
        self._beams.advance(beams, parents, tokens)

    def _take_rows(self, sampled: list[Request], result: StepResult, output: StepOutput) -> bool:
        """Takes rows of several tokens each, up to the one with which a request ends. Returns
        whether any ended."""
        k = result.tokens.shape[1]
        counts = result.num_taken.tolist() or [k] * len(sampled)
        ended = False
        for row, (request, tokens, taken) in enumerate(
            zip(sampled, result.tokens.tolist(), counts, strict=True)
        ):
            if request.status is Status.FINISHED:
                self.stats.wasted_rows += request is not _BEAM
                continue
            if taken != 1:
                self._settle_placeholder(request, taken)
            for place, token in enumerate(tokens[:taken]):
                output.requests.append(request)
                output.tokens.append(token)
                output.rows.append(row * k + place)
                if self._take_token(request, token):
                    ended = True
                    break
        return ended

    def _settle_placeholder(self, request: Request, taken: int) -> None:
        """Puts `taken` tokens in the place of the one that was expected of a row.

        What is beyond the first is computed by the next row, as all tokens are that are not in the
        cache; and if there is none, the last token is computed once more, since its logits are
        needed again. (A state that has taken it up cannot do so twice: where layers keep a state,
        every row takes a token.)
        """
        if request.plans_ahead:
            raise IntegrityError("the next row was planned for exactly one token")
        request.total += taken - 1
        if not taken and self.kv_cache.has_states:
            raise IntegrityError("a state cannot be computed again")
        if not taken and request.slot >= 0:
            self.num_running_prefill -= request.num_uncomputed
            request.num_computed -= 1
            self.num_running_prefill += request.num_uncomputed

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
            self._waiting.count_out(request)
        else:
            if reason != "error":
                self.kv_cache.commit(request)
            self._leave_slot(request)
        return True

    @staticmethod
    def _mark_finished(request: Request, reason: str, stop_reason: int | str | None) -> None:
        request.status = Status.FINISHED
        request.finish_reason = reason
        request.stop_reason = stop_reason

    def _end(self, request: Request, reason: str, stop_reason: int | str | None) -> None:
        self._mark_finished(request, reason, stop_reason)
        if request.num_cached < 0:
            self._fair_queuing.drop(request)
        else:
            self._fair_queuing.end(request)

    # ---------------------------------------------------------------- checks

    def requests(self) -> Iterator[Request]:
        """Yields every request that has not ended."""
        yield from self.running
        yield from self._blocked
        yield from self._waiting

    def check_integrity(self) -> None:
        """Raises IntegrityError unless blocks, slots and queues agree with the requests."""
        beams = self._beams.check_integrity(self.running)
        placed = self.running + [beam for beam in beams if beam.blocks]
        self.kv_cache.check_integrity(placed)
        slots = [r.slot for r in self.running + beams] + self.free_slots
        if sorted(slots) != list(range(self.limits.max_num_seqs)):
            raise IntegrityError("a slot was lost or given twice")
        if any(later < earlier for earlier, later in pairwise(self.running)):
            raise IntegrityError("the running requests are out of order")
        if any(r.status is not Status.RUNNING for r in self.running):
            raise IntegrityError("a request that ended still runs")
        if any(r.status is not Status.BLOCKED or r.slot >= 0 or r.blocks for r in self._blocked):
            raise IntegrityError("a blocked request holds a slot or blocks")
        self._waiting.check_integrity()
        self._fair_queuing.check_integrity(
            sum(request.num_cached < 0 for request in self.requests())
        )
        if sum(request.num_uncomputed for request in placed) != self.num_running_prefill:
            raise IntegrityError("the tokens to prefill are miscounted")
        if sum(request.is_constrained for request in self.running) != self._num_constrained:
            raise IntegrityError("the constrained requests are miscounted")
