"""Beams: the sequences of a beam search, and how they get slots, blocks and rows.

The beams of a search are a `BeamGroup`. Its leader is a request like any other: it waits in the
queue, stands among the running requests, and computes the prompt. The other beams are in no queue.
They get their slots together with the leader, and lose them together with it, so no group ever
holds blocks while it waits for a beam of its own that does not fit.

A round of the search: each beam has a row, and the row's result brings the likeliest next tokens of
the beam. When the results of all beams have come, the engine decides which beams go on and calls
`advance`: a beam goes on with one of its tokens, or takes over the tokens of another. Then it is
forked: it shares the full blocks of that beam, by reference count, and the block behind the full
ones is copied on the device before the next row is computed (copy-on-write, as for parallel
sampling). The chosen tokens go to the workers like tokens that a grammar forces. Beams that come to
different steps, for want of budget, wait for each other; no other request waits for them.

The prompt's row is the leader's alone, and the first `advance` forks all others from it. After a
preemption the leader recomputes its tokens; the other beams fork from it as far as their tokens are
equal, and compute the rest.

`StepPlanner` has a `BeamPlanner` plan the rows of beams, and `Scheduler` has it advance them.
Imports neither torch nor aiohttp.
"""

from __future__ import annotations

from collections.abc import Sequence

from aioinfer.errors import IntegrityError
from aioinfer.ipc.plan import GROWTH_BYTES
from aioinfer.scheduler.kv_cache import Prefix
from aioinfer.scheduler.limits import SchedulerLimits
from aioinfer.scheduler.plan_builder import PlanBuilder
from aioinfer.scheduler.request import Beam, BeamGroup, Request, Status
from aioinfer.scheduler.running import RunningRequests


class BeamPlanner:
    """Plans the rows of one scheduler's beam groups."""

    def __init__(self, limits: SchedulerLimits, running: RunningRequests):
        self._limits = limits
        self._running = running
        self._kv_cache = running.kv_cache

    # ---------------------------------------------------------------- admission

    def can_admit(self, leader: Request, prefix: Prefix) -> bool:
        """Whether all beams of a group find slots and blocks; the leader begins with `prefix`."""
        group = leader.beams
        assert group is not None
        width = len(group.beams)
        return len(self._running.free_slots) >= width and self._kv_cache.can_admit_beams(
            prefix, leader, width - 1
        )

    def enter(self, builder: PlanBuilder, leader: Request) -> None:
        """Gives a slot to each beam of a leader that has its own slot and is in the plan."""
        group = leader.beams
        assert group is not None
        group.beams[0].is_admitted = group.beams[0].is_placed = True
        group.beams[0].first_unsent = leader.num_blocks
        builder.has_beams = True
        for beam in group.beams[1:]:
            request = beam.request
            request.status = Status.RUNNING
            request.slot = self._running.free_slots.pop()
            if not request.num_output:  # the prompt is in the plan, for the leader
                self._send(builder, beam, builder.admission_bytes(request, 0))

    # ---------------------------------------------------------------- planning

    def plan(self, builder: PlanBuilder, leader: Request) -> bool:
        """Plans the next tokens of a group's beams. Returns whether any request was preempted for
        them; that may be the group itself, of which nothing is in the plan then."""
        group, kv_cache, size = leader.beams, self._kv_cache, self._limits.block_size
        assert group is not None
        self._place(group)
        rows: list[tuple[Beam, int, int]] = []
        for beam in group.beams:
            request = beam.request
            if not beam.is_placed or request.num_pending or not self._has_bytes(builder, beam):
                continue
            start = request.num_computed
            if tokens := builder.grant(request.total - start, start):
                kv_cache.free_behind_windows(request, start)
                missing = -((request.num_blocks * size - start - tokens) // size)
                rows.append((beam, tokens, max(0, missing)))
        num_missing = sum(missing for _, _, missing in rows)
        preempts = not kv_cache.can_grow(num_missing)
        if preempts and not self._running.preempt_for(leader, num_missing):
            return True
        for row in rows:
            self._plan_row(builder, *row)
        return preempts

    def _plan_row(self, builder: PlanBuilder, beam: Beam, tokens: int, missing: int) -> None:
        """Gives a beam `tokens` tokens of this step and `missing` new blocks, and sends the workers
        those parts of its record, tokens and block tables that they do not have."""
        request = beam.request
        if not beam.is_admitted:
            self._send(builder, beam, builder.admission_bytes(request, 0))
        elif beam.has_unsent_token:
            builder.force(request, len(request.tokens) - 1, 1, 0)
        beam.has_unsent_token = False
        self._kv_cache.grow(request, missing)
        if beam.first_unsent < request.num_blocks:
            builder.grow_tables(request, beam.first_unsent)
            beam.first_unsent = request.num_blocks
        index = request.num_computed // self._limits.block_size
        for group, block in beam.copied:
            builder.copy_block(group, block, request.blocks[group][index])
        beam.copied = []
        self._running.plan_row(builder, request, tokens)
        builder.has_beams = True

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
        """Forks a beam from `parent`: their first `num_tokens` tokens are equal, and the beam gets
        the parent's blocks of these. Where the parent has freed such blocks, the beam computes all
        of its tokens."""
        running, request = self._running, beam.request
        prefix = self._kv_cache.fork(parent, num_tokens)
        if prefix is None:
            prefix = self._kv_cache.no_prefix()
        if beam.is_placed:
            running.num_prefill -= request.num_uncomputed
        first = self._kv_cache.replace(request, prefix)
        running.num_prefill += request.num_uncomputed
        beam.is_placed = True
        beam.copied = prefix.copied
        beam.first_unsent = min(beam.first_unsent, first)
        request.block_hashes = parent.block_hashes[: prefix.num_blocks]

    def _has_bytes(self, builder: PlanBuilder, beam: Beam) -> bool:
        """Whether the plan has the bytes for the record and the tables of a beam; the first always
        fits. Bytes that fit are counted as taken."""
        request, num_groups = beam.request, len(self._limits.groups)
        # two entries of a table are counted with its row, as for any row
        entries = max(0, request.num_blocks - beam.first_unsent - 2) * num_groups
        size = GROWTH_BYTES * entries
        wanted = size
        if not beam.is_admitted:
            wanted += builder.admission_bytes(request, 0)
        if wanted and not builder.has_bytes(wanted):
            return False
        builder.admitted_bytes += size
        return True

    def _send(self, builder: PlanBuilder, beam: Beam, size: int) -> None:
        builder.admit(beam.request, size)
        beam.is_admitted = True

    # ---------------------------------------------------------------- results

    def advance(self, group: BeamGroup, parents: Sequence[int], tokens: Sequence[int]) -> None:
        """Appends a token to each beam of a running group, once the results of all its beams have
        come.

        Args:
            group: the beams; before the first call only the leader has a result.
            parents: of each beam, the number of the beam that it continues. A beam that another one
                continues has to continue itself.
            tokens: of each beam, the token that it appends.
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


def _common_length(first: Request, second: Request) -> int:
    """Returns how many tokens two beams have in common, from the start; their prompts are equal."""
    ours, theirs = first.tokens, second.tokens
    length = first.prompt_len
    while length < len(ours) and ours[length] == theirs[length]:
        length += 1
    return length
