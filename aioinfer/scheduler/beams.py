"""Beams: the sequences of a beam search, and how they get slots, blocks and rows.

The beams of a search are a `BeamGroup`. Its leader is a request like any other: it waits in the
queue, stands among the running requests, and computes the prompt. The other beams are in no queue.
They get their slots together with the leader, and lose them together with it, so no group ever
holds blocks while it waits for a beam of its own that does not fit.

A round of the search. Each beam has a row, whose result brings its likeliest tokens. When all have
come, the engine decides which beams go on and calls `advance`: a beam goes on with one of its
tokens, or takes over the tokens of another. Then it is forked: it shares the full blocks of that
beam, by reference count, and the block after those is copied on the device before the next row is
computed (copy-on-write, as for parallel sampling). The chosen tokens go to the workers like those
that a grammar forces. Beams that come to different steps, for want of budget, wait for each other;
nobody waits for them.

The prompt's row is the leader's alone, and the first `advance` forks all others from it. After a
preemption the leader computes its tokens anew, and the others share what they have in common with
it and compute the rest.

`Scheduler` owns a `BeamPlanner`, which does all of that for it. Imports neither torch nor aiohttp.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

from aioinfer.errors import IntegrityError
from aioinfer.ipc.plan import GROWTH_BYTES
from aioinfer.scheduler.kv_cache import KVCacheManager, Prefix
from aioinfer.scheduler.limits import SchedulerLimits
from aioinfer.scheduler.plan_builder import PlanBuilder
from aioinfer.scheduler.request import Beam, BeamGroup, Request, Status

#: (place among the result's rows, whose row it is, `BeamGroup.num_detached` when it was posted)
_Row = tuple[int, Request, int]


class PlanningScheduler(Protocol):
    """What a `BeamPlanner` uses of its scheduler. See `Scheduler`."""

    limits: SchedulerLimits
    kv_cache: KVCacheManager
    free_slots: list[int]
    num_running_prefill: int

    def plan_row(self, builder: PlanBuilder, request: Request, tokens: int) -> None: ...

    def preempt_for(self, request: Request, blocks: int) -> bool: ...


class BeamPlanner:
    """Plans for the groups of beams of one scheduler."""

    def __init__(self, scheduler: PlanningScheduler, max_admitted_bytes: int):
        """`max_admitted_bytes`: what a plan takes of admissions and of tables that were forked."""
        self._scheduler = scheduler
        self._max_admitted_bytes = max_admitted_bytes
        self._has_rows = False  # whether the plan that is being made has rows of beams
        self._posted: deque[tuple[int, list[_Row]]] = deque()

    def clear(self) -> None:
        """Forgets the posted rows, whose results will not come."""
        self._has_rows = False
        self._posted.clear()

    # ---------------------------------------------------------------- groups come and go

    def can_admit(self, leader: Request, prefix: Prefix) -> bool:
        """Whether all beams of a group find slots and blocks; the leader begins with `prefix`."""
        group, scheduler = leader.beams, self._scheduler
        assert group is not None
        return len(scheduler.free_slots) >= len(group.beams) and scheduler.kv_cache.can_admit_beams(
            prefix, leader, len(group.beams) - 1
        )

    def enter(self, builder: PlanBuilder, leader: Request) -> None:
        """Gives slots to all beams, with their leader, which has its own and is in the plan."""
        group = leader.beams
        assert group is not None
        group.beams[0].is_admitted = group.beams[0].is_placed = True
        group.beams[0].first_unsent = leader.num_blocks
        self._has_rows = True
        for beam in group.beams[1:]:
            request = beam.request
            request.status = Status.RUNNING
            request.slot = self._scheduler.free_slots.pop()
            if not request.num_output:  # the prompt is in the plan, for the leader
                self._send(builder, beam, builder.admission_bytes(request, 0))

    def leave(self, leader: Request) -> None:
        """Takes the slots and blocks of all other beams away, once the leader has lost its own."""
        group = leader.beams
        assert group is not None
        for beam in group.beams[1:]:
            request = beam.request
            request.status = Status.WAITING
            self._scheduler.free_slots.append(request.slot)
            if beam.is_placed:
                self._scheduler.num_running_prefill -= request.num_uncomputed
                self._scheduler.kv_cache.free(request)
        group.detach()

    # ---------------------------------------------------------------- planning

    def plan(self, builder: PlanBuilder, leader: Request) -> bool:
        """Plans the next tokens of a group's beams. Returns whether any request was preempted for
        them; that may be the group itself, of which nothing is in the plan then."""
        group, scheduler, kv_cache = leader.beams, self._scheduler, self._scheduler.kv_cache
        assert group is not None
        self._place(group)
        rows: list[tuple[Beam, int, int]] = []
        for beam in group.beams:
            request = beam.request
            if not beam.is_placed or request.num_pending or not self._has_bytes(builder, beam):
                continue
            start = request.num_computed
            if tokens := builder.grant(request.total - start):
                kv_cache.free_behind_windows(request, start)
                size = scheduler.limits.block_size
                missing = -((request.num_blocks * size - start - tokens) // size)
                rows.append((beam, tokens, max(0, missing)))
        num_missing = sum(missing for _, _, missing in rows)
        preempts = not kv_cache.can_grow(num_missing)
        if preempts and not scheduler.preempt_for(leader, num_missing):
            return True
        for row in rows:
            self._plan_row(builder, *row)
        return preempts

    def _plan_row(self, builder: PlanBuilder, beam: Beam, tokens: int, missing: int) -> None:
        """Gives a beam `tokens` tokens of this step and `missing` new blocks, and tells the workers
        what they do not know of it."""
        request, kv_cache = beam.request, self._scheduler.kv_cache
        if not beam.is_admitted:
            self._send(builder, beam, builder.admission_bytes(request, 0))
        elif beam.has_unsent_token:
            builder.force(request, len(request.tokens) - 1, 1, 0)
        beam.has_unsent_token = False
        kv_cache.grow(request, missing)
        if beam.first_unsent < request.num_blocks:
            builder.grow_tables(request, beam.first_unsent)
            beam.first_unsent = request.num_blocks
        index = request.num_computed // self._scheduler.limits.block_size
        for group, block in beam.copied:
            builder.copy_block(group, block, request.blocks[group][index])
        beam.copied = []
        self._scheduler.plan_row(builder, request, tokens)
        self._has_rows = True

    def _place(self, group: BeamGroup) -> None:
        """After a preemption, once the leader's tokens are computed: forks the other beams from it,
        as far as they are the same."""
        leader = group.leader
        if not leader.num_output or leader.num_computed < len(leader.tokens):
            return
        for beam in group.beams[1:]:
            if not beam.is_placed:
                common = _common_length(leader, beam.request)
                self._fork(beam, leader, min(common, len(leader.tokens) - 1))

    def _fork(self, beam: Beam, parent: Request, num_tokens: int) -> None:
        """Makes a beam begin with the first `num_tokens` tokens of another, which are its own as
        well. Where the other has freed blocks of them, the beam computes all of its tokens."""
        scheduler, request = self._scheduler, beam.request
        prefix = scheduler.kv_cache.fork(parent, num_tokens)
        if prefix is None:
            prefix = scheduler.kv_cache.no_prefix()
        if beam.is_placed:
            scheduler.num_running_prefill -= request.num_uncomputed
        first = scheduler.kv_cache.replace(request, prefix)
        scheduler.num_running_prefill += request.num_uncomputed
        beam.is_placed = True
        beam.copied = prefix.copied
        beam.first_unsent = min(beam.first_unsent, first)
        request.block_hashes = parent.block_hashes[: prefix.num_blocks]

    def _has_bytes(self, builder: PlanBuilder, beam: Beam) -> bool:
        """Whether the plan has the bytes for the record and the tables of a beam; the first always
        fits. What fits is counted."""
        request, num_groups = beam.request, len(self._scheduler.limits.groups)
        # two entries of a table are counted as those of any row
        entries = max(0, request.num_blocks - beam.first_unsent - 2) * num_groups
        size = GROWTH_BYTES * entries
        wanted = size
        if not beam.is_admitted:
            wanted += builder.admission_bytes(request, 0)
        if (
            wanted
            and builder.admitted_bytes
            and builder.admitted_bytes + wanted > self._max_admitted_bytes
        ):
            return False
        builder.admitted_bytes += size
        return True

    def _send(self, builder: PlanBuilder, beam: Beam, size: int) -> None:
        builder.admit(beam.request, size)
        beam.is_admitted = True

    # ---------------------------------------------------------------- results

    def take_rows(self, step_id: int, sampled: list[Request], in_place: Request) -> None:
        """Notes which rows of a plan are beams', and puts `in_place` where they stand in `sampled`,
        so that their sampled tokens are dropped: the engine decides which tokens they take."""
        if not self._has_rows:
            return
        self._has_rows = False
        rows: list[_Row] = []
        for row, request in enumerate(sampled):
            if request.beams is not None:
                rows.append((row, request, request.beams.num_detached))
                sampled[row] = in_place
        self._posted.append((step_id, rows))

    def rows_of(self, step_id: int) -> Sequence[tuple[int, Request]]:
        """Returns the beams' rows of a step whose result has come: the place of each among the
        result's rows, and whose it is. Rows of groups that were preempted or have ended since are
        left out."""
        if not self._posted or self._posted[0][0] != step_id:
            return ()
        _, rows = self._posted.popleft()
        return [
            (row, request)
            for row, request, number in rows
            if request.beams is not None and request.beams.num_detached == number
        ]

    def advance(self, group: BeamGroup, parents: Sequence[int], tokens: Sequence[int]) -> None:
        """Appends a token to each beam of a running group whose results have all come.

        Args:
            group: the beams; before the first call only the leader has a result.
            parents: of each beam, the number of the beam whose tokens it goes on from. A beam that
                any goes on from goes on from itself.
            tokens: the token that each takes.
        """
        beams = group.beams
        for beam, parent in zip(beams, parents, strict=True):
            source, request = beams[parent].request, beam.request
            if source is request:
                continue
            if parents[parent] != parent:
                raise IntegrityError("a beam that others go on from has to go on as well")
            request.tokens[request.prompt_len :] = source.tokens[source.prompt_len :]
            self._fork(beam, source, source.num_computed)
        for beam, token in zip(beams, tokens, strict=True):
            beam.request.tokens.append(token)
            beam.request.total = len(beam.request.tokens)
            beam.has_unsent_token = True

    # ---------------------------------------------------------------- checks

    @staticmethod
    def check_integrity(running: Iterable[Request]) -> list[Request]:
        """Raises IntegrityError unless the beams of the running groups go with their leaders.
        Returns the beams that are no leaders."""
        followers: list[Request] = []
        for leader in running:
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


def _common_length(first: Request, second: Request) -> int:
    """Returns how many tokens two beams have in common, from the start; their prompts are equal."""
    ours, theirs = first.tokens, second.tokens
    length = first.prompt_len
    while length < len(ours) and ours[length] == theirs[length]:
        length += 1
    return length
