"""Sampling on a GPU: from the logits of a step's sampled rows to tokens in the slots and in the
results. The counterpart of `sampler`, whose rules hold here."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from aioinfer.ipc.plan import I32
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
from aioinfer.sampling_params import FILTERS
from aioinfer.worker.sampling.adjustments import Adjust
from aioinfer.worker.slots import BANNED, BIASED, PENALIZED, Slots
from aioinfer.worker.staging import NUM_BUFFERS, upload

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
            *(slots.params[name] for name in ("temperature", *FILTERS)),
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

    def needs_resampling(self, slot_ids: I32, positions: I32, late: I32 | None = None) -> bool:
        """Whether any of the rows, but for the late ones, needs more than `sample_plain` does."""
        flags = self._slots.current_flags(slot_ids, positions)
        if late is not None:
            flags[late] = 0
        return bool(flags.max() & ADJUSTED)

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
        *,
        late: I32 | None = None,
        adjust: Adjust | None = None,
        in_place: bool = False,
    ) -> None:
        """Samples a token for each row of logits [S, local_size] by the parameters of its request,
        and enters it in its slot and in the results.

        Args:
            logits: of the model, or changed ones.
            rows: the rows of `logits`.
            buffer_index: int32 [1], which result buffer to write.
            late: rows (int32 [M]) that are sampled by a later call, so that their parameters do not
                matter here: their `is_real` is 0.
            adjust: changes the logits of all rows but `late`, before the temperature.
            in_place: whether `logits`, float32 then, may be changed.
        """
        flags = self._slots.current_flags(rows.host_slots, rows.host_positions)
        if late is not None:
            flags[late] = 0
        flags_of_all = int(np.bitwise_or.reduce(flags, initial=0))
        if flags_of_all & ADJUSTED or adjust is not None:
            if not in_place:
                logits = logits.to(torch.float32, copy=True)
            self._adjust(logits, rows, flags_of_all)
        if adjust is not None:
            _adjust_others(logits, late, adjust)
        tokens = self.sample_plain(
            logits, rows.slots, rows.positions, rows.is_real, buffer_index, rows.places
        )
        if flags_of_all & PENALIZED:
            if late is not None:
                tokens = torch.where(rows.is_real != 0, tokens, -1)
            occurrences = self._slots.occurrences
            add_occurrences(tokens, rows.slots, occurrences.row_of_slot, occurrences.rows)

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


def _adjust_others(logits: torch.Tensor, late: I32 | None, adjust: Adjust) -> None:
    """Calls `adjust` for all rows of logits [S, local_size] but `late`."""
    if late is None:
        adjust(logits)
        return
    others = upload(np.delete(np.arange(len(logits)), late), logits.device)
    some = logits.index_select(0, others)
    adjust(some)
    logits.index_copy_(0, others, some)
