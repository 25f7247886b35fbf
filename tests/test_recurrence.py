"""Recurrences in plain torch against the recurrence in float64, token by token: outputs, and the
states in every block that a step writes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from aioinfer.ipc.kv_spec import StateSpec
from aioinfer.layers.backend import Backend
from aioinfer.layers.convolution import Convolution
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.layers.recurrence import HeadInputs, recur
from aioinfer.layers.shards import Shard, Source
from aioinfer.layers.state_rows import StateRows
from aioinfer.layers.step import Step
from aioinfer.llm import LLM
from aioinfer.models.causal_lm import CausalLM
from aioinfer.sampling_params import SamplingParams
from tests.paged_model import CPU, PagedModel, load_model, make_step
from tests.test_models import SINGLE, VOCAB
from tests.tiny_models import tiny_model

HEADS, KEYS, VALUES, WIDTH = 3, 5, 4, 4
#: Of each step, (first position, tokens) of its rows: decodes, then chunks that begin and end
#: anywhere in a block.
STEPS = (
    [(0, 1), (9, 1), (16, 1), (0, 40), (3, 29)],
    [(5, 1), (0, 2), (15, 2), (17, 70)],
    [(31, 33)],
    [(15, 1), (0, 1)],
)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


class Sequences:
    """The tokens of a step's rows from their starts on, and their states by the block table; every
    other entry within a row's tokens is no block."""

    def __init__(self, rows: Sequence[tuple[int, int]], block_size: int):
        self.rows, self.block_size = rows, block_size
        self.ends = [start + count for start, count in rows]
        widest = max(-(-end // block_size) for end in self.ends)
        self.tables = [
            [row * widest + entry for entry in range(widest)] for row in range(len(rows))
        ]
        for table, (start, _), end in zip(self.tables, rows, self.ends, strict=True):
            for entry in range(start // block_size, (end - 1) // block_size, 2):
                if entry != (start - 1) // block_size:
                    table[entry] = -1
        self.num_blocks = widest * len(rows)

    def step(self) -> Step:
        total = sum(count for _, count in self.rows)
        ids = torch.zeros(total, dtype=torch.int32)
        starts, lengths = zip(*self.rows, strict=True)
        return make_step(self.tables, starts, lengths, self.block_size, ids)

    def check(
        self, cache: torch.Tensor, before: torch.Tensor, states: Sequence[torch.Tensor]
    ) -> None:
        """Compares the blocks with the `states` of each row after each of its tokens from the
        sequence's start on; all other blocks are as `before`."""
        expected = before.clone()
        for table, (start, _), end, known in zip(
            self.tables, self.rows, self.ends, states, strict=True
        ):
            for entry in range(start // self.block_size, (end - 1) // self.block_size + 1):
                if table[entry] >= 0:
                    position = min((entry + 1) * self.block_size, end) - 1
                    expected[table[entry]] = known[position]
        torch.testing.assert_close(
            cache.double(), expected.double(), rtol=1e-4, atol=1e-5, equal_nan=True
        )


#: Of each recurrence, whether it corrects what a key had before, and how many decays a head has.
KINDS = {"delta rule": (True, 1), "Kimi delta attention": (True, KEYS), "Mamba-2": (False, 1)}


@pytest.mark.parametrize("strength", [3.0, 40.0], ids=["decays", "decays near zero"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block_size", [1, 16, 24, 64])
@pytest.mark.parametrize("rows", STEPS, ids=str)
def test_matrices(rows: list[tuple[int, int]], block_size: int, kind: str, strength: float) -> None:
    corrects, channels = KINDS[kind]
    torch.manual_seed(len(rows))
    sequences = Sequences(rows, block_size)
    cache = torch.full((sequences.num_blocks, HEADS, KEYS, VALUES), torch.nan)
    given, outputs, states = [], [], []
    for table, (start, _), end in zip(sequences.tables, rows, sequences.ends, strict=True):
        keys = torch.nn.functional.normalize(normal(end, HEADS, KEYS), dim=-1)
        queries, values = normal(end, HEADS, KEYS), normal(end, HEADS, VALUES)
        decays = -strength * torch.rand(end, HEADS, channels, dtype=torch.float64) ** 4
        rates = torch.rand(end, HEADS, dtype=torch.float64)
        state, known, out = torch.zeros(HEADS, KEYS, VALUES, dtype=torch.float64), [], []
        for t in range(end):
            state = state * decays[t].exp()[:, :, None]
            added = values[t]
            if corrects:
                read = torch.einsum("hkv,hk->hv", state, keys[t])
                added = (added - read) * rates[t, :, None]
            state = state + keys[t, :, :, None] * added[:, None, :]
            known.append(state)
            out.append(torch.einsum("hkv,hk->hv", state, queries[t]))
        if start:
            cache[table[(start - 1) // block_size]] = known[start - 1].float()
        given.append([x[start:] for x in (queries, keys, values, decays, rates)])
        outputs.append(torch.stack(out[start:]))
        states.append(torch.stack(known))
    queries, keys, values, decays, rates = (
        torch.cat(parts).float() for parts in zip(*given, strict=True)
    )
    inputs = HeadInputs(queries, keys, values, decays, rates if corrects else None)
    before = cache.clone()
    found = recur(inputs, cache, StateRows.of_step(sequences.step(), 0, block_size))
    torch.testing.assert_close(found.double(), torch.cat(outputs), rtol=1e-4, atol=1e-5)
    sequences.check(cache, before, states)


@pytest.mark.parametrize("block_size", [1, 16, 24])
@pytest.mark.parametrize("rows", STEPS, ids=str)
def test_windows_of_convolutions(rows: list[tuple[int, int]], block_size: int) -> None:
    torch.manual_seed(len(rows))
    sequences, channels = Sequences(rows, block_size), 6
    backend = Backend(CPU, torch.float32, ParallelGroup.single())
    sources = [Source("c", Shard.whole(channels))]
    convolution = Convolution(sources, WIDTH, bias=True, backend=backend)
    taps, bias = normal(channels, WIDTH), normal(channels)
    convolution.weight.copy_(taps)
    assert convolution.bias is not None
    convolution.bias.copy_(bias)
    convolution.finalize()
    cache = torch.full((sequences.num_blocks, channels, WIDTH - 1), torch.nan)
    given, outputs, states = [], [], []
    for table, (start, _), end in zip(sequences.tables, rows, sequences.ends, strict=True):
        padded = torch.cat((torch.zeros(WIDTH - 1, channels), normal(end, channels).float()))
        windows = padded.unfold(0, WIDTH, 1)  # [end, channels, WIDTH]
        outputs.append(((windows.double() * taps).sum(-1) + bias)[start:])
        if start:
            cache[table[(start - 1) // block_size]] = windows[start - 1, :, 1:]
        given.append(padded[WIDTH - 1 + start :])
        states.append(windows[..., 1:])
    before = cache.clone()
    rows_of_step = StateRows.of_step(sequences.step(), 0, block_size)
    found = convolution(torch.cat(given), cache, rows_of_step)
    torch.testing.assert_close(found.double(), torch.cat(outputs), rtol=1e-4, atol=1e-5)
    sequences.check(cache, before, states)


FAMILIES = ("qwen3_5_text", "kimi_linear", "bamba")


def decode_logits(model: CausalLM, text: list[int]) -> torch.Tensor:
    """Returns the logits of a text that is computed token by token."""
    paged = PagedModel(model, 16)
    return torch.cat([paged.step({0: [token]})[0] for token in text])


def state_bytes(model: CausalLM) -> int:
    """Returns the bytes of the matrices of one sequence."""
    specs = [spec for of_layer in model.kv_specs for spec in of_layer]
    return sum(s.nbytes for s in specs if isinstance(s, StateSpec) and len(s.shape) == 3)


@pytest.mark.parametrize("family", FAMILIES)
def test_errors_of_rounded_states(family: str, tmp_path: Path) -> None:
    folder = tiny_model(family, tmp_path, vocab_size=VOCAB)
    rng = random.Random(0)
    text = [rng.randrange(VOCAB) for _ in range(300)]
    exact, rounded = (
        load_model(folder, SINGLE, state_dtype=dtype) for dtype in ("float32", "bfloat16")
    )
    assert 2 * state_bytes(rounded) == state_bytes(exact)
    expected, found = decode_logits(exact, text), decode_logits(rounded, text)
    errors = (found - expected).square().mean(1).sqrt() / expected.std()
    assert errors[0] < 1e-5, "the first token's output does not depend on a rounded state"
    assert 1e-4 < errors[20:].mean() < 1e-2


def test_the_key(tmp_path: Path) -> None:
    """Of the configuration, under which states are kept over steps and snapshots."""
    folder = tiny_model("kimi_linear", tmp_path)
    settings = {
        "parallel.executor": "inline", "parallel.device": "cpu", "model.tokenizer": "none",
        "cache.num_blocks": 16, "cache.state_dtype": "bfloat16",
    }  # fmt: skip
    greedy = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    with LLM(str(folder), settings=settings, progress=False) as llm:
        prompt = list(range(3, 40))
        first, second = (llm.generate([prompt], greedy)[0] for _ in range(2))
        assert second.num_cached_tokens == 32
        assert first.token_ids == second.token_ids
        groups = llm.frontend.engines[0].scheduler.limits.groups
        assert any("bfloat16" in str(group.spec) for group in groups)
