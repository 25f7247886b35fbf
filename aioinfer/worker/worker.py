"""A worker: one rank's part of the model, KV cache and request slots on one device.

An executor makes it, in a process of its own or in a thread of the server's, and calls `load`,
`allocate` (with numbers that every rank can keep), `warm_up`, and from then on `execute` for each
plan, in order.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from aioinfer.config import Config
from aioinfer.errors import ConfigError, EngineDeadError
from aioinfer.ipc.expert_placement import ExpertPlacement
from aioinfer.ipc.kv_spec import AttentionSpec, KVGroup, group_layers, groups_of_stage
from aioinfer.ipc.masks import mask_words
from aioinfer.ipc.plan import I32, Admission, StepPlan
from aioinfer.ipc.prompt_rows import MEAN, PooledRows, PromptLogprobRows
from aioinfer.layers.backend import Backend
from aioinfer.layers.kv_cache import FLOAT8
from aioinfer.layers.parallel import ProcessGroups
from aioinfer.models.config import read_json
from aioinfer.models.kv_scales import has_float8_cache, load_kv_scales
from aioinfer.models.registry import build_model, load_model_config
from aioinfer.sampling_params import MAX_LOGPROBS, SamplingParams
from aioinfer.worker.kv_calibration import CALIBRATION_TOKENS, calibrate
from aioinfer.worker.kv_division import CacheDemand
from aioinfer.worker.kv_tensors import KVTensors
from aioinfer.worker.masks import MaskSource
from aioinfer.worker.memory import (
    available_bytes,
    count_blocks,
    keep_freed_memory,
    report_shortage,
)
from aioinfer.worker.model_runner import ModelRunner, PendingResult
from aioinfer.worker.slots import Slots
from aioinfer.worker.stage_links import StageLinks
from aioinfer.worker.stage_runner import StageRunner
from aioinfer.worker.trial_plans import EVERYTHING, trial_admission, trial_plan

if TYPE_CHECKING:
    from aioinfer.worker.compilation import CompilationWatch
    from aioinfer.worker.gpu_runner import GpuModelRunner, PendingGpuResult
    from aioinfer.worker.kernel_timing import KernelTiming

    Pending = PendingResult | PendingGpuResult

#: In the place of a number of KV blocks where layers of other ranks alone need any.
NO_LIMIT = 2**31 - 1
#: Seconds that start-up steps may take, once all ranks that share experts have compiled theirs.
STUCK_AFTER_S = 180.0
CPU_BLOCK_SIZE = 16
# a block is then a tile of prefill attention, which a Hopper GPU copies at a stroke
GPU_BLOCK_SIZE = 128
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a rank found and made while loading.

    Attributes:
        device: such as `"cpu (2 threads)"` or `"NVIDIA H200"`.
        dtype: of the weights and the arithmetic, with the reason if it was selected.
        cache_dtype: of the KV cache, with the origin of its scales if it is float8.
        weights_bytes: of this rank.
        block_size: tokens a KV block.
        groups: the layers of the whole model by what they keep in the KV cache.
        block_bytes: bytes of a KV block of each group, of this rank.
        num_blocks: KV blocks of each group that this rank can have; `NO_LIMIT` of a group of which
            its pipeline stage has no layer.
        model_max_len: the longest sequence that the model was made for.
        vocab_size: of the model's logits.
        implementation: what computes the model, such as `"Triton kernels"`.
        layers: which of the model's layers the rank has.
    """

    device: str
    dtype: str
    weights_bytes: int
    block_size: int
    groups: tuple[KVGroup, ...]
    block_bytes: tuple[int, ...]
    num_blocks: tuple[int, ...]
    model_max_len: int
    vocab_size: int
    implementation: str = ""
    cache_dtype: str = ""
    layers: range = range(0)


class Worker:
    """One rank. The methods are called in the order in which they stand here.

    Attributes:
        device: what it computes on.
        block_size: tokens a KV block.
        graph_bytes: GPU memory that CUDA graphs took.
        timed_choices: kernels that `warm_up` chose by timing, and did not read from a file.
        compilations: kernels that were compiled after `warm_up`, on a GPU.
        on_stuck: called, in another thread, with the error when a start-up step that ranks of other
            engines take part in does not end.
        vocab_size: of the model's logits, once it is loaded.
    """

    vocab_size: int

    def __init__(self, config: Config, folder: Path, groups: ProcessGroups, engine: int = 0):
        """Selects the device; loads nothing yet.

        Args:
            config: the whole configuration.
            folder: the folder of the model.
            groups: the ranks that this one computes with; `groups.tp` shares the layers, of which
                `groups.pp` have theirs one after the other.
            engine: the number of the engine that they belong to.

        Raises:
            ConfigError: `parallel.device` needs GPUs that are not there.
        """
        self._config = config
        self._folder = folder
        self._groups_of_ranks = groups
        self._group, self._pipeline = groups.tp, groups.pp
        self._links: StageLinks | None = None
        place = groups.spec
        self._expert_group = groups.dp if config.parallel.data_parallel_attention else None
        self.device = select_device(
            config, place.local_rank, engine, owns_devices=place.owns_devices
        )
        self.graph_bytes = 0
        self.timed_choices = 0
        self.compilations: CompilationWatch | None = None
        self.on_stuck: Callable[[Exception], None] | None = None
        self.block_size = config.cache.block_size or (
            CPU_BLOCK_SIZE if self.device.type == "cpu" else GPU_BLOCK_SIZE
        )

    def load(self, on_progress: Callable[[int, int], None]) -> LoadReport:
        """Loads the weights and finds out how many KV blocks there can be.

        Args:
            on_progress: called with the bytes that are loaded and that there are.

        Raises:
            ConfigError: the model cannot be loaded with this configuration, or memory is too short.
        """
        config = self._config
        device_name = self._set_up_device()
        trusted, quantization = config.model.trust_remote_code, config.model.quantization
        model_config = load_model_config(
            self._folder, trust_remote_code=trusted, quantization=quantization
        )
        self.vocab_size = model_config.vocab_size
        dtype, dtype_text = select_dtype(config.model.dtype, model_config.dtype, self.device)
        self._backend = Backend.of(
            self.device,
            dtype,
            self._group,
            expert_parallel=config.parallel.expert_parallel,
            expert_group=self._expert_group,
            expert_placement=_read_placement(config),
            stage=self._pipeline.rank,
            num_stages=self._pipeline.size,
        )
        self._backend.cascade = config.cache.cascade_attention
        with report_shortage("the weights", "take a smaller model, or more tensor-parallel ranks"):
            self._model = build_model(
                self._folder,
                self._backend,
                served_len=config.model.max_model_len,
                trust_remote_code=trusted,
                quantization=quantization,
            )
        self._model.load(self._folder, config.model.load_format, config.model.seed, on_progress)
        cache_text = self._select_cache()
        self._connect_experts()
        self._groups = group_layers(self._model.kv_specs)
        self._own_groups = groups_of_stage(self._groups, self._model.layer_numbers)
        available = available_bytes(
            config,
            self.device,
            lambda: self._run_largest_step(model_config.max_len),
            self._captured_fraction(),
        )
        if self.device.type != "cpu":
            available -= self._growth_bytes()
        return LoadReport(
            device=device_name,
            dtype=dtype_text,
            weights_bytes=self._model.weights_bytes,
            block_size=self.block_size,
            groups=self._groups,
            block_bytes=self._block_bytes(self._own_groups),
            num_blocks=self._count_blocks(model_config.max_len, available),
            model_max_len=model_config.max_len,
            vocab_size=model_config.vocab_size,
            implementation=self._model.describe(self.block_size),
            cache_dtype=cache_text,
            layers=self._model.layer_numbers,
        )

    def _connect_experts(self) -> None:
        """Connects the layers with experts to those of other engines' ranks, on GPUs."""
        if self._expert_group is None or self.device.type == "cpu":
            return
        limits = self._config.scheduler
        remedy = "lower scheduler.max_num_batched_tokens, or take fewer engines"
        with report_shortage("the exchange of tokens between engines", remedy):
            self._model.connect_experts(max(limits.max_num_batched_tokens, limits.max_num_seqs))

    @contextmanager
    def _together(self, what: str) -> Iterator[None]:
        """Context in which steps are run that ranks of other engines wait for, and this one for
        theirs. All begin it together; what does not end is reported by `on_stuck`."""
        if self._expert_group is None or self.device.type == "cpu":
            yield
            return
        self._expert_group.meet()
        place, report = self._groups_of_ranks.spec, self.on_stuck
        error = EngineDeadError(
            f"worker {place.rank} of {place.world_size} that share experts did not end {what} "
            f"within {STUCK_AFTER_S:g} s: it waits for another, or another GPU for it"
        )
        timer = threading.Timer(STUCK_AFTER_S, lambda: report and report(error))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _block_bytes(self, groups: Sequence[KVGroup]) -> tuple[int, ...]:
        """Returns the bytes of a KV block of each group."""
        itemsize = self._cache_dtype.itemsize
        return tuple(group.bytes_per_block(self.block_size, itemsize) for group in groups)

    def _count_blocks(self, model_max_len: int, available: int) -> tuple[int, ...]:
        """Returns how many KV blocks of each group fit into `available` bytes; groups without a
        layer here have no limit."""
        limits = self._config.scheduler
        here = tuple(group for group in self._own_groups if group.layers)
        demand = CacheDemand(
            groups=here,
            block_bytes=self._block_bytes(here),
            block_size=self.block_size,
            max_num_seqs=limits.max_num_seqs,
            max_chunk=limits.max_num_batched_tokens,
        )
        counts = iter(count_blocks(self._config, self.device, demand, model_max_len, available))
        return tuple(next(counts) if group.layers else NO_LIMIT for group in self._own_groups)

    def _select_cache(self) -> str:
        """Selects the dtype of the KV cache, and loads its scales if the checkpoint has them.
        Returns how to call it in the start-up table."""
        wanted, scales = self._config.cache.dtype, self._config.cache.scales
        if wanted == "auto":
            wanted = "fp8" if has_float8_cache(read_json(self._folder)) else "model"
        self._is_calibrated = False
        self._cache_dtype = FLOAT8 if wanted == "fp8" else self._backend.dtype
        if wanted != "fp8":
            return str(self._cache_dtype).removeprefix("torch.")
        if not self._model.kv_scales:
            raise ConfigError(
                "a KV cache in float8 is not supported for latent vectors: set cache.dtype to "
                "'model'"
            )
        if scales == "one":
            return "float8 (e4m3; scales: 1)"
        is_stored = not self._config.model.has_random_weights
        if scales == "auto" and is_stored and load_kv_scales(self._folder, self._model.kv_scales):
            return "float8 (e4m3; scales: the checkpoint's)"
        self._is_calibrated = True
        numbers = self._model.layer_numbers
        own_specs = self._model.kv_specs[numbers.start : numbers.stop]
        for layer, spec in zip(self._model.kv_scales, own_specs, strict=True):
            if isinstance(spec, AttentionSpec):
                layer.allow_key_shifts(spec.head_size)
        return "float8 (e4m3; scales: calibrated)"

    def _growth_bytes(self) -> int:
        """Returns the memory that counts of tokens take while they grow to their full size, beyond
        that size, which is part of the largest step."""
        rows, words = self._config.scheduler.max_num_seqs, self.vocab_size
        return Slots.max_sampling_bytes(rows, words) - rows * words * 4

    def _set_up_device(self) -> str:
        """Makes the device this process's own; returns its name for the start-up table."""
        if self.device.type != "cpu":
            torch.cuda.set_device(self.device)
            return torch.cuda.get_device_name(self.device)
        parallel = self._config.parallel
        num_workers = self._groups_of_ranks.spec.world_size * parallel.data_parallel_size
        cores = len(os.sched_getaffinity(0))
        threads = parallel.cpu_threads or max(1, cores // num_workers)
        torch.set_num_threads(threads)
        return f"cpu ({threads} thread{'s' if threads > 1 else ''})"

    def allocate(self, num_blocks: Sequence[int], max_model_len: int) -> None:
        """Makes the KV cache and the slots.

        Args:
            num_blocks: KV blocks of each group, the same on every rank.
            max_model_len: the maximum number of tokens of a request, prompt and output together.

        Raises:
            ConfigError: memory is too short.
        """
        remedy = "lower scheduler.max_num_seqs, model.max_model_len or the KV cache's size"
        with report_shortage("the KV cache and the slots", remedy):
            self._runner = self._make_runner(
                num_blocks, self._config.scheduler.max_num_seqs, max_model_len
            )

    def warm_up(self) -> None:
        """Runs a prefill and a decode step, so that the first request is not slower; leaves no
        trace of them.

        On a GPU all kernels are compiled first, then those of products are timed, and at last CUDA
        graphs are captured.
        """
        runner = self._runner
        if isinstance(runner, ModelRunner):
            keep_freed_memory()
            self._run_warm_up_steps()
            self._calibrate()
            runner.expert_report.begin()
            return
        from aioinfer.worker.compilation import CompilationWatch, compile_only

        timing = self._make_kernel_timing()
        with compile_only():
            self._run_warm_up_steps()
            self._run_prompt_rows()
            runner.warm_up()
            if timing is not None:
                timing.prepare()
        with self._together("warming up"):
            self._run_warm_up_steps()
            self._run_prompt_rows()
            if timing is not None:
                self.timed_choices = timing.run()
            self._calibrate()
            runner.capture()
        runner.expert_report.begin()
        self.graph_bytes = runner.graph_bytes
        self.compilations = CompilationWatch()

    def _make_kernel_timing(self) -> KernelTiming | None:
        """Returns the choice of kernels for products; None where they stay at their defaults."""
        if not self._config.parallel.time_kernels or not self._backend.pdl:
            return None
        from aioinfer.worker.kernel_timing import KernelTiming

        return KernelTiming.of(self._backend)

    def _run_warm_up_steps(self) -> None:
        """Executes a prefill and a decode step in which requests use all of the sampler, with and
        without masks, and forgets them."""
        runner, slots = self._runner, self._runner.slots
        rows = min(2, len(slots.tokens), *(kv.shape[2] for kv in runner.kv.tensors))
        prompt_len = max(1, min(8, self.block_size - 1, slots.max_model_len - 1))
        greedy = trial_admission(0, prompt_len, SamplingParams(temperature=0))
        admissions = [greedy, trial_admission(1, prompt_len, EVERYTHING, banned=(1,))][:rows]
        groups = len(self._groups)
        for num_masked in (0, 1):
            lengths = [prompt_len] * rows
            plan = trial_plan(
                lengths, 0, self.block_size, groups, len(slots.tokens), admissions, num_masked
            )
            runner.step(plan, self._allow_all).wait()
        if prompt_len < min(self.block_size, slots.max_model_len):
            plan = trial_plan([1] * rows, prompt_len, self.block_size)
            runner.step(plan, self._allow_all).wait()
        slots.reset()
        runner.kv.zero(rows)

    def _calibrate(self) -> None:
        """Measures the scales of a KV cache in float8 that has none; leaves no other trace."""
        if not self._is_calibrated:
            return
        runner, slots, size = self._runner, self._runner.slots, self.block_size
        most = size * min(kv.shape[2] for kv in runner.kv.tensors)
        budget = self._config.scheduler.max_num_batched_tokens
        count = max(1, min(CALIBRATION_TOKENS, budget, most, slots.max_model_len - 1))
        tokens = np.random.default_rng(0).integers(0, self.vocab_size, count, dtype=np.int32)
        admission = Admission(0, tokens, count, SamplingParams(temperature=0), 0, ())

        def compute_prompt() -> None:
            groups, slot_count = len(self._groups), len(slots.tokens)
            plan = trial_plan([count], 0, size, groups, slot_count, [admission])
            runner.step(plan).wait()
            slots.reset()

        blocks = -(-count // size)
        calibrate(
            self._model.kv_scales, self._own_groups, runner.kv.tensors, count, slots.max_model_len,
            compute_prompt, self._group, self._groups_of_ranks.world,
        )  # fmt: skip
        runner.kv.zero(blocks)

    def _run_prompt_rows(self) -> None:
        """Executes a prefill step with log-probabilities of the prompt and one that pools, so that
        their kernels are compiled, and forgets them."""
        runner, slots = self._runner, self._runner.slots
        prompt_len = max(1, min(8, self.block_size - 1, slots.max_model_len - 1))
        admission = trial_admission(0, prompt_len, SamplingParams(temperature=0))
        one, count = np.ones(1, np.int32), np.full(1, prompt_len, np.int32)
        slot, top = np.zeros(1, np.int32), np.full(1, MAX_LOGPROBS, np.int32)
        scored, pooled = PromptLogprobRows(slot, count, top), PooledRows(slot, MEAN * one, one)
        for section in (scored, pooled):
            plan = trial_plan(
                [prompt_len], 0, self.block_size, len(self._groups), len(slots.tokens), [admission]
            )
            plan.sections = [*plan.sections, section]
            runner.step(plan).wait()
        slots.reset()
        runner.kv.zero(1)

    def execute(self, plan: StepPlan, masks: MaskSource | None = None) -> Pending:
        """Starts a plan; the result can be waited for.

        Plans are executed in the order of the calls. `masks` is called if it has constrained rows,
        when all else is computed or launched.
        """
        return self._runner.step(plan, masks)

    def _allow_all(self, plan: StepPlan, count: int) -> I32:
        """Implements `MaskSource` for steps that nobody asked for: every token is allowed."""
        return np.full((count, mask_words(self.vocab_size)), -1, np.int32)

    def _make_runner(
        self, num_blocks: Sequence[int], max_num_seqs: int, max_model_len: int
    ) -> ModelRunner | GpuModelRunner:
        groups, config = self._groups, self._config
        slots = Slots(
            max_num_seqs,
            max_model_len,
            self.block_size,
            self.vocab_size,
            self.device,
            len(groups),
        )
        kv = KVTensors(
            self._own_groups, num_blocks, self.block_size, self._cache_dtype, self.device
        )
        tokens = max(config.scheduler.max_num_batched_tokens, max_num_seqs)
        self._make_all_reduce()
        self._model.bind(self._own_groups, kv.tensors, max_num_seqs, tokens)
        links = self._link_stages()
        if self.device.type == "cpu":
            if links is not None:
                return StageRunner(self._model, kv, slots, links)
            return ModelRunner(self._model, kv, slots)
        use_graphs = config.parallel.cuda_graphs
        if links is not None:
            from aioinfer.worker.gpu_stage_runner import GpuStageRunner

            return GpuStageRunner(
                self._model, kv, slots, tokens, use_graphs=use_graphs, links=links
            )
        from aioinfer.worker.gpu_runner import GpuModelRunner

        return GpuModelRunner(self._model, kv, slots, tokens, use_graphs=use_graphs)

    def _link_stages(self) -> StageLinks | None:
        """Returns the links to the other stages, with nothing on its way; None for one stage."""
        if self._pipeline.size > 1 and self._links is None:
            self._links = StageLinks(
                self._groups_of_ranks, self._model.hidden_size, self._backend.dtype, self.device
            )
        elif self._links is not None:
            self._links.drain()
        return self._links

    def _make_all_reduce(self) -> None:
        """Gives the layers their sum over the ranks, at the first call; none for one GPU."""
        backend, group = self._backend, self._group
        if group.size == 1 or not backend.has_kernels or backend.all_reduce is not None:
            return
        from aioinfer.kernels.all_reduce import AllReduce, AllReduceLayout

        limits, hidden = self._config.scheduler, self._model.hidden_size
        max_tokens = max(limits.max_num_batched_tokens, limits.max_num_seqs)
        layout = AllReduceLayout.of(group.size, max_tokens, hidden, backend.dtype)
        memory = group.symmetric_buffer(layout.nbytes)
        backend.all_reduce = AllReduce(memory, layout, hidden, backend.dtype)

    def _captured_fraction(self) -> float:
        """Returns the fraction of the largest step's tokens that the largest graph computes."""
        if self.device.type == "cpu" or not self._config.parallel.cuda_graphs:
            return 0.0
        from aioinfer.worker.gpu_runner import MIXED_GRAPH_TOKENS

        limits = self._config.scheduler
        return min(1.0, (MIXED_GRAPH_TOKENS + limits.max_num_seqs) / limits.max_num_batched_tokens)

    def _run_largest_step(self, model_max_len: int) -> None:
        """Computes as many tokens, and samples as many, as a step may, with a cache that is just
        large enough. Every request uses all of the sampler: float32 logits, counts of
        tokens, log-probabilities."""
        limits = self._config.scheduler
        budget = limits.max_num_batched_tokens
        rows = min(limits.max_num_seqs, budget)
        max_len = min(model_max_len, -(-budget // rows))
        lengths = [min(max_len, budget // rows + (row < budget % rows)) for row in range(rows)]
        num_blocks = [rows * -(-max_len // self.block_size)] * len(self._groups)
        # the slots are as long as those of the real runner: they are part of the peak
        longest = self._config.model.max_model_len or model_max_len
        runner = self._make_runner(num_blocks, rows, max(max_len, min(longest, model_max_len)))
        admissions = [
            trial_admission(slot, length, EVERYTHING, banned=(1,))
            for slot, length in enumerate(lengths)
        ]
        plan = trial_plan(lengths, 0, self.block_size, len(self._groups), rows, admissions, rows)
        if not isinstance(runner, ModelRunner):
            from aioinfer.worker.compilation import compile_only

            with compile_only():
                runner.step(plan, self._allow_all).wait()
        with self._together("the largest step"):
            runner.step(plan, self._allow_all).wait()


def _read_placement(config: Config) -> ExpertPlacement | None:
    path = config.parallel.expert_placement
    return None if path is None else ExpertPlacement.read(Path(path))


def select_device(
    config: Config, rank: int, engine: int = 0, *, owns_devices: bool = False
) -> torch.device:
    """Returns the device of an engine's rank, by its number on its host; `owns_devices` is as in
    `RankSpec`.

    Raises `ConfigError` if it should be a GPU and there are too few.
    """
    wanted = config.parallel.device
    count = torch.cuda.device_count()
    if wanted == "cpu" or (wanted == "auto" and not count):
        return torch.device("cpu")
    if not count:
        raise ConfigError(
            "parallel.device = 'cuda', and there is no GPU that torch can use: set "
            "it to 'cpu' or 'auto'"
        )
    if owns_devices:
        if rank >= count:
            raise ConfigError(f"{rank + 1} ranks of one host need as many GPUs, and it has {count}")
        return torch.device("cuda", rank)
    parallel = config.parallel
    names = "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"
    settings = {f"parallel.{name}": getattr(parallel, name) for name in names}
    size, engines = parallel.world_size, parallel.data_parallel_size
    if size * engines > count:
        above_one = {name: value for name, value in settings.items() if value > 1}
        product = " times ".join(f"{name} = {value}" for name, value in above_one.items())
        raise ConfigError(
            f"{product} takes {size * engines} GPUs, and torch finds {count}: lower "
            f"{' or '.join(above_one)}"
        )
    return torch.device("cuda", engine * size + rank)


def select_dtype(wanted: str, stored: torch.dtype, device: torch.device) -> tuple[torch.dtype, str]:
    """Returns the dtype of weights and arithmetic, and how to call it in the start-up table.

    Few CPUs multiply bfloat16 or float16 faster than float32, and others take a hundred times as
    long: on a CPU it is float32, unless the configuration names another.

    Args:
        wanted: the configured dtype, or "auto".
        stored: the checkpoint's.
    """
    name = str(stored).removeprefix("torch.")
    if wanted != "auto":
        return _DTYPES[wanted], wanted
    if device.type == "cpu" and name != "float32":
        return torch.float32, f"float32 (the weights are {name}, in which few CPUs compute fast)"
    if name not in _DTYPES:
        return torch.bfloat16, f"bfloat16 (the weights are {name})"
    return stored, name
