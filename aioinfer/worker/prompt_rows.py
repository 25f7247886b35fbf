"""Outputs of prompt rows: log-probabilities of the prompt's tokens, and hidden states, pooled or
one for each token.

The runners call `PromptOutputs` in steps whose plan has such rows (`ipc.prompt_rows`). Logits are
computed for `CHUNK_ROWS` tokens at a time, so that the logits of a whole prompt never exist at
once. Of several tensor-parallel ranks each has the logits of its shard; all of them call this
alike, and merge their parts (`vocab_parallel`). Hidden states are the same on every rank.

Pooling the last token needs the sampled rows alone. The mean is summed up over the steps of a
prompt in float32, on the device, in a row for each slot; the first token's state is kept in the
same way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from aioinfer.ipc.plan import StepPlan
from aioinfer.ipc.prompt_rows import (
    CLS,
    LAST,
    MEAN,
    PooledRows,
    PooledStates,
    PromptLogprobRows,
    PromptLogprobs,
    TokenStateRows,
    TokenStates,
)
from aioinfer.ipc.sections import Section
from aioinfer.layers.embedding import Vocabulary
from aioinfer.models.decoder import CausalLM
from aioinfer.sampling_params import MAX_LOGPROBS
from aioinfer.worker.slots import Slots
from aioinfer.worker.vocab_parallel import merge_logprobs

#: Tokens whose logits exist at a time.
CHUNK_ROWS = 256
#: The same, where more of the likeliest tokens are wanted than the kernels find: torch takes more
#: memory for them.
_SORTED_ROWS = 16
#: As many of the likeliest tokens as the kernels always find: one compiled variant.
_KERNEL_TOP = MAX_LOGPROBS

Found = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def has_prompt_rows(plan: StepPlan) -> bool:
    """Whether a plan has rows with outputs of their own."""
    return any(
        isinstance(each, PromptLogprobRows | PooledRows | TokenStateRows) for each in plan.sections
    )


@dataclass(frozen=True, slots=True)
class PendingSection:
    """A section of a result whose arrays are on their way to the host."""

    kind: type[Section]
    parts: tuple[torch.Tensor, ...]

    def to_section(self) -> Section:
        """Returns the section, once the step is over."""
        return self.kind(*(part.cpu().numpy() for part in self.parts))


class PromptOutputs:
    """Computes the outputs of prompt rows for one rank.

    Args:
        model: the rank's part of the model.
        slots: the running requests.
    """

    def __init__(self, model: CausalLM, slots: Slots):
        self._model = model
        self._slots = slots
        self._kept: torch.Tensor | None = None  # [S, hidden_size]; see the module's docstring

    def needs_all_tokens(self, plan: StepPlan) -> bool:
        """Whether the hidden states of all of a step's tokens are needed, and not just the hidden
        states of its sampled rows."""
        if not plan.sections or not has_prompt_rows(plan):
            return False
        pooled = plan.section(PooledRows)
        return (
            plan.section(PromptLogprobRows) is not None
            or plan.section(TokenStateRows) is not None
            or not self._model.finishes_with_hidden_states
            or (pooled is not None and bool((pooled.poolings != LAST).any()))
        )

    def compute(
        self, plan: StepPlan, hidden: torch.Tensor, *, has_all_tokens: bool
    ) -> list[PendingSection]:
        """Returns the sections of a step's result.

        Args:
            plan: with rows that have outputs.
            hidden: before the last norm: [T, hidden_size] of all tokens if `has_all_tokens`, else
                [S, hidden_size] of the sampled rows.
        """
        found: list[PendingSection] = []
        scored, pooled = plan.section(PromptLogprobRows), plan.section(PooledRows)
        stated = plan.section(TokenStateRows)
        if scored is not None:
            found.append(PendingSection(PromptLogprobs, self._score(plan, scored, hidden)))
        if pooled is not None:
            if (pooled.poolings == LAST).all():
                states = self._last(plan, pooled, hidden, has_all_tokens=has_all_tokens)
            else:
                states = self._pool(plan, pooled, hidden)
            if len(states):
                found.append(PendingSection(PooledStates, (self._fetch(states),)))
        if stated is not None:
            tokens = _spread(_first_tokens(plan, stated.slots), stated.counts, 1)
            states = self._model.normed(hidden.index_select(0, self._upload(tokens))).float()
            found.append(PendingSection(TokenStates, (self._fetch(states),)))
        return found

    # ---------------------------------------------------------------- log-probabilities

    def _score(
        self, plan: StepPlan, rows: PromptLogprobRows, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Returns the arrays of `PromptLogprobs`."""
        firsts, starts = _first_tokens(plan, rows.slots), plan.starts[_rows_of(plan, rows.slots)]
        token_of, slot_of, position_of = (
            _spread(values, rows.counts, step)
            for values, step in ((firsts, 1), (rows.slots, 0), (starts + 1, 1))
        )
        there = self._upload(np.stack([token_of, slot_of, position_of]))
        targets = self._slots.tokens[there[1], there[2]]
        top = min(int(rows.num_top.max()), self._model.vocabulary.vocab_size)
        size = CHUNK_ROWS if top <= _KERNEL_TOP else _SORTED_ROWS
        chunks = [
            self._score_chunk(hidden.index_select(0, tokens), of_tokens, top)
            for tokens, of_tokens in zip(there[0].split(size), targets.split(size), strict=True)
        ]
        return tuple(self._fetch(torch.cat(parts)) for parts in zip(*chunks, strict=True))

    def _score_chunk(
        self, hidden: torch.Tensor, targets: torch.Tensor, top: int
    ) -> tuple[torch.Tensor, ...]:
        """Returns log-probabilities float32 [c], ranks int32 [c], and the `top` likeliest tokens
        and their log-probabilities, int32 and float32 [c, top], of the tokens `targets` (int32
        [c])."""
        model, vocabulary = self._model, self._model.vocabulary
        logits = model.logits_of(hidden)
        found = _find_in_shard(logits, targets, top, vocabulary)
        own = vocabulary.group.all_gather_last(found[1][:, None]).amax(dim=1, keepdim=True)
        likelier = (logits > own).sum(dim=1)
        ranks = vocabulary.group.all_reduce(likelier).add_(1).int()
        logprobs, top_tokens, top_logprobs = merge_logprobs(vocabulary, found, top)
        return logprobs, ranks, top_tokens.int(), top_logprobs

    # ---------------------------------------------------------------- pooling

    def _last(
        self, plan: StepPlan, rows: PooledRows, hidden: torch.Tensor, *, has_all_tokens: bool
    ) -> torch.Tensor:
        """Returns the last tokens' states, float32 [P, hidden_size]."""
        at = _rows_of(plan, rows.slots)
        if has_all_tokens:
            index = np.cumsum(plan.lengths)[at] - 1
        else:
            index = np.cumsum(plan.samples)[at] - 1
        selected = hidden.index_select(0, self._upload(index.astype(np.int64)))
        return self._model.normed(selected).float()

    def _pool(self, plan: StepPlan, rows: PooledRows, hidden: torch.Tensor) -> torch.Tensor:
        """Adds the rows of a step to the pooling state of their slots. Returns the pooled states of
        the prompts that end, float32 [ends, hidden_size]."""
        at, kept = _rows_of(plan, rows.slots), self._kept_states()
        firsts, lengths, starts = _first_tokens(plan, rows.slots), plan.lengths[at], plan.starts[at]
        slots = rows.slots.astype(np.int64)
        means = np.flatnonzero(rows.poolings == MEAN)
        if len(means):
            there = self._upload(np.stack([slots, starts, lengths])[:, means].astype(np.int64))
            of_means = self._upload(_spread(firsts[means], lengths[means], 1))
            states = self._model.normed(hidden.index_select(0, of_means)).float()
            totals = torch.segment_reduce(states, "sum", lengths=there[2], unsafe=True)
            before = kept.index_select(0, there[0])
            is_first = (there[1] == 0)[:, None]
            kept.index_copy_(0, there[0], torch.where(is_first, totals, before + totals))
        lasts = (rows.poolings == LAST) & (rows.ends == 1)
        single = np.flatnonzero(lasts | ((rows.poolings == CLS) & (starts == 0)))
        if len(single):
            tokens = np.where(lasts, firsts + lengths - 1, firsts)[single]
            there = self._upload(np.stack([slots[single], tokens]))
            states = self._model.normed(hidden.index_select(0, there[1])).float()
            kept.index_copy_(0, there[0], states)
        ends = np.flatnonzero(rows.ends)
        divisors = np.where(rows.poolings == MEAN, starts + lengths, 1).astype(np.int64)
        there = self._upload(np.stack([slots, divisors])[:, ends])
        return kept.index_select(0, there[0]) / there[1][:, None]

    def _kept_states(self) -> torch.Tensor:
        if self._kept is None:
            shape = len(self._slots.tokens), self._model.hidden_size
            self._kept = torch.zeros(shape, dtype=torch.float32, device=self._slots.device)
        return self._kept

    # ---------------------------------------------------------------- to the device and back

    def _upload(self, array: npt.NDArray[np.int64]) -> torch.Tensor:
        """Copies an array to the device, without waiting for the device's computation."""
        tensor = torch.from_numpy(array)
        if self._slots.device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self._slots.device, non_blocking=True)

    def _fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """Starts the copy of a result to the host; it is there when the step is over. It goes
        through the stream that computes, since such results are small and rare."""
        return tensor.to("cpu", non_blocking=True)


def _rows_of(plan: StepPlan, slots: npt.NDArray[np.int32]) -> npt.NDArray[np.intp]:
    """Returns the rows of these slots in a plan."""
    order = np.argsort(plan.slots)
    return order[np.searchsorted(plan.slots, slots, sorter=order)]


def _first_tokens(plan: StepPlan, slots: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """Returns which of a step's tokens is the first one of the row of each slot."""
    firsts = np.cumsum(plan.lengths, dtype=np.int64) - plan.lengths
    return firsts[_rows_of(plan, slots)]


def _spread(
    values: npt.NDArray[np.integer], counts: npt.NDArray[np.int32], step: int
) -> npt.NDArray[np.int64]:
    """Returns each value `counts[i]` times, growing by `step` from one to the next."""
    repeated = np.repeat(values.astype(np.int64), counts)
    if step:
        starts = np.repeat(np.cumsum(counts, dtype=np.int64) - counts, counts)
        repeated += np.arange(len(repeated)) - starts
    return repeated


def _find_in_shard(
    logits: torch.Tensor, targets: torch.Tensor, top: int, vocabulary: Vocabulary
) -> Found:
    """Returns the `found` of `merge_logprobs`, from the logits [c, local_size] of a rank's
    shard."""
    if logits.device.type == "cuda" and top <= _KERNEL_TOP:
        from aioinfer.kernels.logprobs import shard_logprobs

        requested = torch.ones_like(targets)
        count = min(_KERNEL_TOP, vocabulary.vocab_size)
        return shard_logprobs(logits, targets, requested, count, vocabulary.start)
    local, start = vocabulary.local_size, vocabulary.start
    # the last column is for tokens out of the shard
    logits = logits.float()
    padded = torch.nn.functional.pad(logits, (0, 1), value=-math.inf)
    inside = (targets >= start) & (targets < start + local)
    column = torch.where(inside, targets - start, local).long()
    own = padded.gather(1, column[:, None])[:, 0]
    best = logits.topk(min(top, local), dim=-1)
    return padded.logsumexp(dim=-1), own, best.values, best.indices.int() + start


def sections_of(pending: Sequence[PendingSection]) -> list[Section]:
    """Returns the sections of a result, once its step is over."""
    return [each.to_section() for each in pending]
