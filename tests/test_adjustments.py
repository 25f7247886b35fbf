"""Biases, bans and penalties of the CPU sampler."""

from __future__ import annotations

import numpy as np
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from aioinfer.sampling_params import SamplingParams
from aioinfer.worker.adjustments import adjust_logits
from aioinfer.worker.slots import LookaheadTensors, SamplingRows, Slots
from tests.filled_slots import make_slots, sample_rows


def adjusted(
    logits: torch.Tensor, slots: Slots, slot_ids: list[int], positions: list[int]
) -> torch.Tensor:
    at, where = np.array(slot_ids, np.int32), np.array(positions, np.int32)
    result = logits.clone()
    rows, flags = SamplingRows(at, where, 0), slots.current_flags(at, where)
    adjust_logits(result, slots, rows, flags)
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


def test_drafts_before_a_row_count_as_output() -> None:
    """A row with two drafts before it, behind a row of another request: as if both had been
    sampled."""
    torch.manual_seed(6)
    logits = torch.randn(2, 60)
    params = SamplingParams(presence_penalty=0.4, frequency_penalty=0.25, repetition_penalty=1.2)
    prompt, drafts = [3, 9, 9, 20], [20, 7]
    sampled = make_slots([params, params], 60, [[5], prompt + drafts], prompt_len=3)
    expected = adjusted(logits, sampled, [0, 1], [1, 6])
    slots = make_slots([params, params], 60, [[5], prompt], prompt_len=3)
    slots.tokens[1, 4:7] = torch.tensor([*drafts, 7])
    at, where = np.array([0, 1], np.int32), np.array([1, 6], np.int32)
    lookahead = LookaheadTensors(*torch.tensor([[0, 2], [0, 7]], dtype=torch.int32))
    rows = SamplingRows(at, where, 0, lookahead=lookahead)
    adjust_logits(logits, slots, rows, slots.current_flags(at, where))
    torch.testing.assert_close(logits, expected)


def test_penalties_follow_the_sampled_tokens() -> None:
    """Flat logits and a frequency penalty: every token comes once before any comes twice."""
    slots = make_slots([SamplingParams(temperature=0, frequency_penalty=0.5)], 10)
    sampled = []
    for position in range(1, 21):
        sampled.append(int(sample_rows(torch.zeros(1, 10), slots, [0], [position])))
    assert sampled == list(range(10)) * 2


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
        sampled = [int(sample_rows(logits, slots, [0], [position])) for position in range(3, 9)]
        assert sampled == [8, 8, 8, 8, 2, 2]


def test_nothing_is_sampled_where_everything_is_banned() -> None:
    params = [SamplingParams(temperature=t, min_tokens=1) for t in (0.0, 1.0)]
    slots = make_slots(params, 3, banned_until_min_tokens=(0, 1, 2))
    assert sample_rows(torch.zeros(2, 3), slots, [0, 1], [1, 1]).tolist() == [-1, -1]
