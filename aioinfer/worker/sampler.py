"""Sampling: from the logits of a step's sampled rows to one token a row, in its slot and in the
step's results.

The model runner calls `Sampler.sample` once a step, and once more for rows whose logits are changed
by a message that comes behind the plan (`features.WorkerFeature.late_logits`: masks). A row's
logits go through these steps, in vLLM's order, each only where the request has it: logit bias;
minus infinity for tokens banned before min_tokens; penalties (`adjustments`); the logits processors
of features; temperature; min-p; top-k; top-p; Gumbel noise and the argmax.

From the temperature on a kernel computes them, which CUDA graphs hold (`Sampler.launch`), or
without kernels `host_sampling`. Of several tensor-parallel ranks each has the logits of its shard
of the vocabulary. They gather the best token of each shard, or the candidates of the filters
(`vocab_parallel`, or the kernel), and all sample the same tokens, the same as one rank with all
logits would.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from aioinfer.ipc.plan import I32
from aioinfer.layers.embedding import Vocabulary
from aioinfer.sampling_params import FILTERS
from aioinfer.worker import host_sampling, vocab_parallel
from aioinfer.worker.adjustments import ADJUSTED, Adjust, adjust_logits, count_sampled
from aioinfer.worker.slots import PENALIZED, RowTensors, SamplingRows, Slots, upload


class RowSampler:
    """Samples a token for each row of logits by temperature, filters and noise of a request, and
    enters it nowhere. With several ranks, all of them call it alike.

    Args:
        slots: the running requests.
        vocabulary: which token ids this rank has logits of.
        max_rows: the maximum of rows.
    """

    def __init__(self, slots: Slots, vocabulary: Vocabulary, max_rows: int):
        self._slots = slots
        self._vocabulary = vocabulary
        if slots.uses_kernels:
            self._bind_kernels(max_rows)

    def _bind_kernels(self, max_rows: int) -> None:
        """Finds the kernel and what it reads in every step."""
        from aioinfer.kernels.sampling import SamplingState, VocabShard, sample_tokens
        from aioinfer.kernels.symmetric_memory import LLBuffers

        self._sample_tokens = sample_tokens
        params = self._slots.params
        self._state = SamplingState(
            self._slots.seeds, *(params[name] for name in ("temperature", *FILTERS))
        )
        self._shard: VocabShard | None = None
        vocabulary, group = self._vocabulary, self._vocabulary.group
        if group.size > 1:
            memory = group.symmetric_buffer(LLBuffers.nbytes(max_rows, group.size))
            self._shard = VocabShard(vocabulary.start, vocabulary.vocab_size, LLBuffers(memory))

    def launch(
        self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Samples with kernels, for the `positions` of `slots`, int32 [S] each; returns int32 [S],
        -1 where no token can be sampled. It can be captured in a CUDA graph."""
        return self._sample_tokens(logits, slots, positions, self._state, shard=self._shard)

    def sample_on_host(
        self, logits: torch.Tensor, slot_ids: I32, positions: I32, flags: npt.NDArray[np.uint8]
    ) -> torch.Tensor:
        """Does what `launch` does without kernels; `flags`: uint8 [S], of the rows."""
        scores, vocabulary = logits.numpy(), self._vocabulary
        of_rows = self._slots, slot_ids, positions, flags
        if vocabulary.group.size > 1:
            return torch.from_numpy(vocab_parallel.sample_rows(scores, *of_rows, vocabulary))
        return torch.from_numpy(host_sampling.sample_rows(scores, *of_rows))


class Sampler:
    """Samples for one rank; with several ranks, all of them call it alike.

    Args:
        slots: the running requests.
        vocabulary: which token ids this rank has logits of.
        results: int32 [buffers, rows] on the device, the result buffers of steps.
    """

    def __init__(self, slots: Slots, vocabulary: Vocabulary, results: torch.Tensor):
        self._slots = slots
        self._vocabulary = vocabulary
        self._results = results
        self._rows = RowSampler(slots, vocabulary, results.shape[1])

    def needs(self, flags: npt.NDArray[np.uint8]) -> bool:
        """Whether rows with these sampling flags (uint8 [S]) need more than `launch` does."""
        return bool(flags.max() & ADJUSTED)

    def sample(
        self,
        logits: torch.Tensor,
        rows: SamplingRows,
        flags: npt.NDArray[np.uint8],
        *,
        late: I32 | None = None,
        adjust: Adjust | None = None,
        in_place: bool = False,
    ) -> None:
        """Samples a token for each row of logits [S, local_size] by the parameters of its request,
        and enters it in its slot and in the step's results: -1 where the logits hold NaN or
        infinity, or every token is banned. In a step with lookahead a row behind a draft that
        differs from the sampled token enters `SKIPPED` in the results, and nothing in its slot.

        Args:
            logits: of the model, or changed ones.
            rows: the rows of `logits`.
            flags: uint8 [S], `Slots.current_flags` of the rows, and 0 of `late`.
            late: rows (int32 [M]) that are sampled by a later call: what this one enters for them
                does not matter.
            adjust: changes the logits of all rows but `late`, before the temperature.
            in_place: whether `logits` may be changed.
        """
        flags_of_all = int(np.bitwise_or.reduce(flags, initial=0))
        if flags_of_all & ADJUSTED or adjust is not None:
            if not in_place or logits.dtype != torch.float32:
                # with the strides of any number of rows, which kernels are compiled for
                whole = torch.contiguous_format
                logits = logits.to(torch.float32, copy=True, memory_format=whole)
            adjust_logits(logits, self._slots, rows, flags, self._vocabulary.start)
        if adjust is not None:
            _adjust_others(logits, late, adjust)
        if rows.there is not None:
            tokens = self.launch(logits, rows.there, rows.places)
        else:
            tokens = self._sample_on_host(logits, rows, flags, late)
        if flags_of_all & PENALIZED:
            has_later_rows = late is not None
            count_sampled(tokens, self._slots, rows, flags, has_later_rows=has_later_rows)

    def launch(
        self, logits: torch.Tensor, rows: RowTensors, places: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Samples a token (int32 [S]) for each row of logits [S, local_size] with kernels, by
        temperature and filters, and enters it, in a step with lookahead unless it is skipped. It
        can be captured in a CUDA graph.

        Args:
            places: see `SamplingRows`.
        """
        slots, positions, lookahead = rows.slots, rows.positions, rows.lookahead
        tokens = self._rows.launch(logits, slots, positions)
        if lookahead is not None:
            from aioinfer.kernels.lookahead import accept_tokens

            accept_tokens(
                tokens, slots, positions, rows.is_real, lookahead.offsets, lookahead.inputs,
                self._slots.tokens, self._slots.next_start,
                results=self._results, buffer_index=rows.index, places=places,
            )  # fmt: skip
            return tokens
        from aioinfer.kernels.prepare import append_tokens

        append_tokens(
            tokens, slots, positions, rows.is_real, self._slots.tokens,
            results=self._results, buffer_index=rows.index, places=places,
        )  # fmt: skip
        return tokens

    def _sample_on_host(
        self, logits: torch.Tensor, rows: SamplingRows, flags: npt.NDArray[np.uint8],
        late: I32 | None,
    ) -> torch.Tensor:  # fmt: skip
        """Does what `launch` does without kernels; the rows `late` enter no slot yet."""
        tokens = self._rows.sample_on_host(logits, rows.slot_ids, rows.positions, flags)
        if rows.lookahead is None:
            self._slots.append(rows.slot_ids, rows.positions, tokens)
        else:
            self._slots.accept(rows.slot_ids, rows.positions, rows.lookahead, tokens, late)
        results = self._results[rows.index]
        if rows.places is None:
            results[: len(tokens)] = tokens
        else:
            results[rows.places.long()] = tokens
        return tokens


def _adjust_others(logits: torch.Tensor, late: I32 | None, adjust: Adjust) -> None:
    """Calls `adjust` for all rows of logits [S, local_size] but `late`."""
    if late is None:
        adjust(logits)
        return
    others = upload(np.delete(np.arange(len(logits)), late), logits.device)
    some = logits.index_select(0, others)
    adjust(some)
    logits.index_copy_(0, others, some)
