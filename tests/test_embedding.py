"""The two ends of the model, whole and split over ranks, whose sums are done here by hand."""

from __future__ import annotations

import pytest
import torch

from aioinfer.layers.embedding import Embedding, LMHead, Vocabulary
from aioinfer.layers.norm import RMSNorm
from aioinfer.layers.parallel import ParallelGroup
from tests.paged_model import UnsummedGroup, backend_of

CPU = torch.device("cpu")
HIDDEN = 12


def load(layer: Embedding | LMHead, weight: torch.Tensor) -> None:
    """Fills a layer with its shard of the weight."""
    for _, shard in layer.weight_shards():
        assert shard.checkpoint_shape == list(weight.shape)
        shard.destination.copy_(weight[shard.start : shard.start + len(shard.destination)])


def embeddings(weight: torch.Tensor, size: int) -> list[Embedding]:
    """Returns each rank's embedding."""
    found = []
    for rank in range(size):
        vocabulary = Vocabulary(len(weight), UnsummedGroup(rank, size))
        found.append(Embedding("e", vocabulary, HIDDEN, backend_of(rank, size)))
        load(found[-1], weight)
    return found


def no_norm(dtype: torch.dtype = torch.float32) -> RMSNorm:
    return RMSNorm("n", HIDDEN, 1e-5, backend_of(dtype=dtype))


SIZES = [(64, 1), (64, 4), (61, 2), (61, 4), (9, 4), (5, 4), (3, 8)]


@pytest.mark.parametrize(("vocab_size", "size"), SIZES)
def test_embeddings_sum_to_the_whole(vocab_size: int, size: int):
    weight = torch.randn(vocab_size, HIDDEN)
    ids = torch.arange(vocab_size).flip(0)
    parts = [embedding(ids.int()).hidden for embedding in embeddings(weight, size)]
    torch.testing.assert_close(torch.stack(parts).sum(0), weight[ids], rtol=0, atol=0)


@pytest.mark.parametrize("prepared", [True, False])
@pytest.mark.parametrize(("vocab_size", "size"), SIZES)
def test_logits_side_by_side_are_the_whole(vocab_size: int, size: int, prepared: bool):
    weight, hidden = torch.randn(vocab_size, HIDDEN), torch.randn(3, HIDDEN)
    parts = []
    norm = no_norm()
    for rank in range(size):
        vocabulary = Vocabulary(vocab_size, UnsummedGroup(rank, size))
        head = LMHead("h", vocabulary, HIDDEN, backend_of(rank, size))
        load(head, weight)
        if prepared:
            head.finalize()
        parts.append(head(hidden, norm))
    logits = torch.cat(parts, dim=-1)
    # no column of padding
    torch.testing.assert_close(logits, norm(hidden) @ weight.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tied_weight_serves_both_ends_after_preparing(dtype: torch.dtype):
    vocabulary = Vocabulary(32, ParallelGroup.single())
    embedding = Embedding("e", vocabulary, HIDDEN, backend_of(dtype=dtype))
    weight = embedding.weight.normal_().clone()
    head = LMHead("h", vocabulary, HIDDEN, backend_of(dtype=dtype), tied=embedding)
    assert list(head.weight_shards()) == []
    head.finalize()
    hidden = embedding(torch.tensor([3, 31, 3], dtype=torch.int32)).hidden
    norm = no_norm(dtype)
    logits = head(hidden, norm)
    assert hidden.dtype == dtype
    assert logits.dtype == torch.float32
    torch.testing.assert_close(hidden, weight[[3, 31, 3]], rtol=0, atol=0)
    torch.testing.assert_close(logits, (norm(hidden) @ weight.T).float(), rtol=1e-5, atol=1e-5)


def test_embeddings_are_scaled_by_the_rounded_factor():
    vocabulary, wide = Vocabulary(8, ParallelGroup.single()), backend_of(dtype=torch.bfloat16)
    embedding = Embedding("e", vocabulary, HIDDEN, wide, scale=33.94)
    embedding.weight.fill_(1)
    hidden = embedding(torch.tensor([1], dtype=torch.int32)).hidden
    assert hidden.unique().tolist() == [34.0]  # the bfloat16 next to 33.94
    assert embedding.weight.unique().tolist() == [1.0]


def test_logits_are_scaled_and_capped():
    vocabulary = Vocabulary(8, ParallelGroup.single())
    head = LMHead("h", vocabulary, HIDDEN, backend_of(), scale=0.25, soft_cap=2.0)
    weight, hidden, norm = torch.randn(8, HIDDEN) * 5, torch.randn(3, HIDDEN), no_norm()
    load(head, weight)
    expected = 2.0 * torch.tanh(norm(hidden) @ weight.T * 0.25 / 2.0)
    torch.testing.assert_close(head(hidden, norm), expected, rtol=1e-5, atol=1e-5)
