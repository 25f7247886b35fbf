"""The device of a rank, as the model runner uses it: a plan goes up, the inputs of a step are
prepared, graphs are replayed, and tokens come back.

`CpuDevice` computes on tensors of just a step's size, and has no graphs. `gpu_device.GpuDevice` has
a buffer for every input, which graphs and kernels refer to; on a CPU such buffers would be copies
without use. All other parts of a step are the same on both: see `runner`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from aioinfer.ipc.lookahead import LookaheadRows
from aioinfer.ipc.plan import I32, StepPlan
from aioinfer.layers.residual import ResidualStream
from aioinfer.layers.step import (
    GroupInputs,
    HostRows,
    Replays,
    SampledRows,
    Step,
    StepInputs,
)
from aioinfer.worker.features import PendingSection, ProposalRows, SampledStep, StepRows
from aioinfer.worker.kv_tensors import KVTensors, sort_copies
from aioinfer.worker.slots import LookaheadTensors, RowTensors, SamplingRows, Slots

#: Steps whose host and result buffers may be in use at a time: two are in flight, one is being
#: prepared, one is being read. With P pipeline stages P + 1 are in flight.
NUM_BUFFERS = 16


class Device:
    """A rank's device, with its slots and its KV cache. One step is begun at a time; all other
    methods are of the step that was begun last.

    Attributes:
        slots: the running requests.
        kv: keys and values of all layers.
        results: int32 [NUM_BUFFERS, rows] on the device, the sampled tokens of steps: of a row for
            each slot, and for each lookahead row that a step may have.
        index: which of these buffers the step has.
        received: [tokens, stream_size], the stream of the pipeline stage before; None without one.
        taps: [tokens, taps, hidden_size], the memory of `Step.taps`; None where nothing reads them.
    """

    def __init__(self, slots: Slots, kv: KVTensors, max_lookahead: int = 0):
        """`max_lookahead`: the maximum of lookahead rows in a step."""
        self.slots = slots
        self.kv = kv
        rows, device = len(slots.tokens) + max_lookahead, slots.device
        self.results = torch.zeros(NUM_BUFFERS, rows, dtype=torch.int32, device=device)
        self.index = 0
        self.received: torch.Tensor | None = None
        self.taps: torch.Tensor | None = None

    def begin(self, plan: StepPlan) -> None:
        """Begins the step of a plan: applies the host's part of it. Once for each plan, in
        order."""
        raise NotImplementedError

    def resolve(self, plan: StepPlan) -> StepPlan:
        """Returns the plan that has been begun, its rows at their positions as far as the host
        knows them: of rows with lookahead the plan has the lowest positions that they can have."""
        return plan

    def hold(self, received: torch.Tensor) -> None:
        """Makes a stream [T, stream_size] the beginning of `received`."""
        raise NotImplementedError

    # ---------------------------------------------------------------- graphs

    def has_decode_graph(self, plan: StepPlan) -> bool:
        """Whether the step does nothing but decode, and a graph has all of it, if its features suit
        graphs."""
        return False

    def replay_decode(
        self, plan: StepPlan, late: I32 | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Replays the graph of a step that only decodes: it samples all rows but `late` (int32 [M])
        by temperature and filters.

        Returns the stream [S, stream_size] of a pipeline stage that does not sample, or the
        logits [S, local_size] of one that does; None for the other.
        """
        raise NotImplementedError

    def replay_layers(self, step: Step) -> ResidualStream | None:
        """Replays the graph of all layers but the model's last for a step that is prepared; None if
        there is none."""
        return None

    def replay_idle(self) -> bool:
        """Replays the graph of a step without rows. Returns whether there is one."""
        return False

    # ---------------------------------------------------------------- without a graph

    def apply(self, plan: StepPlan, late: I32 | None) -> None:
        """Applies a plan to block tables, slots and KV blocks. The rows `late` (int32 [M]) of the
        sampled ones are sampled by a later call."""
        raise NotImplementedError

    def proposal_rows(self, plan: StepPlan) -> ProposalRows:
        """Returns the decodes of a plan with lookahead, after `apply`."""
        raise NotImplementedError

    def prepare(self, plan: StepPlan, *, every_token: bool) -> Step:
        """Returns the step of a plan with at least one row, after `apply`. `every_token`: the
        hidden states of all tokens are wanted, not of the sampled rows alone."""
        raise NotImplementedError

    def prepare_successors(
        self, rows: StepRows, num_tokens: int, num_decodes: int, longest: int, *, keeps_first: bool
    ) -> Step:
        """Prepares a step of any rows in which the input of position i is the token of position
        i + 1 in the slots. On a CPU no row has tokens that may not be cached.

        Args:
            num_tokens: of the rows, padding included, which then counts a token each.
            num_decodes: see `Step`.
            longest: at least the tokens of a row.
            keeps_first: whether the input of position 0 is the slot's first token all the same.
        """
        raise NotImplementedError

    def sampled_step(self, plan: StepPlan, step: Step, hidden: torch.Tensor) -> SampledStep:
        """Returns the step of a plan with lookahead for the features that follow it.

        Args:
            step: of `prepare`.
            hidden: as in `SampledStep`.
        """
        raise NotImplementedError

    def last_tokens(self, plan: StepPlan) -> torch.Tensor:
        """Returns the last token of each sampled row, integers [S] on the device, as indices of the
        step's tokens; after `apply`."""
        raise NotImplementedError

    def logits_buffer(self, rows: int) -> torch.Tensor | None:
        """Returns a buffer [rows, shard_size] for logits, if the device has one."""
        return None

    # ---------------------------------------------------------------- sampling and results

    def sampled_rows(self, slot_ids: I32, positions: I32) -> SamplingRows:
        """Returns the step's sampled rows; `slot_ids`, `positions`: as there."""
        return SamplingRows(slot_ids, positions, self.index)

    def late_rows(self, slot_ids: I32, positions: I32, late: I32) -> SamplingRows:
        """Returns the rows `late` (int32 [M]) of the sampled ones; `slot_ids`, `positions`: int32
        [M], of these rows."""
        raise NotImplementedError

    def tokens(self, count: int) -> torch.Tensor:
        """Returns the step's sampled tokens, int32 [count] on the device."""
        return self.results[self.index, :count]

    def record_time(self) -> torch.cuda.Event | None:
        """Returns an event that has the time at which a GPU gets here; None on a CPU."""
        return None

    def fetch(
        self, count: int, pending: Sequence[PendingSection]
    ) -> tuple[torch.Tensor, Sequence[PendingSection], torch.cuda.Event | None]:
        """Ends the step: starts the copy of its `count` sampled tokens and of its sections to the
        host.

        Returns the tokens and the sections on the host, valid after the event, if there is one.
        """
        raise NotImplementedError


class CpuDevice(Device):
    """Implements `Device` on a CPU, in plain torch."""

    def begin(self, plan: StepPlan) -> None:
        """See `Device.begin`."""
        self.index = (self.index + 1) % NUM_BUFFERS
        self._staged = self.slots.stage(plan)
        self._offsets: I32 | None = None  # of the sampled rows of a step with lookahead
        self._lookahead: LookaheadTensors | None = None

    def resolve(self, plan: StepPlan) -> StepPlan:
        """See `Device.resolve`. All positions are known."""
        rows = plan.section(LookaheadRows)
        if rows is None:
            return plan
        self._offsets = rows.offsets[np.flatnonzero(plan.samples)]
        behind = self.slots.next_start.numpy()[plan.slots] + rows.offsets
        return dataclasses.replace(plan, starts=np.where(rows.settled, plan.starts, behind))

    def hold(self, received: torch.Tensor) -> None:
        """See `Device.hold`."""
        self.received = received

    def apply(self, plan: StepPlan, late: I32 | None) -> None:
        """See `Device.apply`."""
        slots = self.slots
        if len(plan.table_rows):
            where = np.stack([plan.table_rows, plan.table_indices]).astype(np.int64)
            slots.block_tables[torch.from_numpy(where).unbind()] = torch.tensor(plan.table_blocks)
        slots.apply(plan, [torch.tensor(array) for array in self._staged])
        if len(plan.copy_sources):
            counts, copies = sort_copies(plan, len(self.kv.groups))
            self.kv.copy_blocks(counts, *torch.from_numpy(copies))

    def proposal_rows(self, plan: StepPlan) -> ProposalRows:
        """See `Device.proposal_rows`; the plan is resolved."""
        rows, decodes = plan.section(LookaheadRows), count_decodes(plan)
        assert rows is not None
        bases = plan.starts - rows.offsets
        return ProposalRows(
            *(torch.tensor(each[:decodes]) for each in (plan.slots, bases, rows.offsets))
        )

    def prepare(self, plan: StepPlan, *, every_token: bool) -> Step:
        """See `Device.prepare`."""
        step = prepare_step(plan, self.slots)
        if every_token:
            step.sampled = None
        if self._offsets is not None:
            inputs = step.inputs.input_ids.index_select(0, self.last_tokens(plan))
            self._lookahead = LookaheadTensors(torch.tensor(self._offsets), inputs)
        if step.has_lookahead and self.taps is not None:
            step.taps = self.taps[: plan.num_tokens]
        return step

    def prepare_successors(
        self, rows: StepRows, num_tokens: int, num_decodes: int, longest: int, *, keeps_first: bool
    ) -> Step:
        """See `Device.prepare_successors`."""
        slots, starts, lengths, _ = (each.long() for each in rows)
        inputs = _prepare_inputs((slots, starts, lengths), num_tokens, self.slots, 1)
        if keeps_first:
            is_first = inputs.positions == 0
            inputs.input_ids[is_first] = self.slots.tokens[slots[starts == 0], 0]
        host = HostRows(lengths.tolist(), inputs.seq_lens.tolist())
        return Step(inputs, num_decodes, host=host, has_lookahead=True)

    def sampled_step(self, plan: StepPlan, step: Step, hidden: torch.Tensor) -> SampledStep:
        """See `Device.sampled_step`; the plan is resolved."""
        lookahead = plan.section(LookaheadRows)
        assert lookahead is not None
        rows = np.flatnonzero(plan.samples)
        arrays = plan.slots, plan.starts, plan.lengths, lookahead.limits
        ends = plan.starts + plan.lengths
        slots, positions = torch.tensor(plan.slots[rows]), torch.tensor(ends[rows])
        is_real = torch.ones_like(slots)
        return SampledStep(
            step, StepRows(*map(torch.tensor, arrays)), int(plan.lengths.max()),
            RowTensors(slots, positions, is_real, torch.tensor([self.index])),
            (torch.tensor(rows), self.last_tokens(plan)), hidden, self.prepare_successors,
        )  # fmt: skip

    def last_tokens(self, plan: StepPlan) -> torch.Tensor:
        """See `Device.last_tokens`."""
        return torch.from_numpy(np.cumsum(plan.lengths)[np.flatnonzero(plan.samples)] - 1)

    def sampled_rows(self, slot_ids: I32, positions: I32) -> SamplingRows:
        """See `Device.sampled_rows`."""
        return SamplingRows(slot_ids, positions, self.index, lookahead=self._lookahead)

    def late_rows(self, slot_ids: I32, positions: I32, late: I32) -> SamplingRows:
        """See `Device.late_rows`."""
        places, lookahead = torch.tensor(late), None
        if self._lookahead is not None:
            lookahead = self._lookahead.select(places)
        return SamplingRows(slot_ids, positions, self.index, places, lookahead=lookahead)

    def fetch(
        self, count: int, pending: Sequence[PendingSection]
    ) -> tuple[torch.Tensor, Sequence[PendingSection], torch.cuda.Event | None]:
        """See `Device.fetch`."""
        return self.tokens(count), pending, None


def prepare_step(plan: StepPlan, slots: Slots) -> Step:
    """Returns the step of a plan with at least one row, derived from the slots by a few tensor
    operations, whatever the number of rows. `gpu_device` has kernels that do it."""
    rows = np.stack([plan.slots, plan.starts, plan.lengths]).astype(np.int64)
    inputs = _prepare_inputs(torch.from_numpy(rows).unbind(), plan.num_tokens, slots)
    if slots.state_lens is not None:
        replays = _replays(plan, slots.state_lens.numpy())
        inputs = dataclasses.replace(inputs, replays=replays)
    host = HostRows(plan.lengths.tolist(), (plan.starts + plan.lengths).tolist())
    return Step(
        inputs, count_decodes(plan), _sampled_rows(plan, inputs), host,
        has_lookahead=plan.section(LookaheadRows) is not None,
    )  # fmt: skip


def _prepare_inputs(
    rows: Sequence[torch.Tensor], num_tokens: int, slots: Slots, shift: int = 0
) -> StepInputs:
    """Returns the inputs of rows (slots, starts and lengths, int64 [R] each), in which the input of
    position i is the token of position i + `shift`."""
    slot_ids, starts, lengths = rows
    block_size, ends = slots.block_size, lengths.cumsum(0)
    if num_tokens == len(slot_ids):
        token_slots, positions = slot_ids, starts
    else:
        row_of_token = torch.repeat_interleave(lengths, output_size=num_tokens)
        token_slots = slot_ids[row_of_token]
        offsets = (starts - ends + lengths)[row_of_token]
        positions = torch.arange(num_tokens) + offsets
    num_blocks = -(-int((starts + lengths).max()) // block_size)
    groups = []
    for tables in slots.tables_by_group:
        block_ids = tables[token_slots, positions // block_size].long().clamp_(min=0)
        slot_mapping = block_ids * block_size + positions % block_size
        groups.append(GroupInputs(slot_mapping, tables[:, :num_blocks][slot_ids]))
    rotary = None
    if slots.rotary_offsets is not None:
        rotary = (positions + slots.rotary_offsets[token_slots]).int().expand(3, -1)
    types = None
    if slots.has_token_types:
        types = token_types(positions, slots.params["second_text"][token_slots])
    return StepInputs(
        input_ids=slots.tokens[token_slots, positions + shift],
        positions=positions.int(),
        query_starts=torch.nn.functional.pad(ends, (1, 0)).int(),
        seq_lens=(starts + lengths).int(),
        groups=tuple(groups),
        rotary=rotary,
        token_types=types,
        slots=None if shift else slot_ids,
    )


def token_types(positions: torch.Tensor, second_texts: torch.Tensor) -> torch.Tensor:
    """Returns the token types, int32 [T], of tokens by their positions and their requests'
    `SamplingParams.second_text`, integers [T] each."""
    return ((second_texts > 0) & (positions >= second_texts)).int()


def _replays(plan: StepPlan, state_lens: I32) -> Replays:
    """Returns the replays of a plan's rows, and brings `Slots.state_lens` up to the step's end. All
    positions are known."""
    ahead = plan.section(LookaheadRows)
    firsts = np.arange(len(plan.slots))
    if ahead is not None:
        firsts = np.flatnonzero(ahead.offsets == 0)
    slots, starts = plan.slots[firsts], plan.starts[firsts]
    pending, counts = (np.zeros(len(plan.slots), np.int32) for _ in range(2))
    known = state_lens[slots]
    pending[firsts] = np.where(known >= 0, starts - known, 0)
    counts[firsts] = np.diff(firsts, append=len(plan.slots))
    # a slot that keeps no inputs has the state that it will need, whatever copies change
    state_lens[slots] = np.where(counts[firsts] > 1, starts + plan.lengths[firsts], -1)
    return Replays(*(torch.tensor(each) for each in (plan.slots, pending, counts)))


def count_decodes(plan: StepPlan) -> int:
    """Returns how many of the first rows compute one token and sample the next."""
    others = np.flatnonzero((plan.lengths > 1) | (plan.samples == 0))
    return int(others[0]) if len(others) else len(plan.slots)


def _sampled_rows(plan: StepPlan, inputs: StepInputs) -> SampledRows | None:
    """Returns the sampled rows, or None if every token is the last of one."""
    rows = np.flatnonzero(plan.samples).astype(np.int32)
    if len(rows) == len(inputs.input_ids):
        return None
    last = np.cumsum(plan.lengths, dtype=np.int32)[rows] - 1
    return SampledRows.of(inputs, torch.from_numpy(rows), torch.from_numpy(last))
