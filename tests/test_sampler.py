"""The sampler: which token it samples, from what, and that neither depends on who else is in the
batch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from aioinfer.sampling_params import SamplingParams
from aioinfer.worker.masks import MaskedRows
from aioinfer.worker.sampler import sample
from tests.automata import pack
from tests.filled_slots import assert_fits, make_slots, sample_rows
from tests.test_filters import warped


def sample_one(logits: torch.Tensor, position: int = 1, **params: Any) -> int:
    slots = make_slots([SamplingParams(**params)], logits.shape[-1])
    return int(sample_rows(logits[None], slots, [0], [position]).tokens)


def sample_positions(
    logits: torch.Tensor, count: int, params: SamplingParams, seed: int = 3
) -> np.ndarray:
    """The tokens of one request, sampled from the same logits at `count` positions."""
    slots = make_slots([params], len(logits), seed=seed)
    positions = np.arange(1, count + 1, dtype=np.int32)
    return sample(
        logits.expand(count, -1).contiguous(), slots, np.zeros(count, np.int32), positions
    ).tokens.numpy()


# ---------------------------------------------------------------- greedy


def test_greedy_takes_the_likeliest_and_of_equals_the_lowest_id() -> None:
    logits = torch.zeros(3, 100)
    logits[0, 42] = 1
    logits[1, [70, 30, 99]] = 5
    slots = make_slots([SamplingParams(temperature=0)] * 3, 100)
    result = sample_rows(logits, slots, [0, 1, 2], [1, 1, 1])
    assert result.tokens.tolist() == [42, 30, 0]
    assert result.tokens.dtype == torch.int32
    assert result.logprobs.shape == (0,)
    assert result.top_tokens.shape == (3, 0)


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
    sound = sample_rows(logits, slots, list(range(8)), [1] * 8).tokens.tolist()
    logits[0, 17] = logits[1, 3] = logits[2, 49] = logits[3, 0] = math.nan
    assert (
        sample_rows(logits, slots, list(range(8)), [1] * 8).tokens.tolist() == [-1] * 4 + sound[4:]
    )
    logits[:2] = math.inf
    logits[2:4] = -math.inf
    assert (
        sample_rows(logits, slots, list(range(8)), [1] * 8).tokens.tolist() == [-1] * 4 + sound[4:]
    )


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
    together = sample_rows(logits, slots, list(range(rows)), positions).tokens.tolist()
    alone = [int(sample_rows(logits[[i]], slots, [i], [positions[i]]).tokens) for i in range(rows)]
    assert together == alone
    order = torch.randperm(rows)
    shuffled = sample_rows(
        logits[order], slots, order.tolist(), [positions[i] for i in order]
    ).tokens
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


# ---------------------------------------------------------------- log-probabilities


def test_logprobs_are_the_models_own() -> None:
    torch.manual_seed(7)
    logits = torch.randn(3, 40)
    params = [
        SamplingParams(temperature=0, logprobs=3, logit_bias={11: 100.0}),
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.5, top_k=5, logprobs=0, repetition_penalty=1.5),
    ]
    result = sample_rows(logits, make_slots(params, 40), [0, 1, 2], [1, 1, 1])
    expected = logits.log_softmax(-1)
    assert int(result.tokens[0]) == 11
    torch.testing.assert_close(
        result.logprobs[[0, 2]], expected[[0, 2], result.tokens[[0, 2]].long()]
    )
    assert result.logprobs[1].isnan()
    best = expected[0].topk(3)
    assert result.top_tokens[0].tolist() == best.indices.tolist()
    torch.testing.assert_close(result.top_logprobs[0], best.values)
    assert result.top_tokens[1].tolist() == [-1] * 3


def test_logprobs_of_a_broken_row_disturb_nobody() -> None:
    torch.manual_seed(8)
    logits = torch.randn(2, 40)
    logits[0, 5] = math.nan
    result = sample_rows(
        logits, make_slots([SamplingParams(temperature=0, logprobs=20)] * 2, 40), [0, 1], [1, 1]
    )
    assert result.tokens[0] == -1
    torch.testing.assert_close(result.logprobs[1], logits[1].log_softmax(0).max())


def test_more_logprobs_than_tokens() -> None:
    logits = torch.randn(1, 5)
    result = sample_rows(logits, make_slots([SamplingParams(logprobs=20)], 5), [0], [1])
    expected = logits[0].log_softmax(0).sort(descending=True)
    assert result.top_tokens[0].tolist() == expected.indices.tolist()
    torch.testing.assert_close(result.top_logprobs[0], expected.values)


# ---------------------------------------------------------------- masks


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"top_k": 6},
        {"top_p": 0.8, "temperature": 1.3},
        {"logit_bias": {0: 3.0, 1: 100.0}},
    ],
    ids=str,
)
def test_masked_rows_sample_from_what_is_allowed(params: dict[str, Any]) -> None:
    """Filters keep the likeliest of these; rows without a mask are as without any."""
    torch.manual_seed(3)
    count, vocab_size, allowed = 6000, 40, np.zeros(40, np.bool_)
    allowed[[0, *range(9, 40, 3)]] = True
    logits, sampling = torch.randn(vocab_size), SamplingParams(**params)
    slots = make_slots([sampling], vocab_size, seed=5)
    positions, slot_ids = np.arange(1, count + 1, dtype=np.int32), np.zeros(count, np.int32)
    whole = logits.expand(count, -1)
    rows = np.arange(0, count, 2, dtype=np.int32)
    masked = MaskedRows(rows, np.tile(pack(allowed), (len(rows), 1)))
    found = sample(whole.clone(), slots, slot_ids, positions, None, masked).tokens.numpy()
    plain = sample(whole.clone(), slots, slot_ids, positions).tokens.numpy()
    assert (found[1::2] == plain[1::2]).all()
    adjusted = logits.clone()
    for token, bias in sampling.logit_bias.items():
        adjusted[token] += bias
    adjusted[~torch.from_numpy(allowed)] = -math.inf
    expected = warped(adjusted / sampling.temperature, sampling).softmax(0).double().numpy()
    expected *= len(rows)
    rare = (expected > 0) & (expected < 5)
    kept = found[::2][~rare[found[::2]]]
    expected[rare] = 0
    assert_fits(np.bincount(kept, minlength=40), expected / expected.sum() * len(kept))


def test_a_mask_leaves_log_probabilities_as_the_models_own() -> None:
    logits, allowed = torch.randn(1, 50), np.arange(50) == 17
    slots = make_slots([SamplingParams(logprobs=4, repetition_penalty=1.5)], 50)
    masked = MaskedRows(np.zeros(1, np.int32), pack(allowed)[None])
    one = np.ones(1, np.int32)
    found = sample(logits.clone(), slots, one - 1, one, None, masked)
    assert found.tokens.tolist() == [17]
    expected = logits.log_softmax(-1)[0]
    assert found.logprobs.item() == pytest.approx(expected[17].item(), abs=1e-5)
    assert found.top_tokens[0].tolist() == expected.topk(4).indices.tolist()


def test_a_mask_hides_no_broken_logits_and_may_allow_nothing() -> None:
    logits = torch.randn(4, 50)
    logits[0, 3], logits[1, 3] = math.nan, math.inf
    slots = make_slots([SamplingParams(temperature=0), SamplingParams()] * 2, 50)
    allowed = np.tile(np.arange(50) > 9, (4, 1))
    allowed[2] = False
    masked = MaskedRows(np.arange(4, dtype=np.int32), np.stack([*map(pack, allowed)]))
    four = np.arange(4, dtype=np.int32)
    tokens = sample(logits, slots, four, four * 0 + 1, None, masked).tokens.tolist()
    assert tokens[:3] == [-1, -1, -1]
    assert tokens[3] > 9
