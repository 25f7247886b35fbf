"""Constrained rows on a GPU: their logits are gathered under masks, and what is sampled from them
is what the CPU sampler samples."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from aioinfer.kernels import logprobs, masks, sampling
from aioinfer.kernels.masks import gather_masked, gather_masked_reference
from aioinfer.kernels.prepare import append_tokens

from aioinfer.layers.embedding import Vocabulary
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.sampling_params import SamplingParams
from aioinfer.worker.gpu_sampler import GpuSampler, SamplingRows
from aioinfer.worker.masks import MaskedRows
from aioinfer.worker.sampler import Sampled, sample
from aioinfer.worker.slots import Slots
from tests.automata import pack
from tests.filled_slots import make_slots

VOCAB = 300
NONE = np.empty(0, np.int32)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "CHUNK", 64)
    monkeypatch.setattr(sampling, "CHUNK", 64)
    monkeypatch.setattr(logprobs, "CHUNK", 128)


@pytest.mark.parametrize("first", [0, 45, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_are_gathered_under_their_masks(first: int, dtype: torch.dtype) -> None:
    logits = torch.randn(5, 200).to(dtype)[:, :190]
    logits[2, 7], logits[2, 8], logits[4, 0] = float("nan"), float("inf"), float("-inf")
    rows, bits = int32(4, 2, 0), torch.randint(-(2**31), 2**31, (3, 9), dtype=torch.int32)
    bits[0] = -1
    before = logits.clone()
    found = gather_masked(logits, rows, bits, first=first)
    assert found.dtype == torch.float32
    expected = gather_masked_reference(logits, rows, bits, first)
    assert torch.equal(found.nan_to_num(7.0, 8.0), expected.nan_to_num(7.0, 8.0))
    assert torch.equal(found[0], logits[4].float()), "all of it is allowed"
    assert 40 < found[2].isinf().sum() < 150
    assert torch.equal(before.nan_to_num(7.0), logits.nan_to_num(7.0))


def test_results_of_some_rows_go_to_their_places() -> None:
    tokens, results = torch.zeros(4, 9, dtype=torch.int32), torch.zeros(2, 6, dtype=torch.int32)
    append_tokens(
        int32(9, -1), int32(3, 1), int32(1, 2), int32(1, 1), tokens,
        results=results, buffer_index=int32(1), places=int32(4, 2),
    )  # fmt: skip
    assert results.tolist() == [[0] * 6, [0, 0, -1, 0, 9, 0]]
    assert (tokens[3, 1], tokens[1, 2], tokens.sum()) == (9, 0, 9)


def random_params(rng: random.Random) -> SamplingParams:
    fields: dict[str, Any] = {"temperature": rng.choice([0.0, 0.8])}
    for extra in (
        {"top_k": 20}, {"min_p": 0.05}, {"repetition_penalty": 1.3, "frequency_penalty": 0.5},
        {"logit_bias": {5: 3.0, 7: -100.0}}, {"logprobs": rng.randint(0, 5)}, {"min_tokens": 9},
    ):  # fmt: skip
        if rng.random() < 0.35:
            fields |= extra
    return SamplingParams(**fields)


def sample_with_kernels(
    logits: torch.Tensor, slots: Slots, slot_ids: np.ndarray, positions: np.ndarray, masked: Any
) -> Sampled:
    """What the GPU model runner does with the logits of a step."""
    sampler = GpuSampler(slots, Vocabulary(VOCAB, ParallelGroup.single()), len(logits))
    rows, constrained = len(logits), masked.rows
    is_real = np.ones(rows, np.int32)
    is_real[constrained] = 0
    there = [torch.from_numpy(each) for each in (slot_ids, positions, is_real)]
    index = int32(2)
    found = sampler.sample(logits, SamplingRows(*there, slot_ids, positions), index, constrained)
    places = torch.from_numpy(constrained)
    sub = SamplingRows(
        there[0][places], there[1][places], torch.ones_like(places),
        slot_ids[constrained], positions[constrained], places,
    )  # fmt: skip
    found = sampler.sample_masked(logits, sub, torch.from_numpy(masked.masks), index, found)
    tokens = sampler.results(2, rows)[0]
    return Sampled(tokens, *found) if found else Sampled.plain(tokens)


@pytest.mark.parametrize("seed", range(6))
def test_a_step_with_constrained_rows_samples_what_the_cpu_samples(seed: int) -> None:
    """Whatever the rows have, also where all of them are constrained, or only these or only the
    others have penalties or log-probabilities."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    count = 6
    params = [random_params(rng) for _ in range(count)]
    prompts = [[rng.randrange(VOCAB) for _ in range(8)] for _ in range(count)]
    admission = {"prompt_len": 5, "banned_until_min_tokens": (1, 2)}
    plain, ours = (make_slots(params, VOCAB, prompts, **admission) for _ in range(2))
    constrained = sorted(rng.sample(range(count), rng.choice([1, 2, count])))
    allowed = np.random.default_rng(seed).random((len(constrained), VOCAB)) < 0.1
    masked = MaskedRows(np.array(constrained, np.int32), np.stack([*map(pack, allowed)]))
    logits = torch.randn(count, VOCAB) * 3
    slot_ids = np.array(rng.sample(range(count), count), np.int32)
    positions = np.full(count, 8, np.int32)
    expected = sample(logits.clone(), plain, slot_ids, positions, None, masked)
    plain.append(slot_ids, positions, expected.tokens)
    found = sample_with_kernels(logits, ours, slot_ids, positions, masked)
    assert found.tokens.tolist() == expected.tokens.tolist()
    for row, mask in zip(constrained, allowed, strict=True):
        assert mask[found.tokens[row]]
    assert torch.equal(ours.tokens, plain.tokens)
    assert torch.equal(ours.occurrences.rows, plain.occurrences.rows)
    for name in ("logprobs", "top_tokens", "top_logprobs"):
        ours_there, theirs = getattr(found, name), getattr(expected, name)
        torch.testing.assert_close(ours_there, theirs, rtol=0, atol=1e-4, equal_nan=True)
