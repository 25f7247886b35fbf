"""The launches that CUDA graphs are captured from, and others of a start that resemble them.

On a GPU the worker makes `GraphBodies` of its runner: it compiles the kernels of these launches,
times products within some of them, and captures the graphs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from aioinfer.layers.step import HostRows, Step
from aioinfer.worker.runner import ModelRunner
from aioinfer.worker.step_graphs import (
    MIXED_GRAPH_TOKENS,
    CudaGraphs,
    decode_sizes,
    lookahead_sizes,
    mixed_sizes,
    shared_sizes,
    timed_sizes,
)

if TYPE_CHECKING:
    from aioinfer.worker.gpu_device import GpuDevice
    from aioinfer.worker.stopwatch import TimedLayers

#: Products are timed within at least so many layers, since a layer's first product follows another
#: layer, and at most that many.
_TIMED_LAYERS = 2, 8
#: Keys of a row in these layers, and in timed steps, whose rows have tokens that are so far apart.
_TIMED_KEYS, _TOKENS_APART = 256, 7919

#: Tokens of prompts in a warm-up step, beside one for each row: more than our own products take.
WARM_UP_TOKENS = 16
#: The kernels of an extension are the same for all steps of as many tokens and more.
EXTENDED_TOKENS = 1152


class GraphBodies:
    """The launches that graphs are captured from, and others of a start that resemble them. None
    waits for the device.

    Args:
        runner: whose steps they are.
        device: the runner's, which is an attribute, too.
    """

    def __init__(self, runner: ModelRunner, device: GpuDevice):
        self._runner = runner
        self.device = device
        self._model = runner.model

    def launch_decode(self, rows: int) -> None:
        """Launches a decode step of `rows` rows from the plan buffer."""
        self._decode(rows)

    def launch_sharing_decode(self, rows: int) -> None:
        """Launches a decode step with attention that looks for shared prefixes."""
        self._decode(rows, shares_prefix=True)

    def launch_lookahead_decode(self, rows: int) -> None:
        """Launches a decode step that may have lookahead rows: their drafts are proposed."""
        self._decode(rows, has_lookahead=True)

    def _decode(
        self, rows: int, *, shares_prefix: bool = False, has_lookahead: bool = False
    ) -> None:
        """Launches a decode step of `rows` rows from the plan buffer: it samples, or ends with
        hidden states in a buffer."""
        from aioinfer.kernels.slots import grow_tables

        device, plan = self.device, self.device.plan
        grow_tables(*plan.growth_sections(), device.slots.block_tables)
        if has_lookahead:
            self._runner.works.propose(device.resolve_decodes(rows))
        there = [plan.row_section(number, rows) for number in range(3)]
        step = device.prepare_decode(
            there, shares_prefix=shares_prefix, has_lookahead=has_lookahead
        )
        self._model.plan(step)
        hidden = self._model.finish(step, self._runner.begin(step))
        if device.decoded is not None:
            device.decoded[:rows].copy_(hidden)
        else:
            logits = self._model.logits(hidden, device.logits[:rows])
            sampled = device.decoded_rows(rows, has_lookahead=has_lookahead)
            self._runner.sampler.launch(logits, sampled)
            if has_lookahead and self._runner.works.follow_steps:
                self._runner.works.follow(device.decoded_step(step, hidden))

    def launch_idle(self, _: int) -> None:
        """Launches a step without rows."""
        self._model.take_part()

    def clear_mixed(self, max_tokens: int) -> None:
        """Makes the kernels of `launch_mixed` find nothing to compute, for up to `max_tokens`
        tokens; makes the buffer of the hidden states, too."""
        device = self.device
        device.stream = device.stream.new_empty(max_tokens, device.stream.shape[1])
        self._model.plan(Step(device.buffers.clear(), 0))

    def launch_mixed(self, tokens: int) -> None:
        """Launches all layers but the last for `tokens` tokens, of the rows that the plans on the
        GPU describe."""
        self._launch_mixed(self._mixed_step(tokens), tokens)

    def launch_pictured(self, tokens: int) -> None:
        """Launches as many layers of a step with pictures."""
        step = self._mixed_step(tokens)
        self._runner.works.change_captured(step)
        self._launch_mixed(step, tokens)

    def _mixed_step(self, tokens: int) -> Step:
        taps = None if self.device.taps is None else self.device.taps[:tokens]
        return Step(self.device.buffers.views(tokens, self.device.plan.rows), None, taps=taps)

    def _launch_mixed(self, step: Step, tokens: int) -> None:
        device, extension = self.device, self._model.backend.extension
        with nullcontext() if extension is None else extension.expecting(tokens):
            _ = self._runner.begin(step, device.stream[:tokens]).hidden  # reduced over the ranks

    @torch.inference_mode()
    def capture(self, *, leaves_rest: bool = False) -> None:
        """Captures decode steps, and the layers of steps with prompts; with `leaves_rest` those
        decode steps that `time_decodes` times, and of all else the largest: see `step_graphs`.

        For 16 to 512 rows cublasLt's own choice of kernels is up to a tenth faster than cuBLAS's,
        for thousands it is slower. Where a process prefers it from the start, that ends with the
        graphs of decode steps, and holds again while others of them are captured later.
        """
        device, graphs = self.device, self.device.graphs
        # memory that is unused would count against the graphs when it is given back
        torch.cuda.empty_cache()
        before = torch.cuda.mem_get_info(device.slots.device)[0]
        pool, rows = torch.cuda.graph_pool_handle(), len(device.slots.tokens)
        extension, library = self._model.backend.extension, preferred_library()

        def capture(kind: CudaGraphs, sizes: Sequence[int], launch: Callable[[int], None]) -> None:
            is_timed = kind in (graphs.decode, graphs.lookahead)
            first = timed_sizes(sizes) if is_timed else sizes[-1:]
            kind.capture(sizes, launch, pool, first if leaves_rest else None)

        def capture_decodes(
            kind: CudaGraphs, sizes: Sequence[int], launch: Callable[[int], None]
        ) -> None:
            def launch_with_it(rows: int) -> None:
                with preferring(library):
                    launch(rows)

            capture(kind, sizes, launch_with_it)

        device.plan.clear_growth()
        capture_decodes(graphs.decode, decode_sizes(rows), self.launch_decode)
        with extension or nullcontext():
            if device.plan.rows > rows:
                sizes = lookahead_sizes(device.plan.rows)
                capture_decodes(graphs.lookahead, sizes, self.launch_lookahead_decode)
            if extension is not None:
                capture_decodes(graphs.extended, decode_sizes(rows), self.launch_decode)
        # whether other engines' ranks wait for steps without rows
        if self._model.backend.expert_group is not None:
            capture_decodes(graphs.idle, [1], self.launch_idle)
        if graphs.looks_for_prefixes:
            from aioinfer.kernels.cascade_attention import MIN_ROWS

            sizes = shared_sizes(rows, MIN_ROWS)
            capture_decodes(graphs.sharing, sizes, self.launch_sharing_decode)
        torch.backends.cuda.preferred_blas_library("cublas")
        if self._model.supports_prefill_graphs:
            most = MIXED_GRAPH_TOKENS + device.plan.rows
            sizes = mixed_sizes(min(device.max_tokens, most))
            self.clear_mixed(sizes[-1])
            capture(graphs.mixed, sizes, self.launch_mixed)
            if extension is not None:
                with extension:
                    capture(graphs.mixed_extended, sizes, self.launch_mixed)
            if self._runner.works.change_captured(self._mixed_step(sizes[-1])):
                capture(graphs.pictured, sizes, self.launch_pictured)
        torch.cuda.synchronize()
        graphs.nbytes = before - torch.cuda.mem_get_info(device.slots.device)[0]

    @torch.inference_mode()
    def time_decodes(self) -> list[tuple[int, float, bool]]:
        """Returns (rows, seconds, whether with lookahead) of the decode steps that there are graphs
        for: `timed_sizes` are timed, and what is between two is interpolated. Rows have
        `_TIMED_KEYS` keys, which are in the first KV block, and different tokens, as experts are
        chosen by tokens."""
        device, slots = self.device, self.device.slots
        plan, graphs = device.plan, device.graphs
        numbers = torch.arange(plan.rows, dtype=torch.int32, device=slots.device)
        plan.row_section(0, plan.rows).copy_(numbers % len(slots.tokens))
        start = min(_TIMED_KEYS, slots.max_model_len) - 1
        plan.row_section(1, plan.rows).fill_(start)
        plan.row_section(2, plan.rows).fill_(1)
        plan.row_section(5, plan.rows).fill_(1)
        plan.row_section(6, plan.rows).fill_(slots.max_model_len)
        there = slots.tokens[:, start]
        there.copy_(numbers[: len(there)] * _TOKENS_APART % self._model.vocabulary.vocab_size)
        found: list[tuple[int, float, bool]] = []
        for kind in (graphs.decode, graphs.lookahead):
            if kind.sizes:
                timed = timed_sizes(kind.sizes)
                seconds = _seconds_of([partial(kind.replay, rows) for rows in timed])
                for rows in kind.sizes:
                    between = float(np.interp(rows, timed, seconds))
                    found.append((rows, between, kind is graphs.lookahead))
        there.zero_()
        plan.values.zero_()
        plan.clear_growth()
        return found

    # ---------------------------------------------------------------- other launches of a start

    @torch.inference_mode()
    def begin_warm_up(self) -> None:
        """Launches a decode step of one row: kernels of products are timed with the weights that
        have been multiplied with."""
        if self._model.supports_graphs:
            self.launch_decode(1)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Launches steps of all sizes for which kernels are compiled differently: see
        `compile_only`."""
        from aioinfer.kernels.cascade_attention import MIN_ROWS
        from aioinfer.layers.formats.dense import MAX_FEW_ROWS

        model, device = self._model, self.device
        model.take_part()
        if not model.supports_graphs:
            return
        most, capacity = device.plan.rows, len(device.slots.tokens)
        if model.supports_prefill_graphs:
            self._runner.begin(Step(device.buffers.views(WARM_UP_TOKENS, most), None))
        # beyond MAX_FEW_ROWS for quantized weights, whose tiles have 16, 32 and 64 rows
        sizes = (1, 2, MAX_FEW_ROWS + 1, 17, 33, 65, 129, 193)
        few = [rows for rows in sizes if rows < most]
        # beyond the lengths of `kernels.launch.pad_rows`
        many = [1 << bits for bits in range(8, most.bit_length(), 2) if 1 << bits < most]
        for rows in sorted({*few, *(size + 1 for size in many), capacity, most}):
            if rows <= capacity:
                self.launch_decode(rows)
            if most > capacity:
                self.launch_lookahead_decode(rows)
            if device.graphs.looks_for_prefixes and MIN_ROWS <= rows <= capacity:
                self.launch_sharing_decode(rows)
            if rows + WARM_UP_TOKENS <= device.max_tokens:
                self._warm_up_mixed(rows)
                if most > capacity:
                    self._warm_up_mixed(rows, has_lookahead=True)
        extension = model.backend.extension
        if extension is not None and extension.is_active:
            extension.warm_up()
            for size in mixed_sizes(min(device.max_tokens, EXTENDED_TOKENS)):
                self._warm_up_mixed(1, size - 1)

    def _warm_up_mixed(
        self, rows: int, tokens: int = WARM_UP_TOKENS, *, has_lookahead: bool = False
    ) -> None:
        """Launches a step of `rows` rows with one token each, of which the last has `tokens` more,
        all of a prompt."""
        device, host = self.device, None
        if not self._model.supports_prefill_graphs:
            lengths = [1] * (rows - 1) + [tokens + 1]
            longest = device.slots.max_model_len
            host = HostRows(lengths, [min(length, longest) for length in lengths])
        section = device.plan.row_section(0, rows)
        self._runner.compute(
            device.prepare_rows(
                [section] * 3, rows + tokens, rows - 1, (section, section),
                longest=1, host=host, has_lookahead=has_lookahead,
            )
        )  # fmt: skip

    def timed_layers(self) -> TimedLayers:
        """Returns the model's first layers in decode steps: as many as have `cold_bytes` of
        weights, within `_TIMED_LAYERS`. They write into the first KV block."""
        from aioinfer.worker.stopwatch import TimedLayers, cold_bytes

        device, model, slots = self.device, self._model, self.device.slots
        layer_bytes = max(1, model.weights_bytes // len(model.layer_numbers))
        fewest, most = _TIMED_LAYERS
        count = min(max(fewest, -(-cold_bytes(slots.device) // layer_bytes)), most)
        numbers = torch.arange(device.plan.rows, dtype=torch.int32, device=slots.device)
        numbers %= len(slots.tokens)
        starts = torch.full_like(numbers, min(_TIMED_KEYS, slots.max_model_len) - 1)
        lengths = torch.ones_like(numbers)

        def launch(rows: int) -> None:
            step = device.prepare_decode((numbers[:rows], starts[:rows], lengths[:rows]))
            model.plan(step)
            _ = model.begin(step, num_layers=count).hidden  # with all sums

        return TimedLayers(launch, device.plan.rows)


def _seconds_of(launches: Sequence[Callable[[], None]]) -> list[float]:
    """Returns the seconds that a GPU needs for each of the launches, the second time."""
    events = []
    for launch in launches:
        launch()
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        launch()
        ended.record()
        events.append((began, ended))
    for _, ended in events[-1:]:
        ended.synchronize()
    return [began.elapsed_time(ended) / 1e3 for began, ended in events]


def preferred_library() -> Any:
    """Returns the library that PyTorch's products prefer. It is set once more, without stderr:
    PyTorch writes there, once in a process, that the choice is experimental."""
    library = torch.backends.cuda.preferred_blas_library()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        torch.backends.cuda.preferred_blas_library(library)
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
    return library


@contextmanager
def preferring(library: Any) -> Iterator[None]:
    """Context in which PyTorch's products prefer a library."""
    before = torch.backends.cuda.preferred_blas_library()
    if library == before:
        yield
        return
    torch.backends.cuda.preferred_blas_library(library)
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)
