"""Runs a model folder over a paged KV cache by hand, without a worker: for the tests of models and
layers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from aioinfer.config import ModelConfig
from aioinfer.ipc.expert_placement import ExpertPlacement
from aioinfer.ipc.kv_spec import group_layers
from aioinfer.layers.backend import Backend
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.layers.step import GroupInputs, HostRows, Step, StepInputs
from aioinfer.models.causal_lm import CausalLM
from aioinfer.models.registry import build_model
from aioinfer.worker.kv_tensors import KVTensors

CPU = torch.device("cpu")


class UnsummedGroup(ParallelGroup):
    """The group of one of several ranks by itself, whose sums over the ranks are what it brings."""

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        return values


def backend_of(rank: int = 0, size: int = 1, dtype: torch.dtype = torch.float32) -> Backend:
    """Returns the backend of such a rank on a CPU."""
    return Backend(CPU, dtype, UnsummedGroup(rank, size))


def model_options(**fields: Any) -> ModelConfig:
    """Returns the section `[model]` of a model whose folder is given by itself."""
    return ModelConfig(path="", **fields)


def load_model(
    folder: Path,
    group: ParallelGroup,
    dtype: torch.dtype = torch.float32,
    served_len: int | None = None,
    *,
    expert_parallel: bool = False,
    expert_placement: ExpertPlacement | None = None,
    state_dtype: str = "float32",
    quantization: str = "auto",
) -> CausalLM:
    """Returns this rank's part of the model, ready to use; `served_len` as in `build_model`."""
    backend = Backend(CPU, dtype, group, expert_parallel=expert_parallel, state_dtype=state_dtype)
    backend.expert_placement = expert_placement or ExpertPlacement()
    model = build_model(
        folder, backend, model_options(max_model_len=served_len, quantization=quantization)
    )
    model.load(folder, "auto", 0, lambda done, total: None)
    return model


def make_step(
    tables: Sequence[Sequence[int]],
    starts: Sequence[int],
    lengths: Sequence[int],
    block_size: int,
    input_ids: torch.Tensor,
    num_groups: int = 1,
) -> Step:
    """Returns a step in which row i computes `lengths[i]` tokens from `starts[i]`; tables may be
    ragged, and are the same for each KV group."""
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    slots = [
        table[position // block_size] * block_size + position % block_size
        for table, start, end in zip(tables, starts, ends, strict=True)
        for position in range(start, end)
    ]
    positions = [
        position for start, end in zip(starts, ends, strict=True) for position in range(start, end)
    ]
    widest = max(map(len, tables))
    padded = [[*table, *[0] * (widest - len(table))] for table in tables]
    group = GroupInputs(torch.tensor(slots), torch.tensor(padded, dtype=torch.int32))
    inputs = StepInputs(
        input_ids=input_ids,
        positions=torch.tensor(positions, dtype=torch.int32),
        query_starts=torch.tensor([0, *lengths]).cumsum(0).int(),
        seq_lens=torch.tensor(ends, dtype=torch.int32),
        groups=(group,) * num_groups,
    )
    longer = [row for row, length in enumerate(lengths) if length > 1]
    num_decodes = longer[0] if longer else len(lengths)
    return Step(inputs, num_decodes, host=HostRows(list(lengths), ends))


class PagedModel:
    """A model with a cache of NaN, of which each sequence gets scattered blocks as it grows: a
    stray read shows in the logits."""

    def __init__(
        self,
        model: CausalLM,
        block_size: int,
        dtype: torch.dtype = torch.float32,
        num_tokens: int = 512,
    ):
        self.model = model
        self.block_size = block_size
        groups, num_blocks = group_layers(model.kv_specs), num_tokens // block_size
        kv = KVTensors(groups, [num_blocks] * len(groups), block_size, dtype, CPU)
        for tensor in kv.tensors:
            tensor.fill_(torch.nan)
        model.bind(groups, kv.tensors, block_size, 64, num_tokens)
        self.num_groups = len(groups)
        self.free = list(range(num_blocks))
        random.Random(1).shuffle(self.free)
        self.tables: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}

    @torch.inference_mode()
    def step(self, chunks: dict[int, Sequence[int]]) -> dict[int, torch.Tensor]:
        """Computes the next tokens of some sequences together; returns the logits [tokens,
        vocab_size] of each.

        Sequences with one token go first, the others after them, as in a plan.
        """
        chunks = dict(sorted(chunks.items(), key=lambda item: len(item[1]) > 1))
        step = self.prepare(chunks)
        logits = self.model.logits(self.model.finish(step, self.model.begin(step)))
        lengths = [len(chunk) for chunk in chunks.values()]
        return dict(zip(chunks, logits.split(lengths), strict=True))

    def prepare(self, chunks: dict[int, Sequence[int]]) -> Step:
        """Returns the step that computes the next tokens of some sequences, in the order of
        `step`."""
        starts = [self.lengths.get(name, 0) for name in chunks]
        for name, chunk in chunks.items():
            self.lengths[name] = self.lengths.get(name, 0) + len(chunk)
            table = self.tables.setdefault(name, [])
            while len(table) * self.block_size < self.lengths[name]:
                table.append(self.free.pop())
        lengths = [len(chunk) for chunk in chunks.values()]
        input_ids = torch.tensor(
            [token for chunk in chunks.values() for token in chunk], dtype=torch.int32
        )
        tables = [self.tables[name] for name in chunks]
        step = make_step(tables, starts, lengths, self.block_size, input_ids, self.num_groups)
        self.model.plan(step)
        return step

    def run_at_random(
        self, texts: Sequence[Sequence[int]], longest: int, seed: int
    ) -> list[torch.Tensor]:
        """Computes whole texts in chunks of 1 to `longest` tokens, some of them in each step;
        returns the logits of each text."""
        rng = random.Random(seed)
        logits: dict[int, list[torch.Tensor]] = {name: [] for name in range(len(texts))}
        while unfinished := [
            name for name in logits if self.lengths.get(name, 0) < len(texts[name])
        ]:
            chunks = {}
            for name in rng.sample(unfinished, rng.randint(1, len(unfinished))):
                start = self.lengths.get(name, 0)
                chunks[name] = texts[name][start : start + rng.choice([1, rng.randint(1, longest)])]
            for name, part in self.step(chunks).items():
                logits[name].append(part)
        return [torch.cat(parts) for parts in logits.values()]
