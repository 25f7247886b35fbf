"""A GPU, as the model runner uses it: a plan is uploaded in one copy from pinned memory, kernels do
the rest, the tokens come back in another copy, on a stream of their own.

Every input of a step has a buffer that CUDA graphs and kernels refer to: the plan of a decode step
(`step_graphs.PlanBuffer`), the inputs of a step, which kernels fill from the slots (`StepBuffers`),
the stream of the pipeline stage before, and the outputs of the graphs. The host waits for nothing:
a buffer of pinned memory (`Staging`) is written again only when the step that read it is over.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from aioinfer.ipc.lookahead import LookaheadRows
from aioinfer.ipc.plan import I32, StepPlan
from aioinfer.kernels.lookahead import resolve_starts
from aioinfer.kernels.slots import grow_tables
from aioinfer.layers.residual import ResidualStream
from aioinfer.layers.step import (
    HostRows,
    SampledRows,
    Step,
    StepInputs,
)
from aioinfer.models.causal_lm import CausalLM
from aioinfer.worker.device import Device, count_decodes
from aioinfer.worker.features import PendingSection, ProposalRows, SampledStep, StepRows
from aioinfer.worker.kv_tensors import KVTensors, sort_copies
from aioinfer.worker.slots import LookaheadTensors, RowTensors, SamplingRows, Slots, upload
from aioinfer.worker.step_buffers import Staging, StepBuffers, Tensors
from aioinfer.worker.step_graphs import PlanBuffer, StepGraphs

#: The longest row of a mixed step counts as at least so long in input preparation, so that there
#: are two compiled variants: this one and decodes.
_MIN_MIXED_ROW = 1024


class GpuDevice(Device):
    """Implements `Device` on a GPU.

    Attributes:
        plan: the plan of a decode step, which its graph reads; its rows are the maximum of a step.
        buffers: the inputs of a step.
        logits: [rows, shard_size] in the model's dtype, of the sampled rows of a step.
        stream: [tokens, stream_size], the output of the graphs of all layers but the last; empty
            without such graphs.
        decoded: [rows, stream_size], the output of the graphs of decode steps, of a pipeline stage
            that does not sample; None elsewhere.
        max_tokens: the maximum of a step.
        graphs: the captured steps; none before `GraphBodies.capture`.
    """

    def __init__(
        self, model: CausalLM, kv: KVTensors, slots: Slots, max_tokens: int, *,
        is_first: bool = True, is_last: bool = True, max_lookahead: int = 0,
        has_drafter: bool = False,
    ):  # fmt: skip
        """Makes the buffers of steps of up to `max_tokens` tokens, or of a token for each row.

        Args:
            model: bound to `kv` for the rows and tokens of a step.
            is_first, is_last: of the pipeline's stages.
            max_lookahead: see `Device`.
            has_drafter: whether `prepare_successors` is called.
        """
        super().__init__(slots, kv, max_lookahead)
        device, rows = slots.device, self.results.shape[1]
        size, dtype = model.stream_size, model.backend.dtype
        self.max_tokens = max(max_tokens, rows)
        self.plan = PlanBuffer(rows, len(slots.block_tables), device)
        max_pending = model.backend.saved_rows[1]
        self.buffers = StepBuffers(slots, rows, self.max_tokens, max_pending)
        self.logits = torch.empty(rows, model.vocabulary.shard_size, dtype=dtype, device=device)
        self.stream = torch.empty(0, size, dtype=dtype, device=device)
        self.decoded: torch.Tensor | None = None
        if not is_first:
            self.received = torch.zeros(self.max_tokens, size, dtype=dtype, device=device)
        if not is_last:
            self.decoded = torch.zeros(rows, size, dtype=dtype, device=device)
        self.graphs = StepGraphs(
            self.plan, slots, looks_for_prefixes=model.backend.cascade,
            extension=model.backend.extension,
        )  # fmt: skip
        self._local_size, self._backend = model.vocabulary.local_size, model.backend
        self._hidden_size = model.hidden_size
        self._needs_host_rows = not model.supports_prefill_graphs
        self._needs_positions = not model.supports_graphs
        self._bases = torch.zeros(rows, dtype=torch.int32, device=device)
        self._successors = StepBuffers(slots, rows, self.max_tokens) if has_drafter else None
        self._staging = Staging(device)
        self._staged: list[I32] = []
        pinned = device.type == "cuda"
        self._host_results = torch.zeros(self.results.shape, dtype=torch.int32, pin_memory=pinned)
        self._copies = torch.cuda.Stream(device)
        # of the step's plan on the GPU, where no graph has it: slots, starts and lengths of all
        # rows, int32 [R] each; the sampled rows; and which they are, and their last tokens
        self._rows: Tensors = ()
        self._sampled: RowTensors | None = None
        self._places: Tensors = ()
        # the lookahead of the step, if it has any; without a graph its decodes, and the offsets of
        # its sampled rows and of all rows
        self._lookahead: LookaheadRows | None = None
        self._proposals: ProposalRows | None = None
        self._offsets: torch.Tensor | None = None
        self._limits: torch.Tensor | None = None
        self._row_offsets: torch.Tensor | None = None

    def begin(self, plan: StepPlan) -> None:
        """See `Device.begin`. Waits for the step that used the buffers of this one."""
        self.index = self._staging.begin()
        self._staged = self.slots.stage(plan)
        self._sampled = self._row_offsets = None
        self._lookahead = plan.section(LookaheadRows)
        self.graphs.update(plan)

    def resolve(self, plan: StepPlan) -> StepPlan:
        """See `Device.resolve`. Where layers need the rows' positions on the host, it waits for the
        steps before."""
        rows = self._lookahead
        if rows is None or not self._needs_positions or rows.settled.all():
            return plan
        behind = self.slots.next_start.cpu().numpy()[plan.slots] + rows.offsets
        return dataclasses.replace(plan, starts=np.where(rows.settled, plan.starts, behind))

    def hold(self, received: torch.Tensor) -> None:
        """See `Device.hold`."""
        assert self.received is not None
        self.received[: len(received)].copy_(received)

    # ---------------------------------------------------------------- graphs

    def has_decode_graph(self, plan: StepPlan) -> bool:
        """See `Device.has_decode_graph`."""
        return self.graphs.has_decode(plan)

    def replay_decode(
        self, plan: StepPlan, late: I32 | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """See `Device.replay_decode`."""
        rows = len(plan.slots)
        self.plan.fill(plan, self.index, self._staging.host_buffer(len(self.plan.values)), late)
        self.graphs.replay_decode(plan)
        if self.decoded is not None:
            return self.decoded[:rows], None
        return None, self.logits[:rows, : self._local_size]

    def prepare_decode(
        self, rows: Tensors, *, shares_prefix: bool = False, has_lookahead: bool = False
    ) -> Step:
        """Prepares a decode step of rows: slots, starts and lengths, each int32 [R]."""
        count = len(rows[0])
        offsets = self.plan.row_section(4, count) if has_lookahead else None
        inputs = self.buffers.prepare(rows, count, max_length=1, offsets=offsets)
        return Step(
            inputs, count, has_prefill=False, has_lookahead=has_lookahead,
            shares_prefix=shares_prefix, taps=self._taps(count) if has_lookahead else None,
            offsets=offsets,
        )  # fmt: skip

    def _taps(self, num_tokens: int) -> torch.Tensor | None:
        return None if self.taps is None else self.taps[:num_tokens]

    def prepare_successors(
        self, rows: StepRows, num_tokens: int, num_decodes: int, longest: int, *, keeps_first: bool
    ) -> Step:
        """See `Device.prepare_successors`."""
        assert self._successors is not None
        *of_slots, limits = rows
        inputs = self._successors.prepare(
            of_slots, num_tokens, max_length=longest, limits=limits, keeps_first=keeps_first
        )
        inputs = dataclasses.replace(inputs, slots=None)
        return Step(
            inputs, num_decodes, has_prefill=num_decodes < len(rows.slots), has_lookahead=True,
            shares_prefix=False,
        )  # fmt: skip

    def sampled_step(self, plan: StepPlan, step: Step, hidden: torch.Tensor) -> SampledStep:
        """See `Device.sampled_step`."""
        assert self._sampled is not None
        assert self._limits is not None
        longest = int(plan.lengths.max())
        slots, starts, lengths = self._rows
        rows = StepRows(slots, starts, lengths, self._limits)
        numbers, last = self._places
        return SampledStep(
            step, rows, longest if longest == 1 else max(_MIN_MIXED_ROW, longest), self._sampled,
            (numbers, last), hidden, self.prepare_successors,
        )  # fmt: skip

    def decoded_step(self, step: Step, hidden: torch.Tensor) -> SampledStep:
        """Returns a decode step with lookahead, in the plan's buffer, as `sampled_step` does."""
        rows = len(step.inputs.seq_lens)
        there = StepRows(*(self.plan.row_section(number, rows) for number in (0, 1, 2, 6)))
        sampled = self.decoded_rows(rows, has_lookahead=True)
        return SampledStep(step, there, 1, sampled, None, hidden, self.prepare_successors)

    def resolve_decodes(self, rows: int) -> ProposalRows:
        """Puts the positions of `rows` rows with lookahead into the plan's buffer, and returns the
        rows for proposals."""
        there = [self.plan.row_section(number, rows) for number in (0, 1, 4, 5)]
        slots, _, offsets, _ = there
        bases = self._bases[:rows]
        resolve_starts(*there, self.slots.next_start, bases)
        return ProposalRows(slots, bases, offsets)

    def decoded_rows(self, rows: int, *, has_lookahead: bool = False) -> RowTensors:
        """Returns the sampled rows of a decode step of `rows` rows, in the plan's buffer."""
        plan, whole, lookahead = self.plan, self.buffers.whole, None
        if has_lookahead:
            lookahead = LookaheadTensors(plan.row_section(4, rows), whole.input_ids[:rows])
        slots, samples = plan.row_section(0, rows), plan.row_section(3, rows)
        return RowTensors(slots, whole.seq_lens[:rows], samples, plan.buffer_index, lookahead)

    def replay_layers(self, step: Step) -> ResidualStream | None:
        """See `Device.replay_layers`."""
        num_tokens = len(step.inputs.input_ids)
        graphs = self.graphs.layers_of(step)
        size = graphs.fit(num_tokens)
        if not size:
            return None
        graphs.replay(size)
        return ResidualStream.unpacked(self.stream[:num_tokens], self._hidden_size, self._backend)

    def replay_idle(self) -> bool:
        """See `Device.replay_idle`."""
        if not self.graphs.idle.graphs:
            return False
        self.graphs.idle.replay(1)
        return True

    # ---------------------------------------------------------------- without a graph

    def apply(self, plan: StepPlan, late: I32 | None) -> None:
        """See `Device.apply`. Uploads all that the step needs of the plan."""
        sampled = np.flatnonzero(plan.samples).astype(np.int32)
        ends = np.cumsum(plan.lengths, dtype=np.int32)
        is_real = np.ones_like(sampled)
        if late is not None:
            is_real[late] = 0
        copy_counts, copies = sort_copies(plan, len(self.kv.groups))
        sampling = plan.slots[sampled], (plan.starts + plan.lengths)[sampled], is_real
        rows, of_lookahead = self._lookahead, []
        if rows is not None:
            room = np.empty_like(rows.offsets)
            of_lookahead = [
                np.stack([rows.offsets, rows.settled, room, rows.limits]), rows.offsets[sampled],
            ]  # fmt: skip
        self._rows, growth, copies_there, there, self._places, index, *staged = (
            self._staging.upload(
                [
                    np.stack([plan.slots, plan.starts, plan.lengths]),
                    np.stack([plan.table_rows, plan.table_indices, plan.table_blocks]),
                    copies,
                    np.stack(sampling),
                    np.stack([sampled, ends[sampled] - 1]),
                    np.array([self.index], np.int32),
                    *of_lookahead,
                    *self._staged,
                ]
            )
        )
        self._sampled = RowTensors(there[0], there[1], there[2], index)
        grow_tables(*growth, self.slots.block_tables)
        self.slots.apply(plan, staged[len(of_lookahead) :])
        self.kv.copy_blocks(copy_counts, *copies_there)
        if of_lookahead:
            self._resolve_rows(count_decodes(plan), *staged[:2])

    def _resolve_rows(
        self, num_decodes: int, lookahead: torch.Tensor, offsets: torch.Tensor
    ) -> None:
        """Finds the positions of the rows of a step with lookahead.

        Args:
            num_decodes: see `Step`.
            lookahead: int32 [4, R], offsets and settled of the rows, room for their bases, and
                limits.
            offsets: int32 [S], of the sampled rows.
        """
        slots, starts, _ = self._rows
        offsets_of_rows, settled, bases, self._limits = lookahead
        resolve_starts(slots, starts, offsets_of_rows, settled, self.slots.next_start, bases)
        decodes = (each[:num_decodes] for each in (slots, bases, offsets_of_rows))
        self._proposals, self._offsets = ProposalRows(*decodes), offsets
        self._row_offsets = offsets_of_rows

    def proposal_rows(self, plan: StepPlan) -> ProposalRows:
        """See `Device.proposal_rows`."""
        assert self._proposals is not None
        return self._proposals

    def prepare(self, plan: StepPlan, *, every_token: bool) -> Step:
        """See `Device.prepare`."""
        host = None
        if self._needs_host_rows:
            host = HostRows(plan.lengths.tolist(), (plan.starts + plan.lengths).tolist())
        places = None if every_token else self._places
        step = self.prepare_rows(
            self._rows, plan.num_tokens, count_decodes(plan), places,
            longest=int(plan.lengths.max()), host=host, has_lookahead=self._lookahead is not None,
            offsets=self._row_offsets,
        )  # fmt: skip
        if step.has_lookahead:
            self._find_sampled(step.inputs)
        return step

    def _find_sampled(self, inputs: StepInputs) -> None:
        """Completes the sampled rows of a step with lookahead, whose positions and inputs only the
        GPU knows."""
        assert self._sampled is not None
        assert self._offsets is not None
        rows, last = self._places
        self._sampled = dataclasses.replace(
            self._sampled,
            positions=inputs.seq_lens.index_select(0, rows),
            lookahead=LookaheadTensors(self._offsets, inputs.input_ids.index_select(0, last)),
        )

    def prepare_rows(
        self, rows: Tensors, num_tokens: int, num_decodes: int, places: Tensors | None, *,
        longest: int, host: HostRows | None = None, has_lookahead: bool = False,
        offsets: torch.Tensor | None = None,
    ) -> Step:  # fmt: skip
        """Prepares a step of any rows.

        Args:
            rows: slots, starts and lengths, each int32 [R].
            num_tokens: the sum of the lengths.
            num_decodes: see `Step`.
            places: the sampled rows and the last token of each, each int32 [S]; None if the hidden
                states of all tokens are wanted.
            longest: at least the tokens of a row.
            host, has_lookahead: see `Step`.
            offsets: of all rows, see `StepBuffers.prepare`.
        """
        padded = self.graphs.mixed.fit(num_tokens) or num_tokens
        self.buffers.prepare(rows, padded, max_length=max(_MIN_MIXED_ROW, longest), offsets=offsets)
        # graphs of layers read all rows of the buffers, which an earlier step may have filled
        self.buffers.whole.seq_lens[len(rows[0]) :].zero_()
        inputs = self.buffers.views(num_tokens, len(rows[0]), rows[0])
        sampled = None if places is None else SampledRows.of(inputs, places[0], places[1])
        taps = self._taps(num_tokens) if has_lookahead else None
        return Step(
            inputs, num_decodes, sampled, host, has_lookahead=has_lookahead, taps=taps,
            padded=padded,
        )  # fmt: skip

    def last_tokens(self, plan: StepPlan) -> torch.Tensor:
        """See `Device.last_tokens`."""
        return self._places[1]

    def logits_buffer(self, rows: int) -> torch.Tensor | None:
        """See `Device.logits_buffer`."""
        return self.logits[:rows]

    # ---------------------------------------------------------------- sampling and results

    def sampled_rows(self, slot_ids: I32, positions: I32) -> SamplingRows:
        """See `Device.sampled_rows`."""
        has_lookahead = self._lookahead is not None
        there = self._sampled or self.decoded_rows(len(slot_ids), has_lookahead=has_lookahead)
        return SamplingRows(slot_ids, positions, self.index, there=there)

    def late_rows(self, slot_ids: I32, positions: I32, late: I32) -> SamplingRows:
        """See `Device.late_rows`."""
        index = np.full_like(late, self.index)
        arrays = np.stack([slot_ids, positions, np.ones_like(late), late, index])
        slots, ends, is_real, places, of_buffer = upload(arrays, self.slots.device).unbind()
        there = RowTensors(slots, ends, is_real, of_buffer)
        if self._lookahead is not None:  # only the GPU knows the positions
            every = self._sampled or self.decoded_rows(self.plan.rows, has_lookahead=True)
            assert every.lookahead is not None
            ends = every.positions.index_select(0, places)
            there = RowTensors(slots, ends, is_real, of_buffer, every.lookahead.select(places))
        return SamplingRows(slot_ids, positions, self.index, places, there)

    def record_time(self) -> torch.cuda.Event | None:
        """See `Device.record_time`."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def fetch(
        self, count: int, pending: Sequence[PendingSection]
    ) -> tuple[torch.Tensor, Sequence[PendingSection], torch.cuda.Event | None]:
        """See `Device.fetch`. The copies are on a stream that no step waits for."""
        target = self._host_results[self.index, :count]
        self._copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._copies):
            target.copy_(self.tokens(count), non_blocking=True)
            fetched = [each.fetch(self._copies) for each in pending]
            arrived = self._copies.record_event()
        self._staging.end(arrived)
        return target, fetched, arrived
