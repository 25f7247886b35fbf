"""One step of the model on a GPU: a plan goes in with one copy, kernels do the rest, the tokens
come out with another.

The counterpart of `model_runner` for devices with Triton kernels. A step that only decodes is one
CUDA graph, from the growth of block tables to the chosen tokens, replayed for the next larger
number of rows on a ladder. Of a step with prompts the layers are a graph, all but the last, for the
next larger number of tokens on a ladder of its own: launched one by one, their kernels cost the
host more time than a small model's cost the GPU. The host waits for nothing: it stages a plan in
pinned memory (`staging`), launches, and has the tokens copied back by a stream of their own, so
that the next step can be launched behind this one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from aioinfer.ipc.plan import I32, Admission, StepPlan, StepResult
from aioinfer.kernels.logprobs import MAX_TOP, shard_logprobs, token_logprobs
from aioinfer.kernels.penalties import add_biases, add_occurrences, apply_penalties
from aioinfer.kernels.prepare import StepInputs, append_tokens, prepare_inputs
from aioinfer.kernels.sampling import SamplingState, VocabShard, sample_tokens
from aioinfer.kernels.slots import RECORD_FIELDS, SlotTensors, admit_requests, grow_tables
from aioinfer.kernels.symmetric_memory import LLBuffers
from aioinfer.models.llama_gpu import SKINNY_ROWS, GpuLlama, GpuStep, Residual, SampledRows
from aioinfer.worker.cuda_graphs import CudaGraphs, decode_sizes, mixed_sizes
from aioinfer.worker.slots import (
    BANNED,
    BIASED,
    LOGPROBS,
    PENALIZED,
    Slots,
    banned_until,
    numbers_of,
)
from aioinfer.worker.staging import TURNS, Staging
from aioinfer.worker.vocab_parallel import merge_logprobs

#: What input preparation is told at least of a mixed step's longest row, so that it has two
#: compiled variants: this and decodes.
_MIXED_ROW = 1024

#: Tokens of prompts in a rehearsed step, beside one for each row: more than the own products take.
MIXED_TOKENS = 16

#: Steps with prompts of more tokens, beside one for each slot, are launched kernel by kernel: each
#: kernel takes longer than its launch.
MIXED_GRAPH_TOKENS = 4096


@dataclass(slots=True)
class Chosen:
    """The tokens that a step chose, on their way to the host.

    Attributes:
        tokens: int32 [S], pinned.
        extras: float32 [S], int32 [S, K] and float32 [S, K], log-probabilities in pinned memory, or
            nothing.
    """

    tokens: torch.Tensor
    extras: tuple[torch.Tensor, ...] = ()


@dataclass(slots=True)
class PendingGpuResult:
    """The result of a step that has been launched.

    Attributes:
        step_id: the plan's.
        chosen: what was chosen; valid after `arrived`.
        arrived: recorded behind the copy to the host.
        busy_ns: nanoseconds that the host spent on the step.
    """

    step_id: int
    chosen: Chosen
    arrived: torch.cuda.Event
    busy_ns: int

    def wait(self) -> StepResult:
        """Returns the result once it has reached the host."""
        self.arrived.synchronize()
        tokens = self.chosen.tokens.numpy().copy()
        result = StepResult(self.step_id, tokens, busy_ns=self.busy_ns)
        if self.chosen.extras:
            result.logprobs, result.top_tokens, result.top_logprobs = (
                extra.numpy() for extra in self.chosen.extras
            )
        return result


@dataclass(slots=True)
class SamplingRows:
    """The rows of a step that choose a token, on the device and on the host. S rows.

    Attributes:
        slots, positions, wanted: int32 [S] on the device; `wanted` is 0 for padding.
        host_slots, host_positions: int32, of the rows without padding.
    """

    slots: torch.Tensor
    positions: torch.Tensor
    wanted: torch.Tensor
    host_slots: I32
    host_positions: I32


class PlanBuffer:
    """The plan of a decode step where its graph expects it: one int32 array on the GPU, with a
    section for each field.

    Attributes:
        capacity: R, the most rows, and the most entries by which block tables grow.
        device: int32 [7 R + 1]: slots, starts, lengths, samples; then the growth's slots, indices,
            blocks; then the turn.
    """

    def __init__(self, capacity: int, device: torch.device):
        self.capacity = capacity
        self.device = torch.zeros(7 * capacity + 1, dtype=torch.int32, device=device)
        self.turn = self.device[7 * capacity :]

    def section(self, index: int, rows: int) -> torch.Tensor:
        """Returns the first `rows` entries of a section."""
        return self.device[index * self.capacity : index * self.capacity + rows]

    def fill(self, plan: StepPlan, turn: int, host: torch.Tensor) -> None:
        """Writes a plan into pinned memory (int32 like `device`) and starts its copy.

        Rows past the plan's become padding.
        """
        capacity, array = self.capacity, host.numpy()
        array[: 4 * capacity] = 0
        array[4 * capacity : 5 * capacity] = -1
        fields = (
            plan.slots,
            plan.starts,
            plan.lengths,
            plan.samples,
            plan.table_slots,
            plan.table_indices,
            plan.table_blocks,
        )
        for index, field in enumerate(fields):
            array[index * capacity : index * capacity + len(field)] = field
        array[-1] = turn
        self.device.copy_(host, non_blocking=True)


class GpuModelRunner:
    """Runs one rank's model over its KV cache on a GPU.

    Attributes:
        kv: [2, layers, num_blocks, block_size, kv_heads, head_size], keys and values of all layers.
        slots: the running requests.
        graph_bytes: GPU memory that the graphs have taken.
    """

    def __init__(self, model: GpuLlama, kv: torch.Tensor, slots: Slots, max_tokens: int):
        """Makes the buffers of steps of up to `max_tokens` tokens; captures nothing yet.

        All ranks of a model do it at a time.
        """
        self.model = model
        self.kv = kv
        self.slots = slots
        self.graph_bytes = 0
        device, rows = slots.device, len(slots.tokens)
        self._staging = Staging(device)
        self._plan = PlanBuffer(rows, device)
        self._inputs = StepInputs.empty(
            rows, max(max_tokens, rows), slots.block_table.shape[1], device
        )
        self._vocabulary = model.model.vocabulary
        self._logits = torch.empty(rows, self._vocabulary.shard_size, dtype=kv.dtype, device=device)
        self._results = torch.zeros(TURNS, rows, dtype=torch.int32, device=device)
        self._host_results = torch.zeros(
            TURNS, rows, dtype=torch.int32, pin_memory=device.type == "cuda"
        )
        self._sampling = SamplingState(
            slots.seeds, slots.temperature, slots.top_k, slots.top_p, slots.min_p
        )
        self._share = self._share_vocabulary(rows)
        self._copies = torch.cuda.Stream(device)
        self._prefill = model.make_prefill_plan(rows, len(self._inputs.input_ids))
        self._decode_graphs = CudaGraphs()
        self._mixed_graphs = CudaGraphs()
        self._stream = torch.empty(
            0, model.model.embedding.weight.shape[1], dtype=kv.dtype, device=device
        )

    def _share_vocabulary(self, rows: int) -> VocabShard | None:
        """Returns what choosing tokens together takes, for steps of up to `rows` rows; None for one
        rank."""
        vocabulary, group = self._vocabulary, self._vocabulary.group
        if group.size == 1:
            return None
        ll_buffers = LLBuffers(group.symmetric_buffer(LLBuffers.nbytes(rows, group.size)))
        return VocabShard(vocabulary.start, vocabulary.vocab_size, ll_buffers)

    # ---------------------------------------------------------------- steps

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> PendingGpuResult:
        """Launches a plan: slots and blocks as it says, the model over its rows, and a token for
        each sampling row."""
        began = time.perf_counter_ns()
        turn = self._staging.begin()
        chosen, arrived = self._fetch(
            turn, *(self._replay(plan, turn) if self._has_graph(plan) else self._launch(plan, turn))
        )
        self._staging.end(arrived)
        return PendingGpuResult(plan.step_id, chosen, arrived, time.perf_counter_ns() - began)

    def _has_graph(self, plan: StepPlan) -> bool:
        """Whether the step does nothing but decode."""
        rows = len(plan.slots)
        return (
            0 < rows <= self._decode_graphs.fit(rows)
            and not plan.admissions
            and not len(plan.copy_sources)
            and len(plan.table_slots) <= self._plan.capacity
            and plan.num_tokens == rows
            and bool(plan.samples.all())
        )

    def _replay(self, plan: StepPlan, turn: int) -> tuple[int, tuple[torch.Tensor, ...]]:
        """Replays the graph of a step; what few requests wish is done behind it, with the graph's
        logits."""
        rows = len(plan.slots)
        self._plan.fill(plan, turn, self._staging.host_buffer(len(self._plan.device)))
        self._decode_graphs.replay(self._decode_graphs.fit(rows))
        positions = plan.starts + plan.lengths
        if not self.slots.current_flags(plan.slots, positions).max() & (
            BIASED | BANNED | PENALIZED | LOGPROBS
        ):
            return rows, ()
        sampling = SamplingRows(
            self._plan.section(0, rows),
            self._inputs.seq_lens[:rows],
            self._plan.section(3, rows),
            plan.slots,
            positions,
        )
        return rows, self._sample(
            self._logits[:rows, : self._vocabulary.local_size], sampling, self._plan.turn
        )

    def _launch(self, plan: StepPlan, turn: int) -> tuple[int, tuple[torch.Tensor, ...]]:
        """Launches any other step: the layers from a graph if there is one for so many tokens, the
        rest kernel by kernel."""
        sampling = np.flatnonzero(plan.samples).astype(np.int32)
        ends = np.cumsum(plan.lengths, dtype=np.int32)
        records, packed = _pack_admissions(plan.admissions)
        sampling_slots, sampling_positions = (
            plan.slots[sampling],
            (plan.starts + plan.lengths)[sampling],
        )
        rows, growth, copies, records_there, packed_there, chosen_rows, places, turn_there = self._staging.upload([
            np.stack([plan.slots, plan.starts, plan.lengths]),
            np.stack([plan.table_slots, plan.table_indices, plan.table_blocks]),
            np.stack([plan.copy_sources, plan.copy_targets]),
            records, packed,
            np.stack([sampling_slots, sampling_positions, np.ones_like(sampling)]),
            np.stack([sampling, ends[sampling] - 1]),
            np.array([turn], np.int32),
        ])  # fmt: skip
        self._update_slots(plan, growth, copies, records_there, packed_there)
        if not len(plan.slots):
            return 0, ()
        others = np.flatnonzero((plan.lengths > 1) | (plan.samples == 0))
        num_decodes = int(others[0]) if len(others) else len(plan.slots)
        slot_ids, starts, lengths = rows
        hidden = self._mix(
            slot_ids,
            starts,
            lengths,
            plan.num_tokens,
            num_decodes,
            (places[0], places[1]),
            longest=int(plan.lengths.max()),
        )
        if not len(sampling):
            return 0, ()
        logits = self.model.logits(hidden, self._logits[: len(sampling)])
        sampling_rows = SamplingRows(
            chosen_rows[0], chosen_rows[1], chosen_rows[2], sampling_slots, sampling_positions
        )
        return len(sampling), self._sample(logits, sampling_rows, turn_there)

    def _update_slots(
        self,
        plan: StepPlan,
        growth: torch.Tensor,
        copies: torch.Tensor,
        records: torch.Tensor,
        packed: torch.Tensor,
    ) -> None:
        """Brings slots and KV blocks up to date with a plan, whose arrays are on the GPU."""
        slots = self.slots
        grow_tables(*growth, slots.block_table)
        if plan.admissions:
            longest = max(len(admission.tokens) for admission in plan.admissions)
            admit_requests(
                records,
                packed,
                SlotTensors(slots.tokens, slots.seeds, slots.integers, slots.numbers),
                longest,
            )
            for admission in plan.admissions:
                slots.note(admission)
        if len(plan.copy_sources):  # all sources are read before any target is written
            self.kv.index_copy_(2, copies[1].long(), self.kv.index_select(2, copies[0]))

    def _mix(
        self, slot_ids: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor, num_tokens: int,
        num_decodes: int,
        chosen: tuple[torch.Tensor, torch.Tensor], *, longest: int,
    ) -> torch.Tensor:  # fmt: skip
        """Returns the hidden states [S, hidden_size] of the chosen rows, of a step of any rows,
        each int32 [R].

        Args:
            chosen: some of the rows and the last token of each, int32 [S].
            longest: at least the tokens of each row.
        """
        size = self._mixed_graphs.fit(num_tokens)
        self._prepare(
            slot_ids, starts, lengths, size or num_tokens, max_length=max(_MIXED_ROW, longest)
        )
        inputs = self._views(num_tokens, len(slot_ids))
        step = self.model.plan(inputs, num_decodes, SampledRows.of(inputs, *chosen), self._prefill)
        if not size:
            return self.model.forward(step)
        self._mixed_graphs.replay(size)
        return self.model.finish(step, Residual(self._stream[:num_tokens]))

    def _views(self, num_tokens: int, rows: int) -> StepInputs:
        """Returns the beginnings of the buffers of a step's inputs."""
        whole = self._inputs
        return StepInputs(
            whole.input_ids[:num_tokens], whole.positions[:num_tokens],
            whole.slot_mapping[:num_tokens],
            whole.query_starts[: rows + 1], whole.seq_lens[:rows], whole.block_tables[:rows],
        )  # fmt: skip

    def _prepare(
        self,
        slot_ids: torch.Tensor,
        starts: torch.Tensor,
        lengths: torch.Tensor,
        num_tokens: int,
        *,
        max_length: int,
    ) -> StepInputs:
        """Prepares and returns the inputs of rows, each int32 [R]; what `num_tokens` exceeds the
        lengths' sum becomes padding."""
        slots, inputs = self.slots, self._views(num_tokens, len(slot_ids))
        prepare_inputs(
            slot_ids,
            starts,
            lengths,
            slots.tokens,
            slots.block_table,
            inputs,
            block_size=slots.block_size,
            max_length=max_length,
        )
        return inputs

    # ---------------------------------------------------------------- choosing tokens

    def _sample(
        self, logits: torch.Tensor, rows: SamplingRows, turn: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Chooses a token for each row of `logits` [S, held], enters it in its slot and in the
        results.

        Returns log-probabilities, or nothing if no row wants them: those of the model, before any
        adjustment.
        """
        slots = self.slots
        sampling_flags = slots.current_flags(rows.host_slots, rows.host_positions)
        wanted = int(np.bitwise_or.reduce(sampling_flags, initial=0))
        adjusted = logits
        if wanted & (BIASED | BANNED | PENALIZED):
            adjusted = logits.to(torch.float32, copy=True)
            self._adjust(adjusted, rows, wanted)
        tokens = sample_tokens(
            adjusted, rows.slots, rows.positions, self._sampling, share=self._share
        )
        append_tokens(
            tokens,
            rows.slots,
            rows.positions,
            rows.wanted,
            slots.tokens,
            results=self._results,
            turn=turn,
        )
        if wanted & PENALIZED:
            add_occurrences(
                tokens, rows.slots, slots.occurrences.row_of_slot, slots.occurrences.rows
            )
        if not wanted & LOGPROBS:
            return ()
        asking = torch.from_numpy((sampling_flags & LOGPROBS).astype(np.int32)).to(
            logits.device, non_blocking=True
        )
        most = min(int(slots.num_logprobs[rows.host_slots].max()), MAX_TOP)
        top = min(MAX_TOP, self._vocabulary.vocab_size)
        if self._share is None:
            own, top_tokens, top_logprobs = token_logprobs(logits, tokens, asking, top)
        else:
            found = shard_logprobs(logits, tokens, asking, top, self._vocabulary.start)
            own, top_tokens, top_logprobs = merge_logprobs(self._vocabulary, found, top)
        return own, top_tokens[:, :most].contiguous(), top_logprobs[:, :most].contiguous()

    def _adjust(self, logits: torch.Tensor, rows: SamplingRows, wanted: int) -> None:
        """Applies biases, bans and penalties to logits [S, held], in place."""
        slots, first, held = self.slots, self._vocabulary.start, self._vocabulary.local_size
        if wanted & BIASED:
            add_biases(logits, rows.slots, slots.bias.ids, slots.bias.values, first=first)
        if wanted & BANNED:
            banned = slots.banned.ids, slots.banned.values
            add_biases(
                logits,
                rows.slots,
                *banned,
                positions=rows.positions,
                until=slots.banned_until,
                first=first,
            )
        if wanted & PENALIZED:
            counts = slots.occurrences
            penalties = slots.repetition_penalty, slots.presence_penalty, slots.frequency_penalty
            apply_penalties(
                logits,
                rows.slots,
                counts.row_of_slot,
                counts.rows[:, first : first + held],
                *penalties,
            )

    def _fetch(
        self, turn: int, count: int, extras: tuple[torch.Tensor, ...]
    ) -> tuple[Chosen, torch.cuda.Event]:
        """Starts the copy of the first `count` results to the host, on a stream that no step waits
        for."""
        self._copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._copies):
            target = self._host_results[turn, :count]
            target.copy_(self._results[turn, :count], non_blocking=True)
            fetched = tuple(extra.to("cpu", non_blocking=True) for extra in extras)
            arrived = self._copies.record_event()
        for extra in extras:
            extra.record_stream(self._copies)
        return Chosen(target, fetched), arrived

    # ---------------------------------------------------------------- graphs

    @torch.inference_mode()
    def capture(self) -> None:
        """Captures decode steps, and the layers of steps with prompts.

        For 16 to 512 rows cublasLt's own choice of kernels is up to a tenth faster than cuBLAS's,
        for thousands it is slower. Where a process prefers it from the start (it cannot be asked
        for later without a warning), that ends here.
        """
        before = torch.cuda.mem_get_info(self.slots.device)[0]
        capacity = self._plan.capacity
        pool = torch.cuda.graph_pool_handle()
        self._plan.section(4, capacity).fill_(-1)
        self._decode_graphs.capture(decode_sizes(capacity), self._decode, pool, run_each=True)
        torch.backends.cuda.preferred_blas_library("cublas")
        sizes = mixed_sizes(min(len(self._inputs.input_ids), MIXED_GRAPH_TOKENS + capacity))
        self._stream = self._stream.new_empty(sizes[-1], self._stream.shape[1])
        # the largest is run once: it must find nothing to cache and nothing to attend
        self._inputs.slot_mapping.fill_(-1)
        self._prefill.tiles.zero_()
        self._mixed_graphs.capture(sizes, self._begin_mixed, pool, run_each=False)
        torch.cuda.synchronize()
        self.graph_bytes = before - torch.cuda.mem_get_info(self.slots.device)[0]

    def _begin_mixed(self, tokens: int) -> None:
        """Launches all layers but the last for `tokens` tokens, as the plans on the GPU say: what a
        graph holds."""
        self.model.begin(self._planned_step(tokens), self._stream[:tokens])

    def _planned_step(self, tokens: int) -> GpuStep:
        """Returns a step of `tokens` tokens of which the plans on the GPU say the rest."""
        return GpuStep(self._views(tokens, self._plan.capacity), None, self._prefill)

    @torch.inference_mode()
    def rehearse(self) -> None:
        """Launches steps of all sizes for which kernels are compiled differently: see
        `compile_only`."""
        self.model.rehearse()
        self.model.begin(self._planned_step(MIXED_TOKENS))
        capacity = self._plan.capacity
        ordinary = [rows for rows in (1, 2, SKINNY_ROWS + 1) if rows < capacity]
        # the kernels' powers of two
        many = [1 << bits for bits in range(8, capacity.bit_length()) if 1 << bits < capacity]
        for rows in (*ordinary, *(size + 1 for size in many), capacity):
            self._decode(rows)
            section = self._plan.section(0, rows)
            if rows + MIXED_TOKENS <= len(self._inputs.input_ids):
                tokens = rows + MIXED_TOKENS
                self._mix(
                    section, section, section, tokens, rows // 2, (section, section), longest=1
                )

    def _decode(self, rows: int) -> None:
        """Launches a decode step of `rows` rows from the plan buffer: what a graph holds."""
        plan, slots = self._plan, self.slots
        capacity = plan.capacity
        grow_tables(
            plan.section(4, capacity),
            plan.section(5, capacity),
            plan.section(6, capacity),
            slots.block_table,
        )
        inputs = self._prepare(
            plan.section(0, rows), plan.section(1, rows), plan.section(2, rows), rows, max_length=1
        )
        hidden = self.model.forward(self.model.plan(inputs, rows))
        logits = self.model.logits(hidden, self._logits[:rows])
        tokens = sample_tokens(
            logits,
            plan.section(0, rows),
            self._inputs.seq_lens[:rows],
            self._sampling,
            share=self._share,
        )
        append_tokens(
            tokens, plan.section(0, rows), self._inputs.seq_lens[:rows], plan.section(3, rows),
            slots.tokens,
            results=self._results, turn=plan.turn,
        )  # fmt: skip


def _pack_admissions(admissions: Sequence[Admission]) -> tuple[I32, I32]:
    """Returns the records int32 [A, RECORD_FIELDS] of admissions, and all their tokens int32
    [N]."""
    records = np.zeros((len(admissions), RECORD_FIELDS), np.int32)
    offset = 0
    for record, admission in zip(records, admissions, strict=True):
        length = len(admission.tokens)
        record[:3] = admission.slot, offset, length
        record[3:5] = np.array([admission.seed & (2**64 - 1)], np.uint64).view(np.int32)
        record[5:7] = max(0, admission.params.top_k), banned_until(admission)
        record[7:] = np.array(numbers_of(admission.params), np.float32).view(np.int32)
        offset += length
    tokens = [admission.tokens for admission in admissions]
    return records, np.concatenate(tokens) if tokens else np.empty(0, np.int32)
