"""Choosing tokens: from the logits of a step's sampling rows to one token a row, and
log-probabilities.

The model runner calls `sample` once a step. A row's logits pass these stations, in vLLM's order,
each only where the request asks: logit bias; minus infinity for tokens banned before min_tokens;
penalties; temperature; min-p; top-k; top-p; the draw. Log-probabilities are those of the model,
before any of that.

Of several tensor-parallel ranks each has the logits of its share of the vocabulary. They tell each
other the best token of each share, or what the filters have to know (`shares`), and all make the
same choice, that of one rank with all logits.

The draw is Gumbel-max (Gumbel 1954; Maddison et al. 2014): argmax over tokens of logit /
temperature + g, where g is a pure function of the request's seed, the position of the token to be
chosen (counted from the beginning of the prompt) and the token id. So the same seed gives the same
text, whatever else is in the batch and however the step is computed. It is made of 32-bit unsigned
integer operations that wrap, `^` is exclusive or, `>>` shifts in zeros, and `mix` is the finaliser
"lowbias32" of C. Wellons' hash prospector:

    mix(h):  h ^= h >> 16;  h *= 0x7feb352d;  h ^= h >> 15;  h *= 0x846ca68b;  h ^= h >> 16
    key0 = mix(seed_high ^ mix(seed_low ^ mix(position + 0x9e3779b9)))
    key1 = mix(seed_high ^ mix(seed_low ^ mix(position + 0x7f4a7c15)))
    h    = mix of (token ^ key0), with  h ^= key1  after its first multiplication
    u    = ((h >> 9) + 0.5) * 2**-23         (float32, exact; between 2**-24 and 1 - 2**-24)
    g    = -log(-log(u))                     (float32)

This is the arithmetic of the host, in numpy where torch has no unsigned integers or is slow (its
argmax takes ten times as long); a kernel that does the same on a GPU gives the same u bit for bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from aioinfer.ipc.plan import F32, I32
from aioinfer.layers.embedding import Vocabulary
from aioinfer.worker.slots import (
    BANNED,
    BIASED,
    FILTERED,
    IN_PROMPT,
    LOGPROBS,
    PENALIZED,
    RANDOM,
    LogitBiases,
    Slots,
)
from aioinfer.worker.vocab_parallel import (
    CANDIDATES,
    MORE,
    Candidates,
    gather,
    keep_candidates,
    merge_logprobs,
)

U32 = npt.NDArray[np.uint32]

#: How far below the largest scaled logit top-k and top-p look, one after the other, so that they
#: rarely sort the whole vocabulary.
SPANS = (8.0, 12.0, math.inf)


@dataclass(slots=True)
class Sampled:
    """What was chosen for S rows, on the device.

    Attributes:
        tokens: int32 [S], -1 where the logits held NaN or infinity, or every token was banned.
        logprobs: float32 [S] of the chosen tokens, NaN where not asked for; [0] if no row asked.
        top_tokens: int32 [S, K], the likeliest tokens, likeliest first, -1 where not asked for; K
            is the most that a row asked for.
        top_logprobs: float32 [S, K], theirs.
    """

    tokens: torch.Tensor
    logprobs: torch.Tensor
    top_tokens: torch.Tensor
    top_logprobs: torch.Tensor

    @classmethod
    def plain(cls, tokens: torch.Tensor) -> Sampled:
        """Returns `tokens` (int32 [S]) without log-probabilities."""
        nothing = torch.empty((len(tokens), 0), device=tokens.device)
        return cls(tokens, nothing.new_empty(0), nothing.int(), nothing)


def sample(
    logits: torch.Tensor,
    slots: Slots,
    slot_ids: I32,
    positions: I32,
    vocabulary: Vocabulary | None = None,
) -> Sampled:
    """Chooses the token at `positions[i]` of the request in slot `slot_ids[i]` by row i of
    `logits`.

    Args:
        logits: float32 [S, held], of the tokens that this rank holds; may be changed.
        slots: how each request wants it. Not changed.
        slot_ids, positions: int32 [S].
        vocabulary: which these tokens are; by default all. If ranks share it, each has to call
            this, and returns the same.
    """
    shared = vocabulary if vocabulary is not None and vocabulary.group.size > 1 else None
    sampling_flags = slots.current_flags(slot_ids, positions)
    wanted = int(np.bitwise_or.reduce(sampling_flags, initial=0))
    adjusted = logits
    if wanted & (BIASED | BANNED | PENALIZED):
        adjusted = logits.clone() if wanted & LOGPROBS else logits
        adjust_logits(
            adjusted,
            slots,
            sampling_flags,
            slot_ids,
            positions,
            0 if shared is None else shared.start,
        )
    scores = adjusted.cpu().numpy()
    if shared is not None:
        chosen = _sample_vocab_parallel(scores, slots, sampling_flags, slot_ids, positions, shared)
    elif not wanted & RANDOM:
        chosen = _argmax(scores)
    else:
        chosen = np.empty(len(scores), np.int32)
        greedy, drawn = (
            np.flatnonzero(~sampling_flags & RANDOM),
            np.flatnonzero(sampling_flags & RANDOM),
        )
        if len(greedy):
            chosen[greedy] = _argmax(scores[greedy])
        chosen[drawn] = _draw(
            scores, drawn, slots, sampling_flags, slot_ids[drawn], positions[drawn]
        )
    tokens = torch.from_numpy(chosen).to(logits.device)
    if wanted & LOGPROBS:
        asking = np.flatnonzero(sampling_flags & LOGPROBS)
        return _with_logprobs(
            tokens, logits, asking, int(slots.num_logprobs[slot_ids].max()), shared
        )
    return Sampled.plain(tokens)


def gumbel_keys(seeds: npt.NDArray[np.int64], positions: I32) -> tuple[U32, U32]:
    """Returns `key0` and `key1` (uint32 [n]) of the noise, from the seeds' 64 bits and the
    positions (both [n])."""
    halves = np.ascontiguousarray(seeds).view(np.uint64)
    low, high = halves.astype(np.uint32), (halves >> np.uint64(32)).astype(np.uint32)
    at = positions.astype(np.uint32)
    first = _mix(high ^ _mix(low ^ _mix(at + np.uint32(0x9E3779B9))))
    return first, _mix(high ^ _mix(low ^ _mix(at + np.uint32(0x7F4A7C15))))


def uniforms(key0: U32, key1: U32, tokens: U32) -> F32:
    """Returns the uniforms u (float32, the shape that the arguments broadcast to) of token ids
    under the keys."""
    hashed = tokens ^ key0
    hashed ^= hashed >> np.uint32(16)
    hashed *= np.uint32(0x7FEB352D)
    hashed ^= key1
    hashed ^= hashed >> np.uint32(15)
    hashed *= np.uint32(0x846CA68B)
    hashed ^= hashed >> np.uint32(16)
    hashed >>= np.uint32(9)
    u = hashed.view(np.int32).astype(np.float32)  # from signed integers there is an instruction
    u += np.float32(0.5)
    u *= np.float32(2**-23)
    return u


def _mix(hashed: U32) -> U32:
    hashed = hashed ^ (hashed >> np.uint32(16))
    hashed *= np.uint32(0x7FEB352D)
    hashed ^= hashed >> np.uint32(15)
    hashed *= np.uint32(0x846CA68B)
    return hashed ^ (hashed >> np.uint32(16))


def gumbel_noise(key0: U32, key1: U32, tokens: U32) -> F32:
    """Returns the noise g, like `uniforms`."""
    noise = uniforms(key0, key1, tokens)
    np.log(noise, out=noise)
    np.negative(noise, out=noise)
    np.log(noise, out=noise)
    return np.negative(noise, out=noise)


def _argmax(scores: F32) -> npt.NDArray[np.int32]:
    """Returns the best token (the lowest id among equals) of each row of float32 [S, vocab_size],
    or -1 without one."""
    chosen = scores.argmax(axis=1).astype(np.int32)  # the first NaN, if there is any
    best = scores[np.arange(len(chosen)), chosen]
    chosen[~np.isfinite(best)] = -1
    return chosen


def adjust_logits(
    logits: torch.Tensor,
    slots: Slots,
    sampling_flags: npt.NDArray[np.uint8],
    slot_ids: I32,
    positions: I32,
    first: int = 0,
) -> None:
    """Applies biases, bans and penalties to the rows of `logits` whose requests have them, in
    place.

    `first` is the token id of the first column; what concerns tokens beyond the columns is left to
    the ranks that hold them.
    """
    if not logits.shape[1]:
        return
    for bit, biases in ((BIASED, slots.bias), (BANNED, slots.banned)):
        rows = np.flatnonzero(sampling_flags & bit)
        if len(rows):
            _add_biases(logits, biases, rows, slot_ids[rows], first)
    rows = np.flatnonzero(sampling_flags & PENALIZED)
    if len(rows):
        _penalize(logits, slots, rows, slot_ids[rows], positions[rows], first)


def _add_biases(
    logits: torch.Tensor, biases: LogitBiases, rows: npt.NDArray[Any], slot_ids: I32, first: int
) -> None:
    at = torch.from_numpy(slot_ids).to(logits.device)
    ids, values = biases.ids[at] - first, biases.values[at]
    out_of_shard = (ids < 0) | (ids >= logits.shape[1])
    ids, values = ids.masked_fill_(out_of_shard, 0), values.masked_fill_(out_of_shard, 0)
    logits.index_put_(
        (torch.from_numpy(rows).to(logits.device)[:, None], ids), values, accumulate=True
    )


def _penalize(
    logits: torch.Tensor,
    slots: Slots,
    rows: npt.NDArray[Any],
    slot_ids: I32,
    positions: I32,
    first: int,
) -> None:
    """Applies the penalties of `slot_ids` to `rows` of `logits`, in place.

    Repetition: divides positive and multiplies negative logits of tokens of prompt and output
    (CTRL, Keskar et al. 2019). Frequency and presence: subtracted for each, and once for any,
    occurrence in the output (OpenAI). Only the tokens that occur are touched. One that occurs twice
    is read and written twice, with the same value.
    """
    device = logits.device
    where, at = (
        torch.from_numpy(rows).to(device)[:, None],
        torch.from_numpy(slot_ids).long().to(device),
    )
    lengths = torch.from_numpy(positions).to(device)[:, None]
    longest = int(positions.max())
    tokens = slots.tokens[:, :longest][at].long()
    tokens = torch.where(torch.arange(longest, device=device) < lengths, tokens, tokens[:, :1])
    counts = slots.occurrences.rows[slots.occurrences.row_of_slot[at][:, None], tokens] & (
        IN_PROMPT - 1
    )
    repetition, presence, frequency = (
        p[at][:, None]
        for p in (slots.repetition_penalty, slots.presence_penalty, slots.frequency_penalty)
    )
    if logits.shape[1] < slots.occurrences.rows.shape[1]:
        here = (tokens >= first) & (tokens < first + logits.shape[1])
        where, counts, repetition, presence, frequency = (
            t.expand(here.shape)[here] for t in (where, counts, repetition, presence, frequency)
        )  # fmt: skip
        tokens = tokens[here] - first
    values = logits[where, tokens]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= frequency * counts + presence * (counts > 0)
    logits[where, tokens] = values


@dataclass(slots=True)
class _Draws:
    """How n rows that draw want it, on the host.

    Attributes:
        key0, key1: uint32 [n], of the noise.
        temperature: float32 [n].
        filters: (top-k, top-p, min-p) of each row.
    """

    key0: U32
    key1: U32
    temperature: F32
    filters: list[tuple[int, float, float]]

    @classmethod
    def of(cls, slots: Slots, slot_ids: I32, positions: I32) -> _Draws:
        at = torch.from_numpy(slot_ids).to(slots.device)
        filters = zip(
            *(p[at].tolist() for p in (slots.top_k, slots.top_p, slots.min_p)), strict=True
        )
        return cls(
            *gumbel_keys(slots.seeds[at].cpu().numpy(), positions),
            slots.temperature[at].cpu().numpy(),
            list(filters),
        )


def _draw(
    scores: F32,
    rows: npt.NDArray[Any],
    slots: Slots,
    sampling_flags: npt.NDArray[np.uint8],
    slot_ids: I32,
    positions: I32,
) -> npt.NDArray[np.int32]:
    """Draws one token for each of `rows` of `scores`; returns int32 [rows], -1 where there is none
    to draw.

    One row at a time: its arrays then stay in the core's cache, and a filtered row works on few
    tokens.
    """
    draws = _Draws.of(slots, slot_ids, positions)
    vocabulary = np.arange(scores.shape[1], dtype=np.uint32)
    chosen = np.empty(len(rows), np.int32)
    with np.errstate(over="ignore", invalid="ignore"):  # broken logits are found by their largest
        for i, row in enumerate(rows):
            scaled = scores[row] / draws.temperature[i]
            largest = float(scaled.max())
            if not math.isfinite(largest):
                chosen[i] = -1
                continue
            tokens = vocabulary
            if sampling_flags[row] & FILTERED:
                kept = filter_tokens(scaled, largest, *draws.filters[i])
                tokens, scaled = vocabulary[kept], scaled[kept]
            scaled += gumbel_noise(draws.key0[i], draws.key1[i], tokens)
            chosen[i] = tokens[scaled.argmax()]
    return chosen


def _sample_vocab_parallel(
    scores: F32,
    slots: Slots,
    sampling_flags: npt.NDArray[np.uint8],
    slot_ids: I32,
    positions: I32,
    vocabulary: Vocabulary,
) -> npt.NDArray[np.int32]:
    """Chooses a token for each row of `scores` float32 [S, held], together with the ranks that hold
    the others; returns int32 [S]."""
    chosen = np.empty(len(scores), np.int32)
    plain, filtered = (
        np.flatnonzero(~sampling_flags & FILTERED),
        np.flatnonzero(sampling_flags & FILTERED),
    )
    with np.errstate(over="ignore", invalid="ignore"):
        if len(plain):
            found = _best_of_share(
                scores[plain],
                sampling_flags[plain],
                _Draws.of(slots, slot_ids[plain], positions[plain]),
                vocabulary.start,
            )
            best, tokens = gather(vocabulary.group, slots.device, *found)
            winner = _argmax(best.T)
            chosen[plain] = np.where(winner < 0, -1, tokens[winner, np.arange(len(plain))])
        if len(filtered):
            draws = _Draws.of(slots, slot_ids[filtered], positions[filtered])
            chosen[filtered] = _draw_filtered_together(
                scores[filtered], draws, vocabulary, slots.device
            )
    return chosen


def _best_of_share(
    scores: F32, sampling_flags: npt.NDArray[np.uint8], draws: _Draws, first: int
) -> tuple[F32, npt.NDArray[np.int32]]:  # fmt: skip
    """Returns the best score of each row, noise included where it draws, and its token: float32 and
    int32 [n].

    Without any token to choose the score is minus infinity; NaN or infinity if a logit is.
    """
    best, tokens = np.full(len(scores), -np.inf, np.float32), np.zeros(len(scores), np.int32)
    ids = np.arange(first, first + scores.shape[1], dtype=np.uint32)
    for i, scaled in enumerate(scores if len(ids) else ()):
        if sampling_flags[i] & RANDOM:
            scaled = scaled / draws.temperature[i]
            largest = scaled.max()
            if not math.isfinite(largest):
                best[i] = largest
                continue
            scaled += gumbel_noise(draws.key0[i], draws.key1[i], ids)
        at = scaled.argmax()
        best[i], tokens[i] = scaled[at], first + at
    return best, tokens


def _draw_filtered_together(
    scores: F32, draws: _Draws, vocabulary: Vocabulary, device: torch.device
) -> npt.NDArray[np.int32]:
    """Draws a token for each row, all with filters, from the ranks' candidates; returns int32 [n].

    All ranks see alike for which rows there are too few, and repeat those with more, at last with
    all.
    """
    group = vocabulary.group
    chosen = np.full(len(scores), -1, np.int32)
    pending, count = list(range(len(scores))), CANDIDATES
    while pending:
        found = Candidates.empty(len(pending), min(count, vocabulary.shard_size))
        for at, i in enumerate(pending):
            found.find(at, scores[i] / draws.temperature[i], vocabulary.start, draws.filters[i][1])
        values, tokens, largest, mass = gather(
            group, device, found.values, found.tokens, found.largest, found.mass
        )
        complete = np.array([vocabulary.local_size_of(rank) <= count for rank in range(group.size)])
        unsettled = []
        for at, i in enumerate(pending):
            if not math.isfinite(largest[:, at].max()):
                continue
            candidates = Candidates(values[:, at], tokens[:, at], largest[:, at], mass[:, at])
            kept = keep_candidates(candidates, complete, vocabulary.vocab_size, *draws.filters[i])
            if kept is None:
                unsettled.append(i)
                continue
            noisy = kept[0] + gumbel_noise(draws.key0[i], draws.key1[i], kept[1].astype(np.uint32))
            chosen[i] = kept[1][noisy == noisy.max()].min()
        pending, count = unsettled, count * MORE
    return chosen


def filter_tokens(
    scaled: F32, largest: float, top_k: int, top_p: float, min_p: float
) -> npt.NDArray[np.intp]:
    """Returns the ids (rising) of the tokens that min-p, top-k and top-p keep, in this order; at
    least one.

    Each filter sees what the ones before it kept, and keeps everything down to some logit, so that
    equals stay or go together: top-k may keep more than k, and top-p more than it must.

    Args:
        scaled: float32 [vocab_size], logits over temperature, finite or minus infinity; `largest`
            of them.
        top_k: 0 keeps all. top_p: 1 keeps all. min_p: 0 keeps all.
    """
    lowest = largest - SPANS[0]
    head = np.flatnonzero(scaled >= lowest)
    values = scaled[head]
    border = largest + math.log(min_p) if min_p > 0 else -math.inf
    if 0 < top_k < len(scaled):
        among = values if len(values) >= top_k else scaled
        border = max(border, float(np.partition(among, len(among) - top_k)[len(among) - top_k]))
    if top_p < 1:
        kept = values[values >= border] if border >= lowest else scaled[scaled >= border]
        border = max(border, _top_p_border(kept, largest, top_p))
    return head[values >= border] if border >= lowest else np.flatnonzero(scaled >= border)


def _top_p_border(kept: F32, largest: float, top_p: float) -> float:
    """Returns the lowest of the fewest largest logits in `kept` that hold the share `top_p` of its
    probability."""
    mass = top_p * float(np.exp(kept - largest).sum(dtype=np.float64))
    for span in SPANS:
        falling = np.sort(kept[kept >= largest - span])[::-1]
        reached = int(np.searchsorted(np.cumsum(np.exp(falling - largest), dtype=np.float64), mass))
        if reached < len(falling):
            return float(falling[reached])
    return -math.inf  # all of them, but for rounding


def _with_logprobs(
    tokens: torch.Tensor,
    logits: torch.Tensor,
    asking: npt.NDArray[np.intp],
    most: int,
    shared: Vocabulary | None,
) -> Sampled:
    """Adds the log-probabilities of the chosen tokens and of the `most` likeliest to the rows
    `asking`."""
    device = logits.device
    rows = torch.from_numpy(asking).to(device)
    wanted = logits[rows]
    chosen = tokens[rows].long().clamp(min=0)
    if shared is None:
        total = wanted.logsumexp(dim=-1, keepdim=True)
        best = wanted.topk(min(most, logits.shape[1]), dim=-1)
        own, top_tokens, top_logprobs = (
            (wanted.gather(1, chosen[:, None]) - total)[:, 0],
            best.indices.int(),
            best.values - total,
        )
    else:
        own, top_tokens, top_logprobs = _shared_logprobs(wanted, chosen, most, shared)
    sampled = Sampled(
        tokens,
        torch.full((len(tokens),), math.nan, device=device),
        torch.full((len(tokens), top_tokens.shape[1]), -1, dtype=torch.int32, device=device),
        torch.full((len(tokens), top_tokens.shape[1]), math.nan, device=device),
    )
    sampled.logprobs[rows] = own
    sampled.top_tokens[rows] = top_tokens
    sampled.top_logprobs[rows] = top_logprobs
    return sampled


def _shared_logprobs(
    wanted: torch.Tensor, chosen: torch.Tensor, most: int, vocabulary: Vocabulary
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns what `merge_logprobs` does, for logits `wanted` float32 [n, held] and the chosen
    tokens int64 [n]."""
    held, start = vocabulary.local_size, vocabulary.start
    padded = torch.nn.functional.pad(wanted, (0, 1), value=-math.inf)  # for the tokens of others
    column = torch.where((chosen >= start) & (chosen < start + held), chosen - start, held)
    top = min(most, vocabulary.vocab_size)
    best = wanted.topk(min(top, held), dim=-1)
    own = padded.gather(1, column[:, None])[:, 0]
    return merge_logprobs(
        vocabulary, (padded.logsumexp(dim=-1), own, best.values, best.indices.int() + start), top
    )
