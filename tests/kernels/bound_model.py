"""A model of a folder over the kernels, or in plain torch, for the tests that compare the two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from aioinfer.config import MediaConfig
from aioinfer.config_sections import LoraConfig
from aioinfer.features.adapters.layers.parts import AdapterWeights
from aioinfer.features.adapters.layers.slots import AdapterSlots
from aioinfer.ipc.expert_placement import ExpertPlacement
from aioinfer.ipc.kv_spec import group_layers
from aioinfer.layers.backend import Backend, Offload
from aioinfer.layers.kv_cache import FLOAT8
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.layers.step import SampledRows, Step
from aioinfer.models.registry import NO_MEDIA, build_model
from aioinfer.worker.kv_tensors import KVTensors
from tests.adapter_files import pack_adapter
from tests.paged_model import make_step, model_options

CPU = torch.device("cpu")
BLOCK_SIZE = 16
TABLES = [[3, 1], [0], [5, 2, 4]]


class Bound:
    """The model of a folder with a KV cache of its own, over the kernels or in plain torch."""

    def __init__(
        self, folder: Path, *, kernels: bool, fill: float = 0.0,
        group: ParallelGroup | None = None, cache_dtype: torch.dtype = torch.float32,
        expert_parallel: bool = False, quantization: str = "auto",
        expert_placement: ExpertPlacement | None = None, num_adapters: int = 0,
        has_adapted_experts: bool = False, media: MediaConfig = NO_MEDIA,
        offload: Offload | None = None,
    ):  # fmt: skip
        ranks = group or ParallelGroup.single()
        self.backend = Backend(
            CPU, torch.float32, ranks, has_kernels=kernels, expert_parallel=expert_parallel,
            expert_placement=expert_placement or ExpertPlacement(), offload=offload,
        )  # fmt: skip
        if num_adapters:
            targets: Any = ["embeddings", *(["experts"] if has_adapted_experts else [])]
            lora = LoraConfig(max_adapters=num_adapters, max_rank=8, targets=targets)
            self.backend.extension = AdapterSlots(lora, self.backend)
        self.model: Any = build_model(
            folder, self.backend, model_options(quantization=quantization), media
        )
        self.model.load(folder, "auto", 0, lambda done, total: None)
        if self.backend.extension is not None:
            self.backend.extension.allocate(80, 4)
        groups = self.groups = group_layers(self.model.kv_specs)
        kv = KVTensors(groups, [6] * len(groups), BLOCK_SIZE, cache_dtype, CPU)
        self.kv = kv.tensors
        for tensor in self.kv:
            tensor.fill_(fill)
        if cache_dtype == FLOAT8:
            for number, scales in self.model.kv_scales.items():
                (spec,) = self.model.kv_specs[number]
                scales.allow_key_shifts(spec.head_size)
        programs = {"programs": 3} if kernels else {}
        self.model.bind(groups, self.kv, BLOCK_SIZE, 8, 80, **programs)

    def step(self, starts: list[int], lengths: list[int], ids: torch.Tensor) -> Step:
        """Returns a step of three rows with the blocks of `TABLES`."""
        return make_step(TABLES, starts, lengths, BLOCK_SIZE, ids, len(self.kv))

    def fill_adapters(self) -> None:
        """Puts random adapters of all modules, of ranks 8, 7 and so on, into all slots."""
        slots, generator = self.backend.extension, torch.Generator().manual_seed(5)
        assert slots is not None
        for slot in range(slots.count):
            weights = {}
            for name, shape in sorted(slots.modules.items()):
                if ".experts." in name and not shape.experts:
                    continue  # a stack has all of them
                shapes = shape.of_rank((8 - slot) * shape.merged)
                given = {
                    side: torch.randn(size, generator=generator) * 0.2
                    for side, size in shapes.items()
                }
                weights[name] = AdapterWeights(**given, scale=0.7, merged=shape.merged)
            slots.enter(slot, pack_adapter(slots, weights), 8 - slot)

    def run(self, step: Step) -> torch.Tensor:
        """Returns the hidden states."""
        self.model.plan(step)
        return self.model.finish(step, self.model.begin(step))


def random_ids(lengths: list[int], seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(lengths))
    return torch.randint(0, 100, (sum(lengths),), dtype=torch.int32, generator=generator)


def last_tokens(step: Step, rows: list[int]) -> SampledRows:
    """Returns the sampled rows of a step."""
    last = (step.inputs.query_starts[1:] - 1)[rows].int()
    return SampledRows.of(step.inputs, torch.tensor(rows, dtype=torch.int32), last)


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Fails unless logits are equal but for what float32 rounds: of some families they are forty
    times as large as of others."""
    largest = float(theirs.abs().max()) if theirs.numel() else 0.0
    allowed = max(1e-4, 2e-5 * largest)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=allowed)
