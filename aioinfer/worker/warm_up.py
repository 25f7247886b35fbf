"""Warm-up: dummy steps, executed on a worker's runner so that the first request is not slower; on a
GPU also the launches that CUDA graphs are captured from, and the compilation of Triton kernels: all
before the first request, on all cores; none while serving.

Dummy steps serve to measure memory and the scales of the KV cache, too. The worker compiles its
kernels by going through its steps within `compile_only`, and then watches with a `CompilationWatch`
that nothing is compiled any more: a kernel that was left out would stall every stream for seconds.
"""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from aioinfer.ipc.lookahead import LookaheadRows
from aioinfer.ipc.masks import mask_words
from aioinfer.ipc.plan import I32, Admission, Admissions, StepPlan
from aioinfer.ipc.sections import Section
from aioinfer.layers.step import HostRows, Step
from aioinfer.sampling_params import SamplingParams
from aioinfer.worker.compilers import Compilers, compile_with, hash_compiler
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

_log = logging.getLogger(__name__)

#: Products are timed within at least so many layers, since a layer's first product follows another
#: layer, and at most that many.
_TIMED_LAYERS = 2, 8
#: Keys of a row in these layers, and in timed steps.
_TIMED_KEYS = 256

#: Tokens of prompts in a warm-up step, beside one for each row: more than our own products take.
WARM_UP_TOKENS = 16

#: A request that uses all of the sampler.
EVERYTHING = SamplingParams(
    top_k=5,
    top_p=0.9,
    repetition_penalty=1.1,
    logit_bias={0: 1.0},
    min_tokens=9,
)


def dummy_admission(
    slot: int, length: int, params: SamplingParams, banned: tuple[int, ...] = ()
) -> Admission:
    """Returns the admission of a prompt of `length` zeros."""
    return Admission(slot, np.zeros(length, np.int32), length, params, 0, banned)


def dummy_plan(
    lengths: list[int],
    start: int,
    block_size: int,
    num_groups: int = 1,
    max_num_seqs: int = 0,
    admissions: Sequence[Admission] = (),
    features: Sequence[Section] = (),
    num_blocks: int | None = None,
) -> StepPlan:
    """Returns a plan in which slot i computes `lengths[i]` tokens from `start` and samples the next
    one, with the sections `features`.

    Admitted requests get their KV blocks one after the other from block 0 on, in each of
    `num_groups` groups; after `num_blocks` of them from block 0 on again, so that requests write
    over each other's keys.
    """
    rows, none = len(lengths), np.empty(0, np.int32)
    starts, samples = np.full(rows, start, np.int32), np.ones(rows, np.int32)
    counts = [-(-len(admission.tokens) // block_size) for admission in admissions]
    slots = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    indices = np.concatenate([none, *(np.arange(count, dtype=np.int32) for count in counts)])
    blocks = np.arange(sum(counts), dtype=np.int32)
    if num_blocks is not None:
        blocks %= num_blocks
    firsts = np.arange(num_groups, dtype=np.int32)[:, None] * max_num_seqs
    sections = [*([Admissions.of(admissions)] if admissions else []), *features]
    return StepPlan(
        -1, np.arange(rows, dtype=np.int32), starts, np.array(lengths, np.int32), samples,
        (firsts + slots).reshape(-1), np.tile(indices, num_groups), np.tile(blocks, num_groups),
        none, none, sections,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class DummySteps:
    """Executes dummy plans on a runner that no request uses yet.

    Attributes:
        runner: of the rank.
        num_groups: the KV groups of the whole model.
        block_size: tokens a KV block.
        vocab_size: of the model's logits.
        fewest_blocks: KV blocks of the group that has the fewest, on all ranks: every stage of a
            pipeline has to execute the same plans.
        max_tokens: of a step.
    """

    runner: ModelRunner
    num_groups: int
    block_size: int
    vocab_size: int
    fewest_blocks: int
    max_tokens: int

    def run_all(self) -> None:
        """Executes prefill steps and a decode step in which requests use all of the sampler, one of
        them with all features, and forgets them."""
        runner, slots = self.runner, self.runner.slots
        rows = min(2, len(slots.tokens), self.fewest_blocks, self.max_tokens)
        prompt_len = self._short_prompt(rows)
        greedy = dummy_admission(0, prompt_len, SamplingParams(temperature=0))
        admissions = [greedy, dummy_admission(1, prompt_len, EVERYTHING, banned=(1,))][:rows]
        lengths = [prompt_len] * rows
        for features in ((), self._features(lengths)):
            self.run(self._admit(lengths, admissions, features))
        if prompt_len < min(self.block_size, slots.max_model_len):
            self.run(dummy_plan([1] * rows, prompt_len, self.block_size))
        if runner.device.results.shape[1] > len(slots.tokens) and prompt_len + 2 < min(
            self.block_size, slots.max_model_len
        ):
            for late in ([], runner.works.late_sections(2)):
                self.run(self._lookahead_plan(rows - 1, prompt_len, late))
        slots.reset()
        runner.device.kv.zero(rows)

    def _lookahead_plan(self, slot: int, start: int, features: Sequence[Section]) -> StepPlan:
        """Returns a plan in which a slot computes its token at `start` and a draft, with the
        sections of features."""
        plan = dummy_plan([1, 1], start, self.block_size)
        plan.slots[:] = slot
        plan.starts[1] += 1
        ones = np.ones(2, np.int32)
        rows = LookaheadRows(np.arange(2, dtype=np.int32), ones, self.block_size * ones)
        plan.sections = [rows, *features]
        return plan

    def run_prompt(self, tokens: I32) -> None:
        """Executes a prefill step of one prompt, and forgets the request; its keys and values in
        the first KV blocks stay."""
        count = len(tokens)
        admission = Admission(0, tokens, count, SamplingParams(temperature=0), 0, ())
        self.runner.step(self._admit([count], [admission])).wait()
        self.runner.slots.reset()

    @torch.inference_mode()
    def score_prompt(self, tokens: I32) -> torch.Tensor:
        """Computes one prompt, of a model on one rank, and forgets the request. Returns the
        log-probabilities of the token behind each of its tokens, float32 [T, V] on the host."""
        runner, count = self.runner, len(tokens)
        model, device = runner.model, runner.device
        plan = self._admit([count], [Admission(0, tokens, count, SamplingParams(), 0, ())])
        runner.works.begin(plan)
        device.begin(plan)
        device.apply(plan, None)
        step = device.prepare(plan, every_token=True)
        hidden = runner.compute(step, every_token=True)
        numbers = torch.arange(count, device=hidden.device)
        logits = model.logits_of(hidden, numbers).float()
        _, _, arrived = device.fetch(0, [])
        if arrived is not None:
            arrived.synchronize()
        runner.slots.reset()
        return logits.log_softmax(-1).cpu()

    def largest_plan(self, lengths: list[int]) -> StepPlan:
        """Returns the plan that computes prompts of these lengths, of requests that use all of the
        sampler (float32 logits, counts of tokens) and of the features. They have `fewest_blocks` KV
        blocks together: their results are never read."""
        admissions = [
            dummy_admission(slot, length, EVERYTHING, banned=(1,))
            for slot, length in enumerate(lengths)
        ]
        return self._admit(lengths, admissions, self._features(lengths), self.fewest_blocks)

    def run(self, plan: StepPlan) -> None:
        """Executes a plan; a message that late rows wait for has all bits set."""
        self.runner.step(plan, self._all_bits).wait()

    def _features(self, lengths: Sequence[int]) -> list[Section]:
        """Returns the sections of all features, for prompts of these lengths in the first slots."""
        works, none = self.runner.works, np.zeros(len(lengths), np.int32)
        sections, links = works.dummy_sections(range(len(lengths)), lengths), self.runner.links
        if works.follow_steps or (links is not None and links.num_drafts):
            sections.append(LookaheadRows(none, none + 1, none + self.runner.slots.max_model_len))
        return sections

    def _short_prompt(self, rows: int) -> int:
        """Returns a number of tokens after which a decode step needs no further KV block, unless
        blocks have one token, and which a step has for each of `rows` rows."""
        longest = min(self.block_size - 1, self.runner.slots.max_model_len - 1)
        return max(1, min(8, longest, self.max_tokens // rows))

    def _admit(
        self,
        lengths: list[int],
        admissions: list[Admission],
        features: Sequence[Section] = (),
        num_blocks: int | None = None,
    ) -> StepPlan:
        """Returns a `dummy_plan` from the first token on."""
        slots = len(self.runner.slots.tokens)
        return dummy_plan(
            lengths, 0, self.block_size, self.num_groups, slots, admissions, features, num_blocks
        )

    def _all_bits(self, plan: StepPlan, count: int) -> I32:
        """Implements `features.AwaitMessage` for dummy steps: as masks, every token is allowed."""
        return np.full((count, mask_words(self.vocab_size)), -1, np.int32)


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
        `_TIMED_KEYS` keys; they write into the first KV block."""
        device, slots = self.device, self.device.slots
        plan, graphs = device.plan, device.graphs
        numbers = torch.arange(plan.rows, dtype=torch.int32, device=slots.device)
        plan.row_section(0, plan.rows).copy_(numbers % len(slots.tokens))
        plan.row_section(1, plan.rows).fill_(min(_TIMED_KEYS, slots.max_model_len) - 1)
        plan.row_section(2, plan.rows).fill_(1)
        plan.row_section(5, plan.rows).fill_(1)
        plan.row_section(6, plan.rows).fill_(slots.max_model_len)
        found: list[tuple[int, float, bool]] = []
        for kind in (graphs.decode, graphs.lookahead):
            if kind.sizes:
                timed = timed_sizes(kind.sizes)
                seconds = _seconds_of([partial(kind.replay, rows) for rows in timed])
                for rows in kind.sizes:
                    between = float(np.interp(rows, timed, seconds))
                    found.append((rows, between, kind is graphs.lookahead))
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
        model.warm_up()
        model.take_part()
        if not model.supports_graphs:
            return
        most, capacity = device.plan.rows, len(device.slots.tokens)
        if model.supports_prefill_graphs:
            self._runner.begin(Step(device.buffers.views(WARM_UP_TOKENS, most), None))
        # beyond MAX_FEW_ROWS for quantized weights, whose tiles have 16, 32 and 64 rows
        sizes = (1, 2, MAX_FEW_ROWS + 1, 17, 33, 65, 129, 193)
        few = [rows for rows in sizes if rows < most]
        many = [1 << bits for bits in range(8, most.bit_length()) if 1 << bits < most]
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

    def _warm_up_mixed(self, rows: int, *, has_lookahead: bool = False) -> None:
        """Launches a step of `rows` rows, of which the last has all tokens that the other rows do
        not have."""
        device, host = self.device, None
        if not self._model.supports_prefill_graphs:
            lengths = [1] * (rows - 1) + [WARM_UP_TOKENS + 1]
            longest = device.slots.max_model_len
            host = HostRows(lengths, [min(length, longest) for length in lengths])
        section = device.plan.row_section(0, rows)
        self._runner.compute(
            device.prepare_rows(
                [section] * 3, rows + WARM_UP_TOKENS, rows - 1, (section, section),
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
    """Returns the library that PyTorch's products prefer."""
    return torch.backends.cuda.preferred_blas_library()


@contextmanager
def preferring(library: Any) -> Iterator[None]:
    """Context in which PyTorch's products prefer a library."""
    before = preferred_library()
    if library == before:
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the choice is experimental
        torch.backends.cuda.preferred_blas_library(library)
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)


def prepare_compiler() -> None:
    """Does what Triton does before it compiles its first kernel, and what takes up to two seconds:
    it hashes its own files and has a C compiler make its driver. To be called in a thread of its
    own while the model is made."""
    from triton.runtime import driver

    hash_compiler()
    _ = driver.active


@contextmanager
def compile_only(compilers: Compilers | None = None) -> Iterator[None]:
    """Context in which launched kernels are compiled, in parallel, and not run; at its end all of
    them are compiled and loaded. They are compiled by `compilers`, or in threads.

    Triton can compile asynchronously, but only kernels that are not launched; so launches become
    its `warmup` here. It also has a C compiler make a launcher for each kernel, but at its first
    launch, one after the other: they are made here, too. And while a kernel is being compiled, each
    further launch of it computes the hash by which it is found on disk, in some milliseconds; here
    a launch is recognised by its specialization.
    """
    import triton
    from triton.runtime import driver
    from triton.runtime.errors import OutOfResources
    from triton.runtime.jit import JITFunction

    run = JITFunction.run
    kernels: dict[Any, Any] = {}
    compile_kernel = None if compilers is None else compile_with(compilers)

    def compile_instead(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        binder = self.device_caches[driver.active.get_current_device()][-1]
        _, specialization, given = binder(*args, **options)
        key = id(self), tuple(specialization), str(given)
        if key not in kernels:
            if compile_kernel is not None:
                self.compile = compile_kernel
            kernels[key] = run(self, *args, grid=grid, warmup=True, **options)
        return kernels[key]

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        with triton.AsyncCompileMode(threads):
            JITFunction.run = compile_instead
            try:
                yield
            finally:
                JITFunction.run = run
        compiled = list(threads.map(_make_launcher, kernels.values()))
    for kernel in compiled:
        # threads may get each other's launchers, which are modules of one name in sys.modules
        with contextlib.suppress(OutOfResources):  # which is raised at its launch, too
            kernel._init_handles()


def _make_launcher(kernel: Any) -> Any:
    """Puts the launcher of a compiled kernel into Triton's cache, where it is looked for when the
    kernel is loaded. Returns the kernel."""
    from triton.runtime import driver
    from triton.runtime._async_compile import FutureKernel

    if isinstance(kernel, FutureKernel):
        kernel = kernel.result()
    if kernel.module is None:
        driver.active.launcher_cls(kernel.src, kernel.metadata)
    return kernel


class CompilationWatch:
    """Records the kernels that are compiled from its creation on.

    Attributes:
        names: of these kernels, in order.
    """

    def __init__(self) -> None:
        import triton

        self.names: list[str] = []
        self._knobs = triton.knobs.runtime
        self._knobs.jit_post_compile_hook = self._note

    def stop(self) -> None:
        """Ends the watch."""
        self._knobs.jit_post_compile_hook = None

    def _note(self, *, fn: Any, **details: Any) -> None:
        self.names.append(fn.name)
        _log.warning(
            "the kernel %s was compiled while serving, for %s", fn.name, details.get("repr")
        )
