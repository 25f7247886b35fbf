"""A worker: one tensor-parallel rank's model, KV cache and request slots on one device.

An executor makes it, in a process of its own or in a thread of the server's, and calls `load`,
`allocate` (with numbers that every rank can keep), `warm_up`, and from then on `execute` for each
plan, in order.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from aioinfer.config import Config
from aioinfer.errors import ConfigError
from aioinfer.ipc.plan import Admission, StepPlan
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.models.architecture import Architecture
from aioinfer.models.llama import LlamaModel
from aioinfer.models.loader import load_weights
from aioinfer.models.registry import build_model
from aioinfer.sampling_params import SamplingParams
from aioinfer.worker.memory import available_bytes, count_blocks, make_kv
from aioinfer.worker.model_runner import ModelRunner, PendingResult
from aioinfer.worker.slots import Slots

if TYPE_CHECKING:
    from aioinfer.kernels.all_reduce import AllReduce
    from aioinfer.worker.compilation import CompilationWatch
    from aioinfer.worker.gpu_runner import GpuModelRunner, PendingGpuResult

    Pending = PendingResult | PendingGpuResult

CPU_BLOCK_SIZE = 16
# a block is then a tile of prefill attention, which a Hopper GPU copies at a stroke
GPU_BLOCK_SIZE = 128
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a rank found and made while loading.

    Attributes:
        device: such as `"cpu (2 threads)"` or `"NVIDIA H200"`.
        dtype: of the weights and the arithmetic, with the reason if it was chosen.
        weights_bytes: of this rank.
        block_size: tokens a KV block.
        bytes_per_block: of this rank, all layers together.
        max_blocks: KV blocks that this rank can have.
        model_max_len: the longest sequence that the model was made for.
        vocab_size: of the model's logits.
    """

    device: str
    dtype: str
    weights_bytes: int
    block_size: int
    bytes_per_block: int
    max_blocks: int
    model_max_len: int
    vocab_size: int


class Worker:
    """One rank. The methods are called in the order in which they stand here.

    Attributes:
        device: what it computes on.
        block_size: tokens a KV block.
        graph_bytes: GPU memory that CUDA graphs took.
        compilations: kernels that were compiled after `warm_up`, on a GPU.
    """

    def __init__(self, config: Config, folder: Path, group: ParallelGroup, engine: int = 0):
        """Chooses the device; loads nothing yet.

        Args:
            config: the whole configuration.
            folder: the folder of the model.
            group: this rank among the ranks that share the model.
            engine: the number of the engine that they belong to.

        Raises:
            ConfigError: `parallel.device` asks for GPUs that are not there.
        """
        self._config = config
        self._folder = folder
        self._group = group
        self.device = select_device(config, group.rank, engine)
        self.graph_bytes = 0
        self.compilations: CompilationWatch | None = None
        self._exchange: AllReduce | None = None
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
        if self.device.type == "cpu":
            num_workers = self._group.size * config.parallel.data_parallel_size
            threads = config.parallel.cpu_threads or max(
                1, len(os.sched_getaffinity(0)) // num_workers
            )
            torch.set_num_threads(threads)
            device_name = f"cpu ({threads} thread{'s' if threads > 1 else ''})"
        else:
            torch.cuda.set_device(self.device)
            device_name = torch.cuda.get_device_name(self.device)
        arch = Architecture.load(self._folder)
        self._arch = arch
        self._vocab_size = arch.vocab_size
        self._dtype, dtype_text = select_dtype(config.model.dtype, arch.dtype, self.device)
        self._model = build_model(arch, self._group, self._dtype, self.device)
        load_weights(
            self._model, self._folder, config.model.load_format, config.model.seed, on_progress
        )
        self._model.finalize()
        bytes_per_block = math.prod(self._kv_shape(1)) * self._dtype.itemsize
        available = available_bytes(
            config,
            self.device,
            lambda: self._run_largest_step(arch.max_position_embeddings),
            self._captured_share(),
        )
        return LoadReport(
            device=device_name,
            dtype=dtype_text,
            weights_bytes=self._model.weights_bytes,
            block_size=self.block_size,
            bytes_per_block=bytes_per_block,
            max_blocks=count_blocks(
                config, self.device, bytes_per_block, self.block_size, available
            ),
            model_max_len=arch.max_position_embeddings,
            vocab_size=arch.vocab_size,
        )

    def allocate(self, num_blocks: int, max_model_len: int) -> None:
        """Makes the KV cache and the slots.

        Args:
            num_blocks: KV blocks, the same on every rank.
            max_model_len: the most tokens of a request, prompt and output together.
        """
        self._runner = self._make_runner(
            num_blocks, self._config.scheduler.max_num_seqs, max_model_len
        )

    def warm_up(self) -> None:
        """Runs a prefill and a decode step, so that the first request is not slower; leaves no
        trace of them.

        On a GPU all kernels are compiled first, and at last the graphs of decode steps are
        captured.
        """
        runner = self._runner
        if isinstance(runner, ModelRunner):
            self._rehearse()
            return
        from aioinfer.worker.compilation import CompilationWatch, compile_only

        with compile_only():
            self._rehearse()
            runner.rehearse()
        self._rehearse()
        runner.capture()
        self.graph_bytes = runner.graph_bytes
        self.compilations = CompilationWatch()

    def _rehearse(self) -> None:
        """Executes a prefill and a decode step in which requests ask for everything, and forgets
        them."""
        runner, slots = self._runner, self._runner.slots
        rows = min(2, len(slots.tokens), runner.kv.shape[2])
        prompt_len = max(1, min(8, self.block_size - 1, slots.max_model_len - 1))
        sampling_flags = SamplingParams(
            top_k=5,
            top_p=0.9,
            repetition_penalty=1.1,
            logit_bias={0: 1.0},
            logprobs=1,
            min_tokens=9,
        )
        admissions = [
            Admission(
                0, np.zeros(prompt_len, np.int32), prompt_len, SamplingParams(temperature=0), seed=0
            ),
            Admission(
                1,
                np.zeros(prompt_len, np.int32),
                prompt_len,
                sampling_flags,
                seed=0,
                banned_until_min_tokens=(1,),
            ),
        ]
        runner.step(_make_plan([prompt_len] * rows, 0, self.block_size, admissions[:rows])).wait()
        if prompt_len < min(self.block_size, slots.max_model_len):
            runner.step(_make_plan([1] * rows, prompt_len, self.block_size)).wait()
        slots.reset()
        runner.kv[:, :, :rows] = 0

    def execute(self, plan: StepPlan) -> Pending:
        """Starts a plan; the result can be waited for.

        Plans are executed in the order of the calls.
        """
        return self._runner.step(plan)

    def _kv_shape(self, num_blocks: int) -> tuple[int, ...]:
        model = self._model
        return 2, model.num_layers, num_blocks, self.block_size, model.num_kv_heads, model.head_size

    def _make_runner(
        self, num_blocks: int, max_num_seqs: int, max_model_len: int
    ) -> ModelRunner | GpuModelRunner:
        slots = Slots(max_num_seqs, max_model_len, self.block_size, self._vocab_size, self.device)
        kv = make_kv(self._kv_shape(num_blocks), self._dtype, self.device)
        if self.device.type == "cpu":
            return ModelRunner(self._model, kv, slots)
        from aioinfer.models.llama_gpu import GpuLlama
        from aioinfer.worker.gpu_runner import GpuModelRunner

        if not isinstance(self._model, LlamaModel) or not GpuLlama.supports(
            self._arch, self.block_size, self._group.size
        ):
            # plain torch, for shapes that the kernels lack
            return ModelRunner(self._model, kv, slots)
        is_hopper = torch.cuda.get_device_capability(self.device)[0] >= 9
        model = GpuLlama(
            self._model, kv, dependent_launch=is_hopper, exchange=self._make_all_reduce()
        )
        return GpuModelRunner(model, kv, slots, self._config.scheduler.max_num_batched_tokens)

    def _make_all_reduce(self) -> AllReduce | None:
        """Returns the sums over the ranks, made at the first call, or None for one rank."""
        if self._group.size > 1 and self._exchange is None:
            from aioinfer.kernels.all_reduce import AllReduce, AllReduceLayout

            limits, hidden = self._config.scheduler, self._arch.hidden_size
            longest = max(limits.max_num_batched_tokens, limits.max_num_seqs)
            layout = AllReduceLayout.of(self._group.size, longest, hidden, self._dtype)
            self._exchange = AllReduce(
                self._group.symmetric_buffer(layout.nbytes), layout, hidden, self._dtype
            )
        return self._exchange

    def _captured_share(self) -> float:
        """Returns what part of the largest step the largest graph computes."""
        if self.device.type == "cpu":
            return 0.0
        from aioinfer.worker.gpu_runner import MIXED_GRAPH_TOKENS

        limits = self._config.scheduler
        return min(1.0, (MIXED_GRAPH_TOKENS + limits.max_num_seqs) / limits.max_num_batched_tokens)

    def _run_largest_step(self, model_max_len: int) -> None:
        """Computes as many tokens, and chooses as many, as a step may, with a cache that is just
        large enough."""
        limits = self._config.scheduler
        budget = limits.max_num_batched_tokens
        rows = min(limits.max_num_seqs, budget)
        longest = min(model_max_len, -(-budget // rows))
        lengths = [min(longest, budget // rows + (row < budget % rows)) for row in range(rows)]
        runner = self._make_runner(rows * -(-longest // self.block_size), rows, longest)
        prompt = np.zeros(longest, np.int32)
        admissions = [
            Admission(slot, prompt[:length], length, SamplingParams(temperature=0), seed=0)
            for slot, length in enumerate(lengths)
        ]
        plan = _make_plan(lengths, 0, self.block_size, admissions)
        if not isinstance(runner, ModelRunner):
            from aioinfer.worker.compilation import compile_only

            with compile_only():
                runner.step(plan).wait()
        runner.step(plan).wait()


def _make_plan(
    lengths: list[int], start: int, block_size: int, admissions: Sequence[Admission] = ()
) -> StepPlan:
    """Returns a plan in which slot i computes `lengths[i]` tokens from `start` and chooses the next
    one.

    Admitted ones get their KV blocks one after the other from block 0 on.
    """
    rows, none = len(lengths), np.empty(0, np.int32)
    starts, samples = np.full(rows, start, np.int32), np.ones(rows, np.int32)
    counts = [-(-len(admission.tokens) // block_size) for admission in admissions]
    table_slots = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    table_indices = np.concatenate([none, *(np.arange(count, dtype=np.int32) for count in counts)])
    table_blocks = np.arange(sum(counts), dtype=np.int32)
    return StepPlan(
        -1, np.arange(rows, dtype=np.int32), starts, np.array(lengths, np.int32), samples,
        table_slots, table_indices, table_blocks, none, none, list(admissions),
    )  # fmt: skip


def select_device(config: Config, rank: int, engine: int = 0) -> torch.device:
    """Returns the device of an engine's rank.

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
    size, engines = config.parallel.tensor_parallel_size, config.parallel.data_parallel_size
    if size * engines > count:
        settings = {"parallel.tensor_parallel_size": size, "parallel.data_parallel_size": engines}
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
    long: on a CPU it is float32, unless the configuration says otherwise.

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
