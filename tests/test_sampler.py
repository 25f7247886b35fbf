"""The sampler: which token it chooses, from what, and that neither depends on who else is in the
batch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from aioinfer.ipc.plan import Admission, StepPlan
from aioinfer.sampling_params import SamplingParams
from aioinfer.worker.sampler import (
    Sampled,
    adjust_logits,
    filter_tokens,
    gumbel_keys,
    sample,
    uniforms,
)
from aioinfer.worker.slots import Slots

NONE = np.empty(0, np.int32)
CPU = torch.device("cpu")
MASK = 2**32 - 1


def make_slots(
    params: list[SamplingParams],
    vocab_size: int,
    tokens: list[list[int]] | None = None,
    **admission: Any,
) -> Slots:
    """Slots 0, 1, ... with requests of these parameters; by default their prompt is the one token
    0."""
    slots = Slots(len(params), 64, 16, vocab_size, CPU)
    prompts = tokens or [[0]] * len(params)
    common = {"prompt_len": 1, "seed": 7} | admission
    admissions = [
        Admission(slot, np.array(prompt, np.int32), params=p, **common)
        for slot, (p, prompt) in enumerate(zip(params, prompts, strict=True))
    ]
    slots.apply(StepPlan(0, NONE, NONE, NONE, NONE, NONE, NONE, NONE, NONE, NONE, admissions))
    return slots


def choose(
    logits: torch.Tensor, slots: Slots, slot_ids: list[int], positions: list[int]
) -> Sampled:
    return sample(
        logits.clone(), slots, np.array(slot_ids, np.int32), np.array(positions, np.int32)
    )


def choose_one(logits: torch.Tensor, position: int = 1, **params: Any) -> int:
    slots = make_slots([SamplingParams(**params)], logits.shape[-1])
    return int(choose(logits[None], slots, [0], [position]).tokens)


def draws(logits: torch.Tensor, count: int, params: SamplingParams, seed: int = 3) -> np.ndarray:
    """The tokens that one request draws from the same logits at `count` positions."""
    slots = make_slots([params], len(logits), seed=seed)
    positions = np.arange(1, count + 1, dtype=np.int32)
    return sample(
        logits.expand(count, -1).contiguous(), slots, np.zeros(count, np.int32), positions
    ).tokens.numpy()


def assert_fits(observed: np.ndarray, expected: np.ndarray) -> None:
    """Pearson's chi-square test at one in a million; its quantile by Wilson and Hilferty."""
    assert (observed[expected == 0] == 0).all()
    observed, expected = observed[expected > 0], expected[expected > 0]
    assert expected.min() >= 5, "too few draws for the test"
    degrees = len(expected) - 1
    if degrees == 0:
        return
    statistic = ((observed - expected) ** 2 / expected).sum()
    limit = degrees * (1 - 2 / (9 * degrees) + 4.75 * math.sqrt(2 / (9 * degrees))) ** 3
    assert statistic < limit, f"chi-square {statistic:.1f} where at most {limit:.1f} is likely"


# ---------------------------------------------------------------- noise


def mix(h: int) -> int:
    h ^= h >> 16
    h = h * 0x7FEB352D & MASK
    h ^= h >> 15
    h = h * 0x846CA68B & MASK
    return h ^ h >> 16


def uniform_by_hand(seed: int, position: int, token: int) -> float:
    """The module's definition in Python's integers."""
    low, high = seed & MASK, seed >> 32
    key0, key1 = (mix(high ^ mix(low ^ mix(position + c & MASK))) for c in (0x9E3779B9, 0x7F4A7C15))
    h = token ^ key0
    h ^= h >> 16
    h = h * 0x7FEB352D & MASK ^ key1
    h ^= h >> 15
    h = h * 0x846CA68B & MASK
    h ^= h >> 16
    return ((h >> 9) + 0.5) / 2**23


def test_uniforms_are_those_of_the_definition_bit_for_bit() -> None:
    seeds, positions = [0, 1, 2**64 - 1, 0x0123456789ABCDEF], [0, 1, 8191, 2**31 - 1]
    tokens = [0, 1, 49151, 2**31 - 1]
    key0, key1 = gumbel_keys(
        np.array(seeds, np.uint64).view(np.int64), np.array(positions, np.int32)
    )
    u = uniforms(key0[:, None], key1[:, None], np.array(tokens, np.uint32))
    assert u.dtype == np.float32
    for i, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        assert u[i].tolist() == [uniform_by_hand(seed, position, token) for token in tokens]


def test_uniforms_stay_off_both_ends() -> None:
    key0, key1 = gumbel_keys(np.array([5], np.int64), np.array([9], np.int32))
    u = uniforms(key0, key1, np.arange(2**22, dtype=np.uint32))
    assert 2**-24 <= u.min() < 1e-5
    assert 1 - 1e-5 < u.max() <= 1 - 2**-24


@pytest.mark.parametrize("along", ["tokens", "positions", "seeds"])
def test_uniforms_are_uniform_and_uncorrelated(along: str) -> None:
    count = 2**16
    index = np.arange(count)
    seeds = index.astype(np.int64) if along == "seeds" else np.array([11], np.int64)
    positions = (index if along == "positions" else np.array([100])).astype(np.int32)
    tokens = (index if along == "tokens" else np.array([123])).astype(np.uint32)
    key0, key1 = gumbel_keys(*np.broadcast_arrays(seeds, positions))
    u = uniforms(key0, key1, tokens).astype(np.float64)
    assert_fits(np.histogram(u, 256, (0, 1))[0], np.full(256, count / 256))
    pairs = np.histogram2d(u[:-1], u[1:], 16, [(0, 1), (0, 1)])[0].ravel()
    assert_fits(pairs, np.full(256, (count - 1) / 256))


# ---------------------------------------------------------------- greedy


def test_greedy_takes_the_likeliest_and_of_equals_the_lowest_id() -> None:
    logits = torch.zeros(3, 100)
    logits[0, 42] = 1
    logits[1, [70, 30, 99]] = 5
    slots = make_slots([SamplingParams(temperature=0)] * 3, 100)
    result = choose(logits, slots, [0, 1, 2], [1, 1, 1])
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
    sound = choose(logits, slots, list(range(8)), [1] * 8).tokens.tolist()
    logits[0, 17] = logits[1, 3] = logits[2, 49] = logits[3, 0] = math.nan
    assert choose(logits, slots, list(range(8)), [1] * 8).tokens.tolist() == [-1] * 4 + sound[4:]
    logits[:2] = math.inf
    logits[2:4] = -math.inf
    assert choose(logits, slots, list(range(8)), [1] * 8).tokens.tolist() == [-1] * 4 + sound[4:]


# ---------------------------------------------------------------- the draw


def test_draws_follow_softmax() -> None:
    torch.manual_seed(1)
    logits = torch.randn(30)
    tokens = draws(logits, 8000, SamplingParams(temperature=0.8))
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
def test_filtered_draws_follow_the_renormalised_softmax(params: SamplingParams) -> None:
    torch.manual_seed(2)
    logits = torch.randn(40)
    tokens = draws(logits, 6000, params)
    expected = warped(logits / params.temperature, params).softmax(0).double().numpy()
    assert 0 < (expected == 0).sum() < 40
    assert_fits(np.bincount(tokens, minlength=40), 6000 * expected)


def warped(scaled: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """What transformers' warpers leave of scaled logits, in our order: min-p, top-k, top-p."""
    warpers = LogitsProcessorList()
    if params.min_p > 0:
        warpers.append(MinPLogitsWarper(params.min_p))
    if params.top_k > 0:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    return warpers(torch.zeros(1, 1, dtype=torch.long), scaled[None])[0]


@pytest.mark.parametrize("spread", [0.01, 1.0, 4.0, 30.0])
@pytest.mark.parametrize("top_k", [0, 1, 50, 2999, 3000])
@pytest.mark.parametrize("top_p", [1.0, 0.999, 0.5, 1e-6])
@pytest.mark.parametrize("min_p", [0.0, 0.3, 1e-6])
def test_filters_keep_what_transformers_keeps(
    spread: float, top_k: int, top_p: float, min_p: float
) -> None:
    """From nearly flat logits, where top-p reaches beyond every span, to a single likely token."""
    params = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)
    torch.manual_seed(3)
    scaled = torch.randn(3000) * spread
    expected = warped(scaled, params).isfinite().nonzero()[:, 0].tolist()
    kept = filter_tokens(scaled.numpy(), float(scaled.max()), top_k, top_p, min_p).tolist()
    missing = set(kept) ^ set(expected)
    assert len(missing) <= (1 if top_p < 1 else 0), (
        "only rounding of a sum may move top-p's border, by a token"
    )
    assert kept == sorted(kept)
    assert kept


def test_equals_at_the_border_stay_together() -> None:
    scaled = np.log(np.array([0.1, 0.2, 0.2, 0.3, 0.2], np.float32))
    largest = float(scaled.max())
    assert filter_tokens(scaled, largest, 2, 1.0, 0.0).tolist() == [1, 2, 3, 4]
    assert filter_tokens(scaled, largest, 0, 0.45, 0.0).tolist() == [1, 2, 3, 4]
    assert filter_tokens(scaled, largest, 0, 0.25, 0.0).tolist() == [3]


def test_tokens_ruled_out_are_never_drawn_by_a_filter() -> None:
    logits = torch.full((20,), -math.inf)
    logits[[4, 11]] = 0.0
    for params in (
        SamplingParams(),
        SamplingParams(top_k=10),
        SamplingParams(top_p=0.999),
        SamplingParams(top_k=10, top_p=0.5),
    ):
        assert set(draws(logits, 200, params).tolist()) == {4, 11}


def test_extreme_temperatures() -> None:
    logits = torch.linspace(-80, 80, 50)
    assert choose_one(logits, temperature=1e-5) == 49
    # beyond float32: no token, and no warning
    assert choose_one(logits * 1e36, temperature=2e-5) in (-1, 49)
    assert len(set(draws(logits, 300, SamplingParams(temperature=100)).tolist())) > 25


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
    together = choose(logits, slots, list(range(rows)), positions).tokens.tolist()
    alone = [int(choose(logits[[i]], slots, [i], [positions[i]]).tokens) for i in range(rows)]
    assert together == alone
    order = torch.randperm(rows)
    shuffled = choose(logits[order], slots, order.tolist(), [positions[i] for i in order]).tokens
    assert shuffled.tolist() == [together[i] for i in order]


def test_the_draw_depends_on_seed_and_position() -> None:
    logits = torch.zeros(1000)
    params = SamplingParams()
    assert (draws(logits, 200, params, seed=1) != draws(logits, 200, params, seed=2)).mean() > 0.95
    assert (
        draws(logits, 200, params, seed=1) != draws(logits, 200, params, seed=1 + 2**32)
    ).mean() > 0.95
    assert len(set(draws(logits, 200, params).tolist())) > 150


# ---------------------------------------------------------------- adjustments


def adjusted(
    logits: torch.Tensor, slots: Slots, slot_ids: list[int], positions: list[int]
) -> torch.Tensor:
    at, where = np.array(slot_ids, np.int32), np.array(positions, np.int32)
    result = logits.clone()
    adjust_logits(result, slots, slots.current_flags(at, where), at, where)
    return result


def test_repetition_penalty_equals_transformers() -> None:
    torch.manual_seed(5)
    logits = torch.randn(2, 60)
    tokens = [[3, 3, 9, 20, 20, 20], [1, 2]]
    slots = make_slots(
        [SamplingParams(repetition_penalty=1.3), SamplingParams(repetition_penalty=0.8)],
        60,
        tokens,
        prompt_len=2,
    )
    result = adjusted(logits, slots, [0, 1], [6, 2])
    for row, penalty in enumerate((1.3, 0.8)):
        expected = RepetitionPenaltyLogitsProcessor(penalty)(
            torch.tensor(tokens[row])[None], logits[row : row + 1]
        )
        torch.testing.assert_close(result[row : row + 1], expected)


def test_presence_and_frequency_count_the_output_alone() -> None:
    torch.manual_seed(6)
    logits = torch.randn(1, 60)
    slots = make_slots(
        [SamplingParams(presence_penalty=0.4, frequency_penalty=0.25)],
        60,
        [[3, 9, 9, 20, 3, 3]],
        prompt_len=3,
    )
    expected = logits.clone()
    expected[0, 3] -= 0.4 + 2 * 0.25
    expected[0, 20] -= 0.4 + 0.25
    torch.testing.assert_close(adjusted(logits, slots, [0], [6]), expected)


def test_penalties_follow_the_chosen_tokens() -> None:
    """Flat logits and a frequency penalty: every token comes once before any comes twice."""
    slots = make_slots([SamplingParams(temperature=0, frequency_penalty=0.5)], 10)
    chosen = []
    for position in range(1, 21):
        at = np.array([position], np.int32)
        tokens = choose(torch.zeros(1, 10), slots, [0], [position]).tokens
        slots.append(np.zeros(1, np.int32), at, tokens)
        chosen.append(int(tokens))
    assert chosen == list(range(10)) * 2


def test_rows_of_unequal_length_are_penalised_each_by_their_own_tokens() -> None:
    tokens = [[1] * 40, [2, 3]]
    slots = make_slots([SamplingParams(repetition_penalty=2.0)] * 2, 10, tokens)
    result = adjusted(torch.ones(2, 10), slots, [0, 1], [40, 2])
    assert (result < 1).nonzero().tolist() == [[0, 1], [1, 2], [1, 3]]


def test_logit_bias_is_added_once_and_only_to_its_row() -> None:
    params = [
        SamplingParams(logit_bias={3: 5.0, 7: -100.0, 0: 1.0}),
        SamplingParams(),
        SamplingParams(logit_bias={9: 2.0}),
    ]
    slots = make_slots(params, 10)
    result = adjusted(torch.zeros(3, 10), slots, [0, 1, 2], [1, 1, 1])
    expected = torch.zeros(3, 10)
    expected[0, [3, 7, 0]] = torch.tensor([5.0, -100.0, 1.0])
    expected[2, 9] = 2.0
    assert result.equal(expected)


def test_end_tokens_are_banned_until_min_tokens_counted_from_the_prompt() -> None:
    """Also where the request comes back after a preemption, with output among its tokens."""
    logits = torch.zeros(1, 10)
    logits[0, 2], logits[0, 5], logits[0, 8] = 3, 2, 1
    params = [SamplingParams(temperature=0, min_tokens=4)]
    fresh = make_slots(params, 10, [[0, 0, 0]], prompt_len=3, banned_until_min_tokens=(2, 5))
    resumed = make_slots(
        params, 10, [[0, 0, 0, 8, 8]], prompt_len=3, banned_until_min_tokens=(2, 5)
    )
    for slots in (fresh, resumed):
        chosen = [int(choose(logits, slots, [0], [position]).tokens) for position in range(3, 9)]
        assert chosen == [8, 8, 8, 8, 2, 2]


def test_nothing_is_chosen_where_everything_is_banned() -> None:
    params = [SamplingParams(temperature=t, min_tokens=1) for t in (0.0, 1.0)]
    slots = make_slots(params, 3, banned_until_min_tokens=(0, 1, 2))
    assert choose(torch.zeros(2, 3), slots, [0, 1], [1, 1]).tokens.tolist() == [-1, -1]


# ---------------------------------------------------------------- log-probabilities


def test_logprobs_are_the_models_own() -> None:
    torch.manual_seed(7)
    logits = torch.randn(3, 40)
    params = [
        SamplingParams(temperature=0, logprobs=3, logit_bias={11: 100.0}),
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.5, top_k=5, logprobs=0, repetition_penalty=1.5),
    ]
    result = choose(logits, make_slots(params, 40), [0, 1, 2], [1, 1, 1])
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
    result = choose(
        logits, make_slots([SamplingParams(temperature=0, logprobs=20)] * 2, 40), [0, 1], [1, 1]
    )
    assert result.tokens[0] == -1
    torch.testing.assert_close(result.logprobs[1], logits[1].log_softmax(0).max())


def test_more_logprobs_than_tokens() -> None:
    result = choose(torch.randn(1, 5), make_slots([SamplingParams(logprobs=20)], 5), [0], [1])
    assert result.top_tokens.shape == (1, 5)
