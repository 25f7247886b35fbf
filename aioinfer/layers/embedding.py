"""The vocabulary at both ends of the model, split over the ranks: token embedding and LM head."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from aioinfer.layers.linear import PackedWeight, Target, pack_weight
from aioinfer.layers.parallel import ParallelGroup


class Vocabulary:
    """Which token ids a rank holds: equal shares, the last ones padded with zeros where the ranks
    do not divide the vocabulary.

    Attributes:
        vocab_size: of all ranks together.
        shard_size: rows of each rank's weights, with padding.
        start, local_size: this rank's first token id, and how many it holds.
    """

    def __init__(self, vocab_size: int, group: ParallelGroup):
        self.vocab_size = vocab_size
        self.group = group
        self.shard_size = -(-vocab_size // group.size)
        self.start = min(group.rank * self.shard_size, vocab_size)
        self.local_size = self.local_size_of(group.rank)

    def local_size_of(self, rank: int) -> int:
        """Returns how many token ids a rank holds; the last ranks may hold none of a small
        vocabulary."""
        return max(0, min(self.shard_size, self.vocab_size - rank * self.shard_size))

    def rows(self, hidden_size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns a weight [share, hidden_size] of zeros."""
        return torch.zeros(self.shard_size, hidden_size, dtype=dtype, device=device)

    def target(self, weight: torch.Tensor) -> Target:
        """Returns where this rank's rows of a checkpoint's [vocab_size, hidden_size] go; padding
        stays zero."""
        return Target(weight[: self.local_size], 0, self.start, self.vocab_size)


class Embedding:
    """Looks token ids up; a rank gives zeros for ids that others hold, and the sum is the
    embedding."""

    def __init__(self, vocabulary: Vocabulary, weight: torch.Tensor):
        self.weight = weight
        self._vocabulary = vocabulary

    def __call__(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Returns [T, hidden_size] for input_ids int64 [T]."""
        vocabulary = self._vocabulary
        if vocabulary.group.size == 1:
            return F.embedding(input_ids, self.weight)
        local = input_ids - vocabulary.start
        out_of_shard = (local < 0) | (local >= vocabulary.shard_size)
        embedded = F.embedding(local.masked_fill(out_of_shard, 0), self.weight)
        return vocabulary.group.all_reduce(embedded.masked_fill_(out_of_shard.unsqueeze(-1), 0))


class LMHead:
    """Scores the token ids that this rank holds; its weight may be the embedding's (tied)."""

    def __init__(self, vocabulary: Vocabulary, weight: torch.Tensor):
        self.weight: torch.Tensor | None = weight
        self._vocabulary = vocabulary
        self._packed: PackedWeight | None = None

    def finalize(self) -> None:
        """Prepares the weight as `Linear.finalize` does; a tied one then stays for the embedding
        too."""
        self._packed = pack_weight(self.weight)
        if self._packed is not None:
            self.weight = None

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the logits of this rank's tokens, float32 [S, held], for hidden [S,
        hidden_size]."""
        if self._packed is not None:
            logits = self._packed.multiply(hidden, None)
        else:
            assert self.weight is not None
            logits = F.linear(hidden, self.weight)
        return logits[:, : self._vocabulary.local_size].float()
