"""The sampler: which token it samples, from what, and that neither depends on who else is in the
batch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from aioinfer.features.masks.worker import mask_logits
from aioinfer.sampling_params import SamplingParams
from tests.automata import pack
from tests.filled_slots import assert_fits, make_slots, sample, sample_rows
from tests.test_host_sampling import warped


def sample_one(logits: torch.Tensor, position: int = 1, **params: Any) -> int:
    slots = make_slots([SamplingParams(**params)], logits.shape[-1])
    return int(sample_rows(logits[None], slots, [0], [position]))


def sample_positions(
    logits: torch.Tensor, count: int, params: SamplingParams, seed: int = 3
) -> np.ndarray:
    """The tokens of one request, sampled from the same logits at `count` positions."""
    slots = make_slots([params], len(logits), max_len=count + 1, seed=seed)
    positions = np.arange(1, count + 1, dtype=np.int32)
    return sample(
        logits.expand(count, -1).contiguous(), slots, np.zeros(count, np.int32), positions
    ).numpy()


# ---------------------------------------------------------------- greedy


def test_greedy_takes_the_likeliest_and_of_equals_the_lowest_id() -> None:
    logits = torch.zeros(3, 100)
    logits[0, 42] = 1
    logits[1, [70, 30, 99]] = 5
    slots = make_slots([SamplingParams(temperature=0)] * 3, 100)
    tokens = sample_rows(logits, slots, [0, 1, 2], [1, 1, 1])
    assert tokens.tolist() == [42, 30, 0]
    assert tokens.dtype == torch.int32


def test_broken_logits_give_no_token_and_leave_the_others_alone() -> None:
    torch.manual_seed(0)
    logits = torch.randn(8, 50) * 3
    params = [
        SamplingParams(temperature=0),
        SamplingParams(),
        SamplingParams(top_p=0.8),
        SamplingParams(temperature=0, presence_penalty=1),
    ] * 2
    slots = make_slots(params, 50)
    sound = sample_rows(logits, slots, list(range(8)), [1] * 8).tolist()
    logits[0, 17] = logits[1, 3] = logits[2, 49] = logits[3, 0] = math.nan
    assert sample_rows(logits, slots, list(range(8)), [1] * 8).tolist() == [-1] * 4 + sound[4:]
    logits[:2] = math.inf
    logits[2:4] = -math.inf
    assert sample_rows(logits, slots, list(range(8)), [1] * 8).tolist() == [-1] * 4 + sound[4:]


# ---------------------------------------------------------------- random sampling


def test_random_tokens_follow_softmax() -> None:
    torch.manual_seed(1)
    logits = torch.randn(30)
    tokens = sample_positions(logits, 8000, SamplingParams(temperature=0.8))
    assert_fits(
        np.bincount(tokens, minlength=30), 8000 * (logits / 0.8).softmax(0).double().numpy()
    )


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_k=7),
        SamplingParams(top_p=0.7),
        SamplingParams(min_p=0.2),
        SamplingParams(top_k=1),
        SamplingParams(temperature=1.3, top_k=12, top_p=0.9, min_p=0.05),
    ],
    ids=str,
)
def test_filtered_tokens_follow_the_renormalised_softmax(params: SamplingParams) -> None:
    torch.manual_seed(2)
    logits = torch.randn(40)
    tokens = sample_positions(logits, 6000, params)
    expected = warped(logits / params.temperature, params).softmax(0).double().numpy()
    assert 0 < (expected == 0).sum() < 40
    assert_fits(np.bincount(tokens, minlength=40), 6000 * expected)


def test_tokens_ruled_out_are_never_sampled_by_a_filter() -> None:
    logits = torch.full((20,), -math.inf)
    logits[[4, 11]] = 0.0
    for params in (
        SamplingParams(),
        SamplingParams(top_k=10),
        SamplingParams(top_p=0.999),
        SamplingParams(top_k=10, top_p=0.5),
    ):
        assert set(sample_positions(logits, 200, params).tolist()) == {4, 11}


def test_extreme_temperatures() -> None:
    logits = torch.linspace(-80, 80, 50)
    assert sample_one(logits, temperature=1e-5) == 49
    # the quotient is beyond float32: no token, and no warning
    assert sample_one(logits * 1e36, temperature=2e-5) == -1
    assert len(set(sample_positions(logits, 300, SamplingParams(temperature=100)).tolist())) > 25


def test_a_seed_gives_the_same_tokens_whatever_the_batch() -> None:
    torch.manual_seed(4)
    rows, vocab = 24, 500
    kinds = [
        SamplingParams(),
        SamplingParams(temperature=0),
        SamplingParams(top_p=0.9, temperature=0.7),
        SamplingParams(top_k=20, repetition_penalty=1.2),
        SamplingParams(min_p=0.02, logprobs=2, logit_bias={3: 2.0}),
        SamplingParams(frequency_penalty=0.5, presence_penalty=0.1),
    ]
    logits = torch.randn(rows, vocab) * 2
    slots = make_slots(kinds * (rows // len(kinds)), vocab)
    positions = list(range(1, rows + 1))
    together = sample_rows(logits, slots, list(range(rows)), positions).tolist()
    alone = [int(sample_rows(logits[[i]], slots, [i], [positions[i]])) for i in range(rows)]
    assert together == alone
    order = torch.randperm(rows)
    shuffled = sample_rows(logits[order], slots, order.tolist(), [positions[i] for i in order])
    assert shuffled.tolist() == [together[i] for i in order]


def test_the_token_depends_on_seed_and_position() -> None:
    logits = torch.zeros(1000)
    params = SamplingParams()
    assert (
        sample_positions(logits, 200, params, seed=1)
        != sample_positions(logits, 200, params, seed=2)
    ).mean() > 0.95
    assert (
        sample_positions(logits, 200, params, seed=1)
        != sample_positions(logits, 200, params, seed=1 + 2**32)
    ).mean() > 0.95
    assert len(set(sample_positions(logits, 200, params).tolist())) > 150


# ---------------------------------------------------------------- the logits


def test_logits_stay_unless_they_may_be_changed() -> None:
    torch.manual_seed(7)
    logits = torch.randn(2, 40)
    before = logits.clone()
    params = [SamplingParams(temperature=0, logit_bias={11: 100.0}), SamplingParams(temperature=0)]
    slots = make_slots(params, 40)
    assert int(sample_rows(logits, slots, [0, 1], [1, 1])[0]) == 11
    assert logits.equal(before)
    two = np.arange(2, dtype=np.int32)
    assert int(sample(logits, slots, two, two * 0 + 1, in_place=True)[0]) == 11
    assert logits[0, 11] == before[0, 11] + 100
    assert logits[1].equal(before[1])


def test_logits_are_changed_between_penalties_and_temperature() -> None:
    params = [SamplingParams(temperature=0.01, logit_bias={3: 2.0}), SamplingParams(temperature=0)]
    slots, logits, seen = make_slots(params, 6), torch.zeros(2, 6), []

    def adjust(changed: torch.Tensor) -> None:
        seen.append(changed.clone())
        changed[:, 4] = 9.0

    two = np.arange(2, dtype=np.int32)
    assert sample(logits, slots, two, two * 0 + 1, None, adjust).tolist() == [4, 4]
    assert [each.tolist() for each in seen] == [[[0, 0, 0, 2, 0, 0], [0] * 6]]
    assert not logits.any()


# ---------------------------------------------------------------- masks


@pytest.mark.parametrize(
    "params",
    [{}, {"top_k": 6}, {"top_p": 0.8, "temperature": 1.3}, {"logit_bias": {0: 3.0, 1: 100.0}}],
    ids=str,
)
def test_masked_rows_sample_from_what_is_allowed(params: dict[str, Any]) -> None:
    """Filters keep the likeliest of these."""
    torch.manual_seed(3)
    count, vocab_size, allowed = 6000, 40, np.zeros(40, np.bool_)
    allowed[[0, *range(9, 40, 3)]] = True
    logits, sampling = torch.randn(vocab_size), SamplingParams(**params)
    slots = make_slots([sampling], vocab_size, max_len=count, seed=5)
    positions, slot_ids = np.arange(1, count + 1, dtype=np.int32), np.zeros(count, np.int32)
    masked = logits.repeat(count, 1)
    mask_logits(masked, np.tile(pack(allowed), (count, 1)))
    found = sample(masked, slots, slot_ids, positions).numpy()
    adjusted = logits.clone()
    for token, bias in sampling.logit_bias.items():
        adjusted[token] += bias
    adjusted[~torch.from_numpy(allowed)] = -math.inf
    expected = warped(adjusted / sampling.temperature, sampling).softmax(0).double().numpy()
    expected *= count
    rare = (expected > 0) & (expected < 5)
    kept = found[~rare[found]]
    expected[rare] = 0
    assert_fits(np.bincount(kept, minlength=40), expected / expected.sum() * len(kept))


def test_a_mask_hides_no_broken_logits_and_may_allow_nothing() -> None:
    logits = torch.randn(4, 50)
    logits[0, 3], logits[1, 3] = math.nan, math.inf
    slots = make_slots([SamplingParams(temperature=0), SamplingParams()] * 2, 50)
    allowed = np.tile(np.arange(50) > 9, (4, 1))
    allowed[2] = False
    mask_logits(logits, np.stack([*map(pack, allowed)]))
    four = np.arange(4, dtype=np.int32)
    tokens = sample(logits, slots, four, four * 0 + 1).tolist()
    assert tokens[:3] == [-1, -1, -1]
    assert tokens[3] > 9
