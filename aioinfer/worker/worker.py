"""A worker: one rank's part of the model, KV cache and request slots on one device.

An executor makes it, in a process of its own or in a thread of the server's, and calls `load`,
`allocate` (with numbers that every rank can keep) and `warm_up`. From then on `runner.step`
executes each plan, in order.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch

from aioinfer.config import Config
from aioinfer.ipc.content_digest import digest_files
from aioinfer.ipc.kv_spec import KVGroup, group_layers, groups_of_stage
from aioinfer.ipc.read_tally import StoreTally, Tally
from aioinfer.layers.parallel import ProcessGroups
from aioinfer.models.registry import load_model_config
from aioinfer.worker.cache_check import CacheCheck, text_tokens
from aioinfer.worker.called_worker import CalledWorker
from aioinfer.worker.compilation import CompilationWatch, compile_only, prepare_compiler
from aioinfer.worker.compilers import Compilers
from aioinfer.worker.device import CpuDevice, Device
from aioinfer.worker.dummy_steps import DummySteps
from aioinfer.worker.features import Rank
from aioinfer.worker.host_memory import keep_freed_memory
from aioinfer.worker.kv_calibration import CALIBRATION_TOKENS, calibrate
from aioinfer.worker.kv_tensors import KVTensors, MakeTensor
from aioinfer.worker.memory import CacheDemand, available_bytes, count_blocks, report_shortage
from aioinfer.worker.peers import Peers
from aioinfer.worker.rank_memory import make_rank_memory
from aioinfer.worker.rank_model import RankModel
from aioinfer.worker.runner import ModelRunner
from aioinfer.worker.selection import (
    begin_context,
    select_backend,
    select_cache_dtype,
    select_device,
    select_dtype,
    set_up_device,
)
from aioinfer.worker.slots import Slots
from aioinfer.worker.step_graphs import MIXED_GRAPH_TOKENS, StepGraphs
from aioinfer.worker.step_works import StepWorks, load_works
from aioinfer.worker.warm_up import GpuWarmUp, run_kinds

#: In the place of a number of KV blocks where layers of other ranks alone need any.
NO_LIMIT = 2**31 - 1
CPU_BLOCK_SIZE = 16
# a block is then a tile of prefill attention, which a Hopper GPU copies at a stroke
GPU_BLOCK_SIZE = 128


#: Copies of a row's logits in float32 that a step has at once: penalized ones, and those of which a
#: feature takes log-probabilities.
_LOGITS_COPIES = 2


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The results of loading on one rank.

    Attributes:
        device: such as `"cpu (2 threads)"` or `"NVIDIA H200"`.
        dtype: of the weights and the arithmetic, with the reason if it was selected.
        cache_dtype: of the KV cache, with the origin of its scales if it is float8.
        weights_bytes: of this rank.
        block_size: tokens a KV block.
        groups: the layers of the whole model by KV group.
        block_bytes: bytes of a KV block of each group, of this rank.
        num_blocks: KV blocks of each group that this rank can have; `NO_LIMIT` of a group of which
            its pipeline stage has no layer.
        model_max_len: the longest sequence that the model was made for.
        vocab_size: of the model's logits.
        implementation: what computes the model, such as `"Triton kernels"`.
        layers: which of the model's layers the rank has.
        max_lookahead: the maximum of lookahead rows in a step.
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
    max_lookahead: int = 0


class Worker(CalledWorker):
    """One rank. The methods are called in the order in which they stand here.

    Attributes:
        device: the device that it computes on.
        block_size: tokens a KV block.
        graph_bytes: GPU memory that CUDA graphs took.
        timed_choices: kernels that `warm_up` chose by timing, and did not read from a file.
        compilations: kernels that were compiled after `warm_up`, on a GPU.
        memory: of weights and KV cache; None where it cannot sleep.
        compilers: processes that compile its kernels, until it has warmed up; None for threads.
        on_stuck: called, in another thread, with the error when a start-up step that ranks of other
            engines take part in does not end.
        vocab_size: of the model's logits, once it is loaded.
        model: the rank's part of the model, once it is made.
        rank: the number of the rank in its engine.
    """

    vocab_size: int

    def __init__(
        self,
        config: Config,
        folder: Path,
        groups: ProcessGroups,
        engine: int = 0,
        tally: Tally | None = None,
    ):
        """Selects the device; loads nothing yet.

        Args:
            config: the whole configuration.
            folder: the folder of the model.
            groups: the ranks that this one computes with; `groups.tp` shares the layers, which are
                divided among the stages of `groups.pp` in order.
            engine: the number of the engine that they belong to.
            tally: of what the ranks of this host read, if there may be several.

        Raises:
            ConfigError: `parallel.device` needs GPUs that are not there.
        """
        self._config = config
        self._folder = folder
        place = groups.spec
        self._engine, self._tally = engine, tally
        if groups.store is not None and not place.is_local:
            self._tally = StoreTally(groups.store, engine, place.engine_size)
        self.rank = place.engine_rank
        self._world_size = place.world_size
        self.device = select_device(
            config, place.local_rank, engine, owns_devices=place.owns_devices
        )
        self._peers = Peers(config, groups, self.device)
        self.memory = make_rank_memory(self.device, sleeps=config.model.sleep_mode)
        self.graph_bytes = 0
        self.step_times: list[tuple[int, float, bool]] = []
        self._fewest_blocks = 1
        self._graphs: StepGraphs | None = None  # on a GPU, once it has warmed up
        #: parts of the warm-up that are left; each returns whether it did anything
        self._left: list[Callable[[], bool]] = []
        self._check: CacheCheck | None = None  # from `allocate` to `warm_up`
        self.timed_choices = 0
        self.compilations: CompilationWatch | None = None
        self.compilers: Compilers | None = None
        self.on_stuck: Callable[[Exception], None] | None = None
        self.block_size = config.cache.block_size or (
            CPU_BLOCK_SIZE if self.device.type == "cpu" else GPU_BLOCK_SIZE
        )

    def load(self, on_progress: Callable[[int, int], None]) -> LoadReport:
        """Loads the weights and finds out how many KV blocks there can be.

        Args:
            on_progress: called with the bytes that are loaded and the total.

        Raises:
            ConfigError: the model cannot be loaded with this configuration, or memory is too short.
        """
        config, peers = self._config, self._peers
        if self.device.type == "cuda":
            begin_context(self.device)
        model_config = load_model_config(self._folder, config.model)  # imports all families
        self.vocab_size = model_config.vocab_size
        load_works(config.model.features)
        device_name = set_up_device(config, self.device, peers.groups.spec.world_size)
        if self.device.type == "cuda":
            threading.Thread(target=prepare_compiler, name="compiler", daemon=True).start()
        dtype, dtype_text = select_dtype(config.model.dtype, model_config.dtype, self.device)
        self._backend = select_backend(config, self.device, dtype, peers)
        served_len = config.model.max_model_len or model_config.max_len
        rope = getattr(model_config, "rope", None)
        # where keys may depend on it, KV blocks are known by the length: transformers' modules may
        # have longrope, too
        self._length = served_len if rope is None or rope.kind == "longrope" else 0
        self._layers = RankModel(
            config, self._folder, self._backend, peers, min(served_len, model_config.max_len)
        )
        self.model = self._layers.model
        self._layers.load(on_progress, self.memory)
        cache = select_cache_dtype(config, self._folder, self.model, dtype)
        self._cache_dtype, self._is_calibrated = cache.dtype, cache.is_calibrated
        self._is_checked = cache.is_checked and self._backend.computes_alone
        peers.connect_experts(self.model)
        looks_ahead = peers.agree(self.model.looks_ahead(self.block_size))
        self._max_lookahead = config.max_lookahead if looks_ahead else 0
        self._groups = group_layers(self._layers.kv_specs)
        self._own_groups = groups_of_stage(self._groups, self._layers.layer_numbers)
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
            weights_bytes=self._layers.weights_bytes,
            block_size=self.block_size,
            groups=self._groups,
            block_bytes=self._block_bytes(self._own_groups),
            num_blocks=self._count_blocks(model_config.max_len, available),
            model_max_len=model_config.max_len,
            vocab_size=model_config.vocab_size,
            implementation=self.model.describe(self.block_size),
            cache_dtype=cache.text,
            layers=self.model.layer_numbers,
            max_lookahead=self._max_lookahead,
        )

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
            prefix_caching=self._config.cache.enable_prefix_caching,
        )
        if not here:
            return (NO_LIMIT,) * len(self._own_groups)
        counts = iter(count_blocks(self._config, self.device, demand, model_max_len, available))
        return tuple(next(counts) if group.layers else NO_LIMIT for group in self._own_groups)

    def _growth_bytes(self) -> int:
        """Returns the memory that the largest step does not show: that of counts of tokens while
        they grow to their full size, beyond that size, and that of logits of lookahead rows in
        float32, which penalties and features take."""
        rows, words = self._config.scheduler.max_num_seqs, self.vocab_size
        growth = Slots.max_sampling_bytes(rows, words) - rows * words * 4
        shard = self.model.vocabulary.shard_size
        return growth + self._max_lookahead * shard * 4 * _LOGITS_COPIES

    def allocate(self, num_blocks: Sequence[int], max_model_len: int) -> None:
        """Makes the KV cache and the slots.

        Args:
            num_blocks: KV blocks of each group, the same on every rank.
            max_model_len: the maximum number of tokens of a request, prompt and output together.

        Raises:
            ConfigError: memory is too short.
        """
        self._fewest_blocks = min(num_blocks, default=NO_LIMIT)
        if self._is_checked:
            self._check = self._begin_check(max_model_len)
        remedy = "lower scheduler.max_num_seqs, model.max_model_len or the KV cache's size"
        with report_shortage("the KV cache and the slots", remedy):
            self.runner = self._make_runner(
                num_blocks, self._config.scheduler.max_num_seqs, max_model_len,
                None if self.memory is None else self.memory.make_kv,
            )  # fmt: skip

    def warm_up(self, *, leaves_graphs: bool = False) -> None:
        """Runs a prefill and a decode step, so that the first request is not slower; leaves no
        trace of them.

        On a GPU all kernels are compiled first, then the kernels of products are timed, and at last
        CUDA graphs are captured: with `leaves_graphs` a part of them, if nothing but this rank's
        own kernels is in them. `continue_warm_up` is to be called while there is nothing else to
        do.
        """
        runner, steps = self.runner, self._dummy_steps(self.runner)
        if isinstance(runner.device, CpuDevice):
            keep_freed_memory()
            steps.run_all()
            self._settle_cache(steps)
        else:
            self._warm_up_kernels(steps, leaves_graphs=leaves_graphs)
        if self.compilers is not None:
            self.compilers.close()
            self.compilers = None
        runner.works.begin_service()
        if self.memory is not None:
            self.memory.begin_service()
        if self.device.type != "cpu":
            self.compilations = CompilationWatch()

    @torch.inference_mode()
    def continue_warm_up(self) -> bool:
        """Captures a CUDA graph that `warm_up` has left, or else loads kernels (`library_kernels`),
        while no step is being prepared; returns whether anything was left. A rank that sleeps takes
        no memory for it."""
        if self.memory is not None and self.memory.asleep:
            return False
        return any(part() for part in self._left)

    # ---------------------------------------------------------------- parts of the start

    def _warm_up_kernels(self, steps: DummySteps, *, leaves_graphs: bool) -> None:
        """Does what `warm_up` does on a GPU."""
        warm_up = GpuWarmUp(steps, self._layers, self._backend, self._peers)
        warm_up.compile(self.compilers)
        with self._peers.together("warming up", self.on_stuck):
            self.timed_choices = warm_up.run()
            self._settle_cache(steps)
            if self._config.parallel.cuda_graphs and self.model.supports_graphs:
                backend, offloads = self._backend, self._config.model.offload_gb > 0
                alone = backend.computes_alone and backend.extension is None and not offloads
                warm_up.capture(leaves_rest=leaves_graphs and alone)
                if self._max_lookahead:
                    self.step_times = warm_up.time_decodes()
            torch.backends.cuda.preferred_blas_library("cublas")
        self._graphs = warm_up.device.graphs
        self.graph_bytes = self._graphs.nbytes
        from aioinfer.worker.library_kernels import LibraryKernels

        library = LibraryKernels.of(self.model, warm_up.device, self._backend)
        self._left = [self._graphs.capture_next, library.load_next]

    def _settle_cache(self, steps: DummySteps) -> None:
        """Measures the scales of a KV cache in float8 that has none, and ends the check of it."""
        if self._is_calibrated:
            self._calibrate(steps)
        if self._check is not None:
            self._check.end(steps)
            self._check = None

    def _calibrate(self, steps: DummySteps) -> None:
        """Measures the scales of the KV cache; leaves no other trace."""
        device, peers = steps.runner.device, self._peers
        max_len = device.slots.max_model_len
        most = self.block_size * self._fewest_blocks
        budget = self._config.scheduler.max_num_batched_tokens
        count = max(1, min(CALIBRATION_TOKENS, budget, most, max_len - 1))
        tokens = np.random.default_rng(0).integers(0, self.vocab_size, count, dtype=np.int32)
        of_model, _ = device.kv.divided(len(self.model.layer_numbers))
        calibrate(
            self.model.kv_scales, *of_model, count, max_len,
            lambda: steps.run_prompt(tokens), peers.tp, peers.groups.world,
        )  # fmt: skip
        device.kv.zero(-(-count // self.block_size))

    def _begin_check(self, max_model_len: int) -> CacheCheck | None:
        """Begins the check of a cache in float8 with a cache in the dtype of the arithmetic, before
        the real one takes the memory; None where there is nothing to check it with."""
        budget = self._config.scheduler.max_num_batched_tokens
        most = min(budget, max_model_len - 1, self.block_size * self._fewest_blocks)
        tokens = text_tokens(self._folder, self.vocab_size, most)
        if tokens is None or not self.model.scores_tokens:
            return None
        rounded, self._cache_dtype = self._cache_dtype, self._backend.dtype
        count = -(-len(tokens) // self.block_size)
        blocks = [1 if group.keeps_source else count for group in self._groups]
        steps = self._dummy_steps(self._make_runner(blocks, 1, len(tokens) + 1), count)
        self._cache_dtype = rounded
        if self.device.type != "cpu":
            with compile_only(self.compilers):
                steps.score_prompt(tokens)
        return CacheCheck(tokens, steps)

    def _dummy_steps(self, runner: ModelRunner, fewest_blocks: int | None = None) -> DummySteps:
        fewest = fewest_blocks or self._fewest_blocks
        return DummySteps(
            runner, len(self._groups), self.block_size, self.vocab_size, fewest,
            self._config.max_step_tokens,
        )  # fmt: skip

    def _make_runner(
        self, num_blocks: Sequence[int], max_num_seqs: int, max_model_len: int,
        make_kv: MakeTensor | None = None,
    ) -> ModelRunner:  # fmt: skip
        """Makes the slots, the KV cache (by `make_kv`, if it is given) and all that computes steps
        with them."""
        groups, config, model = self._groups, self._config, self.model
        uses_kernels = self.device.type != "cpu"
        max_lookahead = self._max_lookahead
        replays = max_lookahead > 0 and any(group.keeps_states for group in groups)
        if replays:
            self._backend.saved_rows = max_num_seqs, config.speculation.max_draft_tokens
        slots = Slots(
            max_num_seqs, max_model_len, self.block_size, self.vocab_size, self.device, len(groups),
            uses_kernels=uses_kernels, has_rotary_offsets=model.has_rotary_sections,
            has_state_lens=replays, has_token_types=model.has_token_types,
        )  # fmt: skip
        kv = KVTensors(
            self._own_groups, num_blocks, self.block_size, self._cache_dtype, self.device, make_kv
        )
        rows, tokens = max_num_seqs + max_lookahead, self._config.max_step_tokens
        self._layers.bind(kv, self.block_size, rows, tokens)
        num_drafts = config.speculation.max_draft_tokens if config.speculation.has_drafter else 0
        links = self._peers.link_stages(
            model.stream_size, len(model.tapped_layers) * model.hidden_size,
            num_drafts if max_lookahead else 0, self._backend.dtype,
        )  # fmt: skip
        if not max_lookahead:
            config = replace(config, speculation=replace(config.speculation, method="none"))
        rank = Rank(
            model, slots, links, config, self._layers.drafter, kv, self._engine, self._identify_kv,
            self._peers.groups.spec, self._tally,
        )  # fmt: skip
        works = StepWorks.load(rank, config.model.features)
        device: Device
        if uses_kernels:
            from aioinfer.worker.gpu_device import GpuDevice

            is_first, is_last = (links.is_first, links.is_last) if links else (True, True)
            device = GpuDevice(
                model, kv, slots, tokens,
                is_first=is_first, is_last=is_last, max_lookahead=max_lookahead,
                has_drafter=self._layers.drafter is not None and max_lookahead > 0,
            )  # fmt: skip
        else:
            device = CpuDevice(slots, kv, max_lookahead)
        if taps := len(model.tapped_layers):
            shape, like = (tokens, taps, model.hidden_size), self._backend
            device.taps = torch.zeros(shape, dtype=like.dtype, device=like.device)
        return ModelRunner(model, device, works, links)

    def _identify_kv(self) -> bytes:
        """Returns 16 bytes that stand for the model, its weights, and the form of its KV blocks."""
        config, place = self._config.model, self._peers.groups.spec
        if not self._weights_digest and self._folder.exists():
            # once: other weights may come there, which are not loaded
            self._weights_digest = digest_files(self._folder)
        scales = [
            (each.table.tolist(), None if each.key_shifts is None else each.key_shifts.tolist())
            for each in self.model.kv_scales.values()
        ]
        form = (
            self._weights_digest, json.dumps(config.hf_overrides, sort_keys=True, default=str),
            self._length, config.load_format, config.seed, config.quantization,
            str(self._backend.dtype), str(self._cache_dtype), self.block_size, self._own_groups,
            # where ranks share a head, the same rank of another number of ranks has another head
            place.size_of("tp"), place.engine_rank, scales,
        )  # fmt: skip
        return blake2b(repr(form).encode(), digest_size=16).digest()

    def _captured_fraction(self) -> float:
        """Returns the fraction of the largest step's tokens that the largest graph computes."""
        if self.device.type == "cpu" or not self._config.parallel.cuda_graphs:
            return 0.0
        limits = self._config.scheduler
        captured = MIXED_GRAPH_TOKENS + limits.max_num_seqs + self._max_lookahead
        return min(1.0, captured / limits.max_num_batched_tokens)

    def _run_largest_step(self, model_max_len: int) -> None:
        """Computes as many tokens, and samples as many, as a step may, of requests that use all of
        the sampler and all features. They share the KV blocks of one: a cache of their own would
        count as memory that a step needs beside the cache."""
        limits = self._config.scheduler
        budget = limits.max_num_batched_tokens
        rows = min(limits.max_num_seqs, budget)
        max_len = min(model_max_len, -(-budget // rows))
        lengths = [min(max_len, budget // rows + (row < budget % rows)) for row in range(rows)]
        num_blocks = -(-max_len // self.block_size)
        # the slots are as long as the real runner's: they are part of the peak
        longest = self._config.model.max_model_len or model_max_len
        blocks = [1 if group.keeps_source else num_blocks for group in self._groups]
        runner = self._make_runner(blocks, rows, max(max_len, min(longest, model_max_len)))
        steps = self._dummy_steps(runner, min(blocks, default=num_blocks))
        plan = steps.largest_plan(lengths)
        if self.device.type != "cpu":
            # of all steps: this step's few kernels would leave most cores idle; kernels that the
            # real cache needs besides are compiled in `warm_up`
            warm_up = GpuWarmUp(steps, self._layers, self._backend, self._peers)
            warm_up.compile(self.compilers, plan)
            del warm_up  # which has memory of its own, that would count as the step's
        with self._peers.together("the largest step", self.on_stuck):
            run_kinds(self._backend, lambda: steps.run(plan))
