"""A worker: one rank's part of the model, KV cache and request slots on one device.

An executor makes it, in a process of its own or in a thread of the server's, and calls `load`,
`allocate` (with numbers that every rank can keep) and `warm_up`. From then on `runner.step`
executes each plan, in order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from aioinfer.config import Config
from aioinfer.errors import ConfigError
from aioinfer.ipc.content_digest import digest_files
from aioinfer.ipc.expert_placement import ExpertPlacement
from aioinfer.ipc.kv_spec import KVGroup, KVSpec, StateSpec, group_layers, groups_of_stage
from aioinfer.ipc.plan import I32, StepPlan
from aioinfer.ipc.read_tally import ReadTally
from aioinfer.layers.backend import Backend
from aioinfer.layers.parallel import ProcessGroups
from aioinfer.layers.transfers import Offload, Transfers
from aioinfer.models.drafters.drafter import Drafter
from aioinfer.models.drafters.registry import build_drafter
from aioinfer.models.registry import build_model, load_model_config
from aioinfer.worker.cache_check import check_loss, expected_loss, text_tokens
from aioinfer.worker.called_worker import CalledWorker
from aioinfer.worker.compilation import CompilationWatch, compile_only, prepare_compiler
from aioinfer.worker.compilers import Compilers
from aioinfer.worker.device import CpuDevice, Device
from aioinfer.worker.dummy_steps import DummySteps
from aioinfer.worker.features import Rank, StepWorks, extend_layers, load_works
from aioinfer.worker.graph_bodies import GraphBodies
from aioinfer.worker.kv_calibration import CALIBRATION_TOKENS, calibrate
from aioinfer.worker.kv_tensors import KVTensors, MakeTensor
from aioinfer.worker.memory import (
    CacheDemand,
    available_bytes,
    check_weights,
    count_blocks,
    keep_freed_memory,
    report_shortage,
)
from aioinfer.worker.peers import Peers
from aioinfer.worker.pinned_memory import GpuTransfers
from aioinfer.worker.rank_memory import make_rank_memory
from aioinfer.worker.runner import ModelRunner
from aioinfer.worker.selection import (
    begin_context,
    select_cache_dtype,
    select_device,
    select_dtype,
    set_up_device,
)
from aioinfer.worker.slots import Slots
from aioinfer.worker.step_graphs import MIXED_GRAPH_TOKENS, StepGraphs

if TYPE_CHECKING:
    from aioinfer.worker.kernel_timing import KernelTiming

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
        tally: ReadTally | None = None,
    ):
        """Selects the device; loads nothing yet.

        Args:
            config: the whole configuration.
            folder: the folder of the model.
            groups: the ranks that this one computes with; `groups.tp` shares the layers, which are
                divided among the stages of `groups.pp` in order.
            engine: the number of the engine that they belong to.
            tally: of the KV blocks that its ranks read, if there are several.

        Raises:
            ConfigError: `parallel.device` needs GPUs that are not there.
        """
        self._config = config
        self._folder = folder
        self._engine, self._tally = engine, tally
        place = groups.spec
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
        # the tokens of the check of a cache in float8, and what they give without rounding
        self._unrounded: tuple[I32, torch.Tensor] | None = None
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
        self._backend = Backend.of(
            self.device,
            dtype,
            peers.tp,
            expert_parallel=config.parallel.expert_parallel,
            expert_group=peers.experts,
            expert_placement=_read_placement(config),
            stage=peers.pp.rank,
            num_stages=peers.pp.size,
        )
        self._backend.cascade = True
        self._backend.state_dtype = config.cache.state_dtype
        method = config.speculation.method
        self._backend.wants_mtp = method == "mtp"
        self._backend.wants_embedding = method in ("mtp", "eagle3")
        served_len = config.model.max_model_len or model_config.max_len
        self._load_weights(dtype, min(served_len, model_config.max_len), on_progress)
        cache = select_cache_dtype(config, self._folder, self.model, dtype)
        self._cache_dtype, self._is_calibrated = cache.dtype, cache.is_calibrated
        self._is_checked = cache.is_checked and self._backend.computes_alone
        peers.connect_experts(self.model)
        looks_ahead = peers.agree(self.model.looks_ahead(self.block_size))
        self._max_lookahead = config.max_lookahead if looks_ahead else 0
        specs, layers = [*self.model.kv_specs, *self._drafter_specs], self.model.layer_numbers
        if self._drafter is not None:
            layers = range(layers.start, len(specs))
        self._groups = group_layers(specs)
        self._own_groups = groups_of_stage(self._groups, layers)
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
            weights_bytes=self._weights_bytes,
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

    def _load_weights(
        self, dtype: torch.dtype, served_len: int, on_progress: Callable[[int, int], None]
    ) -> None:
        """Makes and loads the rank's part of the model, and of its drafter, if it has one.

        Args:
            dtype: of the arithmetic.
            served_len: the longest sequence that may be served.
            on_progress: as for `load`.
        """
        config, folder = self._config, self._folder
        form, seed = config.model.load_format, config.model.seed
        with report_shortage("the weights", "take a smaller model, or more tensor-parallel ranks"):
            extension = self._backend.extension = extend_layers(config, self._backend)
            offload = self._backend.offload = self._make_offload()
            self.model = build_model(folder, self._backend, config.model, config.media)
            self._backend.extension = self._backend.offload = None  # a drafter has none
            if offload is not None and getattr(self.model, "offloaded", None) is None:
                raise ConfigError("model.offload_gb: only layers of decoders can be offloaded")
            drafter = build_drafter(config, self.model, served_len)
        self._drafter: Drafter | None = None
        self._drafter_specs: Sequence[Sequence[KVSpec]] = ()
        if drafter is not None:
            made, folder = drafter
            self.model.tapped_layers = made.tapped_layers
            self._drafter = made if self._backend.is_last_stage else None
        if self.device.type == "cpu":
            check_weights(config, self._weights_bytes, dtype, self._peers.groups.spec)
        self.model.load(self._folder, form, seed, on_progress)
        if drafter is not None:
            if self._drafter is not None:
                made.load(folder, form, seed, on_progress)
            self._drafter_specs = made.kv_specs
            if any(isinstance(spec, StateSpec) for of in made.kv_specs for spec in of):
                raise ConfigError(
                    "speculation.model: a model whose layers keep states cannot draft"
                )
        if self.memory is not None:
            with report_shortage("the weights", "model.sleep_mode takes 256 MiB more at the start"):
                self.memory.take_weights([self.model, self._drafter])
        if extension is not None and extension.is_used:
            with report_shortage(*extension.shortage):
                extension.allocate(config.max_step_tokens, config.scheduler.max_num_seqs)
            self._backend.extension = extension

    def _make_offload(self) -> Offload | None:
        """Returns what is to be offloaded, if anything is. Raises `ConfigError` where that cannot
        be."""
        config, backend = self._config, self._backend
        nbytes = int(config.model.offload_gb * 2**30)
        if not nbytes:
            return None
        if backend.expert_group is not None:
            raise ConfigError("model.offload_gb: not with experts that engines have in common")
        transfers = self._make_transfers()
        # a dependent launch may read weights before the event that it waits for; and products would
        # be timed with copies beside them
        backend.pdl = False
        return Offload(nbytes, transfers)

    def _make_transfers(self) -> Transfers:
        """Returns the copies of offloaded weights. Raises `ConfigError` on a CPU."""
        if self.device.type == "cpu":
            raise ConfigError("model.offload_gb: on a CPU all weights are in memory of the host")
        return GpuTransfers(self.device)

    @property
    def _weights_bytes(self) -> int:
        """The bytes of the model's weights, and of its drafter's."""
        own = 0 if self._drafter is None else self._drafter.weights_bytes
        return self.model.weights_bytes + own

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
            self._score_unrounded(max_model_len)
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
        own kernels is in them, and `capture_next` is to be called while there is nothing else to
        do.
        """
        runner, steps = self.runner, self._dummy_steps(self.runner)
        if isinstance(runner.device, CpuDevice):
            keep_freed_memory()
            steps.run_all()
            self._calibrate()
            self._check_cache()
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
    def capture_next(self) -> bool:
        """Captures a CUDA graph that `warm_up` has left, if there is one, while no step is being
        prepared; returns whether there was. A rank that sleeps takes no memory for it."""
        if self._graphs is None or (self.memory is not None and self.memory.asleep):
            return False
        return self._graphs.capture_next()

    # ---------------------------------------------------------------- parts of the start

    def _warm_up_kernels(self, steps: DummySteps, *, leaves_graphs: bool) -> None:
        """Does what `warm_up` does on a GPU."""
        bodies, timing = self._compile(steps)
        device = bodies.device
        with self._peers.together("warming up", self.on_stuck):
            self._run_kinds(steps.run_all)
            if timing is not None:
                self.timed_choices = timing.run()
                device.kv.zero(1)  # the timed layers have written there
            self._calibrate()
            self._check_cache()
            if self._config.parallel.cuda_graphs and self.model.supports_graphs:
                backend, offloads = self._backend, self._config.model.offload_gb > 0
                alone = backend.computes_alone and backend.extension is None and not offloads
                bodies.capture(leaves_rest=leaves_graphs and alone)
                if self._max_lookahead:
                    self.step_times = bodies.time_decodes()
                    device.kv.zero(1)  # the timed steps have written there
            torch.backends.cuda.preferred_blas_library("cublas")
        self._graphs, self.graph_bytes = device.graphs, device.graphs.nbytes

    def _compile(
        self, steps: DummySteps, largest: StepPlan | None = None
    ) -> tuple[GraphBodies, KernelTiming | None]:
        """Compiles the kernels of all steps that `steps` executes on a GPU, of the plan `largest`
        first, and the kernels among which products choose. Returns the launches that graphs are
        captured from, and the choice of kernels."""
        from aioinfer.worker.gpu_device import GpuDevice

        device = steps.runner.device
        assert isinstance(device, GpuDevice)
        bodies = GraphBodies(steps.runner, device)
        timing = self._make_kernel_timing(bodies)
        with compile_only(self.compilers):
            self._run_kinds(bodies.begin_warm_up)  # all layers' weights are known from then on
            with self._backend.omitting_equal_layers():
                if largest is not None:
                    self._run_kinds(lambda: steps.run(largest))
                self._run_kinds(steps.run_all)
                self._run_kinds(bodies.warm_up)
            if timing is not None:
                timing.prepare()
            self._peers.drain_stages()
        return bodies, timing

    def _run_kinds(self, run: Callable[[], None]) -> None:
        """Launches steps without the extension of the layers, and with it if there is one."""
        run()
        if self._backend.extension is not None:
            with self._backend.extension:
                run()

    def _make_kernel_timing(self, bodies: GraphBodies) -> KernelTiming | None:
        """Returns the choice of kernels for products; None where they stay at their defaults."""
        if not self._backend.pdl:
            return None
        from aioinfer.worker.kernel_timing import KernelTiming

        can_run_layers = self._backend.computes_alone and self.model.supports_graphs
        return KernelTiming.of(self._backend, bodies.timed_layers() if can_run_layers else None)

    def _calibrate(self) -> None:
        """Measures the scales of a KV cache in float8 that has none; leaves no other trace."""
        if not self._is_calibrated:
            return
        runner, size, peers = self.runner, self.block_size, self._peers
        max_len = runner.slots.max_model_len
        most = size * self._fewest_blocks
        budget = self._config.scheduler.max_num_batched_tokens
        count = max(1, min(CALIBRATION_TOKENS, budget, most, max_len - 1))
        tokens = np.random.default_rng(0).integers(0, self.vocab_size, count, dtype=np.int32)
        steps = self._dummy_steps(runner)
        of_model, _ = runner.device.kv.divided(len(self.model.layer_numbers))
        calibrate(
            self.model.kv_scales, *of_model, count, max_len,
            lambda: steps.run_prompt(tokens), peers.tp, peers.groups.world,
        )  # fmt: skip
        runner.device.kv.zero(-(-count // size))

    def _score_unrounded(self, max_model_len: int) -> None:
        """Begins the check of a cache in float8: computes a text with one in the dtype of the
        arithmetic, before the real one takes the memory. See `cache_check`."""
        budget = self._config.scheduler.max_num_batched_tokens
        most = min(budget, max_model_len - 1, self.block_size * self._fewest_blocks)
        tokens = text_tokens(self._folder, self.vocab_size, most)
        if tokens is None or not self.model.scores_tokens:
            return
        rounded, self._cache_dtype = self._cache_dtype, self._backend.dtype
        count = -(-len(tokens) // self.block_size)
        blocks = [1 if group.keeps_source else count for group in self._groups]
        steps = self._dummy_steps(self._make_runner(blocks, 1, len(tokens) + 1), count)
        self._cache_dtype = rounded
        if self.device.type != "cpu":
            with compile_only(self.compilers):
                steps.score_prompt(tokens)
        self._unrounded = tokens, steps.score_prompt(tokens)

    def _check_cache(self) -> None:
        """Ends the check of a cache in float8. Raises `ConfigError` if it harms the model."""
        if self._unrounded is None:
            return
        (tokens, plain), self._unrounded = self._unrounded, None
        found = self._dummy_steps(self.runner).score_prompt(tokens)
        self.runner.device.kv.zero(-(-len(tokens) // self.block_size))
        check_loss(expected_loss(plain, found))

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
        self._peers.connect_all_reduce(self._backend, model.hidden_size)
        self._bind(kv, rows, tokens)
        num_drafts = config.speculation.max_draft_tokens if config.speculation.has_drafter else 0
        links = self._peers.link_stages(
            model.stream_size, len(model.tapped_layers) * model.hidden_size,
            num_drafts if max_lookahead else 0, self._backend.dtype,
        )  # fmt: skip
        if not max_lookahead:
            config = _without_drafts(config)
        rank = Rank(
            model, slots, links, config, self._drafter, kv, self._engine, self._identify_kv,
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
                has_drafter=self._drafter is not None and max_lookahead > 0,
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
            self._weights_digest, config.load_format, config.seed, config.quantization,
            str(self._backend.dtype), str(self._cache_dtype), self.block_size, self._own_groups,
            place.engine_rank, scales,
        )  # fmt: skip
        return blake2b(repr(form).encode(), digest_size=16).digest()

    def _bind(self, kv: KVTensors, rows: int, tokens: int) -> None:
        """Gives the layers of the model and of its drafter, which are numbered behind the model's,
        their KV caches."""
        first = len(self.model.layer_numbers)
        of_model, of_drafter = kv.divided(first)
        self.model.bind(*of_model, self.block_size, rows, tokens)
        if (drafter := self._drafter) is None:
            return
        self._peers.connect_all_reduce(drafter.backend, drafter.hidden_size)
        drafter.bind(*of_drafter, self.block_size, rows, tokens)
        if self.device.type != "cpu" and not drafter.supports_graphs:
            raise ConfigError(
                "speculation: the kernels lack the shape of a layer of the model that drafts"
            )

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
            self._compile(steps, plan)
        with self._peers.together("the largest step", self.on_stuck):
            self._run_kinds(lambda: steps.run(plan))


def _without_drafts(config: Config) -> Config:
    return replace(config, speculation=replace(config.speculation, method="none"))


def _read_placement(config: Config) -> ExpertPlacement | None:
    path = config.parallel.expert_placement
    return None if path is None else ExpertPlacement.read(Path(path))
