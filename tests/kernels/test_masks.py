"""Constrained rows on a GPU: their logits are gathered under masks, and what is sampled from them
is what the CPU sampler samples."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from aioinfer.kernels import logprobs, masks, sampling
from aioinfer.kernels.masks import gather_masked
from aioinfer.kernels.prepare import append_tokens
from references import gather_masked_reference

from aioinfer.features.logprobs.sections import LogprobRows, Logprobs
from aioinfer.features.logprobs.worker import Work as LogprobWork
from aioinfer.features.masks.worker import Work as MaskWork
from aioinfer.ipc.masks import ConstrainedRows
from aioinfer.ipc.plan import StepPlan
from aioinfer.ipc.sections import Section
from aioinfer.sampling_params import SamplingParams
from aioinfer.worker.sampler import Sampler
from aioinfer.worker.slots import RowTensors, SamplingRows, Slots
from aioinfer.worker.step_works import StepWorks
from tests.automata import pack
from tests.filled_slots import Shift, ShiftedRows, logits_runner, make_slots, rank_of, rows_plan

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
        {"logit_bias": {5: 3.0, 7: -100.0}}, {"min_tokens": 9},
    ):  # fmt: skip
        if rng.random() < 0.35:
            fields |= extra
    return SamplingParams(**fields)


class Found(NamedTuple):
    tokens: list[int]
    logprobs: Logprobs | None


def sample_with_kernels(
    logits: torch.Tensor, works: StepWorks, plan: StepPlan, masks: Any
) -> Found:
    """What the model runner does with the logits of a step on a GPU."""
    rank, calls, count = works.all[0].rank, works.of(plan), len(logits)
    results = torch.zeros(3, count, dtype=torch.int32)
    sampler = Sampler(rank.slots, rank.model.vocabulary, results)
    late, is_real = calls.late, np.ones(count, np.int32)
    assert late is not None
    is_real[late] = 0
    slot_ids, positions = plan.slots, plan.starts + plan.lengths
    there = [torch.from_numpy(each) for each in (slot_ids, positions, is_real)]
    index, others = int32(2), np.delete(np.arange(count), late)
    flags = rank.slots.current_flags(slot_ids, positions)
    late_flags, flags[late] = flags[late], 0
    if len(others):
        rows = SamplingRows(slot_ids, positions, 2, there=RowTensors(*there, index))
        sampler.sample(logits, rows, flags, late=late, adjust=calls.adjuster_of_others(count))
    places = torch.from_numpy(late)
    of_late = RowTensors(there[0][places], there[1][places], torch.ones_like(places), index)
    rows = SamplingRows(slot_ids[late], positions[late], 2, places, of_late)
    changed, _ = calls.late_logits(logits, places, lambda *_: masks)
    sampler.sample(changed, rows, late_flags, adjust=calls.adjuster(late), in_place=True)
    tokens = results[2]
    calls.read_tokens(logits, tokens)
    found = [each.to_section() for each in calls.pending]
    return Found(tokens.tolist(), found[0] if found else None)  # type: ignore[arg-type]


def works_of(slots: Slots) -> StepWorks:
    rank = rank_of(slots)
    return StepWorks([LogprobWork(rank), MaskWork(rank), Shift(rank)])


@pytest.mark.parametrize("seed", range(6))
def test_a_step_with_constrained_rows_samples_what_the_cpu_samples(seed: int) -> None:
    """Whatever the rows have, also where all of them are constrained, or only these or only the
    others have penalties or log-probabilities, and with a logits processor in odd steps."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    count = 6
    params = [random_params(rng) for _ in range(count)]
    prompts = [[rng.randrange(VOCAB) for _ in range(8)] for _ in range(count)]
    admission = {"prompt_len": 5, "banned_until_min_tokens": (1, 2)}
    plain, ours = (
        make_slots(params, VOCAB, prompts, uses_kernels=kernels, **admission)
        for kernels in (False, True)
    )
    constrained = sorted(rng.sample(range(count), rng.choice([1, 2, count])))
    allowed = np.random.default_rng(seed).random((len(constrained), VOCAB)) < 0.1
    masks = np.stack([*map(pack, allowed)])
    logits = torch.randn(count, VOCAB) * 3
    slot_ids = rng.sample(range(count), count)
    sections: list[Section] = [ConstrainedRows(np.array(constrained, np.int32))]
    asking = [(row, rng.randint(0, 5)) for row in range(count) if rng.random() < 0.35]
    if asking:
        rows, num_top = np.array(asking, np.int32).T.copy()
        sections.append(LogprobRows(rows, num_top, rows * 0, NONE))
    if seed % 2:
        sections.append(ShiftedRows(np.arange(1, count + 1, dtype=np.int32)))
    plan = rows_plan(slot_ids, [8] * count, *sections)
    cpu_works = works_of(plain)
    runner = logits_runner(cpu_works.all[0].rank, cpu_works, logits.clone())
    expected = runner.step(plan, lambda *_: masks).wait()
    before, works = logits.clone(), works_of(ours)
    found = sample_with_kernels(logits, works, plan, masks)
    assert torch.equal(logits, before)
    assert found.tokens == expected.tokens.tolist()
    for row, mask in zip(constrained, allowed, strict=True):
        assert seed % 2 or mask[found.tokens[row]]
    assert torch.equal(ours.tokens, plain.tokens)
    assert torch.equal(ours.occurrences.rows, plain.occurrences.rows)
    seen, cpu_seen = (each.all[2].seen for each in (works, cpu_works))  # type: ignore[attr-defined]
    assert len(seen) == len(cpu_seen) == (seed % 2) * (1 + (len(constrained) < count))
    for (some_rows, some), (cpu_rows, cpu_some) in zip(seen, cpu_seen, strict=True):
        assert some_rows.tolist() == cpu_rows.tolist()
        torch.testing.assert_close(some, cpu_some, rtol=0, atol=1e-4)
    logprobs = expected.section(Logprobs)
    assert (found.logprobs is None) == (logprobs is None) == (not asking)
    if found.logprobs is not None and logprobs is not None:
        for name in ("rows", "top_tokens", "counts", "named"):
            assert getattr(found.logprobs, name).tolist() == getattr(logprobs, name).tolist()
        for name in ("sampled", "top_logprobs"):
            values, theirs = getattr(found.logprobs, name), getattr(logprobs, name)
            np.testing.assert_allclose(values, theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("num_top", "size"), [(0, 2), (3, 3), (20, 2), (40, 40)])
def test_log_probabilities_are_those_of_the_cpu(num_top: int, size: int) -> None:
    """Of all rows, and of some; kernels find up to 20 of the likeliest tokens."""
    torch.manual_seed(num_top)
    logits, tokens = torch.randn(size, VOCAB) * 3, torch.arange(size).int() * 7
    tokens[-1] = -1
    on_cpu, on_gpu = (
        make_slots([SamplingParams()], VOCAB, uses_kernels=kernels) for kernels in (False, True)
    )
    for first in (0, 1):
        rows = np.arange(first, size, dtype=np.int32)
        named = np.where(rows % 3 == 1, 2, 0).astype(np.int32)
        of_rows = np.arange(named.sum(), dtype=np.int32)
        section = LogprobRows(rows, np.full_like(rows, num_top), named, of_rows)
        cpu, gpu = (
            LogprobWork(rank_of(slots))
            .read_tokens(rows_plan([], []), section, logits, tokens)
            .to_section()
            for slots in (on_cpu, on_gpu)
        )
        for name in ("rows", "top_tokens", "counts"):
            assert getattr(gpu, name).tolist() == getattr(cpu, name).tolist()
        for name in ("sampled", "top_logprobs", "named"):
            values, theirs = getattr(gpu, name), getattr(cpu, name)
            np.testing.assert_allclose(values, theirs, rtol=0, atol=1e-4)
