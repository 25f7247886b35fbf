"""One step of the model on a GPU: a plan is uploaded in one copy, kernels do the rest, the tokens
come back in another.

The counterpart of `model_runner` for devices with Triton kernels. They are two classes since they
share no step but the calls of the model: here every input has a buffer that graphs and kernels
refer to; on a CPU a step computes on tensors of just its size, and such buffers would be copies
without use.

A step that only decodes is one CUDA graph, from the growth of block tables to the sampled tokens,
replayed for the next larger captured number of rows; `step_graphs` has these and the other graphs.
Late rows (of constrained requests) are sampled after the replay, once their message has come; the
tokens that the graph sampled for them are overwritten. (A graph without sampling would save some 50
us of such a step, and take a second set of graphs.) Of a step with prompts the layers are a graph,
all but the last, for the next larger captured number of tokens: launched one by one, their kernels
cost the host more time than a small model's cost the GPU. The host waits for nothing but such
messages: it stages a plan in pinned memory (`staging`), launches, and has the tokens copied back on
a stream of their own, so that the next step can be launched behind this one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from aioinfer.ipc.plan import I32, StepPlan, StepResult
from aioinfer.kernels.cascade_attention import MIN_ROWS
from aioinfer.kernels.slots import grow_tables
from aioinfer.layers.formats.dense import MAX_FEW_ROWS
from aioinfer.layers.residual import ResidualStream
from aioinfer.layers.step import HostRows, SampledRows, Step
from aioinfer.models.decoder import CausalLM
from aioinfer.worker.features import (
    AwaitMessage,
    PendingSection,
    StepCalls,
    StepWorks,
    sections_of,
)
from aioinfer.worker.kv_tensors import KVTensors, sort_copies
from aioinfer.worker.model_runner import count_decodes
from aioinfer.worker.sampling.adjustments import Adjust
from aioinfer.worker.sampling.gpu_sampler import GpuSampler, SamplingRows
from aioinfer.worker.slots import Slots
from aioinfer.worker.staging import Staging, upload
from aioinfer.worker.step_buffers import PlanBuffer, StepBuffers, Tensors
from aioinfer.worker.step_graphs import StepGraphs
from aioinfer.worker.stopwatch import TimedLayers, cold_bytes

#: The longest row of a mixed step counts as at least so long in input preparation, so that there
#: are two compiled variants: this one and decodes.
_MIN_MIXED_ROW = 1024

#: Products are timed within at least so many layers, since a layer's first product follows another
#: layer, and at most that many.
_TIMED_LAYERS = 2, 8
#: Keys of a row in these layers.
_TIMED_KEYS = 256

#: Tokens of prompts in a warm-up step, beside one for each row: more than our own products take.
WARM_UP_TOKENS = 16


@dataclass(slots=True)
class PendingGpuResult:
    """The result of a step that has been launched.

    Attributes:
        step_id: the plan's.
        tokens: int32 [S], pinned; valid after `arrived`.
        arrived: recorded behind the copy to the host.
        busy_ns: nanoseconds that the host spent on the step, less those spent waiting for a
            message.
        pending: its sections, valid after `arrived`.
    """

    step_id: int
    tokens: torch.Tensor
    arrived: torch.cuda.Event
    busy_ns: int
    pending: Sequence[PendingSection] = ()

    def wait(self) -> StepResult:
        """Returns the result once it has reached the host."""
        self.arrived.synchronize()
        tokens = self.tokens.numpy().copy()
        return StepResult(self.step_id, tokens, sections_of(self.pending), self.busy_ns)


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step that has been launched, all but the sampling of its late rows.

    Attributes:
        logits: [S, local_size] of the sampled rows; None without any.
        index_there: int32 [1] on the device, the number of the result buffer.
    """

    logits: torch.Tensor | None
    index_there: torch.Tensor


class GpuModelRunner:
    """Runs one rank's model over its KV cache on a GPU.

    Attributes:
        model: the rank's part of the model.
        kv: keys and values of all layers.
        slots: the running requests.
        works: the worker halves of the features; by default none.
        graphs: the captured steps; none before `capture`.
    """

    #: Whether the runner samples, and calls the features of a plan: all do but the runners of a
    #: pipeline's first stages.
    _samples = True

    def __init__(
        self,
        model: CausalLM,
        kv: KVTensors,
        slots: Slots,
        max_tokens: int,
        works: StepWorks | None = None,
        *,
        use_graphs: bool = True,
    ):
        """Makes the buffers of steps of up to `max_tokens` tokens; captures nothing yet. All ranks
        of a model do it at the same time.

        Args:
            model: bound to `kv` for the rows and tokens of a step.
            use_graphs: whether `capture` captures anything.
        """
        self.model = model
        self.kv = kv
        self.slots = slots
        self.works = works or StepWorks()
        device, rows, groups = slots.device, len(slots.tokens), len(slots.tables_by_group)
        self._max_tokens = max(max_tokens, rows)
        self._use_graphs = use_graphs and model.supports_graphs
        self._staging = Staging(device)
        self._plan = PlanBuffer(rows, rows * groups, device)
        self._buffers = StepBuffers(slots, rows, self._max_tokens)
        self._sampler = GpuSampler(slots, model.vocabulary, rows)
        dtype = model.backend.dtype
        self._logits = torch.empty(rows, model.vocabulary.shard_size, dtype=dtype, device=device)
        self._copies = torch.cuda.Stream(device)
        # whether other engines' ranks wait for steps without rows
        self._takes_part = model.backend.expert_group is not None
        cascade = model.backend.cascade
        self.graphs = StepGraphs(self._plan, slots, looks_for_prefixes=cascade)
        self._stream = torch.empty(0, model.hidden_size, dtype=dtype, device=device)

    # ---------------------------------------------------------------- steps

    @torch.inference_mode()
    def step(self, plan: StepPlan, await_message: AwaitMessage | None = None) -> PendingGpuResult:
        """Launches a plan: applies it to slots and KV blocks, computes its rows, and samples a
        token for each sampled row. If there are late rows, waits for their message before their
        sampling is launched; the device computes meanwhile."""
        began = time.perf_counter_ns()
        index = self._staging.begin()
        staged = self.slots.stage(plan)
        self.graphs.update(plan)
        calls = self.works.of(plan) if self._samples else StepCalls(plan)
        if self.graphs.has_decode(plan) and calls.suit_graphs:
            launched = self._replay(plan, index, calls)
        else:
            launched = self._launch(plan, index, staged, calls)
        logits, count, waited_ns = launched.logits, 0, 0
        if logits is not None:
            count = len(logits)
            waited_ns = self._sample_late(plan, calls, logits, launched.index_there, await_message)
            if calls:
                calls.read_tokens(logits, self._sampler.results(index, count)[0])
        if self._samples:
            calls.pending += self.works.read_step(plan.step_id)
        tokens, pending, arrived = self._fetch(index, count, calls.pending)
        self._staging.end(arrived)
        busy_ns = time.perf_counter_ns() - began - waited_ns
        return PendingGpuResult(plan.step_id, tokens, arrived, busy_ns, pending)

    def _replay(self, plan: StepPlan, index: int, calls: StepCalls) -> _Launched:
        """Replays the graph of a step. Rows with penalties, biases or logits processors are
        re-sampled after the replay, from the graph's logits."""
        rows, buffer, late = len(plan.slots), self._plan, calls.late
        buffer.fill(plan, index, self._staging.host_buffer(len(buffer.values)), late)
        self.graphs.replay_decode(plan)
        if not self._samples:
            return _Launched(None, buffer.buffer_index)
        logits = self._logits[:rows, : self.model.vocabulary.local_size]
        positions = plan.starts + plan.lengths
        adjust = _adjuster_of_others(calls, rows)
        if adjust is None and not self._sampler.needs_resampling(plan.slots, positions, late):
            return _Launched(logits, buffer.buffer_index)
        sampling = SamplingRows(
            buffer.row_section(0, rows),
            self._buffers.whole.seq_lens[:rows],
            buffer.row_section(3, rows),
            plan.slots,
            positions,
        )
        self._sampler.sample(logits, sampling, buffer.buffer_index, late=late, adjust=adjust)
        return _Launched(logits, buffer.buffer_index)

    def _launch(self, plan: StepPlan, index: int, staged: list[I32], calls: StepCalls) -> _Launched:
        """Launches any other step: the layers from a graph if there is one for so many tokens, the
        rest kernel by kernel. `staged`: what `Slots.stage` returned."""
        sampled = np.flatnonzero(plan.samples).astype(np.int32)
        ends = np.cumsum(plan.lengths, dtype=np.int32)
        sampled_slots = plan.slots[sampled]
        sampled_positions = (plan.starts + plan.lengths)[sampled]
        late, is_real = calls.late, np.ones_like(sampled)
        if late is not None:
            is_real[late] = 0
        copy_counts, copies = sort_copies(plan, len(self.kv.groups))
        rows, growth, copies_there, sampling, places, index_there, *admitted = self._staging.upload(
            [
                np.stack([plan.slots, plan.starts, plan.lengths]),
                np.stack([plan.table_rows, plan.table_indices, plan.table_blocks]),
                copies,
                np.stack([sampled_slots, sampled_positions, is_real]),
                np.stack([sampled, ends[sampled] - 1]),
                np.array([index], np.int32),
                *staged,
            ]
        )
        grow_tables(*growth, self.slots.block_tables)
        self.slots.apply_staged(plan, admitted)
        self.kv.copy_blocks(copy_counts, *copies_there)
        if not len(plan.slots):
            if self._takes_part:
                self._take_part()
            return _Launched(None, index_there)
        hidden = self._compute(plan, calls, rows, places)
        if not len(sampled) or not self._samples:
            return _Launched(None, index_there)
        logits = self.model.logits(hidden, self._logits[: len(sampled)])
        if late is not None and len(late) == len(sampled):
            return _Launched(logits, index_there)
        sampling_rows = SamplingRows(
            sampling[0], sampling[1], sampling[2], sampled_slots, sampled_positions
        )
        adjust = _adjuster_of_others(calls, len(sampled))
        self._sampler.sample(logits, sampling_rows, index_there, late=late, adjust=adjust)
        return _Launched(logits, index_there)

    def _take_part(self) -> None:
        """Launches the part of a step without rows that the ranks of other engines wait for."""
        if self.graphs.idle.graphs:
            self.graphs.idle.replay(1)
        else:
            self.model.take_part()

    def _sample_late(
        self,
        plan: StepPlan,
        calls: StepCalls,
        logits: torch.Tensor,
        index_there: torch.Tensor,
        await_message: AwaitMessage | None,
    ) -> int:
        """Samples the late rows of a step, once their message has come.

        Args:
            logits: [S, local_size] of all sampled rows.
            index_there: see `_Launched`.

        Returns:
            Nanoseconds that the message was waited for.
        """
        late = calls.late
        if late is None:
            return 0
        rows = np.flatnonzero(plan.samples)[late]
        slots, positions = plan.slots[rows], (plan.starts + plan.lengths)[rows]
        arrays = np.stack([slots, positions, np.ones_like(slots), late])
        there = upload(arrays, self.slots.device).unbind()
        sampling = SamplingRows(there[0], there[1], there[2], slots, positions, there[3])
        changed, waited_ns = calls.late_logits(logits, there[3], await_message)
        self._sampler.sample(
            changed, sampling, index_there, adjust=calls.adjuster(late), in_place=True
        )
        return waited_ns

    def _compute(
        self, plan: StepPlan, calls: StepCalls, rows: Tensors, places: Tensors
    ) -> torch.Tensor:
        """Returns the hidden states [S, hidden_size] of the sampled rows.

        Args:
            calls: of the plan's features, which read hidden states.
            rows: each int32 [R], slots, starts and lengths of the plan.
            places: each int32 [S], the sampled rows and the last token of each.
        """
        host = None
        if not self.model.supports_prefill_graphs:
            host = HostRows(plan.lengths.tolist(), (plan.starts + plan.lengths).tolist())
        longest, every = int(plan.lengths.max()), calls.need_all_tokens
        hidden = self._mix(
            rows, plan.num_tokens, count_decodes(plan), places, longest=longest, host=host,
            every_token=every,
        )  # fmt: skip
        calls.read_hidden(hidden, has_all_tokens=every)
        if not every:
            return hidden
        hidden = hidden.index_select(0, places[1])
        return hidden if self.model.finishes_with_hidden_states else self.model.logits_of(hidden)

    def _mix(
        self, rows: Tensors, num_tokens: int, num_decodes: int, places: Tensors, *, longest: int,
        host: HostRows | None = None, every_token: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        """Computes a step of any rows; see `_compute`. `longest`: at least the tokens of a row;
        `every_token`: return the hidden states of all tokens."""
        size = self.graphs.mixed.fit(num_tokens)
        max_length = max(_MIN_MIXED_ROW, longest)
        self._buffers.prepare(rows, size or num_tokens, max_length=max_length)
        inputs = self._buffers.views(num_tokens, len(rows[0]))
        sampled = None if every_token else SampledRows.of(inputs, places[0], places[1])
        step = Step(inputs, num_decodes, sampled, host)
        self.model.plan(step)
        if size:
            self.graphs.mixed.replay(size)
            stream = ResidualStream(self._stream[:num_tokens], self.model.backend)
        else:
            stream = self._begin(step)
        finish = self.model.finish_all if every_token else self.model.finish
        return finish(step, stream)

    def _begin(self, step: Step, out: torch.Tensor | None = None) -> ResidualStream:
        """Computes all layers but the model's last; see `CausalLM.begin`."""
        return self.model.begin(step, out)

    def _fetch(
        self, index: int, count: int, pending: Sequence[PendingSection]
    ) -> tuple[torch.Tensor, Sequence[PendingSection], torch.cuda.Event]:
        """Starts the copy of the first `count` tokens and of the sections to the host, on a stream
        that no step waits for."""
        source, target = self._sampler.results(index, count)
        self._copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._copies):
            target.copy_(source, non_blocking=True)
            fetched = [each.fetch(self._copies) for each in pending]
            arrived = self._copies.record_event()
        return target, fetched, arrived

    # ---------------------------------------------------------------- graphs

    @torch.inference_mode()
    def capture(self) -> None:
        """Captures the graphs of `StepGraphs.capture`, if the runner uses graphs."""
        if self._use_graphs:
            mixed = self._max_tokens if self.model.supports_prefill_graphs else None
            self.graphs.capture(self, has_idle=self._takes_part, max_mixed_tokens=mixed)
        torch.backends.cuda.preferred_blas_library("cublas")

    def timed_layers(self) -> TimedLayers:
        """Returns the model's first layers in decode steps: as many as have `cold_bytes` of
        weights, within `_TIMED_LAYERS`. They write into the first KV block."""
        slots = self.slots
        layer_bytes = max(1, self.model.weights_bytes // len(self.model.layer_numbers))
        fewest, most = _TIMED_LAYERS
        count = min(max(fewest, -(-cold_bytes(slots.device) // layer_bytes)), most)
        numbers = torch.arange(self._plan.rows, dtype=torch.int32, device=slots.device)
        starts = torch.full_like(numbers, min(_TIMED_KEYS, slots.max_model_len) - 1)
        lengths = torch.ones_like(numbers)

        def launch(rows: int) -> None:
            step = self._plan_decode((numbers[:rows], starts[:rows], lengths[:rows]))
            _ = self.model.begin(step, num_layers=count).hidden  # with all sums

        return TimedLayers(launch, self._plan.rows)

    def launch_idle(self, _: int) -> None:
        """See `GraphBodies`."""
        self.model.take_part()

    def clear_mixed(self, max_tokens: int) -> None:
        """See `GraphBodies`; makes the buffer of the hidden states, too."""
        self._stream = self._stream.new_empty(max_tokens, self._stream.shape[1])
        self.model.plan(Step(self._buffers.clear(), 0))

    def launch_mixed(self, tokens: int) -> None:
        """See `GraphBodies`: for the rows that the plans on the GPU describe."""
        step = Step(self._buffers.views(tokens, self._plan.rows), None)
        _ = self._begin(step, self._stream[:tokens]).hidden  # reduced over the ranks

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Launches steps of all sizes for which kernels are compiled differently: see
        `compile_only`."""
        self.model.warm_up()
        self.model.take_part()
        if not self.model.supports_graphs:
            return
        if self.model.supports_prefill_graphs:
            self._begin(Step(self._buffers.views(WARM_UP_TOKENS, self._plan.rows), None))
        capacity = self._plan.rows
        # beyond MAX_FEW_ROWS for quantized weights, whose tiles have 16, 32 and 64 rows
        sizes = (1, 2, MAX_FEW_ROWS + 1, 17, 33, 65, 129, 193)
        few = [rows for rows in sizes if rows < capacity]
        many = [1 << bits for bits in range(8, capacity.bit_length()) if 1 << bits < capacity]
        for rows in (*few, *(size + 1 for size in many), capacity):
            self.launch_decode(rows)
            if self.graphs.looks_for_prefixes and rows >= MIN_ROWS:
                self.launch_sharing_decode(rows)
            section = self._plan.row_section(0, rows)
            tokens = rows + WARM_UP_TOKENS
            if tokens <= self._max_tokens:
                there = [section] * 3
                host = self._warm_up_lengths(rows)
                self._mix(there, tokens, rows // 2, (section, section), longest=1, host=host)

    def _warm_up_lengths(self, rows: int) -> HostRows | None:
        """Returns the lengths of a mixed step's rows in `warm_up` for models that ask for them: the
        last row has all tokens that the other rows do not have."""
        if self.model.supports_prefill_graphs:
            return None
        lengths = [1] * (rows - 1) + [WARM_UP_TOKENS + 1]
        return HostRows(lengths, [min(length, self.slots.max_model_len) for length in lengths])

    def launch_decode(self, rows: int) -> None:
        """See `GraphBodies`."""
        self._decode(rows, shares_prefix=False)

    def launch_sharing_decode(self, rows: int) -> None:
        """See `GraphBodies`."""
        self._decode(rows, shares_prefix=True)

    def _decode(self, rows: int, *, shares_prefix: bool) -> None:
        """Launches a decode step of `rows` rows from the plan buffer."""
        grow_tables(*self._plan.growth_sections(), self.slots.block_tables)
        there = [self._plan.row_section(number, rows) for number in range(3)]
        step = self._plan_decode(there, shares_prefix=shares_prefix)
        self._sample_decodes(self.model.finish(step, self._begin(step)), rows)

    def _plan_decode(self, rows: Tensors, *, shares_prefix: bool = False) -> Step:
        """Prepares a decode step of rows: slots, starts and lengths, each int32 [R]."""
        count = len(rows[0])
        inputs = self._buffers.prepare(rows, count, max_length=1)
        step = Step(inputs, count, has_prefill=False, shares_prefix=shares_prefix)
        self.model.plan(step)
        return step

    def _sample_decodes(self, hidden: torch.Tensor, rows: int) -> None:
        """Launches the end of `_decode`, from the hidden states [rows, hidden_size] on."""
        buffer = self._plan
        logits = self.model.logits(hidden, self._logits[:rows])
        slot_ids, is_real = buffer.row_section(0, rows), buffer.row_section(3, rows)
        positions = self._buffers.whole.seq_lens[:rows]
        self._sampler.sample_plain(logits, slot_ids, positions, is_real, buffer.buffer_index)


def _adjuster_of_others(calls: StepCalls, rows: int) -> Adjust | None:
    """Returns what changes the logits of the rows of a step that are not late, of `rows` sampled
    ones; None if no feature does."""
    if not calls:
        return None
    others = np.arange(rows)
    if calls.late is not None:
        others = np.delete(others, calls.late)
    return calls.adjuster(others) if len(others) else None
