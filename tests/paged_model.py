"""Runs a model folder over a paged KV cache by hand, without a worker: for the tests of models and
layers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import torch

from aioinfer.layers.attention import AttentionMetadata, KVCache
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.models.architecture import Architecture
from aioinfer.models.loader import load_weights
from aioinfer.models.registry import CausalLM, build_model

CPU = torch.device("cpu")


def load_model(folder: Path, group: ParallelGroup, dtype: torch.dtype = torch.float32) -> CausalLM:
    """Returns this rank's share of the model, ready to use."""
    model = build_model(Architecture.load(folder), group, dtype, CPU)
    load_weights(model, folder, "auto", 0, lambda done, total: None)
    model.finalize()
    return model


def make_metadata(
    tables: Sequence[Sequence[int]], starts: Sequence[int], lengths: Sequence[int], block_size: int
) -> AttentionMetadata:
    """Returns the metadata of a step in which row i computes `lengths[i]` tokens from `starts[i]`;
    tables may be ragged."""
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    slots = [
        table[position // block_size] * block_size + position % block_size
        for table, start, end in zip(tables, starts, ends, strict=True)
        for position in range(start, end)
    ]
    widest = max(map(len, tables))
    longer = [row for row, length in enumerate(lengths) if length > 1]
    return AttentionMetadata(
        slot_mapping=torch.tensor(slots),
        block_tables=torch.tensor(
            [[*table, *[0] * (widest - len(table))] for table in tables], dtype=torch.int32
        ),
        query_starts=torch.tensor([0, *lengths]).cumsum(0).int(),
        seq_lens=torch.tensor(ends, dtype=torch.int32),
        num_decodes=longer[0] if longer else len(lengths),
        query_lens_cpu=list(lengths),
        seq_lens_cpu=ends,
    )


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
        shape = (
            2,
            model.num_layers,
            num_tokens // block_size,
            block_size,
            model.num_kv_heads,
            model.head_size,
        )
        keys, values = torch.full(shape, torch.nan, dtype=dtype)
        self.caches = [KVCache(*pair) for pair in zip(keys, values, strict=True)]
        self.free = list(range(shape[2]))
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
        starts = [self.lengths.get(name, 0) for name in chunks]
        for name, chunk in chunks.items():
            self.lengths[name] = self.lengths.get(name, 0) + len(chunk)
            table = self.tables.setdefault(name, [])
            while len(table) * self.block_size < self.lengths[name]:
                table.append(self.free.pop())
        lengths = [len(chunk) for chunk in chunks.values()]
        metadata = make_metadata(
            [self.tables[name] for name in chunks], starts, lengths, self.block_size
        )
        input_ids = torch.tensor([token for chunk in chunks.values() for token in chunk])
        positions = torch.cat(
            [
                torch.arange(start, start + length)
                for start, length in zip(starts, lengths, strict=True)
            ]
        )
        logits = self.model.logits(self.model.forward(input_ids, positions, self.caches, metadata))
        return dict(zip(chunks, logits.split(lengths), strict=True))

    def run_at_random(
        self, texts: Sequence[Sequence[int]], longest: int, seed: int
    ) -> list[torch.Tensor]:
        """Computes whole texts in chunks of 1 to `longest` tokens, some of them in each step;
        returns the logits of each text."""
        choice = random.Random(seed)
        logits: dict[int, list[torch.Tensor]] = {name: [] for name in range(len(texts))}
        while unfinished := [
            name for name in logits if self.lengths.get(name, 0) < len(texts[name])
        ]:
            chunks = {}
            for name in choice.sample(unfinished, choice.randint(1, len(unfinished))):
                start = self.lengths.get(name, 0)
                chunks[name] = texts[name][
                    start : start + choice.choice([1, choice.randint(1, longest)])
                ]
            for name, part in self.step(chunks).items():
                logits[name].append(part)
        return [torch.cat(parts) for parts in logits.values()]
