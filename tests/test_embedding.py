"""The two ends of the model, whole and shared out; the ranks' sums are done here by hand."""

from __future__ import annotations

import pytest
import torch

from aioinfer.layers.embedding import Embedding, LMHead, Vocabulary
from aioinfer.layers.parallel import ParallelGroup

CPU = torch.device("cpu")
HIDDEN = 12


class Rank(ParallelGroup):
    """A rank whose sums are what it brings."""

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        return values


def shares(weight: torch.Tensor, size: int) -> list[tuple[Vocabulary, torch.Tensor]]:
    """Returns each rank's vocabulary and part of the weight."""
    found = []
    for rank in range(size):
        vocabulary = Vocabulary(len(weight), Rank(rank, size))
        mine = vocabulary.rows(HIDDEN, torch.float32, CPU)
        target = vocabulary.target(mine)
        assert target.checkpoint_shape == list(weight.shape)
        target.destination.copy_(weight[target.start : target.start + len(target.destination)])
        found.append((vocabulary, mine))
    return found


SIZES = [(64, 1), (64, 4), (61, 2), (61, 4), (9, 4), (5, 4), (3, 8)]


@pytest.mark.parametrize(("vocab_size", "size"), SIZES)
def test_embeddings_sum_to_the_whole(vocab_size: int, size: int):
    weight = torch.randn(vocab_size, HIDDEN)
    ids = torch.arange(vocab_size).flip(0)
    parts = [Embedding(vocabulary, mine)(ids) for vocabulary, mine in shares(weight, size)]
    torch.testing.assert_close(torch.stack(parts).sum(0), weight[ids], rtol=0, atol=0)


@pytest.mark.parametrize("prepared", [True, False])
@pytest.mark.parametrize(("vocab_size", "size"), SIZES)
def test_logits_side_by_side_are_the_whole(vocab_size: int, size: int, prepared: bool):
    weight, hidden = torch.randn(vocab_size, HIDDEN), torch.randn(3, HIDDEN)
    parts = []
    for vocabulary, mine in shares(weight, size):
        head = LMHead(vocabulary, mine)
        if prepared:
            head.finalize()
        parts.append(head(hidden))
    logits = torch.cat(parts, dim=-1)
    # no column of padding
    torch.testing.assert_close(logits, hidden @ weight.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tied_weight_serves_both_ends_after_preparing(dtype: torch.dtype):
    vocabulary = Vocabulary(32, ParallelGroup.single())
    weight = vocabulary.rows(HIDDEN, dtype, CPU).normal_()
    embedding, head = Embedding(vocabulary, weight), LMHead(vocabulary, weight)
    head.finalize()
    hidden = embedding(torch.tensor([3, 31, 3]))
    logits = head(hidden)
    assert hidden.dtype == dtype
    assert logits.dtype == torch.float32
    torch.testing.assert_close(hidden, weight[[3, 31, 3]], rtol=0, atol=0)
    torch.testing.assert_close(logits, (hidden @ weight.T).float(), rtol=1e-5, atol=1e-5)
