"""Sampling on a GPU: from the logits of a step's sampled rows to tokens in the slots and in the
results, and log-probabilities. The counterpart of `sampler`, whose rules hold here."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from aioinfer.ipc.plan import I32
from aioinfer.kernels.logprobs import MAX_TOP, shard_logprobs, token_logprobs
from aioinfer.kernels.masks import gather_masked
from aioinfer.kernels.penalties import (
    add_biases,
    add_occurrences,
    apply_penalties,
    ban_tokens,
)
from aioinfer.kernels.prepare import append_tokens
from aioinfer.kernels.sampling import SamplingState, VocabShard, sample_tokens
from aioinfer.kernels.symmetric_memory import LLBuffers
from aioinfer.layers.embedding import Vocabulary
from aioinfer.worker.sampler import row_logprobs
from aioinfer.worker.slots import BANNED, BIASED, LOGPROBS, PENALIZED, Slots
from aioinfer.worker.staging import NUM_BUFFERS
from aioinfer.worker.vocab_parallel import merge_logprobs

#: Rows whose log-probabilities are computed at a time where more are wanted than kernels bring.
_WIDE_ROWS = 16
#: Sampling flags of rows that a graph of a decode step does not serve.
ADJUSTED = BIASED | BANNED | PENALIZED


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """The rows of a step that sample a token, on the device and on the host. S rows.

    Attributes:
        slots, positions, is_real: int32 [S] on the device; `is_real` is 0 for padding.
        host_slots, host_positions: int32, of the rows without padding.
        places: int32 [S] on the device, the place of each in the step's results; None where it is
            its number.
    """

    slots: torch.Tensor
    positions: torch.Tensor
    is_real: torch.Tensor
    host_slots: I32
    host_positions: I32
    places: torch.Tensor | None = None


#: Log-probabilities of a step: float32 [S], int32 [S, K] and float32 [S, K] as in `Sampled`; empty
#: if no row requests them.
StepLogprobs = tuple[torch.Tensor, ...]


class GpuSampler:
    """Samples for one rank; with several ranks, all of them call it alike.

    Args:
        slots: the running requests.
        vocabulary: which token ids this rank has logits of.
        max_rows: of a step.
    """

    def __init__(self, slots: Slots, vocabulary: Vocabulary, max_rows: int):
        self._slots = slots
        self._vocabulary = vocabulary
        device = slots.device
        self._state = SamplingState(
            slots.seeds,
            *(slots.params[name] for name in ("temperature", "top_k", "top_p", "min_p")),
        )
        self._shard = self._make_shard(max_rows)
        self._results = torch.zeros(NUM_BUFFERS, max_rows, dtype=torch.int32, device=device)
        pinned = device.type == "cuda"
        self._host_results = torch.zeros(
            NUM_BUFFERS, max_rows, dtype=torch.int32, pin_memory=pinned
        )

    def _make_shard(self, max_rows: int) -> VocabShard | None:
        """Returns the shard for vocabulary-parallel sampling; None for one rank."""
        vocabulary, group = self._vocabulary, self._vocabulary.group
        if group.size == 1:
            return None
        memory = group.symmetric_buffer(LLBuffers.nbytes(max_rows, group.size))
        return VocabShard(vocabulary.start, vocabulary.vocab_size, LLBuffers(memory))

    def results(self, index: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the first `count` tokens (int32) of result buffer `index`: on the device, and
        where they go in pinned memory."""
        return self._results[index, :count], self._host_results[index, :count]

    def needs_resampling(
        self, slot_ids: I32, positions: I32, constrained: I32 | None = None
    ) -> bool:
        """Whether any of the rows, but for the constrained ones, needs more than `sample_plain`
        does."""
        flags = self._slots.current_flags(slot_ids, positions)
        if constrained is not None:
            flags[constrained] = 0
        return bool(flags.max() & (ADJUSTED | LOGPROBS))

    def sample_plain(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        is_real: torch.Tensor,
        buffer_index: torch.Tensor,
        places: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Samples a token (int32 [S]) for each row of logits [S, local_size], by temperature and
        filters, and enters it in its slot and in the results. It can be captured in a CUDA graph.

        Args:
            slots, positions, is_real: int32 [S], as in `SamplingRows`.
            buffer_index: int32 [1], which result buffer to write.
            places: see `SamplingRows`.
        """
        tokens = sample_tokens(logits, slots, positions, self._state, shard=self._shard)
        append_tokens(
            tokens, slots, positions, is_real, self._slots.tokens,
            results=self._results, buffer_index=buffer_index, places=places,
        )  # fmt: skip
        return tokens

    def sample(
        self,
        logits: torch.Tensor,
        rows: SamplingRows,
        buffer_index: torch.Tensor,
        constrained: I32 | None = None,
    ) -> StepLogprobs:
        """Samples a token for each row of logits [S, local_size] by the parameters of its request,
        and enters it in its slot and in the results.

        Args:
            logits: of the model.
            rows: the rows of `logits`.
            buffer_index: int32 [1], which result buffer to write.
            constrained: rows (int32 [M]) that `sample_masked` samples later, so that their
                parameters do not matter here: their `is_real` is 0.

        Returns:
            The model's log-probabilities, before any adjustment.
        """
        flags = self._slots.current_flags(rows.host_slots, rows.host_positions)
        if constrained is not None:
            flags[constrained] = 0
        flags_of_all = int(np.bitwise_or.reduce(flags, initial=0))
        adjusted = logits
        if flags_of_all & ADJUSTED:
            adjusted = logits.to(torch.float32, copy=True)
            self._adjust(adjusted, rows, flags_of_all)
        tokens = self.sample_plain(adjusted, rows.slots, rows.positions, rows.is_real, buffer_index)
        if flags_of_all & PENALIZED:
            kept = tokens if constrained is None else torch.where(rows.is_real != 0, tokens, -1)
            self._count(kept, rows)
        if not flags_of_all & LOGPROBS:
            return ()
        return self._logprobs(logits, tokens, rows)

    def sample_masked(
        self,
        logits: torch.Tensor,
        rows: SamplingRows,
        masks: torch.Tensor,
        buffer_index: torch.Tensor,
        logprobs: StepLogprobs,
    ) -> StepLogprobs:
        """Samples a token for each constrained row by its mask and the parameters of its request,
        and enters it in its slot and in the results.

        Args:
            logits: [S, local_size], of all sampled rows of the step. Not changed.
            rows: the constrained rows, with their places among the sampled rows.
            masks: int32 [M, words], of the constrained rows.
            buffer_index: int32 [1], which result buffer to write.
            logprobs: of the other rows.

        Returns:
            The log-probabilities of all S rows.
        """
        assert rows.places is not None
        flags = self._slots.current_flags(rows.host_slots, rows.host_positions)
        flags_of_all = int(np.bitwise_or.reduce(flags, initial=0))
        masked = gather_masked(logits, rows.places, masks, first=self._vocabulary.start)
        # tokens that a mask does not allow stay so: biases and penalties are finite
        self._adjust(masked, rows, flags_of_all)
        tokens = self.sample_plain(
            masked, rows.slots, rows.positions, rows.is_real, buffer_index, rows.places
        )
        if flags_of_all & PENALIZED:
            self._count(tokens, rows)
        if not flags_of_all & LOGPROBS:
            return logprobs
        found = self._logprobs(logits.index_select(0, rows.places), tokens, rows)
        return _merge_rows(logprobs, found, rows.places, len(logits))

    def _count(self, tokens: torch.Tensor, rows: SamplingRows) -> None:
        """Counts the sampled tokens of requests with penalties."""
        occurrences = self._slots.occurrences
        add_occurrences(tokens, rows.slots, occurrences.row_of_slot, occurrences.rows)

    def _logprobs(
        self, logits: torch.Tensor, tokens: torch.Tensor, rows: SamplingRows
    ) -> StepLogprobs:
        """Returns the log-probabilities of the tokens and of the likeliest, as many as one of the
        rows requests at most."""
        slots = self._slots
        if slots.num_logprobs[rows.host_slots].max() > MAX_TOP:
            return self._wide_logprobs(logits, tokens, rows)
        asking = (slots.params["logprobs"].index_select(0, rows.slots) >= 0).int()
        count = min(int(slots.num_logprobs[rows.host_slots].max()), MAX_TOP)
        top = min(MAX_TOP, self._vocabulary.vocab_size)
        if self._shard is None:
            own, top_tokens, top_logprobs = token_logprobs(logits, tokens, asking, top)
        else:
            found = shard_logprobs(logits, tokens, asking, top, self._vocabulary.start)
            own, top_tokens, top_logprobs = merge_logprobs(self._vocabulary, found, top)
        return own, top_tokens[:, :count].contiguous(), top_logprobs[:, :count].contiguous()

    def _wide_logprobs(
        self, logits: torch.Tensor, tokens: torch.Tensor, rows: SamplingRows
    ) -> StepLogprobs:
        """Returns the same as `_logprobs` where rows (of a beam search) want more of the likeliest
        tokens than the kernels find: with torch, a few rows at a time, since it takes memory."""
        flags = self._slots.current_flags(rows.host_slots, rows.host_positions)
        count = int(self._slots.num_logprobs[rows.host_slots].max())
        count = min(count, self._vocabulary.vocab_size)
        size, device = len(logits), logits.device
        own = torch.full((size,), math.nan, device=device)
        top_tokens = torch.full((size, count), -1, dtype=torch.int32, device=device)
        top_logprobs = torch.full((size, count), math.nan, device=device)
        sharded = None if self._shard is None else self._vocabulary
        for some in torch.from_numpy(np.flatnonzero(flags & LOGPROBS)).split(_WIDE_ROWS):
            at = some.to(device)
            ids = tokens[at].long().clamp(min=0)
            found = row_logprobs(logits[at].float(), ids, count, sharded)
            for target, part in zip((own, top_tokens, top_logprobs), found, strict=True):
                target[at] = part
        return own, top_tokens, top_logprobs

    def _adjust(self, logits: torch.Tensor, rows: SamplingRows, flags_of_all: int) -> None:
        """Applies biases, bans and penalties to logits [S, local_size], in place."""
        slots, first, size = self._slots, self._vocabulary.start, self._vocabulary.local_size
        if flags_of_all & BIASED:
            biases = slots.bias_ids, slots.bias_values, slots.params["num_bias"]
            add_biases(logits, rows.slots, *biases, first=first)
        if flags_of_all & BANNED:
            ban_tokens(
                logits, rows.slots, slots.banned_ids, slots.params["num_banned"],
                positions=rows.positions, until=slots.params["banned_until"], first=first,
            )  # fmt: skip
        if flags_of_all & PENALIZED:
            counts, kinds = slots.occurrences, ("repetition", "presence", "frequency")
            apply_penalties(
                logits, rows.slots, counts.row_of_slot, counts.rows[:, first : first + size],
                *(slots.params[f"{kind}_penalty"] for kind in kinds),
            )  # fmt: skip


def _merge_rows(
    whole: StepLogprobs, part: StepLogprobs, places: torch.Tensor, rows: int
) -> StepLogprobs:
    """Returns the log-probabilities of all rows of a step: `part` at `places`, and `whole` at the
    other rows."""
    count = max(parts[1].shape[1] for parts in (whole, part) if parts)
    if whole:
        merged = _widen(whole, count)
    else:
        nothing = torch.full((rows, count), math.nan, device=places.device)
        none = torch.full((rows, count), -1, dtype=torch.int32, device=places.device)
        merged = nothing.new_full((rows,), math.nan), none, nothing
    for target, source in zip(merged, _widen(part, count), strict=True):
        target.index_copy_(0, places.long(), source)
    return merged


def _widen(logprobs: StepLogprobs, count: int) -> StepLogprobs:
    """Returns log-probabilities with `count` of the likeliest tokens."""
    sampled, tokens, values = logprobs
    more = (0, count - tokens.shape[1])
    pad = torch.nn.functional.pad
    return sampled, pad(tokens, more, value=-1), pad(values, more, value=math.nan)
