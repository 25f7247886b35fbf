"""Log-probabilities of given tokens and of the likeliest ones, from logits, in plain torch.

Features call it for sampled rows and for the tokens of prompts; `kernels.logprobs` computes the
same on a GPU for up to 20 of the likeliest tokens. Of several tensor-parallel ranks each has the
logits of its shard of the vocabulary: each finds its part, and all merge the parts alike.
"""

from __future__ import annotations

import math

import torch

from aioinfer.layers.embedding import Vocabulary

#: The part of a rank; see `merge_logprobs`.
ShardPart = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def token_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, top: int, vocabulary: Vocabulary
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns log-probabilities over the whole vocabulary. If it is split over ranks, each has to
    call this. R rows.

    Args:
        logits: float32 [R, local_size], of the rank's shard.
        tokens: int32 [R], a token id for each row; -1 (no token) is read as token 0.
        top: how many of the likeliest tokens are wanted; no more than the vocabulary come.
        vocabulary: which token ids are in which shard.

    Returns:
        logprobs: float32 [R], of `tokens`. top_tokens: int32 [R, top], likeliest first.
        top_logprobs: float32 [R, top].
    """
    top = min(top, vocabulary.vocab_size)
    if vocabulary.group.size > 1:
        return merge_logprobs(vocabulary, find_in_shard(logits, tokens, top, vocabulary), top)
    total = logits.logsumexp(dim=-1, keepdim=True)
    best = logits.topk(top, dim=-1)
    own = logits.gather(1, tokens.long().clamp(min=0)[:, None]) - total
    return own[:, 0], best.indices.int(), best.values - total


def find_in_shard(
    logits: torch.Tensor, tokens: torch.Tensor, top: int, vocabulary: Vocabulary
) -> ShardPart:
    """Returns the part of `merge_logprobs` of a rank; arguments as for `token_logprobs`, `top` at
    most the vocabulary."""
    local, start = vocabulary.local_size, vocabulary.start
    # the last column is for tokens out of the shard
    padded = torch.nn.functional.pad(logits, (0, 1), value=-math.inf)
    tokens = tokens.long().clamp(min=0)
    inside = (tokens >= start) & (tokens < start + local)
    column = torch.where(inside, tokens - start, local)
    own = padded.gather(1, column[:, None])[:, 0]
    best = logits.topk(min(top, local), dim=-1)
    return padded.logsumexp(dim=-1), own, best.values, best.indices.int() + start


def merge_logprobs(
    vocabulary: Vocabulary,
    found: ShardPart,
    top: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns log-probabilities over the whole vocabulary, from the `found` of each rank's shard,
    in one all-gather. R rows.

    Args:
        vocabulary: which token ids are in which shard.
        found: float32 [R], the logarithm of the sum of exp(logit) of the rank's tokens; float32
            [R], the given token's logit, minus infinity where it is out of shard; float32 and
            int32 [R, K], the rank's largest logits, largest first, and their ids, K at least the
            smaller of `top` and the shard's size.
        top: how many of the likeliest tokens are wanted, at most the vocabulary.

    Returns:
        logprobs: float32 [R]. top_tokens: int32 [R, top], likeliest first, the lower id among
        equals. top_logprobs: float32 [R, top].
    """
    totals, own, values, tokens = found
    group, wider = vocabulary.group, (0, max(0, top - values.shape[1]))
    values, tokens = (torch.nn.functional.pad(part, wider)[:, :top] for part in (values, tokens))
    floats = torch.cat([totals[:, None], own[:, None], values], dim=1)
    packed = torch.cat([floats.view(torch.int32), tokens], dim=1)
    ranks = group.all_gather_last(packed).view(len(packed), group.size, -1)
    floats = ranks[:, :, : 2 + top].contiguous().view(torch.float32)
    total = floats[:, :, 0].logsumexp(dim=1)
    candidates, ids = floats[:, :, 2:].flatten(1), ranks[:, :, 2 + top :].flatten(1)
    columns = [
        rank * top + i
        for rank in range(group.size)
        for i in range(min(top, vocabulary.local_size_of(rank)))
    ]
    if len(columns) < candidates.shape[1]:
        candidates, ids = candidates[:, columns], ids[:, columns]
    best, order = candidates.sort(dim=1, descending=True, stable=True)
    return (
        floats[:, :, 1].amax(dim=1) - total,
        ids.gather(1, order[:, :top]),
        best[:, :top] - total[:, None],
    )
