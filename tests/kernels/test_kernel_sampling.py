"""Sampling, penalties, biases and log-probabilities against the rules of the CPU sampler."""

from __future__ import annotations

import pytest
import torch
from aioinfer.kernels import logprobs, penalties, sampling
from aioinfer.kernels.sampling import SamplingState, sample_tokens
from references import penalties_reference, token_logprobs_reference
from sampling_cases import make_state, sample_and_judge, uniforms_agree


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "CHUNK", 256)
    monkeypatch.setattr(logprobs, "CHUNK", 512)


def test_uniforms_equal_those_of_the_cpu_bit_for_bit() -> None:
    assert uniforms_agree("cpu")


@pytest.mark.parametrize("rounded", [False, True])
def test_sampled_tokens_follow_the_rules_of_the_cpu_sampler(rounded: bool) -> None:
    wrong, different = sample_and_judge(24, 1500, make_state(40, "cpu"), "cpu", rounded=rounded)
    assert wrong == 0
    assert different <= 1


def test_rows_with_nan_or_infinite_logits_give_minus_one_and_affect_no_other_row() -> None:
    logits = torch.randn(6, 700)
    logits[0, 3] = float("nan")
    logits[1, 4] = float("inf")
    logits[2] = float("-inf")
    logits[3, :699] = float("-inf")
    state = SamplingState(
        torch.zeros(2, dtype=torch.int64), torch.tensor([0.0, 0.8]), int32(0, 9),
        torch.tensor([1.0, 0.9]), torch.zeros(2),
    )  # fmt: skip
    for slot in (0, 1):
        tokens = sample_tokens(logits, int32(*[slot] * 6), int32(*range(6)), state).tolist()
        assert tokens[:4] == [-1, -1, -1, 699]
        assert min(tokens[4:]) >= 0


def test_logprobs_of_sampled_and_of_the_most_likely_tokens() -> None:
    logits, sampled = torch.randn(3, 1500), int32(1, 2, 1499)
    ours = logprobs.token_logprobs(logits, sampled, int32(1, 0, 1), 20)
    reference = token_logprobs_reference(logits.double(), sampled, 20)
    for mine, theirs in zip(ours, reference, strict=True):
        torch.testing.assert_close(
            mine[[0, 2]].double(), theirs[[0, 2]].double(), rtol=0, atol=1e-5
        )
    assert ours[0][1].isnan()
    assert (ours[1][1] == -1).all()


def test_penalties_from_counts() -> None:
    tokens, prompt_lens = [[1, 2, 3, 2, 5, 5], [7, 7, 8]], [3, 2]
    occurrences, row_of_slot = torch.zeros(4, 600, dtype=torch.int32), torch.tensor([-1, 2, -1, 0])
    penalties.count_occurrences(int32(*tokens[0]), 3, occurrences[2])
    penalties.count_occurrences(int32(*tokens[1][:2]), 2, occurrences[0])
    penalties.add_occurrences(int32(8, 4, -1), int32(3, 0, 1), row_of_slot, occurrences)
    repetition, presence, frequency = (
        torch.tensor([1, 1.3, 1, 0.8]),
        torch.tensor([0, 0.5, 0, -0.5]),
        torch.tensor([0, 0.25, 0, 1.0]),
    )
    logits = torch.randn(3, 600)
    expected = penalties_reference(
        logits[[0, 2]].double(), tokens, prompt_lens, [1.3, 0.8], [0.5, -0.5], [0.25, 1.0]
    )
    untouched = logits[1].clone()
    penalties.apply_penalties(
        logits, int32(1, 2, 3), row_of_slot, occurrences, repetition, presence, frequency
    )
    torch.testing.assert_close(logits[[0, 2]].double(), expected, rtol=0, atol=1e-5)
    assert torch.equal(logits[1], untouched)


def test_biases_and_bans() -> None:
    logits = torch.zeros(3, 20)
    ids = torch.tensor([[5, 6, 9], [1, 9, 9], [2, 3, 9]], dtype=torch.int32)
    values, counts = torch.tensor([[1.0, -2.0, 7.0], [4.0, 7.0, 7.0], [7.0] * 3]), int32(2, 1, 0)
    penalties.add_biases(logits, int32(0, 1, 2), ids, values, counts)
    expected = torch.zeros(3, 20)
    expected[0, 5], expected[0, 6], expected[1, 1] = 1.0, -2.0, 4.0
    assert torch.equal(logits, expected)
    penalties.ban_tokens(
        logits, int32(1, 0, 2), ids, int32(2, 1, 3), positions=int32(3, 3, 3), until=int32(4, 9, 3)
    )
    expected[0, 1] = expected[1, 5] = expected[1, 6] = float("-inf")
    assert torch.equal(logits, expected), "the last row is past its minimum"
